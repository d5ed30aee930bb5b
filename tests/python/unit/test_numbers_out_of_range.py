# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers that PyTorch refuses for the dtype of a tensor are refused, whichever call brings them."""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortrain import ORTModule

Function = Callable[[torch.Tensor, float], torch.Tensor]
_FUNCTIONS: dict[str, Function] = {
    "difference": lambda x, n: x - n,
    "difference from": lambda x, n: n - x,
    "power": lambda x, n: x**n,
    "clamp": lambda x, n: torch.clamp(x, max=n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "full_like": torch.full_like,
    "new_full": lambda x, n: x.new_full((2,), n),
    "where": lambda x, n: torch.where(x > 0, x, n),
    "fill": lambda x, n: x.clone().fill_(n),
    "scaled sum": lambda x, n: torch.add(x, x, alpha=n),
    "scaled product": lambda x, n: torch.addcmul(x, x, x, value=n),
    "floor": lambda x, n: torch.div(x, n, rounding_mode="floor"),
}
_NUMBERS = ((2, 3, 300, -1, 2**31), (0.5, 0.7, 1e6, -1.5))


class _Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, n: float) -> torch.Tensor:
        return self.function(x, n)


def _result(model: nn.Module, x: torch.Tensor, number: float) -> torch.Tensor | None:
    try:
        return model(x, number)  # type: ignore[no-any-return]
    except RuntimeError:
        return None


@pytest.mark.sampled(12)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8, torch.float16])
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_refused_where_pytorch_refuses(name: str, dtype: torch.dtype) -> None:
    x = (torch.arange(10) - 4).to(dtype)
    for numbers in _NUMBERS:
        module = _Of(_FUNCTIONS[name])
        model = ORTModule(module)
        for number in numbers:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mine, theirs = _result(model, x, number), _result(module, x, number)
            assert (mine is None) == (theirs is None), number
            if theirs is not None:
                torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=1e-3, equal_nan=True)

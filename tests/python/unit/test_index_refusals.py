# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Indices that PyTorch refuses, and those that it counts from the end."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from ortrain import ORTModule

Ask = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_ROWS = (-1, 4)
_ASKED: dict[str, Ask] = {
    "index_select": lambda w, i: w.index_select(0, i),
    "gather rows": lambda w, i: w.gather(0, i[:, None].expand(-1, 4)),
    "gather": lambda w, i: w.gather(1, torch.stack([i, i.flip(0)])),
    "scatter": lambda w, i: w.scatter(0, i[:, None].expand(_ROWS), w[:2] * 2),
    "scatter of a number": lambda w, i: w.scatter(1, i[None], 2.0),
    "scatter_add rows": lambda w, i: w.scatter_add(0, i[:, None].expand(_ROWS), w[:2]),
    "scatter_reduce": lambda w, i: w.scatter_reduce(0, i[:, None].expand(_ROWS), w[:2], "amax"),
    "index_add": lambda w, i: w.index_add(0, i, w[:2]),
    "index_copy": lambda w, i: w.index_copy(0, i, w[:2] * 3),
    "embedding": lambda w, i: functional.embedding(i, w),
    "nll_loss": lambda w, i: functional.nll_loss(w[:2], i),
    "cross_entropy": lambda w, i: functional.cross_entropy(w[:2], i),
    "one_hot": lambda w, i: functional.one_hot(i, 4) * w.sum(),
    "index": lambda w, i: w[i],
    "take": lambda w, i: w.take(i),
    "index_fill": lambda w, i: w.index_fill(0, i, 2.0),
}


class Indexes(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).reshape(4, 4))
        self.ask = ask

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.ask(self.weight, index)


@pytest.mark.parametrize("name", _ASKED)
def test_what_pytorch_refuses_is_refused(name: str) -> None:
    plain = Indexes(_ASKED[name])
    ours = ORTModule(Indexes(_ASKED[name]))
    refused = 0
    for index in ([1, 3], [0, -1], [-2, -4], [-5, 0], [0, 4], [2**40, 0], [2, 0]):
        given = torch.tensor(index)
        try:
            expected = plain(given)
        except (RuntimeError, IndexError):
            refused += 1
            with pytest.raises((RuntimeError, IndexError)):
                ours(given)
        else:
            torch.testing.assert_close(ours(given), expected)
    assert refused >= (1 if name in ("index", "take", "index_fill") else 4)
    assert ours.report().captures[0].native_nodes > 0

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Arguments with gaps between their rows, or in the midst of a larger memory, where a forward asks for that or writes to them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.signature import has_gaps

pytestmark = pytest.mark.filterwarnings("ignore:.*runs in")


class Applied(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def written_flat(x: torch.Tensor) -> torch.Tensor:
    y = x.reshape(-1)
    y.add_(1)
    return y.sum()


def written_dense(x: torch.Tensor) -> torch.Tensor:
    y = x.contiguous()
    y.mul_(2)
    return y + 1


def written_item(x: torch.Tensor) -> torch.Tensor:
    y = x.flatten()
    y[0] = 7.0
    return x + 1


def returned_dense(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x.contiguous()


def asked_for_gaps(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_contiguous() else x * 3


def asked_for_strides(x: torch.Tensor) -> torch.Tensor:
    return x * x.stride(0)


def asked_for_offset(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + x.storage_offset())


def asked_for_memory(x: torch.Tensor) -> torch.Tensor:
    return x + x.untyped_storage().nbytes()


def asked_whether_shared(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.is_shared() else x * 3


def strided(x: torch.Tensor) -> torch.Tensor:
    return torch.as_strided(x, (2, 2), (1, 1)) * 1.0


def asked_by_text(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if getattr(x, "is_contiguous")() else x * 3  # noqa: B009


def reshaped_and_written(x: torch.Tensor) -> torch.Tensor:
    x.reshape(2, -1).clamp_(1)
    return x * 2


def reshaped_and_returned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x.reshape(2, -1)


ASKING = [
    *(written_flat, written_dense, written_item, returned_dense, asked_for_gaps),
    *(asked_for_strides, asked_for_offset, asked_for_memory, asked_whether_shared, strided),
    *(asked_by_text, reshaped_and_written, reshaped_and_returned),
]
BASE = torch.arange(24.0).reshape(4, 6)
KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda base: base[:, :4].contiguous(),
    "gaps": lambda base: base[:, :4],
    "rows": lambda base: base[1:],
    "columns": lambda base: base.t()[:4],
    "transposed": lambda base: base[:, :4].contiguous().t(),
    "expanded": lambda base: base[:, :1].expand(4, 5),
    "shared": lambda base: base.share_memory_(),
}
WRITES = (written_flat, written_dense, written_item, reshaped_and_written)


def listed(results: object) -> list[torch.Tensor]:
    return list(results) if isinstance(results, tuple) else [results]


@pytest.mark.parametrize("first", ["dense", "gaps", "rows", "transposed"])
@pytest.mark.parametrize("function", ASKING, ids=lambda f: f.__name__)
def test_arguments_lie_as_the_caller_has_them(
    function: Callable[[torch.Tensor], object], first: str
) -> None:
    plain, ours = Applied(function), ORTModule(Applied(function))
    for kind in (first, *KINDS):
        if kind == "expanded" and function in WRITES:
            continue  # PyTorch refuses some of these
        theirs, given = KINDS[kind](BASE.clone()), KINDS[kind](BASE.clone())
        wanted, got = plain(theirs), ours(given)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        torch.testing.assert_close(given, theirs, rtol=0, atol=0)
        assert [r.stride() for r in listed(got)] == [r.stride() for r in listed(wanted)]
        if isinstance(wanted, tuple):
            wanted[1].fill_(9), got[1].fill_(9)
            torch.testing.assert_close(given, theirs, rtol=0, atol=0)


def test_who_does_not_ask_has_graphs_for_them() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.linear = nn.Embedding(30, 8), nn.Linear(8, 8)
            self.stride = 2

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            y = self.stride * self.linear(self.table(ids)).transpose(1, 2).contiguous()
            return y.view(ids.shape[0], -1)

    net = Model()
    ours, ids = ORTModule(net), torch.randint(0, 30, (4, 7))
    for given in (ids, ids[:, :-1], ids[1:]):
        torch.testing.assert_close(ours(given), net.forward(given))
    assert [record.fallback for record in ours.report().captures] == [""]


def test_gaps_are_told_from_orders() -> None:
    assert not any(map(has_gaps, (BASE, BASE.t(), BASE[1:], BASE[:1], BASE[:0], torch.ones(()))))
    assert all(map(has_gaps, (BASE[:, 1:], BASE.t()[1:], BASE[:1].expand(4, 6), BASE[::2])))

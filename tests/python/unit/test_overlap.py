# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory that a forward writes to and in which other tensors of the call lie."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ortrain import ORTModule
from ortrain.overlap import any_overlap

SIDE = 4
ELEMENTS = 64


class Writes(nn.Module):
    """Writes to a buffer between two reads of its argument and of a tensor that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.array = np.arange(SIDE * SIDE, dtype=np.float32).reshape(SIDE, SIDE)
        self.register_buffer("written", torch.from_numpy(self.array))
        self.layer = nn.Linear(SIDE, SIDE)
        self.register_buffer("held", torch.ones(SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.written.mul_(2.0)
        return y + x.sum() + self.held.sum()


class WritesToArgument(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)
        self.register_buffer("written", torch.ones(SIDE, SIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        x.mul_(2.0)
        return y + self.written.sum()


VIEWS: dict[str, Callable[[Any], torch.Tensor]] = {
    "itself": lambda m: m.written,
    "view": lambda m: m.written.view(SIDE, SIDE),
    "transposed": lambda m: m.written.t(),
    "a part": lambda m: m.written[1:3],
    "with gaps": lambda m: m.written[:, 0:1].expand(SIDE, SIDE),
    "last element": lambda m: m.written[SIDE - 1 :, SIDE - 1 :].expand(1, SIDE),
    "another storage": lambda m: torch.from_numpy(m.array) if hasattr(m, "array") else m.written,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("make", [Writes, WritesToArgument])
def test_arguments_in_memory_that_a_known_graph_writes_to(make: type[nn.Module], view: str) -> None:
    if make is WritesToArgument and view in ("with gaps", "last element"):
        pytest.skip("PyTorch does not write to an element by two places")
    torch.manual_seed(0)
    expected_by: Any = make()
    wrapped: Any = ORTModule(copy.deepcopy(expected_by))
    model = wrapped.module
    if make is Writes:  # copies of a module have arrays of their own
        model.array = model.written.numpy()
        expected_by.array = expected_by.written.numpy()
    for take in (lambda m: torch.ones(SIDE, SIDE), VIEWS[view], VIEWS[view]):
        torch.testing.assert_close(wrapped(take(model)), expected_by(take(expected_by)))
        torch.testing.assert_close(model.written, expected_by.written)


def test_a_buffer_that_is_moved_onto_another_one_later() -> None:
    torch.manual_seed(0)
    expected_by, model = Writes(), Writes()
    model.load_state_dict(expected_by.state_dict())
    wrapped = ORTModule(model)
    x = torch.ones(SIDE, SIDE)
    for turn in range(3):
        torch.testing.assert_close(wrapped(x), expected_by(x))
        if turn == 0:
            for m in (model, expected_by):
                m.held.data = m.written[2]


def test_what_lies_apart_stays_in_the_graph() -> None:
    memory = torch.zeros(2, SIDE, SIDE)
    model = Writes()
    wrapped = ORTModule(model)
    wrapped(memory[1].clone())
    model.written.data = memory[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as where a call runs in PyTorch
        wrapped(memory[1])
        with pytest.raises(RuntimeWarning, match="memory in which another"):
            wrapped(memory[0])


@st.composite
def _views(draw: st.DrawFn) -> torch.Tensor:
    rank = draw(st.integers(0, 3))
    sizes = [draw(st.integers(0, 3)) for _ in range(rank)]
    strides = [draw(st.integers(0, 7)) for _ in range(rank)]
    reach = sum(max(n - 1, 0) * s for n, s in zip(sizes, strides, strict=True))
    offset = draw(st.integers(0, ELEMENTS - 1 - reach))
    return torch.arange(ELEMENTS, dtype=torch.int16).as_strided(sizes, strides, offset)


@settings(deadline=None)
@given(st.lists(_views(), max_size=4), st.lists(_views(), max_size=4))
def test_any_overlap_never_misses_one(
    written: list[torch.Tensor], read: list[torch.Tensor]
) -> None:
    memory = torch.arange(ELEMENTS, dtype=torch.int16)

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def elements(tensor: torch.Tensor) -> set[int]:
        return set(placed(tensor).flatten().tolist())

    def reach(tensor: torch.Tensor) -> set[int]:
        found = elements(tensor)
        return set(range(min(found), max(found) + 1)) if found else set()

    def overlap(of: Callable[[torch.Tensor], set[int]]) -> bool:
        return any(
            not of(w).isdisjoint(of(other))
            for i, w in enumerate(written)
            for other in [*written[i + 1 :], *read]
        )

    found = any_overlap(map(placed, written), map(placed, read))
    assert found or not overlap(elements)
    assert found == overlap(reach)


class WritesArgument(nn.Module):
    """Writes to its first argument, and reads the second one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE, SIDE)
        self.register_buffer("count", torch.zeros(3, SIDE))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        with torch.no_grad():
            self.count.add_(1)
        return self.layer(x) * self.layer(y)


@pytest.mark.filterwarnings("ignore:.* runs in PyTorch")
@pytest.mark.parametrize("first", ["each other", "a buffer"])
def test_a_first_call_in_one_memory_leaves_the_others_their_graph(first: str) -> None:
    module = WritesArgument()
    plain, ours = copy.deepcopy(module), ORTModule(module)
    memory = torch.randn(5, SIDE)
    for call in range(3):
        given = []
        for net in (module, plain):
            both = memory.clone()
            y = both[1:4] if first == "each other" else net.count
            given.append((both[:3], y if call == 0 else both[1:4].clone()))
        torch.testing.assert_close(ours(*given[0]), plain(*given[1]))
        torch.testing.assert_close(given[0], given[1])
    assert sorted(record.fallback == "" for record in ours.report().captures) == [False, True]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards that ask which of several equal objects a name stands for."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import Linear, assert_same_calls
from torch import nn

from ortrain import _core
from ortrain.capture.object_places import ObjectPlaces


class Chooses(Linear):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second = make(), make()
        self.active = self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y if self.active is self.first else y.neg()


class ChoosesInAList(Chooses):
    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(make)
        self.all = [self.first, self.second]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (3 if self.all[0] is self.active else 5)


class CountsAndChooses(Chooses):
    """In pieces: Dynamo does not compare which object a name stands for."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def swap(net: Any, step: int) -> None:
    net.active = net.second if step in (2, 4) else net.first


class Equal:
    def __init__(self) -> None:
        self.uses = 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    __hash__ = None  # type: ignore[assignment]


MAKERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [1],
    "nested list": lambda: [[1, 2]],
    "dictionary": lambda: {"a": 1},
    "ordered": lambda: collections.OrderedDict(a=1),
    "set": lambda: {1, 2},
    "deque": lambda: collections.deque([1], maxlen=3),
    "tuple": lambda: tuple([1, 2]),  # noqa: C409
    "object": Equal,
}


@pytest.mark.parametrize("kind", [Chooses, ChoosesInAList, CountsAndChooses])
@pytest.mark.parametrize("make", list(MAKERS))
def test_equal_objects_are_told_apart(kind: type[Chooses], make: str) -> None:
    assert_same_calls(lambda: kind(MAKERS[make]), swap)


class CountsOnTheActive(Chooses):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.active.uses += 1
        y = self.linear(x)
        return y * 2 if self.active is self.first else y.neg()


def test_equal_objects_that_the_forward_changes() -> None:
    assert_same_calls(lambda: CountsOnTheActive(Equal), swap)


class Plain:
    def __init__(self) -> None:
        self.uses = 0


class Slotted:
    __slots__ = ("uses",)

    def __init__(self) -> None:
        self.uses = 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.uses = 0


class ReadsUnderAnotherName(Linear):
    """Asks no question, but reads under one name what it has changed under another."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.first, self.second = make(), make()
        self.active = None
        self.unset = collections.defaultdict(list)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.active.uses += 1
        return self.linear(x) * (1 + self.first.uses)


class ReadsItems(ReadsUnderAnotherName):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.active[0] += 1
        return self.linear(x) * (1 + self.first[0])


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (ReadsUnderAnotherName, Plain),
        (ReadsUnderAnotherName, Slotted),
        (ReadsUnderAnotherName, Layer),
        (ReadsItems, lambda: [0]),
        (ReadsItems, lambda: {0: 0}),
    ],
)
def test_an_object_of_two_names_that_the_forward_changes(
    kind: type[ReadsUnderAnotherName], make: Callable[[], Any]
) -> None:
    model = assert_same_calls(lambda: kind(make), swap)
    assert not model.module.unset


def test_places_are_compared_by_which_hold_the_same_object() -> None:
    module = ReadsUnderAnotherName(Plain)
    places = ObjectPlaces(module, ())
    apart = places.pattern()
    module.active = module.first
    assert places.pattern() != apart
    module.active = Plain()
    assert places.pattern() == apart
    module.unset["a"] = [1]
    assert places.pattern() == apart


class Shapes(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [2, 3]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scales[0]


def test_a_list_that_is_made_anew_with_equal_items_needs_no_other_graph() -> None:
    def renew(net: Any, step: int) -> None:
        net.scales = [2, 3]

    model = assert_same_calls(Shapes, renew)
    assert [record.fallback for record in model.report().captures] == [""]


def test_places_that_had_different_containers_must_have_different_ones() -> None:
    module = torch.nn.Module()
    module.a, module.b = [1], [1]
    guard = _core.ModuleGuard([module])
    assert guard.holds()
    module.a = [1]
    assert guard.holds()
    module.b = module.a
    assert not guard.holds()
    assert not guard.holds()
    module.b = [1]
    assert guard.holds()


def test_views_and_proxies_are_compared_by_what_they_show_each_time() -> None:
    module = torch.nn.Module()
    held = collections.OrderedDict(a=1, b=(2, 3))
    module.views = [held.keys(), held.items(), held.values()]
    module.ordered = held
    guard = _core.ModuleGuard([module])
    assert all(guard.holds() for _ in range(4))
    held["c"] = 1
    assert not guard.holds()


def test_the_order_of_keys_is_a_state() -> None:
    class Reorders(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.order = dict.fromkeys([2.0, 1.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, *rest = self.order
            self.order.clear()
            self.order.update(dict.fromkeys([*rest, first]))
            return self.linear(x) * first

    assert_same_calls(Reorders)


def test_a_key_in_front_of_others_is_a_state() -> None:
    class Grows(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.order = dict.fromkeys([2.0, 1.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = next(iter(self.order))
            kept = [first + 1, *self.order]
            self.order.clear()
            self.order.update(dict.fromkeys(kept))
            return self.linear(x) * first

    assert_same_calls(Grows)


def test_an_item_that_moves_to_the_end_is_a_state() -> None:
    class Moves(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.order = collections.OrderedDict(a=1.0, b=2.0, c=3.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.order.move_to_end(next(iter(self.order)))
            return self.linear(x).tanh() * next(iter(self.order.values()))

    assert_same_calls(Moves)


def test_an_attribute_that_is_made_again_is_a_state() -> None:
    class Again(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = 2.0, 3.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.first
            del self.first
            self.first = first
            names = [name for name in vars(self) if name in ("first", "second")]
            return self.linear(x) * getattr(self, names[0])

    assert_same_calls(Again)

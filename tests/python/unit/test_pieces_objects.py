# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Dictionaries, queues, iterators, generators, texts and methods of one's own mean in pieces what they mean in Python."""

from __future__ import annotations

import collections
import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule


@pytest.fixture(autouse=True)
def everything_in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ORTRAIN_PIECES", "all")
    yield
    torch._dynamo.reset()


class Branching(nn.Module):
    """Branches on a value, and multiplies by a number that is computed behind it."""

    def __init__(self, compute: Callable[[Any, torch.Tensor], Any], **held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compute = compute
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor, **given: Any) -> torch.Tensor:
        y = self.linear(x) * 0 + 1
        if y.sum() > -1e9:
            y = y + 0
        return y * self.compute(self, x, **given)


class Counting(dict[str, float]):
    """Counts from an attribute of its class."""

    calls = 0

    def count(self) -> int:
        self.calls += 1
        return self.calls


class Tenfold(float):
    """Multiplies otherwise."""

    def __mul__(self, other: Any) -> Any:
        return other * 10

    __rmul__ = __mul__


class Doubled(dict[str, float]):
    """Looks things up otherwise."""

    def __getitem__(self, key: str) -> float:
        return 2 * super().__getitem__(key)


class Unequal:
    """Is not equal to itself, and found in a list all the same."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = object.__hash__


class Threes(type):
    """A metaclass that says what is an instance."""

    def __instancecheck__(cls, value: Any) -> bool:
        return value == 3


class Three(metaclass=Threes):
    pass


class Gone:
    """Tells when it is dropped."""

    log: list[int] = []

    def __del__(self) -> None:
        self.log.append(1)


def first_key(d: dict[str, Any]) -> str:
    return list(d)[0]


def kept_iterator(m: Any, x: torch.Tensor) -> Any:
    items = [1.0, 2.0]
    left = iter(
        items,
    )
    if x.sum() > -1e9:
        x = x + 1
    items.append(4.0)
    return sum(left)


def kept_reversed(m: Any, x: torch.Tensor) -> Any:
    items = [1.0, 2.0]
    backwards = reversed(items)
    items[0] = 9.0
    return sum(backwards)


def kept_view(m: Any, x: torch.Tensor) -> Any:
    table = {"a": 1.0}
    names = table.keys()
    if x.sum() > -1e9:
        table["b"] = 2.0
    return len(names)


def kept_in_a_tuple(m: Any, x: torch.Tensor) -> Any:
    items = [1.0, 2.0]
    pair = (iter(items), 1.0)
    if x.sum() > -1e9:
        items.append(4.0)
    return sum(pair[0])


def kept_as_an_attribute(m: Any, x: torch.Tensor) -> Any:
    if m.left is None:
        m.left = iter(m.items)
    m.items.append(3.0)
    return next(m.left, -1.0)


def reversed_in_a_tuple(m: Any, x: torch.Tensor) -> Any:
    pair = (reversed(m.items), 1)
    m.items[0] += 1
    return sum(pair[0])


def reversed_dictionary(m: Any, x: torch.Tensor) -> Any:
    pair = (reversed(m.table.values()), 1)
    m.table["a"] += 1
    return sum(pair[0])


def kept_map(m: Any, x: torch.Tensor) -> Any:
    items = [1.0, 2.0]
    pair = (map(float, items), 1.0)
    if x.sum() > -1e9:
        items.append(4.0)
    return sum(pair[0])


def drops(m: Any, x: torch.Tensor) -> Any:
    Gone()
    return len(m.dropped.log)


def held_unequal() -> dict[str, Any]:
    item = Unequal()
    return {"item": item, "items": [item]}


def reorder(m: Any) -> None:
    m.table = dict(reversed(list(m.table.items())))


def move(m: Any) -> None:
    m.table.move_to_end("a")


TABLE: Callable[[], dict[str, Any]] = lambda: {"table": {"a": 1.0, "b": 2.0}}  # noqa: E731
ORDERED: Callable[[], dict[str, Any]] = lambda: {  # noqa: E731
    "table": collections.OrderedDict(a=1.0, b=2.0)
}
# What is computed, what the module holds, and what happens to it between calls.
CASES: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]], Any]] = {
    "a list of keys": (lambda m, x: 2 if first_key(m.table) == "a" else 3, TABLE, reorder),
    "keys in brackets": (lambda m, x: 2 if [*m.table][0] == "a" else 3, TABLE, reorder),
    "keys of a copy": (lambda m, x: 2 if [*m.table.copy()][0] == "a" else 3, TABLE, reorder),
    "a merged table": (lambda m, x: 2 if [*{**m.table}][0] == "a" else 3, TABLE, reorder),
    "the first of equals": (
        lambda m, x: 2 if min(m.table, key=lambda _: 0) == "a" else 3,
        TABLE,
        reorder,
    ),
    "keys that move": (
        lambda m, x: 2 if min(m.table, key=lambda _: 0) == "a" else 3,
        ORDERED,
        move,
    ),
    "kinds of keys": (
        lambda m, x: 2 if type(list(m.table)[0]) is int else 3,
        lambda: {"table": {1: 0}},
        lambda m: setattr(m, "table", {True: 0}),
    ),
    "a generator": (lambda m, x: m.rng.random(), lambda: {"rng": random.Random(0)}, None),
    "the text of a number": (
        lambda m, x: 2 if f"{x.mean().item():.1f}" == "1.2" else 3,
        dict,
        None,
    ),
    "a text that is formatted": (
        lambda m, x: 2 if "{:.1f}".format(x.mean().item()) == "1.2" else 3,  # noqa: UP032
        dict,
        None,
    ),
    "a queue with a limit": (
        lambda m, x: m.last.append(x.mean()) or sum(m.last) / len(m.last),
        lambda: {"last": collections.deque(maxlen=2)},
        None,
    ),
    "the dictionary of an object": (
        lambda m, x: m.__dict__.get("scale", 1.0),
        dict,
        lambda m: setattr(m, "scale", 5.0),
    ),
    "a dictionary that counts": (lambda m, x: m.table.count(), lambda: {"table": Counting()}, None),
    "a number that multiplies": (
        lambda m, x: m.factor * x.sum(),
        lambda: {"factor": Tenfold(2.0)},
        None,
    ),
    "a dictionary that looks up": (
        lambda m, x: m.table["a"],
        lambda: {"table": Doubled(a=1.0)},
        None,
    ),
    "what is unequal to itself": (lambda m, x: 2 if m.item in m.items else 3, held_unequal, None),
    "NaN as a key": (
        lambda m, x: m.table.get(m.key, 5.0),
        lambda: (lambda nan: {"key": nan, "table": {nan: 2.0}})(float("nan")),
        None,
    ),
    "a class that tells its instances": (lambda m, x: 2 if isinstance(3, Three) else 3, dict, None),
    "a kept iterator": (kept_iterator, dict, None),
    "a kept reversed": (kept_reversed, dict, None),
    "a kept view": (kept_view, dict, None),
    "an iterator in a tuple": (kept_in_a_tuple, dict, None),
    "an iterator as an attribute": (
        kept_as_an_attribute,
        lambda: {"left": None, "items": [1.0, 2.0]},
        None,
    ),
    "a reversed in a tuple": (reversed_in_a_tuple, lambda: {"items": [1.0, 2.0]}, None),
    "a reversed dictionary": (reversed_dictionary, TABLE, None),
    "a kept map": (kept_map, dict, None),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_objects_mean_what_they_mean_in_python(name: str) -> None:
    compute, held, change = CASES[name]
    module = Branching(compute, **held())
    plain = Branching(compute, **held())
    plain.load_state_dict(module.state_dict())
    wrapped = ORTModule(module)
    for step in range(4):
        if step == 2 and change is not None:
            change(module)
            change(plain)
        x = torch.full((1, 4), 1.0 + 0.1 * step)
        torch.testing.assert_close(wrapped(x), plain(x))


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_objects_are_dropped_when_python_drops_them() -> None:
    module = Branching(drops, dropped=Gone)
    wrapped = ORTModule(module)
    Gone.log.clear()
    counts = [wrapped(torch.ones(1, 4))[0, 0].item() for _ in range(4)]
    assert counts == [1.0, 2.0, 3.0, 4.0]


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_the_order_of_arguments_by_name() -> None:
    def folded(module: Any, x: torch.Tensor, **weights: float) -> Any:
        total = 0.0
        for name in [*weights]:
            total = total * 0.5 + weights[name]
        return total

    module = Branching(folded)
    plain = copy.deepcopy(module)
    wrapped = ORTModule(module)
    x = torch.ones(1, 4)
    for given in ({"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}) * 2:
        torch.testing.assert_close(wrapped(x, **given), plain(x, **given))


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_modules_that_hold_dictionaries_stay_in_pieces() -> None:
    module = Branching(lambda m, x: m.table["a"] + len(m.table), **TABLE())
    wrapped = ORTModule(module)
    for _ in range(3):
        wrapped(torch.ones(1, 4))
    assert "in 2 pieces" in str(wrapped.report())


OF_A_PACKAGE = """
class Doubled(dict):
    def __getitem__(self, key):
        return 2 * dict.__getitem__(self, key)
"""


@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_dictionaries_of_packages_look_up_by_their_own_methods(
    imported_package: Callable[..., Any],
) -> None:
    package = imported_package("doubling", {"": OF_A_PACKAGE})
    module = Branching(lambda m, x: m.table["a"], table=package.Doubled(a=1.0))
    wrapped = ORTModule(module)
    for _ in range(3):
        torch.testing.assert_close(wrapped(torch.ones(1, 4)), torch.full((1, 4), 2.0))

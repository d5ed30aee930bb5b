# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules in pieces tell constants apart that are equal, and find keys by the equality of their class."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.dynamo_guards import _has_equals, identity_of


@pytest.fixture(autouse=True)
def everything_in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ORTRAIN_PIECES", "all")
    yield
    torch._dynamo.reset()


class Named:
    """Equal by its name."""

    def __init__(self, name: str, weight: float) -> None:
        self.name = name
        self.weight = weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Equal by one of its fields."""

    name: str
    weight: float = dataclasses.field(default=0.0, compare=False)


class Branching(nn.Module):
    """Branches on a value, and adds what is computed of a constant."""

    def __init__(self, constant: Any, compute: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.constant = constant
        self.compute = compute

    def forward(self, x: torch.Tensor, given: Any = None) -> torch.Tensor:
        y = self.linear(x)
        if y.sum() > -1e9:
            y = y * 2
        return y + self.compute(self.constant if given is None else given)


CONTAINERS = (tuple, list, set, frozenset)


def kinds(value: Any) -> float:
    """Return another number for each constant, equal or not."""
    if isinstance(value, CONTAINERS):
        return 1.0 + sum((i + 2) * kinds(each) for i, each in enumerate(value))
    if type(value) is bool:
        return 5.0 + value
    if type(value) is int:
        return 11.0 + value
    if type(value) is complex:
        return 23.0 * math.copysign(1.0, value.imag) + value.real
    return 17.0 * math.copysign(1.0, value) + value


PAIRS: dict[str, tuple[Any, Any]] = {
    "signs of zeros": (0.0, -0.0),
    "signs of parts": (1 + 0j, complex(1, -0.0)),
    "numbers in a tuple": ((1, 2), (1.0, 2)),
    "numbers in tuples of tuples": (((1,),), ((True,),)),
    "zeros in a list": ([[0.0]], [[-0.0]]),
    "numbers in a set": ({1, 2}, {1.0, 2.0}),
    "orders of a set": ({8, 0}, {0, 8}),
    "numbers in a frozenset": (frozenset({1}), frozenset({True})),
}


@pytest.mark.parametrize("is_given", [False, True], ids=["attribute", "argument"])
@pytest.mark.parametrize("name", PAIRS)
def test_equal_constants_are_told_apart(name: str, is_given: bool) -> None:
    first, second = PAIRS[name]
    assert first == second
    module = Branching(first, kinds)
    wrapped = ORTModule(module)
    x = torch.randn(2, 4)
    for constant in (first, second, first, second):
        module.constant = constant
        given = constant if is_given else None
        torch.testing.assert_close(wrapped(x, given), module(x, given))
    assert "in 2 pieces" in str(wrapped.report())


A, B, C = Named("a", 1.0), Named("a", 2.0), Named("c", 3.0)
KEYS: dict[str, tuple[Callable[[Any], float], Any, Any]] = {
    "an equal key of a dictionary": (lambda d: float(d.get(A, 5)), {B: 1}, {C: 1}),
    "a key that becomes an equal one": (lambda d: float(d.get(A, 5)), {C: 1}, {B: 4}),
    "an equal item of a set": (lambda s: float(A in s), {C}, {B}),
    "keys in a literal": (lambda k: float(len({k: 1, A: 2})), C, B),
    "a field that does not count": (
        lambda d: float(d.get(Frozen("a", 3.0), 5)),
        {Frozen("c"): 1},
        {Frozen("a"): 4},
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys_are_found_by_their_equality(name: str) -> None:
    compute, first, second = KEYS[name]
    module = Branching(first, compute)
    wrapped = ORTModule(module)
    x = torch.randn(2, 4)
    for constant in (first, second, first):
        module.constant = constant
        torch.testing.assert_close(wrapped(x), module(x))


def constant_and_equal(draw: random.Random, depth: int = 0) -> tuple[Any, Any]:
    """Return a random constant, and one of the same type that is equal to it."""
    kind = draw.choice(
        ["int", "float", "complex", "text", *(["tuple", "list", "set", "slice"] * (depth < 3))]
    )
    number = draw.choice([0, 0, 1, 2, 7])
    if kind == "int":
        return draw.choice([(number, number), (bool(number), bool(number))])
    if kind == "float":
        return float(number), draw.choice([1.0, -1.0]) * number if number == 0 else float(number)
    if kind == "complex":
        imaginary = 0.0 if number == 0 else float(number)
        return complex(1, imaginary), complex(1, -imaginary if number == 0 else imaginary)
    if kind == "text":
        return "a", "a"
    if kind == "slice":
        one, other = items(draw, 0)
        return slice(one, 9), slice(other, 9)
    pairs = [items(draw, depth + 1) for _ in range(draw.randrange(4))]
    one, other = [p[0] for p in pairs], [p[1] for p in pairs]
    if kind == "set":
        numbers = [float(n) for n in draw.sample(range(20), 4)]
        return set(numbers), set(draw.sample([int(n) for n in numbers], 4))
    return (one, other) if kind == "list" else (tuple(one), tuple(other))


def items(draw: random.Random, depth: int) -> tuple[Any, Any]:
    """Return a constant and an equal one, which within a container may be of another type."""
    if draw.random() < 0.3:
        return draw.choice([(1, True), (1.0, 1), (0, -0.0), (True, 1.0)])
    return constant_and_equal(draw, depth)


def shown(value: Any) -> str:
    return repr(value)  # of numbers: type, sign and value; of containers: order


def test_of_random_constants_each_has_an_identity_of_its_own() -> None:
    draw = random.Random(0)
    apart = 0
    for _ in range(3000):
        one, other = constant_and_equal(draw)
        assert one == other and type(one) is type(other), "the generator makes equal constants"
        if shown(one) != shown(other):
            apart += 1
            assert _has_equals(one), f"{one!r} is compared by =="
            assert identity_of(one) != identity_of(other), f"{one!r} is taken for {other!r}"
        else:
            assert identity_of(one) == identity_of(other), f"{one!r} is not taken for itself"
    assert apart > 500

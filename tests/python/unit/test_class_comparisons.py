# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code that asks for the very class of a number, and what is captured of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ortrain.capture.class_comparisons import compares_classes_of_numbers
from tests.python.unit.side_by_side import Linear, assert_same_calls

_TABLE: dict[Any, float] = {int: 2.0, "int": 2.0}
_INTEGER = (int,)

_ASKING: dict[str, Callable[[Any], Any]] = {
    "is": lambda n: 2.0 if type(n) is int else 3.0,
    "equal": lambda n: 2.0 if type(n) == int else 3.0,  # noqa: E721
    "among": lambda n: 2.0 if type(n) in _INTEGER else 3.0,
    "table": lambda n: _TABLE[type(n)] if _TABLE else 3.0,
    "name": lambda n: 2.0 if type(n).__name__ == "int" else 3.0,
    "table of names": lambda n: _TABLE[type(n).__name__],
    "length of the name": lambda n: float(len(type(n).__name__)),
    "default of a table": lambda n: _TABLE.get(type(n), 3.0),
    "function of a table": lambda n: 2.0 if _TABLE.get(type(n)) else 3.0,
    "another class": lambda n: 2.0 if type(n) is type(len("four")) else 3.0,
    "subclass": lambda n: 2.0 if issubclass(type(n), _INTEGER) else 3.0,
    "bases": lambda n: 1.0 + len(type(n).__mro__),
    "kept": lambda n: [k for k in [type(n)] if k in _INTEGER] and 2.0 or 3.0,
    "of a closure": (lambda kind: lambda n: 2.0 if type(n) is kind else 3.0)(int),
    "a part": lambda n: 2.0 if type((n, 1)[0]) is int else 3.0,
}
_TELLING: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda n: n,
    "a text": lambda n: f"{type(n)} and {type(n).__name__}",
    "a call": lambda n: type(n)(3),
    "text of its own": lambda n: str(type(n)).startswith("<class 'torch."),
    "type itself": lambda n: isinstance(n, type) and n in _TABLE,
    "another class": lambda n: type(n) is dict,
    "attributes": lambda n: n.int() if n.type == "cpu" else n.type in ("cuda", "mps"),
}


@pytest.mark.parametrize("name", _ASKING)
def test_asking(name: str) -> None:
    assert compares_classes_of_numbers(_ASKING[name].__code__)


@pytest.mark.parametrize("name", _TELLING)
def test_not_asking(name: str) -> None:
    assert not compares_classes_of_numbers(_TELLING[name].__code__)


class Asks(Linear):
    def __init__(self, ask: Callable[[Any], Any]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.ask(x.shape[0])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", _ASKING)
def test_the_class_of_a_size(name: str) -> None:
    model = assert_same_calls(lambda: Asks(_ASKING[name]), rows=(3, 5, 7, 3))
    assert all(record.native_nodes > 0 for record in model.report().captures)

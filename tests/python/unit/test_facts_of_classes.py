# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What Python keeps of classes and functions, what reads without naming, and functions of packages, changed between calls."""

from __future__ import annotations

import abc
import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from transformers.models.bert import modeling_bert

from ortrain import ORTModule


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Reading(nn.Module):
    """Scales by what a function makes of something that it holds."""

    def __init__(self, read: Callable[[Any], float], held: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.read, self.held = read, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.read(self.held)


def made_class(name: str = "Made", *bases: type, **attributes: Any) -> type:
    return types.new_class(name, bases, exec_body=lambda space: space.update(attributes))


def made_function() -> Callable[[], float]:
    def function() -> float:
        """2"""
        return 0.0

    return function


def subclass(cls: type) -> None:
    cls.kept = made_class("Below", cls)


def rebase(cls: type) -> None:
    cls.__bases__ = (made_class("Other"),)


def register(pair: Any) -> None:
    pair.abstract.register(pair.cls)


def unmask(array: Any) -> None:
    array.mask = [False, False]


def abstract_and_other() -> types.SimpleNamespace:
    return types.SimpleNamespace(abstract=abc.ABCMeta("Abstract", (), {}), cls=made_class())


def two_equal() -> list[types.SimpleNamespace]:
    return [types.SimpleNamespace(k=1), types.SimpleNamespace(k=1)]


class Getter(nn.Module):
    def __init__(self, get: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.get, self.scale = get, 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (self.get(self) if self.get is not getattr else self.by_text())

    def by_text(self) -> float:
        return self.get(self, "".join(["sc", "ale"]))


# What is held, what is read of it, and how it changes.
CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], Any]]] = {
    "name of a class": (
        made_class,
        lambda c: 2.0 if c.__name__ == "Made" else 3.0,
        lambda c: setattr(c, "__name__", "Renamed"),
    ),
    "name of a function": (
        made_function,
        lambda f: 2.0 if f.__name__ == "function" else 3.0,
        lambda f: setattr(f, "__name__", "renamed"),
    ),
    "text of a function": (
        made_function,
        lambda f: float(f.__doc__),
        lambda f: setattr(f, "__doc__", "3"),
    ),
    "bases": (
        lambda: made_class("Lower", made_class("Upper")),
        lambda c: 2.0 if c.__bases__[0].__name__ == "Upper" else 3.0,
        rebase,
    ),
    "classes below": (made_class, lambda c: 2.0 + len(c.__subclasses__()), subclass),
    "abstract class": (
        abstract_and_other,
        lambda pair: 2.0 + isinstance(pair.cls(), pair.abstract),
        register,
    ),
    "abstract class of classes": (
        abstract_and_other,
        lambda pair: 2.0 + issubclass(pair.cls, pair.abstract),
        register,
    ),
    "equality of namespaces": (
        two_equal,
        lambda spaces: 2.0 + (spaces[0] == spaces[1]),
        lambda spaces: setattr(spaces[0], "k", 5),
    ),
    "text of a namespace": (
        two_equal,
        lambda spaces: float(len(repr(spaces))),
        lambda spaces: setattr(spaces[0], "k", 500),
    ),
    "array of objects": (
        lambda: np.array([{"k": 2.0}, None], dtype=object),
        lambda array: array[0]["k"],
        lambda array: array[0].update(k=3.0),
    ),
    "masked array": (
        lambda: np.ma.array([2.0, 3.0], mask=[False, True]),
        lambda array: float(array.sum()),
        unmask,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_followed(name: str) -> None:
    make, read, change = CASES[name]
    held = make()
    net = Reading(read, held)
    ours, x = ORTModule(net), torch.linspace(-1, 1, 6).reshape(2, 3)
    results = []
    for step in range(4):
        if step == 2:
            change(held)
        y = ours(x)
        torch.testing.assert_close(y, net.forward(x))
        results.append(y.detach())
        y.sum().backward()
    assert not torch.equal(results[0], results[-1])


@pytest.mark.parametrize("get", [getattr, operator.attrgetter("scale")])
def test_functions_that_read_by_names_are_followed(get: Any) -> None:
    net = Getter(get)
    ours, x = ORTModule(net), torch.ones(2, 3)
    for scale in (2.0, 2.0, 3.0):
        net.scale = scale
        torch.testing.assert_close(ours(x), net.forward(x))


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=32,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        attn_implementation="eager",
    )
    return transformers.BertModel(config).eval()


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return (result[0] * 2, *result[1:]) if isinstance(result, tuple) else result * 2

    return call


@pytest.mark.parametrize(
    "owner, name",
    [
        (modeling_bert, "eager_attention_forward"),
        (modeling_bert.BertLayer, "feed_forward_chunk"),
    ],
    ids=["function", "method"],
)
def test_functions_of_packages_may_be_replaced(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = bert()
    ours, ids = ORTModule(net), torch.arange(12).reshape(2, 6)
    first = ours(ids).last_hidden_state
    monkeypatch.setattr(owner, name, doubled(getattr(owner, name)))
    second = ours(ids).last_hidden_state
    torch.testing.assert_close(second, net.forward(ids).last_hidden_state)
    assert not torch.allclose(first, second)
    monkeypatch.undo()
    torch.testing.assert_close(ours(ids).last_hidden_state, first)
    assert len(ours.report().captures) == 2  # the first graph is used again


def test_a_method_of_a_layer_of_pytorch_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Conv1d(2, 2, 1))
    ours, x = ORTModule(net), torch.ones(1, 2, 3)
    first = ours(x)
    monkeypatch.setattr(nn.Conv1d, "_conv_forward", doubled(nn.Conv1d._conv_forward))
    torch.testing.assert_close(ours(x), 2 * first)


def test_names_that_nobody_reads_may_change() -> None:
    cls = made_class()
    net = Reading(lambda held: 2.0 if held is not None else 3.0, cls)
    ours, x = ORTModule(net), torch.ones(2, 3)
    for name in ("A", "B", "C"):
        cls.__name__ = name
        ours(x)
    assert len(ours.report().captures) == 1

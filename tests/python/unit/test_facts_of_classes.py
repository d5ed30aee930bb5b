# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What Python keeps of classes and functions, what reads without naming, and functions of packages, changed between calls."""

from __future__ import annotations

import abc
import collections.abc
import dataclasses
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


class ByProperty(Getter):
    size = property(operator.attrgetter("scale"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.size


READERS: dict[str, Callable[[], nn.Module]] = {
    "getattr": lambda: Getter(getattr),
    "attrgetter": lambda: Getter(operator.attrgetter("scale")),
    "methodcaller": lambda: Getter(operator.methodcaller("__getattribute__", "scale")),
    "format": lambda: Getter(lambda self, read="{0.scale}".format: float(read(self))),
    "property": lambda: ByProperty(None),
}


@pytest.mark.parametrize("name", READERS)
def test_functions_that_read_by_names_are_followed(name: str) -> None:
    net = READERS[name]()
    ours, x = ORTModule(net), torch.ones(2, 3)
    for scale in (2.0, 2.0, 3.0):
        net.scale = scale
        torch.testing.assert_close(ours(x), net.forward(x))
    assert ours.report().native_share == 1.0


class OfCall(nn.Module):
    def __init__(self, held: Any) -> None:
        super().__init__()
        self.linear, self.held = nn.Linear(3, 3), held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.held.scale


@pytest.mark.parametrize(
    "make",
    [
        lambda: types.SimpleNamespace(scale=2.0),
        lambda: types.SimpleNamespace(scale=2.0, key=operator.attrgetter("order")),
        lambda: dataclasses.make_dataclass("Made", [("scale", float)])(2.0),
    ],
    ids=["namespace", "with a reader", "dataclass"],
)
def test_what_is_not_read_may_change(make: Callable[[], Any]) -> None:
    net = OfCall(make())
    ours, x = ORTModule(net), torch.ones(2, 3)
    for step in range(4):
        if not hasattr(net.held, "key"):  # where anything may be read by names, all counts
            net.held.step = step
        torch.testing.assert_close(ours(x), net.forward(x))
    assert len(ours.report().captures) == 1
    assert ours.report().native_share == 1.0


class Upper:
    scale = 2.0


class Other:
    scale = 3.0


class Lower(Upper):
    pass


@pytest.mark.parametrize(
    "read", [lambda held: held.scale, lambda held: 2.0 + isinstance(held, Upper)]
)
def test_attributes_are_those_of_the_bases(read: Callable[[Any], float]) -> None:
    net = Reading(read, Lower())
    ours, x = ORTModule(net), torch.ones(2, 3)
    try:
        for base in (Upper, Upper, Other, Upper):
            Lower.__bases__ = (base,)
            torch.testing.assert_close(ours(x), net.forward(x))
    finally:
        Lower.__bases__ = (Upper,)
    assert len(ours.report().captures) == 2


def test_registering_with_a_class_below_or_in_another_module_counts() -> None:
    class Above(metaclass=abc.ABCMeta):  # noqa: B024
        pass

    class Below(Above):
        pass

    class First:
        pass

    class Second:
        pass

    for read, held, register in (
        (lambda held: 2.0 + isinstance(held, Above), First(), Below.register),
        (
            lambda held: 2.0 + isinstance(held, collections.abc.Mapping),
            Second(),
            collections.abc.Mapping.register,
        ),
    ):
        net = Reading(read, held)
        ours, x = ORTModule(net), torch.ones(2, 3)
        first = ours(x)
        register(type(held))
        torch.testing.assert_close(ours(x), 1.5 * first)
        torch.testing.assert_close(ours(x), net.forward(x))


def test_errors_and_generators_of_the_callers_stay_as_they_are() -> None:
    def fail() -> None:
        secret = 42
        raise KeyError(secret)

    def rows(kept: list[Any]) -> Iterator[int]:
        try:
            try:
                fail()
            except KeyError as error:
                kept.append(error)
                yield 1
            yield 2
        finally:
            kept.append("closed")

    class Raising(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise kept[0]

    kept: list[Any] = []
    iterator = rows(kept)
    next(iterator)
    with pytest.raises(KeyError):
        ORTModule(Raising())(torch.ones(2))
    trace = kept[0].__traceback__
    while trace.tb_next is not None:
        trace = trace.tb_next
    assert trace.tb_frame.f_locals["secret"] == 42
    assert len(kept) == 1 and next(iterator) == 2


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

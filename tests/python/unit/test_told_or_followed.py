# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What stands in no code and in no dictionary: memory behind addresses, texts of classes, names that are made up, attributes
of parameters that packages ask for, functions in C. It is followed, or said to be read once."""

from __future__ import annotations

import copy
import ctypes
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from markupsafe import _speedups
from torch import nn

from ortrain import ORTModule
from ortrain.capture.tensor_questions import TensorQuestions

pytestmark = pytest.mark.filterwarnings("ignore:.* runs in :RuntimeWarning")


class Scaling(nn.Module):
    """A module that multiplies by what it finds."""

    def __init__(self, factor: Callable[..., Any], held: Any = None) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("ones", torch.ones(2))
        self.factor, self.held = factor, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.factor(self, x)


def factors(module: Scaling, model: ORTModule, x: torch.Tensor) -> tuple[float, float]:
    """Return by what the engine's call multiplies, and PyTorch's."""
    plain = module.linear(x)
    return tuple((result / plain).mean().item() for result in (model(x), module.forward(x)))


def assert_followed(
    module: Scaling, change: Callable[[], object], x: torch.Tensor | None = None
) -> ORTModule:
    model = ORTModule(module)
    x = torch.ones(2, 3) if x is None else x
    seen = set()
    for _ in range(3):
        ours, theirs = factors(module, model, x)
        assert ours == pytest.approx(theirs)
        seen.add(round(theirs, 4))
        change()
    assert len(seen) > 1
    return model


class Pointing(ctypes.Structure):
    _fields_ = (("size", ctypes.c_int), ("first", ctypes.POINTER(ctypes.c_float)))


class Outer(ctypes.Structure):
    _fields_ = (("inner", Pointing * 2),)


MEMORY = (ctypes.c_float * 2)(1.0, 2.0)
ADDRESS = ctypes.addressof(MEMORY)
POINTER = ctypes.cast(MEMORY, ctypes.POINTER(ctypes.c_float))
OUTER = Outer((Pointing(1, POINTER), Pointing(1, POINTER)))
PLAIN = (ctypes.c_float * 2)(1.0, 2.0)
TEXT = ctypes.create_string_buffer(b"1")
BEHIND = ctypes.c_char_p(ctypes.addressof(TEXT))
CALLED = [0]


@ctypes.CFUNCTYPE(ctypes.c_double)
def call_back() -> float:
    CALLED[0] += 1
    return float(MEMORY[0])


def grow() -> None:
    for memory in (MEMORY, PLAIN):
        memory[0] += 1
    TEXT.value = str(int(TEXT.value) + 1).encode()


ADDRESSES: dict[str, tuple[Callable[..., Any], Any]] = {
    "pointer": (lambda m, x: m.held[0], POINTER),
    "contents": (lambda m, x: m.held.contents.value, POINTER),
    "global": (lambda m, x: POINTER[0], None),
    "field": (lambda m, x: m.held.first[0], Pointing(1, POINTER)),
    "fields of fields": (lambda m, x: OUTER.inner[1].first[0], None),
    "text": (lambda m, x: float(m.held.value), BEHIND),
    "function": (lambda m, x: m.held(), call_back),
    "bytes": (lambda m, x: m.held[0], PLAIN),
}


@pytest.mark.parametrize("kind", ADDRESSES)
def test_memory_behind_addresses(kind: str) -> None:
    factor, held = ADDRESSES[kind]
    model = assert_followed(Scaling(factor, held), grow)
    native = [record.fallback == "" for record in model.report().captures]
    assert all(native) == (kind == "bytes")


class Meta(type):
    """A metaclass of the user's own."""

    def __repr__(cls) -> str:
        return cls.__name__


class Named:
    """A class of the user's own."""


class OfMeta(metaclass=Meta):
    """A class with a text of its own."""


def function_that_is_shown() -> None:
    """Do nothing."""


def rename(held: Any) -> None:
    held.__qualname__ += "_"
    held.__name__ += "_"


@pytest.mark.parametrize(
    "show",
    [
        lambda m, x: len(str(m.held)),
        lambda m, x: len(f"{m.held}"),
        lambda m, x: len("%s" % m.held),  # noqa: UP031
        lambda m, x: len("{}".format(m.held)),  # noqa: UP032
        lambda m, x: len(repr([m.held])),
    ],
)
@pytest.mark.parametrize("held", [Named, OfMeta, function_that_is_shown])
def test_texts_of_classes_and_functions(show: Callable[..., Any], held: Any) -> None:
    own = (
        types.FunctionType(held.__code__, globals(), "shown") if inspect.isfunction(held) else None
    )
    held = own or type(held)(held.__name__, (held,), {"__module__": __name__})
    assert_followed(Scaling(show, held), lambda: rename(held))


@pytest.mark.parametrize("method", ["__repr__", "__str__", "__format__"])
@pytest.mark.parametrize("of", ["class", "object"])
def test_a_text_that_a_method_gives(method: str, of: str) -> None:
    bases = (type,) if of == "class" else ()
    meta = type("Changing", bases, {method: lambda *_: "one"})
    held = meta("Held", (), {}) if of == "class" else meta()
    show = (lambda m, x: len(f"{m.held}")) if method == "__format__" else None
    texts = iter(("three", "seventeen", "more than that"))

    def change() -> None:
        text = next(texts)
        setattr(meta, method, lambda *_: text)

    assert_followed(Scaling(show or (lambda m, x: len(str(m.held))), held), change)


@pytest.mark.parametrize("show", [str, repr, "{}".format, lambda x: f"{x}"])
def test_what_tensors_show(show: Callable[[Any], str]) -> None:
    module = Scaling(lambda m, x: len(m.held(m.ones)), show)
    assert_followed(module, lambda: module.ones.mul_(1000.5))


def ask(tensor: torch.Tensor, begin: str, end: str) -> Any:
    answer = getattr(tensor, begin + end)
    return answer() if callable(answer) else answer


READERS: dict[str, Callable[..., Any]] = {
    "getattr": ask,
    "attrgetter": lambda t, a, b: operator.attrgetter(a + b)(t),
    "object": lambda t, a, b: object.__getattribute__(t, a + b),
}


@pytest.mark.parametrize("reader", READERS)
def test_names_that_are_made_up(reader: str) -> None:
    read = READERS[reader]
    module = Scaling(lambda m, x: 1 + float(read(m.linear.weight, "is_", "leaf")))
    model = ORTModule(module)
    ours, theirs = factors(module, model, torch.ones(2, 3))
    assert ours == pytest.approx(theirs)
    assert "reads" in model.report().captures[0].fallback


def test_versions_and_offsets_by_names_that_are_made_up() -> None:
    module = Scaling(lambda m, x: 1 + ask(m.ones, "_ver", "sion"))
    assert_followed(module, lambda: module.ones.mul_(1))
    memory, begin = torch.ones(9, 3), [0]
    module = Scaling(lambda m, x: 1 + ask(x, "storage_", "offset"))
    model = ORTModule(module)
    for begin in (0, 2, 4):
        ours, theirs = factors(module, model, memory[begin : begin + 2])
        assert ours == pytest.approx(theirs)


def test_gaps_by_names_that_are_made_up() -> None:
    module = Scaling(lambda m, x: 1 + float(ask(x, "is_conti", "guous")))
    model = ORTModule(module)
    for x in (torch.ones(2, 3), torch.ones(2, 5)[:, :3], torch.ones(4, 3)):
        ours, theirs = factors(module, model, x)
        assert ours == pytest.approx(theirs)
    assert sum(record.fallback == "" for record in model.report().captures) == 1


def test_functions_past_what_watches_them() -> None:
    def factor(module: Scaling, x: torch.Tensor) -> Any:
        with torch._C.DisableTorchFunction():
            return float(module.linear.weight.is_leaf) + len(module.held)

    held = [1]
    model = assert_followed(Scaling(factor, held), lambda: held.append(1))
    assert "past what watches" in model.report().captures[0].fallback


ASKING = """
def scaled(tensor, x):
    return 2 * x if getattr(tensor, "doubled", False) else x


def named(tensor, x, name):
    return 3 * x if hasattr(tensor, name + "led") else x
"""


@pytest.mark.parametrize("where", ["weight", "bias", "ones"])
def test_attributes_that_packages_ask_parameters_for(
    imported_package: Callable[..., types.ModuleType], where: str
) -> None:
    asking = imported_package("asking_of_parameters", {"": ASKING})
    module = Scaling(
        lambda m, x: asking.scaled(m.ones, 1.0) * asking.named(m.linear.bias, 1.0, "trip")
    )
    if where == "weight":
        module.factor = lambda m, x: asking.scaled(m.linear.weight, 1.0)
    tensor = module.ones if where == "ones" else getattr(module.linear, where)
    name = "tripled" if where == "bias" else "doubled"
    changes = iter((lambda: setattr(tensor, name, True), lambda: delattr(tensor, name)))
    model = assert_followed(module, lambda: next(changes, lambda: None)())
    model(torch.ones(2, 3))
    assert sum(record.fallback == "" for record in model.report().captures) == 1


READING = """
import os


def scale():
    return float(os.environ.get("SCALE_OF_A_PACKAGE", "1"))
"""


def test_what_is_read_once_is_told(imported_package: Callable[..., types.ModuleType]) -> None:
    reading = imported_package("reading_variables", {"": READING})

    def factor(module: Scaling, x: torch.Tensor) -> float:
        return reading.scale() * len(_speedups._escape_inner("abc"))

    model = ORTModule(Scaling(factor))
    model(torch.ones(2, 3))
    told = model.report().captures[0].read_once
    assert "environment variables (reading_variables.scale)" in told
    assert "markupsafe._speedups._escape_inner (a function in C)" in told
    assert "read once: environment variables" in str(model.report())


def clear_by_hand(module: Scaling, x: torch.Tensor) -> None:
    for parameter in module.parameters():
        parameter.grad = None


GRADIENTS: dict[str, Callable[[Scaling, torch.Tensor], object]] = {
    "set": lambda m, x: setattr(m.held.weight, "grad", torch.ones(2, 3)),
    "cleared": lambda m, x: setattr(m.linear.weight, "grad", None),
    "cleared by hand": clear_by_hand,
    "zero_grad": lambda m, x: m.zero_grad(),
    "deleted": lambda m, x: delattr(m.linear.weight, "grad"),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_gradients_that_a_forward_writes(kind: str) -> None:
    def factor(module: Scaling, x: torch.Tensor) -> float:
        GRADIENTS[kind](module, x)
        return 1.0

    torch.manual_seed(0)
    module = Scaling(factor, nn.Linear(3, 2))
    plain = copy.deepcopy(module)
    model, x = ORTModule(module), torch.ones(2, 3)
    for _ in range(3):
        for net in (model, plain):
            net(x).sum().backward()
        for own, other in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad)


def test_what_is_heard_can_be_set_on_a_tensor_as_before() -> None:
    questions = TensorQuestions(("stride", "grad"), lambda *_: True, lambda *_: False)
    tensor = torch.ones(2, 3)
    with questions.heard():
        tensor.stride = lambda: "own"
        assert tensor.stride() == "own"
        del tensor.stride
        assert tensor.stride() == (3, 1)
        tensor.grad = torch.ones(2, 3)
        assert tensor.grad is not None
        del tensor.grad
        assert tensor.grad is None
    assert set(questions.asked) == {"stride", "grad"}

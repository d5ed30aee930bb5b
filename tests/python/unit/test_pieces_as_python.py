# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code in pieces gives what Python and NumPy give where Dynamo, or its code, gives something else."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortrain import ORTModule
from ortrain.capture.dynamo_misreads import misread_by_dynamo

GAIN = np.float64(1.5)


@pytest.fixture(autouse=True)
def everything_in_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ORTRAIN_PIECES", "all")
    yield
    torch._dynamo.reset()


def _counts(x: torch.Tensor) -> np.ndarray:
    return np.bincount(x.detach().argmax(1).numpy(), minlength=4)


class Stepping:
    """Counts on its class."""

    steps = 0

    def step(self) -> int:
        self.__class__.steps += 1
        return self.steps


def stepping(m: Any, x: torch.Tensor) -> torch.Tensor:
    type(m).steps += 1
    return x * m.steps


def stepping_base(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.base.steps += 1
    return x * m.derived.steps


def stepping_attribute(m: Any, x: torch.Tensor) -> torch.Tensor:
    stepping_attribute.steps = m.calls  # type: ignore[attr-defined]
    return x * stepping_attribute.steps  # type: ignore[attr-defined]


CASES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a negative base": lambda m, x: x * (-1) ** torch.arange(4),
    "a negative float base": lambda m, x: x * (-0.5) ** torch.arange(4),
    "a negative number": lambda m, x: x * (-1) ** m.calls,
    "negative attributes": lambda m, x: (
        x * (-m.calls) ** torch.arange(4) * (m.calls - 9) ** (torch.arange(4) + 1)
    ),
    "operator.pow": lambda m, x: x * operator.pow(-2, torch.arange(4)),
    "class weights": lambda m, x: x * torch.from_numpy(_counts(x) / _counts(x).sum()),
    "positions": lambda m, x: torch.from_numpy(1 / 10000 ** (np.arange(4) / 4)) * x,
    "an array of ints divided": lambda m, x: torch.from_numpy(m.array / 3),
    "a quantile": lambda m, x: x * torch.as_tensor(np.quantile(m.array, 0.3)),
    "a float of NumPy": lambda m, x: (torch.arange(4) * GAIN, x * GAIN),
    "a float of NumPy's functions": lambda m, x: (torch.arange(4) * np.ceil(m.calls / 2), x),
    "a float of a number": lambda m, x: (
        x * (2 if isinstance(np.float64(1) * m.calls, float) else 3)
    ),
    "the larger of tensors": lambda m, x: max(x.sum() * 0, x.mean() * 0) + m.layer.bias,
    "a number or a tensor": lambda m, x: x * (2 if type(max(0.5, x.min() * 0)) is float else 3),
    "what is in a range": lambda m, x: (
        x * (2 if (m.calls in range(3)) is True else 3) * (len(x) in range(9))
    ),
    "a tensor in a list": lambda m, x: x * (2 if x in [x, x + 1] else 3),
    "how often a tensor is in a list": lambda m, x: x * [x.sum(), x.sum() + 1].count(x.sum()),
    "a set": lambda m, x: [x[i % 3] for i in {9, 1, m.calls % 3 + 4}],
    "a list of a set": lambda m, x: [x[i % 3] for i in list({3, 1, m.calls + 4})],
    "a set of a loop": lambda m, x: [x[i % 3] for i in {v % 5 for v in (9, 3, m.calls)}],
    "a set by its name": lambda m, x: [x[i % 3] for i in set(range(m.calls, 9, 4)) | {5}],
}


class Counting(nn.Module):
    """Counts its calls, so that no graph holds it whole."""

    def __init__(self, case: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.case = nn.Linear(4, 4), case
        self.calls, self.array = 0, np.arange(4)

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.case(self, self.layer(x).exp())


STEPPING: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a class that is asked by an object": stepping,
    "a class of an object of somebody's": lambda m, x: x * m.stepping.step(),
    "a base that is asked by a class": stepping_base,
    "an attribute of a function": stepping_attribute,
}


class Stepped(Counting):
    """Has, and is of, classes of its own."""

    def __init__(self, case: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__(case)
        self.base = type("Base", (Stepping,), {"steps": 0})
        self.derived = type("Derived", (self.base,), {})
        self.stepping = self.base()
        self.__class__ = type("Stepped", (Counting,), {"steps": 0})


def make(name: str) -> Counting:
    return Stepped(STEPPING[name]) if name in STEPPING else Counting(CASES[name])


@pytest.mark.filterwarnings("ignore:.*runs in")
@pytest.mark.parametrize("name", [*CASES, *STEPPING])
def test_pieces_compute_as_python(name: str) -> None:
    plain, copied = make(name), make(name)
    copied.load_state_dict(plain.state_dict())
    ours, x = ORTModule(copied), torch.eye(4)[[0, 0, 1, 2, 3, 3]]
    for _ in range(4):
        expected, actual = plain(x), ours(x)
        torch.testing.assert_close(actual, expected)
        grads = [
            torch.autograd.grad(
                sum(r.sum() for r in (result if isinstance(result, (list, tuple)) else [result])),
                list(module.parameters()),
                allow_unused=True,
            )
            for result, module in ((expected, plain), (actual, ours))
            if "divided" not in name
        ]
        if grads:
            torch.testing.assert_close(*grads)
    assert ours.calls == plain.calls == 4


def test_compiled_powers_of_negative_numbers() -> None:
    def signed(x: torch.Tensor) -> torch.Tensor:
        return x * (-1) ** torch.arange(4)

    x = torch.ones(2, 4)
    torch.testing.assert_close(torch.compile(signed, backend="ortrain")(x), signed(x))


def _chooses(m: Any, x: torch.Tensor) -> torch.Tensor:
    act = F.gelu if m.calls % 2 else F.relu
    kind = type(m)
    m.seen = kind.__name__
    return (functional := torch.nn.functional).silu(act(x)) + functional.relu(x)


def _counts_on_class(m: Any, x: torch.Tensor) -> torch.Tensor:
    kind = type(m)
    kind.seen = 1
    return x


@pytest.mark.parametrize(("case", "is_misread"), [(_chooses, False), (_counts_on_class, True)])
def test_what_only_reads_classes_and_functions_is_not_misread(case: Any, is_misread: bool) -> None:
    module = Counting(case)
    assert bool(misread_by_dynamo(module, (torch.eye(4),))) == is_misread


class Hooked(nn.Module):
    """Has a hook on what is between its layers that reads `scale` when the backward comes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale, self.calls = 1.0, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.first(x).tanh()
        self.hook(h)
        return self.last(h)


class HookCloses(Hooked):
    def hook(self, h: torch.Tensor) -> None:
        h.register_hook(lambda gradient: gradient * self.scale)


class HookIsMethod(Hooked):
    def scaled(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.scale

    def hook(self, h: torch.Tensor) -> None:
        h.register_hook(self.scaled)


class HookHasDefault(Hooked):
    def hook(self, h: torch.Tensor) -> None:
        h.register_hook(lambda gradient, of=self: gradient * of.scale)


class HookIsPartial(HookIsMethod):
    def hook(self, h: torch.Tensor) -> None:
        h.register_hook(functools.partial(HookIsMethod.scaled, self))


class HookReadsGlobal(Hooked):
    def hook(self, h: torch.Tensor) -> None:
        h.register_hook(lambda gradient: gradient * SCALES["now"])


class HookOfNode(Hooked):
    def hook(self, h: torch.Tensor) -> None:
        h.grad_fn.register_prehook(lambda gradients: (gradients[0] * self.scale,))


SCALES = {"now": 1.0}


@pytest.mark.parametrize(
    "kind",
    [HookCloses, HookIsMethod, HookHasDefault, HookIsPartial, HookReadsGlobal, HookOfNode],
)
@pytest.mark.filterwarnings("ignore")
def test_hooks_read_what_is_there_in_the_backward(kind: type[Hooked]) -> None:
    torch.manual_seed(0)
    plain = kind()
    ours = ORTModule(copy.deepcopy(plain))
    for step in range(3):
        x = torch.randn(3, 4)
        for module in (plain, ours):
            module.scale = SCALES["now"] = 1.0 + step
            module.zero_grad()
            loss = module(x).sum()
            module.scale = SCALES["now"] = -2.0 - step
            loss.backward()
        for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)

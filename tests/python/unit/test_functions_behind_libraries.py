# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward reads by way of code that libraries call, of what makes objects, of Python's own names, of registries."""

from __future__ import annotations

import builtins
import collections
import contextvars
import dataclasses
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from ortrain import ORTModule

FACTOR = 2.0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = FACTOR

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Holder:
    def __init__(self, k: float = 2.0, *, more: float = 0.0) -> None:
        self.k = k + more


@dataclasses.dataclass(slots=True)
class Slots:
    k: float = 2.0


Named = collections.namedtuple("Named", "k", defaults=[2.0])
Made = dataclasses.make_dataclass(
    "Made", [("k", float, dataclasses.field(default_factory=lambda: FACTOR))]
)
ufunc = np.frompyfunc(lambda a: a * FACTOR, 1, 1)
library = torch.library.Library("ortrain_test_libraries", "DEF")
library.define("scaled(Tensor x) -> Tensor")
library.impl("scaled", lambda x: x * FACTOR, "CompositeImplicitAutograd")
variable = contextvars.ContextVar("variable", default=2.0)


class Registry(collections.OrderedDict):
    """Gives objects of the classes that it holds."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name)()

    def items(self) -> Any:
        raise RuntimeError("nobody asks")


class Counted(list):
    def __iter__(self) -> Any:
        return iter(sorted(list.__iter__(self)))


registry = Registry(a=nn.Tanh, b=nn.ReLU)
counted = Counted([3.0, 2.0])


def set_global(value: float) -> None:
    globals()["FACTOR"] = value


def set_default(make: Any) -> Callable[[], None]:
    return lambda: setattr(make, "__defaults__", (3.0,))


def hide_max() -> None:
    globals()["max"] = lambda *values: 3.0


FORWARDS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[], object]]] = {
    "a layer made": (lambda x: Layer()(x), lambda: set_global(3.0)),
    "defaults": (lambda x: x * Holder().k, set_default(Holder.__init__)),
    "defaults by name": (
        lambda x: x * Holder().k,
        lambda: setattr(Holder.__init__, "__kwdefaults__", {"more": 1.0}),
    ),
    "defaults of a class with slots": (lambda x: x * Slots().k, set_default(Slots.__init__)),
    "defaults of a named tuple": (lambda x: x * Named().k, set_default(Named.__new__)),
    "a factory": (lambda x: x * Made().k, lambda: set_global(3.0)),
    "a ufunc": (lambda x: x * float(ufunc(1.0)), lambda: set_global(3.0)),
    "an operator": (
        lambda x: torch.ops.ortrain_test_libraries.scaled(x),
        lambda: set_global(3.0),
    ),
    "a hidden name": (lambda x: x * max(1.0, 2.0), hide_max),
    "a builtin": (lambda x: x * sum([1.0, 1.0]), lambda: setattr(builtins, "sum", lambda v: 3.0)),
    "a name of builtins": (
        lambda x: x * ortrain_test_k,  # noqa: F821
        lambda: setattr(builtins, "ortrain_test_k", 3.0),
    ),
    "a context": (lambda x: x * variable.get(), lambda: variable.set(3.0)),
    "a registry": (lambda x: registry["a"](x), lambda: registry.__setitem__("a", nn.Sigmoid)),
    "a list": (lambda x: x * next(iter(counted)), lambda: counted.append(1.0)),
}


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    functions = (Holder.__init__, Slots.__init__, Named.__new__)
    defaults = [(f, f.__defaults__, f.__kwdefaults__) for f in functions]
    total, items = builtins.sum, list(OrderedItems(registry))
    builtins.ortrain_test_k = 2.0  # type: ignore[attr-defined]
    context = contextvars.copy_context()
    yield
    for f, values, by_name in defaults:
        f.__defaults__, f.__kwdefaults__ = values, by_name
    builtins.sum = total
    del builtins.ortrain_test_k  # type: ignore[attr-defined]
    globals().pop("max", None)
    set_global(2.0)
    variable.set(context.get(variable, 2.0))
    registry.clear()
    registry.update(items)
    counted[:] = [3.0, 2.0]


def OrderedItems(table: Any) -> Any:
    return collections.OrderedDict.items(table)


def module_of(forward: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self.linear(x))

    return Net()


@pytest.mark.parametrize("name", FORWARDS)
def test_what_it_reads_is_followed(name: str) -> None:
    forward, change = FORWARDS[name]
    net, x = module_of(forward), torch.ones(2, 3)
    model = ORTModule(net)
    before = net(x)
    torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(model(x), before)
    change()
    after = net(x)
    assert not torch.allclose(after, before)
    torch.testing.assert_close(model(x), after)


def test_registries_stay_as_they_are() -> None:
    kinds = dict(dict.items(registry)), list(dict.items(ACT2FN)), list(list.__iter__(counted))
    x = torch.ones(2, 3)
    for forward in (lambda x: registry["b"](x), lambda x: ACT2FN["gelu"](x) * next(iter(counted))):
        net = module_of(forward)
        torch.testing.assert_close(ORTModule(net)(x), net(x))
    assert kinds == (dict(dict.items(registry)), list(dict.items(ACT2FN)), [3.0, 2.0])


def test_cached_parametrizations_run_in_pytorch() -> None:
    seen = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        net = nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
        model, x = wrap(net), torch.randn(3, 4)
        model(x)
        with parametrize.cached():
            loss = model(x).sum() + model(2 * x).sum()
        loss.backward()
        model(x)
        norm = net[0].parametrizations.weight
        seen.append([loss.detach(), norm[0]._u, norm.original.grad])
    torch.testing.assert_close(seen[1], seen[0])


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.linear(x))
        return h.relu(), h


def test_a_capture_inside_of_a_checkpoint_runs_nothing() -> None:
    seen = []
    for wrap in (lambda m: m, ORTModule):
        net = TwoResults()
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
        h, _ = checkpoint(wrap(net), x, use_reentrant=False)
        counts = net.norm.num_batches_tracked.clone(), net.norm.running_mean.clone()
        h.sum().backward()
        seen.append([*counts, h.detach(), net.linear.weight.grad, net.norm.running_mean])
    torch.testing.assert_close(seen[1], seen[0])


PROGRAM = """
import os, collections, contextvars, builtins, dataclasses, torch
from torch import nn
from ortrain import ORTModule
K = float(os.environ["FACTOR"])
Named = collections.namedtuple("Named", "k", defaults=[K])
variable = contextvars.ContextVar("variable", default=K)
builtins.my_k = K
class Holder:
    def __init__(self, k=K): self.k = k
@dataclasses.dataclass(slots=True)
class Slots: k: float = K
library = torch.library.Library("ortrain_test_disk", "DEF")
library.define("scaled(Tensor x) -> Tensor")
library.impl("scaled", lambda x: x * K, "CompositeImplicitAutograd")
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3)
class A(Net):
    def forward(self, x): return self.linear(x) * Named().k
class B(Net):
    def forward(self, x): return self.linear(x) * variable.get()
class C(Net):
    def forward(self, x): return self.linear(x) * my_k
class D(Net):
    def forward(self, x): return self.linear(x) * Holder().k
class E(Net):
    def forward(self, x): return self.linear(x) * Slots().k
class F(Net):
    def forward(self, x): return torch.ops.ortrain_test_disk.scaled(self.linear(x))
class G(Net):
    def forward(self, x): return self.linear(x) * 2
for kind in (A, B, C, D, E, F, G):
    net, x = kind(), torch.ones(2, 3)
    model = ORTModule(net)
    assert torch.allclose(model(x), net(x)), kind
    print(kind.__name__, model.report().from_disk if hasattr(model.report(), "from_disk") else "disk" in str(model.report()))
"""


@pytest.mark.long
def test_values_of_the_import_count_on_disk(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    long_ago = time.time() - 3600
    os.utime(program, (long_ago, long_ago))
    said = []
    for factor in ("2", "3", "3"):
        environment = os.environ | {"FACTOR": factor, "ORTRAIN_CACHE_DIR": str(tmp_path / "kept")}
        run = subprocess.run(
            [sys.executable, str(program)], env=environment, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr[-2000:]
        said.append(dict(line.split() for line in run.stdout.splitlines()))
    assert not any(value == "True" for value in said[0].values())
    assert {name for name, value in said[1].items() if value == "True"} <= {"G"}
    assert said[2]["G"] == "True" and said[2]["D"] == "True", said[2]

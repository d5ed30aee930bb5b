# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Facts of the process that a forward asks for, however it comes by the function: no graph is made of them."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import operator
import pathlib
import random
import sys
import time
import types
from collections.abc import Callable
from time import time as wall
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.export import capture
from ortrain.capture.names_read import NamesRead
from ortrain.capture.outside_reads import outside_read

HELD = types.SimpleNamespace(module=time, function=time.time)
LISTED = [time]
SCALES = types.ModuleType("scales")
SCALES.first = 1.0  # type: ignore[attr-defined]


class Clocked(nn.Module):
    """A layer plus what a function of the module returns."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)
        self.clock = time.time
        self.name = "time"
        self.clocks = {"wall": functools.partial(time.time)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * 0 + self.now()

    def now(self) -> float:
        raise NotImplementedError


def around() -> Callable[[Any], float]:
    import time as clock

    return lambda self: clock.time()


def imports(self: Any) -> float:
    from time import time as now

    return now()


def renames(self: Any) -> float:
    now = time
    return now.time()


def nested(self: Any) -> float:
    return [time.time() for _ in range(1)][0]


WAYS: dict[str, Callable[..., float]] = {
    "attribute": lambda self: self.clock(),
    "container": lambda self: self.clocks["wall"](),
    "default": lambda self, clock=time.time: clock(),
    "keyword": lambda self, *, clock=time.time: clock(),
    "closure": around(),
    "global": lambda self: wall(),
    "object": lambda self: HELD.module.time(),
    "function of an object": lambda self: HELD.function(),
    "list": lambda self: LISTED[0].time(),
    "import": imports,
    "variable": renames,
    "comprehension": nested,
    "made-up name": lambda self: getattr(time, self.name)(),
    "getter": lambda self: operator.attrgetter("time")(time)(),
    "caller": lambda self: operator.methodcaller("time")(time),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_no_graph_keeps_the_time(way: str) -> None:
    ours = ORTModule(type("Asking", (Clocked,), {"now": WAYS[way], "__module__": __name__})())
    ours(torch.randn(2, 3))
    assert [bool(record.fallback) for record in ours.report().captures] == [True]


def reads_arguments() -> int:
    return len(sys.argv)


def reads_a_limit() -> int:
    return sys.getrecursionlimit()


def reads_a_module() -> Any:
    return sys.modules["os"]


def reads_threads() -> int:
    return torch.get_num_threads()


def reads_a_flag() -> bool:
    return torch.backends.cudnn.benchmark


def reads_made_up_names(name: str) -> Any:
    return getattr(SCALES, name)


def reads_all_names() -> Any:
    return vars(SCALES)


def reads_a_known_name() -> Any:
    return getattr(SCALES, "first", None)


def reads_constants() -> Any:
    return sys.maxsize, sys.version_info, torch.backends.mps.is_available()


def reads_a_submodule() -> Any:
    return torch.nn.functional.relu


@pytest.mark.parametrize(
    ("function", "tells"),
    [
        (reads_arguments, True),
        (reads_a_limit, True),
        (reads_a_module, True),
        (reads_threads, True),
        (reads_a_flag, True),
        (reads_made_up_names, True),
        (reads_all_names, True),
        (reads_a_known_name, False),
        (reads_constants, False),
        (reads_a_submodule, False),
    ],
)
def test_reads_of_modules(function: types.FunctionType, tells: bool) -> None:
    assert bool(outside_read(function.__code__, function.__globals__)) is tells


class Gathers(nn.Module):
    """A layer that counts with an error that the standard library has handled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        async def read() -> int:
            return int(x.sum())

        async def gather() -> list[Any]:
            return await asyncio.gather(read(), return_exceptions=True)

        return x * (2 if isinstance(asyncio.run(gather())[0], int) else 3)


class Submits(nn.Module):
    """The same by another thread."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            error = pool.submit(lambda: int(x.sum())).exception()
        return x * (2 if error is None else 3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", [Gathers(), Submits()])
def test_errors_that_the_standard_library_handles(module: nn.Module) -> None:
    assert torch.equal(ORTModule(module)(torch.ones(2)), module(torch.ones(2)))


def test_a_state_that_is_only_put_back_tells_nothing() -> None:
    def putting_back() -> float:
        state = random.getstate()
        drawn = random.random()
        random.setstate(state)
        return drawn

    def computing() -> float:
        state = random.getstate()
        random.setstate(state)
        return float(state[1][0])

    def returning() -> Any:
        state = random.getstate()
        return state

    def binding_twice() -> None:
        state = random.getstate()
        state = state[1]
        random.setstate(state)

    assert outside_read(putting_back.__code__, globals()) == ""
    for function in (computing, returning, binding_twice):
        assert outside_read(function.__code__, globals()) == "random.getstate"


IMPORTING = """
import importlib

def __getattr__(name):
    return importlib.import_module(name)
"""


@pytest.mark.parametrize(
    ("file", "told"),
    [
        (pathlib.Path(torch.__file__).parents[1] / "lazy" / "__init__.py", ""),
        (pathlib.Path(__file__).parent / "lazy.py", "modules by their names"),
    ],
)
def test_installed_packages_import_parts_of_themselves(file: pathlib.Path, told: str) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(IMPORTING, str(file), "exec"), namespace)
    read = NamesRead()
    with read.recording():
        namespace["__getattr__"]("math")
    where = f"__getattr__ ({file}:4)" if told else ""  # the function's first line
    assert read.outside_reads() == (told, where)


class Collects(nn.Module):
    """Branches on a value: Dynamo, which looks at the branches, collects garbage itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: 2 * x, lambda x: x - 1, (x,))


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Collects],
    ids=["layers", "branches"],
)
def test_what_runs_when_garbage_is_collected_is_not_the_forwards(
    make: Callable[[], nn.Module],
) -> None:
    seen: list[float] = []

    def see(phase: str, info: dict[str, int]) -> None:
        seen.append(time.perf_counter())

    thresholds = gc.get_threshold()
    gc.callbacks.append(see)
    gc.set_threshold(1)
    try:
        captured = capture(make(), (torch.ones(2, 4),))
        assert see in gc.callbacks
    finally:
        gc.callbacks.remove(see)
        gc.set_threshold(*thresholds)
    assert seen
    assert captured.graph_module is not None
    assert gc.isenabled()

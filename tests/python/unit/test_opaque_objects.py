# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Objects that no guard can compare, which a forward reads or moves on: each call sees what PyTorch's would."""

from __future__ import annotations

import array
import collections
import csv
import ctypes
import functools
import gc
import hashlib
import inspect
import io
import itertools
import mmap
import os
import platform
import queue
import random
import re
import sqlite3
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.opaque_objects import is_opaque
from ortrain.capture.process_facts import fact_of

LINES = "\n".join(str(float(i)) for i in range(1, 40))


class Scaled(nn.Module):
    """A layer whose result is scaled by what a function reads from an object."""

    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.held, self.read = nn.Linear(3, 2), held, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * self.read(self.held)


def simple_queue() -> queue.SimpleQueue[float]:
    made: queue.SimpleQueue[float] = queue.SimpleQueue()
    for i in range(1, 40):
        made.put(float(i))
    return made


def cursor() -> sqlite3.Cursor:
    made = sqlite3.connect(":memory:").cursor()
    made.execute("create table numbers(value)")
    made.executemany("insert into numbers values(?)", [(float(i),) for i in range(1, 40)])
    return made.execute("select value from numbers order by value")


def mapped() -> mmap.mmap:
    made = mmap.mmap(-1, len(LINES))
    made.write(LINES.encode())
    made.seek(0)
    return made


def batches() -> Any:
    return iter(torch.utils.data.DataLoader(list(range(1, 40)), batch_size=None))


def schedule() -> Any:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def next_rate(held: Any) -> float:
    held.optimizer.step()
    held.step()
    return held.get_last_lr()[0]


def digest(held: Any) -> float:
    held.update(b"a")
    return float(held.digest()[0])


def counted(held: Any) -> float:
    held[0] += 1
    return float(held[0])


def counted_value(held: Any) -> float:
    held.value += 1
    return float(held.value)


def toggled(held: Any) -> float:
    if held.is_set():
        held.clear()
        return 1.0
    held.set()
    return 2.0


def taken(held: Any) -> float:
    if held.locked():
        held.release()
        return 1.0
    held.acquire()
    return 2.0


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "text": (lambda: io.StringIO(LINES), lambda held: float(held.readline())),
    "bytes": (lambda: io.BytesIO(LINES.encode()), lambda held: float(held.readline())),
    "simple queue": (simple_queue, lambda held: held.get()),
    "table": (lambda: csv.reader(io.StringIO(LINES)), lambda held: float(next(held)[0])),
    "hash": (hashlib.sha256, digest),
    "mapped file": (mapped, lambda held: float(held.readline())),
    "cursor": (cursor, lambda held: held.fetchone()[0]),
    "loader": (batches, lambda held: float(next(held))),
    "learning rate": (schedule, next_rate),
    "deque iterator": (lambda: iter(collections.deque([1.0, 2.0, 3.0, 4.0])), next),
    "nditer": (lambda: np.nditer(np.arange(9.0)), lambda held: float(next(held))),
    "tee": (lambda: itertools.tee(iter([1.0, 2.0, 3.0, 4.0]))[0], next),
    "bits": (lambda: np.random.PCG64(0), lambda held: float(held.random_raw() % 97)),
    "matches": (lambda: re.finditer(r"\S+", LINES), lambda held: float(next(held).group())),
    "array": (lambda: array.array("d", [1.0]), counted),
    "bytearray": (lambda: bytearray(2), counted),
    "ctypes array": (lambda: (ctypes.c_double * 2)(), counted),
    "ctypes number": (lambda: ctypes.c_double(1.0), counted_value),
    "event": (threading.Event, toggled),
    "lock": (threading.Lock, taken),
    "entropy": (random.SystemRandom, lambda held: 1.0 + 0.0 * held.random()),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_each_call_reads_on_as_in_pytorch(name: str) -> None:
    make, read = CASES[name]
    theirs, ours = Scaled(make(), read), ORTModule(Scaled(make(), read))
    x = torch.randn(2, 3)
    for _ in range(3):
        torch.testing.assert_close(ours(x), theirs(x))


def test_objects_that_no_code_of_the_forward_names_count_for_nothing() -> None:
    module = nn.Sequential(nn.Linear(3, 3))
    module.log_file = io.StringIO()  # type: ignore[assignment]
    ours = ORTModule(module)
    ours(torch.randn(2, 3))
    (record,) = ours.report().captures
    assert record.fallback == ""


def test_known_objects_are_not_opaque() -> None:
    class Plain:
        __slots__ = ("a",)

    class Held(collections.OrderedDict[str, int]):
        pass

    known = [
        *(1, "a", [1], {1: 2}, {1}, np.zeros(2), np.float32(1), np.dtype("f4"), torch.zeros(1)),
        *(Plain(), Held(), Held, len, Scaled, torch.float32, torch.Size([1]), re.compile("a")),
        *(threading.Lock(), types.SimpleNamespace(), collections.Counter(), random.Random()),
        *(ValueError("a"), range(3), slice(1), functools.partial(len), np.random.default_rng(0)),
    ]
    assert [value for value in known if is_opaque(value)] == []


# Of these every object is a value, or is compared by its state.
PLAIN = {
    *(
        "ast",
        "builtins",
        "calendar",
        "collections",
        "contextvars",
        "ctypes",
        "dataclasses",
        "datetime",
    ),
    *(
        "decimal",
        "difflib",
        "enum",
        "fractions",
        "functools",
        "json",
        "numbers",
        "operator",
        "random",
    ),
    *("re", "statistics", "string", "textwrap", "types", "typing", "weakref", "abc", "argparse"),
}
# Calling these has effects, or takes long.
NOT_CALLED = (
    "test",
    "tkinter",
    "turtle",
    "idlelib",
    "lib2to3",
    "antigravity",
    "this",
    "pip",
    "ensurepip",
)


def loaded_classes() -> list[type]:
    """Return the classes, made by compiled code, of the parts of the standard library that are loaded."""
    found: dict[type, None] = {}
    for name, module in sorted(sys.modules.items()):
        root = name.partition(".")[0].lstrip("_")
        if root not in sys.stdlib_module_names or root in PLAIN or root in NOT_CALLED:
            continue
        for value in list(vars(module).values()):
            if isinstance(value, type) and value.__module__.partition(".")[0].lstrip("_") == root:
                found[value] = None
    return list(found)


MOVES = {
    "read",
    "write",
    "get",
    "put",
    "acquire",
    "release",
    "recv",
    "send",
    "update",
    "fetchone",
    "__next__",
    "poll",
}


def has_source(cls: type) -> bool:
    try:
        return bool(inspect.getsource(cls))
    except (OSError, TypeError):
        return False


def test_what_moves_on_in_compiled_code_is_opaque() -> None:
    seen = 0
    for cls in loaded_classes():
        if (
            has_source(cls)
            or MOVES.isdisjoint(vars(cls))
            or issubclass(cls, (dict, tuple, list, set))
        ):
            continue
        try:
            made = cls()
        except Exception:
            continue
        seen += 1
        assert is_opaque(made) or isinstance(
            made, (type(threading.Lock()), type(threading.RLock()))
        ), cls
    assert seen >= 4


def test_functions_that_ask_for_facts_of_the_process_tell() -> None:
    for function in (
        *(
            time.time,
            time.monotonic,
            time.process_time,
            os.getcwd,
            os.getpid,
            os.listdir,
            os.path.exists,
        ),
        *(
            sys.getrecursionlimit,
            sys.getrefcount,
            gc.isenabled,
            threading.active_count,
            inspect.stack,
        ),
        *(
            inspect.currentframe,
            torch.get_num_threads,
            torch.initial_seed,
            io.open,
            random.SystemRandom,
        ),
    ):
        assert fact_of(function), function
    for function in (
        *(
            len,
            sum,
            platform.python_version,
            os.path.join,
            inspect.signature,
            random.random,
            itertools.count,
        ),
        *(torch.zeros, torch.nn.functional.relu, collections.deque, re.compile),
    ):
        assert fact_of(function) == "", function


class Aliased(nn.Module):
    """A module that names one of two attributes with the same file within."""

    def __init__(self) -> None:
        super().__init__()
        held = types.SimpleNamespace(files={"numbers": io.StringIO(LINES)})
        self.unnamed, self.named, self.again = held, held, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.named.files["numbers"].readline())


@pytest.mark.filterwarnings("ignore")
def test_an_object_that_two_attributes_hold() -> None:
    theirs, ours = Aliased(), ORTModule(Aliased())
    for _ in range(3):
        torch.testing.assert_close(ours(torch.ones(2)), theirs(torch.ones(2)))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What tables, functions and objects with slots of installed packages hold, changed while graphs are in use."""

import math
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from package_changes import Net, assert_followed, box_of, found_on_disk

from ortrain import ORTModule
from ortrain.capture import source_files

SOURCE = """
import array
import collections
import contextvars
import functools
import itertools
import random
import threading
import types

import numpy
import torch

ORDERED = collections.OrderedDict(a=1.0, b=3.0)
NESTED = {"a": {"b": [1.0, {"c": 2.0}]}}
PAIRS = {"a": (abs, {"gain": 1.0})}
CONTENTS = {"a": 1.0}
SHOWN = types.MappingProxyType(CONTENTS)
QUEUE = collections.deque([1.0, 2.0], maxlen=4)
SETTING = contextvars.ContextVar("setting", default=1.0)
UNSET = contextvars.ContextVar("unset")
WEIGHTS = numpy.ones(3, numpy.float32)
NUMBERS = array.array("d", [1.0])


class Slots:
    __slots__ = ("factor", "other", "within")

    def __init__(self):
        self.factor = 1.0
        self.within = None


SLOTS = Slots()
SLOTS.within = Slots()


def by_order(x):
    return x * next(iter(ORDERED.values()))


def by_last(x):
    return x * list(ORDERED.items())[-1][1]


def by_nested(x):
    return x * NESTED["a"]["b"][1]["c"] * NESTED["a"]["b"][0]


def by_pair(x):
    return x * PAIRS["a"][1]["gain"]


def by_proxy(x):
    return x * sum(SHOWN.values())


def by_queue(x):
    return x * sum(QUEUE)


def by_setting(x):
    return x * SETTING.get() * UNSET.get(1.0)


def by_slots(x):
    return x * SLOTS.factor * SLOTS.within.factor


def by_array(x):
    return x * float(WEIGHTS.sum()) * NUMBERS[0]


def scaled(x, factor=2.0):
    return x * factor


def by_code(x):
    return scaled(x)


def shifted(x, *, by=2.0):
    return x + by


def by_keyword(x):
    return shifted(x)


def closing(factor):
    def call(x):
        return x * factor

    return call


closed = closing(2.0)


def by_cell(x):
    return closed(x)


class Holder:
    def method(self, x, factor=2.0):
        return x * factor

    @staticmethod
    def static(x):
        return x * 3

    @property
    def gain(self):
        return 2.0

    @functools.cached_property
    def cached(self):
        return 2.0


HOLDER = Holder()


def by_method(x):
    return HOLDER.static(HOLDER.method(x)) * HOLDER.gain


TABLE = {"scaled": scaled, "partial": functools.partial(scaled, factor=1.5)}


def by_table(x):
    return TABLE["partial"](TABLE["scaled"](x))


@functools.lru_cache
def gain_of(name):
    return 2.0


def by_attribute(x):
    return scaled(x) * getattr(scaled, "gain", 1.0)


scaled.gain = 1.0


def by_default_table(x, table={"gain": 2.0}):
    return x * table["gain"]


def by_keyword_list(x, *, gains=[2.0]):
    return x * gains[0]


def closing_over_a_table():
    table = {"gain": 2.0}

    def call(x):
        return x * table["gain"]

    return call


by_closed_table = closing_over_a_table()
MIXED = ({"gain": 2.0}, [1.0])


def by_mixed(x):
    return by_default_table(by_keyword_list(by_closed_table(x))) * MIXED[0]["gain"]


@functools.singledispatch
def dispatched(x):
    return x * 2


def by_dispatch(x):
    return dispatched(x)
"""

CASES = {
    "an order": ("by_order", "box.ORDERED.move_to_end('a')"),
    "an order that ends otherwise": ("by_last", "box.ORDERED.move_to_end('b', last=False)"),
    "a table within tables": ("by_nested", "box.NESTED['a']['b'][1]['c'] = 5.0"),
    "a list within tables": ("by_nested", "box.NESTED['a']['b'][0] = 5.0"),
    "a table within a tuple": ("by_pair", "box.PAIRS['a'][1]['gain'] = 5.0"),
    "what a proxy shows": ("by_proxy", "box.CONTENTS['b'] = 5.0"),
    "a queue": ("by_queue", "box.QUEUE.append(5.0)"),
    "a queue that turns": ("by_queue", "box.QUEUE.rotate(1); box.QUEUE.append(9.0)"),
    "a variable of the context": ("by_setting", "box.SETTING.set(5.0)"),
    "one that was not set": ("by_setting", "box.UNSET.set(5.0)"),
    "a slot": ("by_slots", "box.SLOTS.factor = 5.0"),
    "a slot of what is in one": ("by_slots", "box.SLOTS.within.factor = 5.0"),
    "what is in a slot": (
        "by_slots",
        "box.SLOTS.within = box.Slots(); box.SLOTS.within.factor = 4.0",
    ),
    "an array": ("by_array", "box.WEIGHTS[1] = 5.0"),
    "an array of Python's": ("by_array", "box.NUMBERS[0] = 5.0"),
    "code": ("by_code", "box.scaled.__code__ = (lambda x, factor=2.0: x + factor).__code__"),
    "a default": ("by_code", "box.scaled.__defaults__ = (5.0,)"),
    "defaults of keywords": ("by_keyword", "box.shifted.__kwdefaults__ = {'by': 5.0}"),
    "a default of keywords": ("by_keyword", "box.shifted.__kwdefaults__['by'] = 5.0"),
    "what a function closes over": ("by_cell", "box.closed.__closure__[0].cell_contents = 5.0"),
    "code of a method": (
        "by_method",
        "box.Holder.method.__code__ = (lambda self, x, factor: x + factor).__code__",
    ),
    "a default of a method": ("by_method", "box.Holder.method.__defaults__ = (5.0,)"),
    "code of a static method": (
        "by_method",
        "vars(box.Holder)['static'].__func__.__code__ = (lambda x: x * 9).__code__",
    ),
    "code of a property": (
        "by_method",
        "vars(box.Holder)['gain'].fget.__code__ = (lambda self: 5.0).__code__",
    ),
    "code in a table": ("by_table", "box.scaled.__code__ = (lambda x, factor=2.0: x + 1).__code__"),
    "an attribute of a function": ("by_attribute", "box.scaled.gain = 5.0"),
    "a table by default": ("by_mixed", "box.by_default_table.__defaults__[0]['gain'] = 5.0"),
    "a list by keyword": ("by_mixed", "box.by_keyword_list.__kwdefaults__['gains'][0] = 5.0"),
    "a table that a function closes over": (
        "by_mixed",
        "box.by_closed_table.__closure__[0].cell_contents['gain'] = 5.0",
    ),
    "a table in a tuple of the module": ("by_mixed", "box.MIXED[0]['gain'] = 5.0"),
    "a function that is registered": (
        "by_dispatch",
        "box.dispatched.register(torch.Tensor, lambda x: x * 5)",
    ),
}


@pytest.fixture
def box(imported_package: Callable[..., types.ModuleType]) -> types.ModuleType:
    return imported_package(*box_of(SOURCE))


def change(box: types.ModuleType, name: str) -> Callable[[], None]:
    return lambda: exec(CASES[name][1], {"box": box, "torch": torch})


@pytest.mark.parametrize("name", CASES)
def test_contents_are_followed(box: types.ModuleType, name: str) -> None:
    assert_followed(Net(getattr(box, CASES[name][0])), change(box, name))


@pytest.mark.parametrize("name", CASES)
def test_graphs_on_disk_are_those_of_contents(
    box: types.ModuleType, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source_files, "process_start", lambda: math.inf)
    from_disk = found_on_disk(Net(getattr(box, CASES[name][0])), change(box, name))
    assert not from_disk[0] and not from_disk[2]
    # Functions alone hold what is registered with them, closed over, or there by default.
    assert from_disk[1] is (CASES[name][0] not in ("by_dispatch", "by_mixed"))


def test_equal_numbers_set_anew_are_no_others(box: types.ModuleType) -> None:
    ours, x = ORTModule(Net(box.by_setting)), torch.ones(3)
    for _ in range(3):
        box.SETTING.set(float("1.5"))
        ours(x)
    assert len(ours.report().captures) == 1

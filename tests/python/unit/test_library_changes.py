# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward changes of what installed packages keep: counts, histories, caches, generators."""

import types
from collections.abc import Callable

import pytest
import torch
from package_changes import Net, box_of, values
from torch import nn

from ortrain import ORTModule
from ortrain.capture import kept_contents, kept_values, names_read
from ortrain.capture.library_state import LibraryState

SOURCE = """
import abc
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

SETTING = contextvars.ContextVar("setting", default=1.0)
HISTORY = collections.deque(maxlen=2)
LOSSES = []
COUNTS = {"calls": 0}
STEPS = itertools.count()
DRAWS = random.Random(3)
BITS = numpy.random.default_rng(3)
OLD_BITS = numpy.random.RandomState(3)


class Counting:
    def __init__(self):
        self.calls = 0
        self.average = [0.0]
        self.draws = random.Random(3)

    def __call__(self, x):
        self.calls += 1
        self.average[0] = 0.5 * self.average[0] + self.calls
        return x * self.calls + self.average[0] * self.draws.random()


COUNTING = Counting()


def counting_queue(x):
    HISTORY.append(1.0)
    return x * len(HISTORY)


def counting_list(x):
    LOSSES.append(2.0)
    return x * sum(LOSSES)


def counting_table(x):
    COUNTS["calls"] += 1
    return x * COUNTS["calls"]


def counting_iterator(x):
    return x * next(STEPS)


def drawing(x):
    return x * DRAWS.random()


def drawing_bits(x):
    return x * float(BITS.random()) * float(OLD_BITS.rand())


def counting_object(x):
    return COUNTING(x)


def failing(x):
    COUNTS["calls"] += 1
    DRAWS.random()
    if x.sum() > 100:  # which no trace knows
        x = x + 1
    return x * COUNTS["calls"] * DRAWS.random()


class State:
    def __init__(self):
        self.table, self.number = None, 0


class Classy:
    calls = 0
    table = {"calls": 0}

    @classmethod
    def counted(cls, x):
        cls.calls += 1
        return x * cls.calls


class Slotted:
    __slots__ = ("calls",)


SLOTTED = Slotted()
SLOTTED.calls = 0
EMPTY = {}
DEEP = {"a": {"n": 0}, "b": [[0]]}
TOTAL = torch.zeros(1)


def counting_class(x):
    Classy.calls += 1
    Classy.table["calls"] += 2
    return Classy.counted(x) * Classy.calls * Classy.table["calls"]


def counting_slots(x):
    SLOTTED.calls += 1
    return x * SLOTTED.calls


def counting_new_items(x):
    EMPTY["n"] = EMPTY.get("n", 0) + 1
    return x * EMPTY["n"]


def counting_deep(x):
    DEEP["a"]["n"] += 1
    DEEP["b"][0][0] += 1
    return x * DEEP["a"]["n"] * DEEP["b"][0][0]


def counting_tensor(x):
    TOTAL.add_(1)
    return x * TOTAL


def counter():
    calls, history = 0, [0]

    def count(x, table=[0]):
        nonlocal calls
        calls += 1
        history[0] += 1
        table[0] += 1
        return x * calls * history[0] * table[0]

    return count


counting_closure = counter()


def counting_attribute(x):
    counting_attribute.calls += 1
    return x * counting_attribute.calls


counting_attribute.calls = 0
MIXED_TABLE = {"name": "a", "history": [], "ema": {"n": 0}}
MIXED_LIST = ["a", [0]]
PAIR = ([0], {"n": 0})
RECENT = collections.OrderedDict()
TURNING = collections.OrderedDict(a=1.0, b=2.0)
BY_CLASS = {}


def counting_mixed(x):
    MIXED_TABLE["history"].append(1.0)
    MIXED_TABLE["ema"]["n"] += 1
    MIXED_LIST[1][0] += 1
    PAIR[0][0] += 1
    PAIR[1]["n"] += 1
    n = len(MIXED_TABLE["history"]) + MIXED_TABLE["ema"]["n"] + MIXED_LIST[1][0]
    return x * n * PAIR[0][0] * PAIR[1]["n"]


class Steps:
    steps = 0

    def step(self, x):
        self.__class__.steps += 1
        return x * self.steps

    @classmethod
    def stepped(cls, x):
        cls.steps += 1
        return x * cls.steps


STEPS_TAKEN = Steps()


def counting_class_of_self(x):
    return STEPS_TAKEN.stepped(STEPS_TAKEN.step(x))


def counted(function):
    @functools.wraps(function)
    def call(*args):
        call.calls += 1
        return function(*args) * call.calls

    call.calls = 0
    return call


@counted
def counting_decorated(x):
    return x * 2


def closing_over_a_count():
    n = 0

    def call(x):
        nonlocal n
        n += 1
        return x * n

    return call


REGISTERED = {"a": closing_over_a_count(), "b": [closing_over_a_count()]}


def counting_registered(x):
    return REGISTERED["b"][0](REGISTERED["a"](x))


class Table(dict):
    pass


COUNTED_TABLE = Table()
COUNTED_TABLE.n = 0


def made_of_a_local_class():
    class Local:
        n = 0

    return Local()


LOCAL = made_of_a_local_class()


def counting_attributes_of_tables(x):
    COUNTED_TABLE.n += 1
    type(LOCAL).n += 1
    return x * COUNTED_TABLE.n * LOCAL.n


@functools.lru_cache
def counter_of(name):
    return [0]


def counting_behind_a_cache(x):
    counter_of("a")[0] += 1
    return x * counter_of("a")[0]


def keeping_recent(x):
    RECENT[x.dtype] = RECENT.get(x.dtype, 0.0) + 1.0
    RECENT.move_to_end(x.dtype)
    while len(RECENT) > 2:
        RECENT.popitem(last=False)
    return x * sum(RECENT.values())


def turning(x):
    TURNING.move_to_end(next(iter(TURNING)))
    return x * next(iter(TURNING.values()))


class Unset:
    __slots__ = ("gain", "seen")

    def __call__(self, x):
        if not hasattr(self, "gain"):
            self.gain = 3.0
        is_first = not hasattr(self, "seen")
        self.seen = True
        return x * self.gain * (2 if is_first else 5)


UNSET_SLOTS = Unset()


def setting_slots(x):
    return UNSET_SLOTS(x)


def setting_globals(x):
    globals()["MADE_" + "UP"] = globals().get("MADE_UP", 0) + 1
    return x * globals()["MADE_UP"]


def of_class(x):
    if type(x) not in BY_CLASS:
        BY_CLASS[type(x)] = 2.0, abs
    return BY_CLASS[type(x)][1](x) * BY_CLASS[type(x)][0]


FIRST_IN = {"a": 1.0, "b": 2.0, "c": 3.0}


def turning_a_table(x):
    key = next(iter(FIRST_IN))
    FIRST_IN[key] = FIRST_IN.pop(key)
    return x * next(iter(FIRST_IN.values()))


class ByDefault:
    n = 0

    def hit(self):
        self.n += 1
        return self.n


class Nothing:
    pass


BY_DEFAULT, NOTHING, EMPTY_SPACE = ByDefault(), Nothing(), types.SimpleNamespace()


def counting_at_first(x):
    NOTHING.n = getattr(NOTHING, "n", 0) + 1
    EMPTY_SPACE.n = getattr(EMPTY_SPACE, "n", 0) + 1
    return x * BY_DEFAULT.hit() * NOTHING.n * EMPTY_SPACE.n


class Numbered:
    ids = itertools.count(1)


def closing_over_ids():
    ids = itertools.count(1)

    def call(x, more=itertools.count(1)):
        return x * next(ids) * next(more)

    return call


OF_ID = closing_over_ids()
IDS = {"a": itertools.count(1), "b": [itertools.count(1)]}
BY_PARTIAL = functools.partial(lambda ids, x: x * next(ids), itertools.count(1))
SAME_IDS = AGAIN_IDS = itertools.count(1)


def counting_ids(x):
    n = next(Numbered.ids) * next(IDS["a"]) * next(IDS["b"][0]) * next(SAME_IDS) * next(AGAIN_IDS)
    return BY_PARTIAL(OF_ID(x)) * n


def numbers_from(n):
    while True:
        yield n
        n += 1


NUMBERS_FROM_1 = numbers_from(1)
LISTED, RANGED = iter([1, 2, 3, 4, 5, 6]), iter(range(9))
CYCLE = itertools.cycle([1, 2, 3, 4, 5, 6])


def moving_a_generator(x):
    return x * next(NUMBERS_FROM_1)


def moving_iterators(x):
    return x * next(LISTED) + 0 * next(RANGED)


def moving_a_cycle(x):
    return x * next(CYCLE)


CALLS = contextvars.ContextVar("calls", default=0)
KEPT = contextvars.ContextVar("kept")
KEPT.set([0])
COUNTED = numpy.zeros(2)
BUFFER = array.array("d", [0.0])
BYTES = bytearray(2)
MEAN = numpy.float32(0.0)


def counting_context(x):
    CALLS.set(CALLS.get() + 1)
    KEPT.get()[0] += 1
    return x * CALLS.get() * KEPT.get()[0]


def counting_arrays(x):
    global MEAN
    COUNTED[0] += 1
    BUFFER[0] += 1
    BYTES[1] += 1
    MEAN += numpy.float32(0.5)
    return x * float(COUNTED[0]) * BUFFER[0] * BYTES[1] * float(MEAN)


class Calls:
    def __init__(self):
        self.n = 0

    def count(self):
        self.n += 1
        return self.n

    def within(self, x, kept=[0]):
        kept[0] += 1
        return x * kept[0]


BOUND = Calls().count
PARTIAL = functools.partial(lambda table, x: table.append(1.0) or x * len(table), [])
SPACE = types.SimpleNamespace(calls=0)
HERE = threading.local()
HERE.calls = 0
USERS = collections.UserDict(calls=0)


def counting_bound(x):
    return PARTIAL(x) * BOUND()


def counting_method_default(x):
    return Calls().within(x)


def counting_spaces(x):
    SPACE.calls += 1
    HERE.calls += 1
    USERS["calls"] += 1
    return x * SPACE.calls * HERE.calls * USERS["calls"]


COUNT_BY_NAME, LIST_BY_NAME = 0, []


def counting_by_computed_names(x):
    name = "".join(["cal", "ls"])
    setattr(SLOTTED, name, getattr(SLOTTED, name) + 1)
    globals()["_".join(["LIST", "BY", "NAME"])].append(1)
    return x * SLOTTED.calls * len(LIST_BY_NAME)


def counting_by_text(x):
    setattr(COUNTING, "calls", COUNTING.calls + 1)
    return x * COUNTING.calls


def counting_on_itself(x):
    counting_on_itself.calls = getattr(counting_on_itself, "calls", 0) + 1
    return x * counting_on_itself.calls


class Counted:
    def method(self, x):
        return x

    @staticmethod
    def function(x):
        return x


def counting_on_methods(x):
    for function in (Counted.method, Counted.function):
        if not hasattr(function, "calls"):
            function.calls = 0
        function.calls += 1
    return x * Counted.method.calls * Counted.function.calls


def limited(x):
    return x * Deep.Deeper.Deepest.limited.limit


limited.limit = 2.0


class Deep(abc.ABC):
    class Deeper(abc.ABC):
        class Deepest(abc.ABC):
            limited = staticmethod(limited)


del limited


class Host:
    def run(self, x):
        return x


def replacement(self, x):
    return x * replacement.factor


replacement.factor = 3.0


def counting_on_properties(x):
    for function in (Described.number.fdel, Described.kept.func):
        function.calls = getattr(function, "calls", 0) + 1
    return x * Described.number.fdel.calls * Described.kept.func.calls


class Described:
    @property
    def number(self):
        return 1

    @number.deleter
    def number(self):
        pass

    @functools.cached_property
    def kept(self):
        return 2


def keeping_what_functions_had(x):
    Host.run = replacement
    return Host().run(Deep.Deeper.Deepest.limited(x))


def marking_itself(x):
    if not hasattr(marking_itself, "table"):
        marking_itself.table = torch.ones(3) * 2
    return x * marking_itself.table


def setting_a_variable(x):
    if SETTING.get() == 1.0:
        SETTING.set(3.0)
    return x * SETTING.get()


STATE = State()
DONE = {"done": False, "value": 0}
SIZES = []
IS_ON = False
ROWS = 0


def caching(x):
    if STATE.table is None:
        STATE.table = torch.ones(3) * 2
    return x * STATE.table


def initializing(x):
    if not DONE["done"]:
        DONE["value"] = 7
        DONE["done"] = True
    return x * DONE["value"]


def initializing_objects(x):
    if STATE.table is None:
        STATE.table, STATE.number = object(), 3
    return x * STATE.number


def keeping_sizes(x):
    SIZES.append(x.shape[0])
    STATE.number += x.shape[0]
    return x * sum(SIZES) * STATE.number


def summing_sizes(x):
    global ROWS
    ROWS += x.shape[0]
    return x * ROWS


def switching(x):
    global IS_ON
    IS_ON = not IS_ON
    return x * (2 if IS_ON else 3)
"""


@pytest.fixture
def box(imported_package: Callable[..., types.ModuleType]) -> types.ModuleType:
    return imported_package(*box_of(SOURCE))


@pytest.mark.filterwarnings("ignore:.*runs in")
@pytest.mark.parametrize(
    "function",
    [
        *("counting_queue", "counting_list", "counting_table", "counting_iterator", "drawing"),
        *("drawing_bits", "counting_object", "failing", "caching", "initializing"),
        *("initializing_objects", "keeping_sizes", "summing_sizes", "switching"),
        *("counting_class", "counting_slots", "counting_new_items", "counting_deep"),
        *("counting_tensor", "counting_closure", "counting_attribute", "counting_context"),
        *("counting_arrays", "counting_bound", "counting_method_default", "counting_spaces"),
        *("counting_by_computed_names", "counting_by_text", "setting_a_variable"),
        *("counting_on_itself", "counting_on_methods", "marking_itself"),
        *("counting_on_properties", "keeping_what_functions_had"),
        *("counting_mixed", "counting_class_of_self", "counting_decorated", "counting_registered"),
        *("counting_attributes_of_tables", "counting_behind_a_cache", "keeping_recent", "turning"),
        *("setting_slots", "setting_globals", "of_class", "turning_a_table", "counting_at_first"),
        "counting_ids",
    ],
)
def test_what_packages_count_and_draw_is_not_read_once(
    imported_package: Callable[..., types.ModuleType], function: str
) -> None:
    ours, plain = (imported_package(*box_of(SOURCE)) for _ in range(2))
    model, x = ORTModule(Net(getattr(ours, function))), values()
    wanted = [Net(getattr(plain, function))(x) for _ in range(4)]
    for each in wanted:
        torch.testing.assert_close(model(x), each)


@pytest.mark.filterwarnings("ignore:.*runs in")
@pytest.mark.parametrize("function", ["moving_a_generator", "moving_iterators", "moving_a_cycle"])
def test_iterators_are_seen_to_move(box: types.ModuleType, function: str) -> None:
    model = ORTModule(Net(getattr(box, function)))
    found = [model(values())[2].item() / 3 for _ in range(4)]
    # What a trace took of those that nobody can set back is gone.
    first = found[0]
    assert found == [first, first + 1, first + 2, first + 3]
    assert first == (1 if function == "moving_iterators" else 2)


def test_attributes_that_no_code_names_do_not_end_the_setting_back() -> None:
    attributes = {"a": 1, "gone": 2, "b": 3}
    seen = kept_contents.seen_attributes(attributes)
    del attributes["gone"], attributes["a"]
    change = seen("there", {"a"})
    assert change is not None
    change.set_back()
    assert list(attributes.items()) == [("a", 1), ("b", 3)]


@pytest.mark.filterwarnings("ignore:.*runs in")
def test_large_tensors_are_seen_to_change(
    box: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_values, "_MOST_BYTES", 0)
    model, x = ORTModule(Net(box.counting_tensor)), values()
    before = model(x)
    torch.testing.assert_close(model(x), before / (box.TOTAL - 1) * box.TOTAL)
    assert "TOTAL" in model.report().captures[-1].fallback


def test_packages_that_refuse_to_be_looked_at_do_not_matter(
    imported_package: Callable[..., types.ModuleType],
) -> None:
    source = """
import random


class Meta(type):
    def __eq__(cls, other):
        return cls is other


class Unhashable(metaclass=Meta):
    pass


class Refusing(random.Random):
    def getstate(self):
        raise RuntimeError


UNHASHABLE, REFUSING = Unhashable(), Refusing()
"""
    imported_package(*box_of(source))
    ours = ORTModule(nn.Linear(2, 2))
    ours(torch.ones(1, 2))
    assert [record.fallback for record in ours.report().captures] == [""]


def test_what_is_kept_by_class_of_tensor_is_no_change(box: types.ModuleType) -> None:
    ours = ORTModule(Net(box.of_class))
    for _ in range(3):
        ours(values())
    # The table itself comes to be at the first call.
    assert [bool(record.fallback) for record in ours.report().captures] in ([False], [True, False])


def test_what_is_looked_at_before_a_trace_stays_little() -> None:
    """networkx, which PyTorch loads, took 0.14 s of each first call; what led to a session of tests took more."""
    roots: dict[str, list[types.ModuleType]] = {}
    for module in filter(names_read._may_keep_counts, names_read._packages()):
        roots.setdefault(module.__name__.partition(".")[0], []).append(module)
    objects = {root: len(LibraryState(held)._known) for root, held in roots.items()}
    assert max(objects.values(), default=0) < 3000, objects

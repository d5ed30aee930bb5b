# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers, tables and methods of installed packages, set or replaced while graphs are in use."""

import builtins
import copy
import gc
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from package_changes import Net, assert_followed, found_on_disk
from torch import nn

from ortrain import ORTModule
from ortrain.capture import source_files

SOURCE = """
import collections
import dataclasses
import functools

GAIN = 1.0
PAIR = (1.0, 2.0)
SCALES = {"base": 1.0}
ORDERED = collections.OrderedDict(base=1.0)
STEPS = [1.0, 2.0]
NAMES = {"a"}


def double(x):
    return x * 2


FUNCTIONS = {"double": double}


class Registry:
    kind = 1.0
    table = {"double": double}

    def __init__(self):
        self.factor = 1.0
        self.own = {}

    def __getitem__(self, name):
        return self.own.get(name) or self.table[name]

    def scaled(self, x):
        return x * self.factor * self.kind

    @property
    def shift(self):
        return 1.0

    @classmethod
    def of_class(cls, x):
        return x + 1

    @staticmethod
    def static(x):
        return x + 2

    @functools.cached_property
    def cached(self):
        return 3.0


class Derived(Registry):
    @classmethod
    def unused(cls, x):
        return cls.never


def naming(x):
    return DERIVED.unused if x is None else DERIVED.scaled(x)


REGISTRY = Registry()
DERIVED = Derived()


def by_gain(x):
    return x * GAIN


def by_pair(x):
    return x * PAIR[1]


def by_table(x):
    return x * SCALES["base"] * SCALES.get("more", 1.0)


def by_ordered(x):
    return x * sum(ORDERED.values())


def by_list(x):
    for step in STEPS:
        x = x + step
    return x


def by_set(x):
    return x * (2 if "b" in NAMES else 1)


def by_function(x):
    return FUNCTIONS["double"](x)


def by_registry(x):
    return REGISTRY["double"](x)


def by_object(x):
    return REGISTRY.scaled(x) + DERIVED.shift


def by_class(x):
    return DERIVED.static(Registry.of_class(x))


def by_class_name(x):
    return Registry().scaled(x)


class Forwarding:
    def forward(self, x):
        return x * 2

    def __call__(self, x):
        return x * 3


class Below(Forwarding):
    pass


FORWARDING = Below()


def by_forwarding(x):
    return FORWARDING.forward(x)


def by_call(x):
    return FORWARDING(x)


def by_missing(x):
    return x * getattr(REGISTRY, "missing", 2.0)


def by_absent(x):
    try:
        return x * ABSENT
    except NameError:
        return x


class Single:
    instance = Registry()

    class Inner:
        value = 2.0


def by_single(x):
    return x * Single.instance.factor


def by_inner(x):
    return x * Single.Inner.value


HOLDER = Registry()
HOLDER.part = Registry()


def by_part(x):
    return x * HOLDER.part.factor


def multiplied(factor):
    def decorate(function):
        @functools.wraps(function)
        def call(x):
            return function(x) * factor

        return call

    return decorate


wrapped = multiplied(3.0)(double)


def by_double(x):
    return double(x)


def by_wrapped(x):
    return wrapped(x)


BUILTINS = {"a": abs}


def by_builtin(x):
    return BUILTINS["a"](x)


def by_import(x):
    from .deep import CONSTANT

    return x * CONSTANT


def by_import_of_module(x):
    from . import deep

    return x * deep.CONSTANT


def by_import_of_all(x):
    import installed_toolbox.deep

    return x * installed_toolbox.deep.CONSTANT


AVERAGE, COUNT, HAS_WARNED = 0.0, 0, False


def by_average(x):
    global AVERAGE
    AVERAGE = 0.5 * AVERAGE + 1.0
    return x * AVERAGE


def by_count(x):
    global COUNT, HAS_WARNED
    COUNT += 1
    HAS_WARNED = True
    return x * COUNT


def by_flag(x):
    global HAS_WARNED
    if not HAS_WARNED:
        HAS_WARNED = True
    return x * 2


from . import deep as back, other


def by_module(x):
    return x * back.CONSTANT
"""


_numbers = itertools.count()


@pytest.fixture
def toolbox(imported_package: Callable[..., types.ModuleType]) -> Iterator[types.ModuleType]:
    name = f"installed_toolbox{next(_numbers)}"  # Dynamo knows modules by their names
    source = SOURCE.replace("installed_toolbox", name)
    parts = {"deep": "CONSTANT = 2.0\n", "other": "CONSTANT = 5.0\n"}
    yield imported_package(name, {"": source, **parts})
    vars(builtins).pop("ABSENT", None)


CASES = {
    "a number": ("by_gain", "box.GAIN = 3.0"),
    "a tuple": ("by_pair", "box.PAIR = (1.0, 5.0)"),
    "an item": ("by_table", "box.SCALES['base'] = 4.0"),
    "another item": ("by_table", "box.SCALES['more'] = 4.0"),
    "another table": ("by_table", "box.SCALES = {'base': 7.0}"),
    "an ordered table": ("by_ordered", "box.ORDERED['more'] = 4.0"),
    "a list": ("by_list", "box.STEPS.append(4.0)"),
    "an item of a list": ("by_list", "box.STEPS[0] = 4.0"),
    "a set": ("by_set", "box.NAMES.add('b')"),
    "a set of as many": ("by_set", "box.NAMES.remove('a'); box.NAMES.add('b')"),
    "a function in a table": ("by_function", "box.FUNCTIONS['double'] = lambda x: x * 5"),
    "of an object a table": ("by_registry", "box.REGISTRY.own['double'] = lambda x: x * 5"),
    "of an object another table": (
        "by_registry",
        "box.REGISTRY.own = {'double': lambda x: x * 5}",
    ),
    "of a class a table": ("by_registry", "box.Registry.table['double'] = lambda x: x * 5"),
    "another object": (
        "by_registry",
        "box.REGISTRY = {'double': lambda x: x * 5}",
    ),
    "of an object a number": ("by_object", "box.REGISTRY.factor = 2.5"),
    "of a class a number": ("by_object", "box.Registry.kind = 2.5"),
    "an object's own": ("by_object", "box.REGISTRY.kind = 2.5"),
    "a method": ("by_object", "box.Registry.scaled = lambda self, x: x * 9"),
    "a property": ("by_object", "box.Registry.shift = property(lambda self: 4.0)"),
    "a property of a class below": ("by_object", "box.Derived.shift = 4.0"),
    "a method of a class": (
        "by_class",
        "box.Registry.of_class = classmethod(lambda cls, x: x * 9)",
    ),
    "a function of a class": ("by_class", "box.Registry.static = staticmethod(lambda x: x * 9)"),
    "a function of a class below": (
        "by_class",
        "box.Derived.static = staticmethod(lambda x: x * 9)",
    ),
    "another class": ("by_class_name", "box.Registry = type('R', (), {'scaled': lambda s, x: -x})"),
    "forward of no layer": (
        "by_forwarding",
        "box.Forwarding.forward = lambda self, x: x * 7",
    ),
    "forward of a class below": ("by_forwarding", "box.Below.forward = lambda self, x: x * 7"),
    "a call": ("by_call", "box.Forwarding.__call__ = lambda self, x: x * 7"),
    "a call of a class below": ("by_call", "box.Below.__call__ = lambda self, x: x * 7"),
    "an attribute that was not there": ("by_missing", "box.REGISTRY.missing = 5.0"),
    "a name that was not there": ("by_absent", "box.ABSENT = 5.0"),
    "a name that comes to be Python's": ("by_absent", "import builtins; builtins.ABSENT = 5.0"),
    "an object in a class": ("by_single", "box.Single.instance.factor = 5.0"),
    "another object in a class": (
        "by_single",
        "box.Single.instance = box.Registry(); box.Single.instance.factor = 5.0",
    ),
    "a class in a class": ("by_inner", "box.Single.Inner.value = 5.0"),
    "an object in an object": ("by_part", "box.HOLDER.part.factor = 5.0"),
    "another object in an object": (
        "by_part",
        "box.HOLDER.part = box.Registry(); box.HOLDER.part.factor = 5.0",
    ),
    "a function that is wrapped": ("by_double", "box.double = box.multiplied(5.0)(box.double)"),
    "another wrap": ("by_wrapped", "box.wrapped = box.multiplied(5.0)(box.double)"),
    "a builtin in a table": ("by_builtin", "import operator; box.BUILTINS['a'] = operator.neg"),
    "a number that is imported": ("by_import", "box.deep.CONSTANT = 7.0"),
    "a module that is imported": ("by_import_of_module", "box.deep.CONSTANT = 7.0"),
    "a package that is imported": ("by_import_of_all", "box.deep.CONSTANT = 7.0"),
    "another module": ("by_module", "box.back = box.other"),
    "how objects are made": (
        "by_class_name",
        "box.Registry.__init__ = lambda self: setattr(self, 'factor', 6.0)",
    ),
}


def change(toolbox: types.ModuleType, name: str) -> Callable[[], None]:
    return lambda: exec(CASES[name][1], {"box": toolbox, "__name__": __name__})


@pytest.mark.parametrize("name", CASES)
def test_what_packages_keep_is_followed(toolbox: types.ModuleType, name: str) -> None:
    assert_followed(Net(getattr(toolbox, CASES[name][0])), change(toolbox, name))


@pytest.mark.parametrize("name", CASES)
def test_graphs_on_disk_are_those_of_what_packages_keep(
    toolbox: types.ModuleType,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source_files, "process_start", lambda: math.inf)
    caplog.set_level("DEBUG", "ortrain")
    from_disk = found_on_disk(Net(getattr(toolbox, CASES[name][0])), change(toolbox, name))
    assert from_disk[:3] == [False, True, False]


@pytest.mark.filterwarnings("ignore:.*runs in")
@pytest.mark.parametrize("function", ["by_average", "by_count"])
def test_numbers_that_packages_count_are_counted(toolbox: types.ModuleType, function: str) -> None:
    plain, x = Net(getattr(toolbox, function)), torch.tensor([-1.5, 0.5, 2.0])
    wanted = [plain(x) for _ in range(4)]
    toolbox.AVERAGE, toolbox.COUNT = 0.0, 0
    ours = ORTModule(copy.copy(plain))
    for each in wanted:
        torch.testing.assert_close(ours(x), each)


@pytest.mark.filterwarnings("ignore:.*runs in")
def test_flags_that_packages_set_are_left(toolbox: types.ModuleType) -> None:
    ours, x = ORTModule(Net(toolbox.by_flag)), torch.ones(2)
    for _ in range(2):
        torch.testing.assert_close(ours(x), 3 * x)
    # Of the call that sets it PyTorch knows what it does; the others are those of a graph.
    first, second = (record.fallback for record in ours.report().captures)
    assert "HAS_WARNED of" in first and second == ""


def test_methods_that_are_named_alone_are_the_same(toolbox: types.ModuleType) -> None:
    ours, x = ORTModule(Net(toolbox.naming)), torch.ones(2)
    for _ in range(3):
        ours(x)
    assert len(ours.report().captures) == 1


def test_what_a_forward_does_not_read_of_a_package_is_free(toolbox: types.ModuleType) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return toolbox.by_gain(x)

    ours, x = ORTModule(Net()), torch.ones(2)
    ours(x)
    toolbox.SCALES["base"] = 3.0
    toolbox.PAIR, toolbox.STEPS = (), []
    toolbox.Registry.scaled = None
    ours(x)
    assert len(ours.report().captures) == 1


def test_tables_are_let_go_with_the_module(toolbox: types.ModuleType) -> None:
    class Kept:
        pass

    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return toolbox.by_function(x)

    toolbox.FUNCTIONS["kept"] = Kept
    ours = ORTModule(Net())
    ours(torch.ones(2))
    del toolbox.FUNCTIONS["kept"], ours
    gc.collect()
    assert not [cls for cls in gc.get_objects() if cls is Kept][1:]
    assert sys.getrefcount(Kept) < 20


def test_attention_registered_anew_is_followed() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_cache=False,
    )
    plain = transformers.LlamaForCausalLM(config).eval()
    ours, ids = ORTModule(copy.deepcopy(plain)), torch.arange(6)[None]
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)
    usual = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def sharper(module, query, key, value, mask, **options):
        return usual(module, query * 3, key, value, mask, **options)

    ALL_ATTENTION_FUNCTIONS.register("sdpa", sharper)
    try:
        wanted = plain(ids).logits
        torch.testing.assert_close(ours(ids).logits, wanted, rtol=1e-4, atol=1e-5)
        assert ours.report().captures[-1].fallback == ""
    finally:
        ALL_ATTENTION_FUNCTIONS.register("sdpa", usual)
    torch.testing.assert_close(ours(ids).logits, plain(ids).logits, rtol=1e-4, atol=1e-5)


HOLDERS = """
import collections
import contextvars
import itertools
import random

CLASSES = {int}
PLAIN = {"a": 1.0}
NESTED = {"a": {"b": 1.0}, "many": list(range(2000))}
SETTING = contextvars.ContextVar("setting", default=object())
COUNTER = itertools.count()
DRAWS = random.Random(0)
GAIN = 1.0


class Slots:
    __slots__ = ("factor",)

    def __init__(self):
        self.factor = 1.0


class Open:
    def __init__(self):
        self.factor = 1.0
        self.history = [object()]


SLOTS = Slots()
OPEN = Open()


def closing():
    table = {"object": object()}
    return lambda x: len(table)


closed = closing()


def scaled(x):
    len(CLASSES), COUNTER, DRAWS, PLAIN["a"], OPEN.history, SETTING
    return x * NESTED["a"]["b"] * SLOTS.factor * OPEN.factor * GAIN * closed(x)


def nested(x):
    return x * NESTED["a"]["b"]
"""


def test_what_is_read_once_is_reported(
    imported_package: Callable[..., types.ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "graphs"))
    monkeypatch.setattr(source_files, "process_start", lambda: math.inf)
    holders = imported_package("holders", {"": HOLDERS})

    module = Net(holders.scaled)
    model = ORTModule(copy.copy(module))
    model(torch.ones(1, 2))
    [record] = model.report().captures
    assert {told for told in record.read_once if told.startswith("holders")} == {
        "holders.NESTED (dict)",
        "holders.CLASSES (set)",
        "holders.closing.<locals>.<lambda>.__closure__ (tuple)",
        "holders.SETTING (ContextVar)",
        "holders.COUNTER (count)",
        "holders.DRAWS (Random)",
        "holders.OPEN.history (list)",
    }
    shown = str(model.report())
    page = model.report().to_html()
    assert "Read once" in page and "<code>holders.DRAWS (Random)</code>" in page
    assert "read once: " in shown and "holders.DRAWS (Random)" in shown and " more" in shown
    nested, from_disk = Net(holders.nested), []
    for _ in range(2):
        ours = ORTModule(copy.copy(nested))
        ours(torch.ones(1, 2))
        [record] = ours.report().captures
        assert "holders.NESTED (dict)" in record.read_once
        from_disk.append(record.from_disk)
    assert from_disk == [False, True]
    plain = ORTModule(nn.Linear(2, 2))
    plain(torch.ones(1, 2))
    assert plain.report().captures[0].read_once == ()
    assert "read once" not in str(plain.report())
    assert "Read once" not in plain.report().to_html()

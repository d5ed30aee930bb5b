# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A guard that leaves untouched dictionaries alone sees what one sees that compares everything."""

from __future__ import annotations

import collections
import gc
import random
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from concurrent import futures
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import _core, module_states

STEPS = 250


class Slotted(nn.Module):
    """More attributes than an object keeps beside its dictionary, and slots."""

    __slots__ = ("slot",)

    def __init__(self) -> None:
        super().__init__()
        self.slot = 1
        for number in range(30):
            setattr(self, f"more{number}", number)


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.slotted = Slotted()
        self.inner = nn.ModuleDict({"drop": nn.Dropout(0.5), "act": nn.ReLU()})
        self.scale = 2.0
        self.options = {"k": 7, "rates": [0.5]}
        self._buffers = collections.OrderedDict(self._buffers)  # as old PyTorch had it


def store_scale(layer: Any, value: Any) -> None:
    layer.scale = value


def store_fresh(layer: Any, value: Any) -> None:
    layer.fresh = value


def delete_scale(layer: Any) -> None:
    del layer.scale


def in_a_thread(call: Callable[[], object]) -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        pool.submit(call).result()


def run_as_globals(attributes: dict[str, Any], value: Any) -> None:
    exec(f"scale = {value!r}", attributes)
    attributes.pop("__builtins__", None)


def copy_back(attributes: dict[str, Any]) -> None:
    kept = dict(attributes)
    attributes.clear()
    attributes.update(kept)


def reorder(attributes: dict[str, Any], name: str) -> None:
    attributes[name] = attributes.pop(name)


def replace_dictionary(layer: Any) -> None:
    layer.__dict__ = dict(layer.__dict__)


# Each takes a layer, the name of an attribute and a value.
ATTRIBUTE_CHANGES: list[Callable[[Any, str, Any], object]] = [
    setattr,
    object.__setattr__,
    lambda m, n, v: delattr(m, n),
    lambda m, n, v: object.__delattr__(m, n),
    lambda m, n, v: store_scale(m, v),
    lambda m, n, v: store_fresh(m, v),
    lambda m, n, v: delete_scale(m),
    lambda m, n, v: m.__dict__.__setitem__(n, v),
    lambda m, n, v: vars(m).__setitem__(n, v),
    lambda m, n, v: m.__dict__.__delitem__(n),
    lambda m, n, v: m.__dict__.pop(n),
    lambda m, n, v: m.__dict__.popitem(),
    lambda m, n, v: m.__dict__.setdefault(n, v),
    lambda m, n, v: m.__dict__.update({n: v}),
    lambda m, n, v: m.__dict__.update([(n, v)]),
    lambda m, n, v: m.__dict__.update(scale=v),
    lambda m, n, v: m.__dict__.__ior__({n: v, "scale": v}),
    lambda m, n, v: dict.__init__(m.__dict__, {n: v}),
    lambda m, n, v: run_as_globals(m.__dict__, v),
    lambda m, n, v: copy_back(m.__dict__),
    lambda m, n, v: reorder(m.__dict__, n),
    lambda m, n, v: replace_dictionary(m),
    lambda m, n, v: in_a_thread(lambda: setattr(m, n, v)),
    lambda m, n, v: in_a_thread(lambda: m.__dict__.pop(n, None)),
    lambda m, n, v: m.train(bool(v)),
    lambda m, n, v: m.register_forward_hook(lambda *args: None),
]
# Each takes a table of tensors or layers, one of its names and an item that it may hold.
TABLE_CHANGES: list[Callable[[Any, str, Any], object]] = [
    lambda t, n, v: t.__setitem__(n, v),
    lambda t, n, v: t.__delitem__(n),
    lambda t, n, v: t.pop(n),
    lambda t, n, v: t.popitem(),
    lambda t, n, v: t.update({n: v}),
    lambda t, n, v: t.__ior__({n: v}),
    lambda t, n, v: t.setdefault("fresh", v),
    lambda t, n, v: t.clear(),
    lambda t, n, v: copy_back(t),
    lambda t, n, v: reorder(t, n),
    lambda t, n, v: in_a_thread(lambda: t.__setitem__(n, v)),
]


def guard_of(model: nn.Module, variables: list[tuple[dict[str, Any], str]] | None = None) -> Any:
    return _core.ModuleGuard(list(model.modules()), None, variables or [])


def change_something(model: nn.Module, draw: random.Random) -> None:
    """Change an attribute or a table of one of the layers; or nothing, where that is not there."""
    layer = draw.choice(list(model.modules()))
    try:
        if draw.random() < 0.65:
            names = ["scale", "training", "fresh", "p", "slot", "more3", *layer.__dict__]
            hidden = {"_modules", "_parameters", "_buffers"}
            names = [n for n in names if n not in hidden and not n.endswith(("_hooks", "_impl"))]
            value = draw.choice([1, 2.5, "text", None, True])
            draw.choice(ATTRIBUTE_CHANGES)(layer, draw.choice(names), value)
            return
        kind = draw.choice(["_parameters", "_buffers", "_modules"])
        table = layer.__dict__[kind]
        if kind == "_modules":
            item: Any = draw.choice([nn.ReLU(), nn.Dropout(0.1), None])
        else:
            item = draw.choice([nn.Parameter(torch.ones(2, 2)), torch.ones(2), None])
        draw.choice(TABLE_CHANGES)(table, draw.choice([*table, "fresh"]), item)
    except (AttributeError, KeyError, TypeError):
        pass  # nothing of this name was there, or something else


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(6))
def test_random_changes_are_seen_as_by_a_full_comparison(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(50):  # until the interpreter has specialised what stores
        plain = nn.Identity()
        store_scale(plain, 1)
        store_fresh(plain, 1)
        delete_scale(plain)
    model, seen = Tree(), []
    watching = guard_of(model)
    assert watching.holds()
    for step in range(STEPS):
        if step % 8 == 0:
            model = Tree()
            watching = guard_of(model)
            assert watching.holds()
        comparing = guard_of(model)  # of which the first look compares everything
        layers = list(model.modules())
        change_something(model, draw)
        expected = comparing.holds()
        seen.append(expected)
        assert watching.holds() == expected, step
        if not all("_modules" in layer.__dict__ for layer in layers):
            model = Tree()
        if not expected:
            watching = guard_of(model)
        assert watching.holds()
    assert 20 < sum(seen) < STEPS - 20


@pytest.mark.parametrize("kind", [Tree, Slotted])
def test_a_dictionary_that_nobody_has_asked_for_yet(kind: type[nn.Module]) -> None:
    model = kind()
    watching = guard_of(model)
    assert watching.holds() and watching.holds()
    for number in range(40):
        store_fresh(model, number)
        assert not watching.holds()
        watching = guard_of(model)
        assert watching.holds()
        store_fresh(model, number)
        assert watching.holds()


def test_a_state_that_comes_back_holds_again() -> None:
    model = Tree()
    watching = guard_of(model)
    assert watching.holds()
    for _ in range(5):
        model.scale = 3.0
        assert not watching.holds()
        model.scale = 2.0
        assert watching.holds() and watching.holds()
        weight = model.first._parameters.pop("weight")
        assert not watching.holds()
        model.first._parameters["weight"] = weight  # behind the bias now
        assert not watching.holds()
        reorder(model.first._parameters, "bias")
        assert watching.holds() and watching.holds()


def test_guards_of_one_module_do_not_take_changes_from_each_other() -> None:
    model = Tree()
    guards = [guard_of(model) for _ in range(3)]
    assert all(guard.holds() for guard in guards)
    model.scale = 3.0
    assert not guards[0].holds() and not guards[1].holds()
    del guards[1], guards[0]
    gc.collect()
    assert not guards[0].holds()
    model.scale = 2.0
    assert guards[0].holds()
    model.slotted.more3 = "other"
    assert not guards[0].holds()


def test_variables_of_watched_dictionaries() -> None:
    model, space = nn.ReLU(), {"rate": 1.0, "rates": [1.0], "other": 1}
    watching = guard_of(model, [(space, "rate"), (space, "rates")])
    assert watching.holds() and watching.holds()
    space["other"] = 2
    assert watching.holds()
    for change, undo in [
        (lambda: space.update(rate=2.0), lambda: space.update(rate=1.0)),
        (lambda: space.pop("rate"), lambda: space.setdefault("rate", 1.0)),
        (lambda: space["rates"].append(2.0), lambda: space["rates"].pop()),
        (lambda: exec("rate = 3.0", space), lambda: exec("rate = 1.0", space)),
    ]:
        change()
        assert not watching.holds()
        undo()
        assert watching.holds() and watching.holds()
    space.clear()
    assert not watching.holds()
    watching = guard_of(model, [(space, "missing")])
    assert watching.holds()
    space["missing"] = None
    assert not watching.holds()


def test_what_nobody_reads_may_change() -> None:
    model = Tree()
    watching = _core.ModuleGuard(list(model.modules()), {"scale"})
    assert watching.holds()
    for value in range(3):
        model.unread = value
        assert watching.holds() and watching.holds()
    del model.unread
    assert watching.holds()
    model.scale = 1.0
    assert not watching.holds()


def test_dictionaries_are_let_go_with_their_guard() -> None:
    model = Tree()
    watching = guard_of(model)
    assert watching.holds()
    gone = weakref.ref(model), weakref.ref(model.norm.running_mean)
    del watching, model
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    # Others may get the addresses of those that are gone.
    for _ in range(20):
        model = Tree()
        watching = guard_of(model)
        assert watching.holds() and watching.holds()
        del model.norm.__dict__["eps"]
        assert not watching.holds()


def test_states_of_a_module_are_told_apart() -> None:
    model = Tree()
    states = module_states.ModuleStates(model)
    seen = []
    for scale in (2.0, 3.0, 2.0, 2.0, 3.0):
        for layer in model.modules():
            layer.__dict__["scale"] = scale
        states.look()
        seen.append(states.present)
    assert seen == [1, 2, 1, 1, 2]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="dictionaries have versions of their own")
def test_where_python_takes_no_more_watchers_everything_is_compared() -> None:
    code = """
        import ctypes

        from torch import nn  # which takes one too

        callback = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int] + 3 * [ctypes.c_void_p])(
            lambda *event: 0
        )
        try:
            while True:
                ctypes.pythonapi.PyDict_AddWatcher(callback)
        except RuntimeError:
            pass

        from ortrain import _core

        model = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(2))
        guard = _core.ModuleGuard(list(model.modules()))
        assert guard.holds() and guard.holds()
        model[0].p = 0.1
        assert not guard.holds()
        model[0].p = 0.5
        assert guard.holds()
        model[1]._buffers.pop("running_mean")
        assert not guard.holds()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)

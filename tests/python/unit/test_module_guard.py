# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a captured graph depends on is noticed when it changes, and nothing else is."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_modules import ODD_TENSORS

from ortrain import _core


class Config:
    def __init__(self) -> None:
        self.width = 3
        self.itself = self


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.0)
        self.norm = nn.BatchNorm1d(3)
        self.scale = 2.0
        self.times = 1
        self.mode = "sum"
        self.cache: list[int] = []
        self.window = (3, 2)
        self.options = {"k": 7, "rates": [0.5]}
        self.ordered = collections.OrderedDict(k=7)
        self.act = torch.tanh
        self.offset = torch.zeros(3)
        self.held = [self.first.bias]
        self.config = Config()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.first(x))) * self.scale * self.times


def guard_of(model: nn.Module) -> Any:
    return _core.ModuleGuard(list(model.modules()))


def replace_data(model: Layers) -> None:
    model.first.weight.data = torch.zeros(3, 4)


def delete_bias(model: Layers) -> None:
    model.first.bias = None


CHANGES: dict[str, Callable[[Layers], object]] = {
    "float": lambda m: setattr(m, "scale", 3.0),
    "int": lambda m: setattr(m, "times", 2),
    "type of a number": lambda m: setattr(m, "times", 1.0),
    "text": lambda m: setattr(m, "mode", "mean"),
    "object becomes a number": lambda m: setattr(m, "cache", 1),
    "added attribute": lambda m: setattr(m, "more", 1),
    "removed attribute": lambda m: delattr(m, "mode"),
    "eval": lambda m: m.drop.eval(),
    "rate of a layer": lambda m: setattr(m.drop, "p", 0.5),
    "layer": lambda m: setattr(m, "drop", nn.Identity()),
    "added layer": lambda m: m.add_module("last", nn.Linear(3, 3)),
    "parameter of another shape": lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(4))),
    "frozen parameter": lambda m: setattr(m.first, "bias", nn.Parameter(torch.ones(3), False)),
    "tied buffers": lambda m: setattr(m.norm, "running_mean", m.norm.running_var),
    "table": lambda m: setattr(m.norm, "_buffers", dict(m.norm._buffers)),
    "no parameter": delete_bias,
    "buffer": lambda m: setattr(m.norm, "running_mean", torch.ones(3, dtype=torch.float64)),
    "parameter that another attribute holds": lambda m: m.held.__setitem__(0, torch.ones(3)),
    "constant that becomes a buffer": lambda m: setattr(m.norm, "running_mean", m.offset),
    "shape": replace_data,
    "type": lambda m: m.double(),
    "frozen": lambda m: m.first.weight.requires_grad_(False),
    "tuple": lambda m: setattr(m, "window", (3, 1)),
    "list": lambda m: m.cache.append(1),
    "dictionary": lambda m: m.options.update(k=8),
    "ordered dictionary": lambda m: m.ordered.update(k=8),
    "kind of dictionary": lambda m: setattr(m, "ordered", {"k": 7}),
    "list in a dictionary": lambda m: m.options["rates"].append(1.0),
    "function": lambda m: setattr(m, "act", torch.relu),
    "tensor": lambda m: setattr(m, "offset", torch.zeros(3)),
    "tensor written to": lambda m: m.offset.add_(1.0),
    "configuration": lambda m: setattr(m.config, "width", 4),
    "method": lambda m: setattr(m.first, "forward", lambda x: x),
    "class": lambda m: setattr(m.drop, "__class__", nn.AlphaDropout),
    "hook": lambda m: m.first.register_forward_hook(lambda *args: None),
    "hook before": lambda m: m.first.register_forward_pre_hook(lambda *args: None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_noticed(name: str) -> None:
    model = Layers()
    guard = guard_of(model)
    assert guard.holds()
    CHANGES[name](model)
    assert not guard.holds()
    if name != "added layer":
        assert guard_of(model).holds()


def test_what_no_graph_depends_on_may_change() -> None:
    model = Layers()
    guard = guard_of(model)
    model.scale = float("2.0")  # another object of the same value
    model.cache = []  # as empty as before
    model.window = (int("3"), 2)
    with torch.no_grad():
        model.first.weight.add_(1.0)
        model.norm.running_mean.add_(1.0)
        model.first.weight.data = torch.zeros(3, 3)
    model.first.weight.grad = torch.zeros(3, 3)
    model.drop.__dict__ = dict(model.drop.__dict__)
    model.register_forward_hook(lambda *args: None)
    model.register_full_backward_pre_hook(lambda *args: None)
    assert guard.holds()
    assert guard.holds()


def test_what_took_an_attribute_s_place_is_looked_into() -> None:
    model = Layers()
    guard = guard_of(model)
    model.cache = []
    model.first._forward_hooks = collections.OrderedDict()
    assert guard.holds() and guard.holds()
    model.cache.append(1)
    assert not guard.holds()
    model.cache.clear()
    assert guard.holds()
    hook = model.first.register_forward_hook(lambda *args: None, with_kwargs=True)
    assert not guard.holds()
    hook.remove()
    assert guard.holds() and guard.holds()
    model.first.register_state_dict_pre_hook(lambda *args: None)  # changes no step
    assert guard.holds()


def test_floats_are_compared_by_their_bits() -> None:
    model = Layers()
    model.scale = float("nan")
    guard = guard_of(model)
    model.scale = float("nan")
    assert guard.holds()
    model.scale = 0.0
    assert not guard.holds()
    guard = guard_of(model)
    model.scale = -0.0
    assert not guard.holds()


def test_guard_takes_part_in_garbage_collection() -> None:
    model = Layers()
    model.guard_of_itself = guard_of(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_tensors_of_the_same_kind_are_taken_on() -> None:
    model = Layers()
    guard = guard_of(model)
    before = guard.tensors
    assert guard.holds() and guard.tensors is before
    model.first.weight = nn.Parameter(torch.ones(3, 3))
    model.norm.running_mean = torch.ones(3)
    bias = nn.Parameter(torch.ones(3))
    model.first.bias = bias
    assert not guard.holds() and guard.tensors is before  # another attribute has the old one
    model.held[0] = bias
    assert guard.holds()
    expected = [
        t for part in model.modules() for t in (*part._parameters.values(), *part._buffers.values())
    ]
    assert all(a is b for a, b in zip(guard.tensors, expected, strict=True))


def test_released_tensors_are_found_again() -> None:
    model = Layers()
    guard = guard_of(model)
    gone = weakref.ref(model.first.weight)
    guard.release_tensors()
    model.first.weight = nn.Parameter(torch.ones(3, 3))
    gc.collect()
    assert gone() is None
    assert guard.holds() and any(t is model.first.weight for t in guard.tensors)


def test_lists_of_tensors_are_let_go_with_a_state() -> None:
    model = nn.LSTM(3, 3)
    guard = guard_of(model)
    assert guard.holds()
    gone = weakref.ref(model.weight_ih_l0)
    model.eval()
    assert not guard.holds()
    guard.release_tensors()
    model.weight_ih_l0 = nn.Parameter(torch.ones(12, 3))
    gc.collect()
    assert gone() is None
    model.train()
    assert guard.holds() and guard.holds()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ODD_TENSORS)
def test_tensors_that_the_engine_does_not_hold(name: str) -> None:
    model = nn.Linear(3, 3)
    model.register_buffer("odd", ODD_TENSORS[name]())
    guard = guard_of(model)
    assert guard.holds()
    model.odd = ODD_TENSORS[name]()
    assert guard.holds()
    model.odd = torch.ones(4, dtype=torch.int32)
    assert not guard.holds()
    model.odd = None
    assert not guard.holds()


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_a_tensor_moved_away_is_noticed() -> None:
    model = nn.Linear(3, 3)
    guard = guard_of(model)
    for kind in ("meta", torch.complex64):
        other = nn.Linear(3, 3).to(kind)
        model.weight = other.weight
        assert not guard.holds()


class Registry:
    """Methods of classes and of objects, each of which is another object at each access."""

    scale = 2.0

    @classmethod
    def names(cls) -> list[str]:
        return []

    def items(self) -> list[str]:
        return []


@pytest.mark.parametrize("name", ["names", "items", "fromkeys"])
def test_methods_hold_as_long_as_they_are_the_same(name):
    owner = {"names": Registry, "items": Registry(), "fromkeys": dict}[name]
    guard = _core.ModuleGuard([nn.Linear(1, 1)], None, [(owner, name)], [])
    assert guard.holds()
    assert guard.holds()


def test_another_method_under_the_same_name_does_not_hold():
    class Other(Registry):
        pass

    guard = _core.ModuleGuard([nn.Linear(1, 1)], None, [(Other, "names")], [])
    assert guard.holds()
    Other.names = classmethod(lambda cls: ["other"])
    assert not guard.holds()

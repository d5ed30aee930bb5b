# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""An ORTModule and its module have one dictionary of attributes: whatever is put there, both have it."""

from __future__ import annotations

import collections
import copy
import functools
import gc
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale


class Sequence(nn.Module):
    """Puts a new table of layers in the place of the old one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def keep(self, name: str) -> None:
        self._modules = {name: self._modules[name]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Slotted(nn.Module):
    __slots__ = ("kept",)

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.kept


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))


def exchange_last(m: Any) -> None:
    del m[2]
    m.append(nn.Linear(3, 2))


def take_state_of_another(m: Any) -> None:
    torch.manual_seed(5)
    m.__dict__.update(Scaled().__dict__)
    m.scale = 3.0


def without_hooks(m: Any) -> None:
    m.register_forward_hook(lambda module, arguments, result: result * 100)
    m._forward_hooks = collections.OrderedDict()


def by_setstate(m: Any) -> None:
    torch.manual_seed(6)
    m.__setstate__(Scaled().__dict__)


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], object]]] = {
    "a layer exchanged": (sequential, exchange_last),
    "a layer popped": (sequential, lambda m: m.pop(1)),
    "a slice put": (sequential, lambda m: m.__setitem__(0, nn.Linear(3, 3, bias=False))),
    "a table replaced": (Sequence, lambda m: m.keep("first")),
    "hooks replaced": (Scaled, without_hooks),
    "by vars": (Scaled, lambda m: vars(m).update(scale=5.0)),
    "by update": (Scaled, take_state_of_another),
    "by setstate": (Scaled, by_setstate),
    "the dictionary": (Scaled, lambda m: setattr(m, "__dict__", {**m.__dict__, "scale": 7.0})),
    "a mode by vars": (Scaled, lambda m: m.__dict__.update(training=False)),
    "a slot": (Slotted, lambda m: setattr(m, "kept", 4.0)),
}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("by_module", [False, True])
def test_what_is_put_there_counts(name: str, by_module: bool) -> None:
    make, change = CHANGES[name]
    seen = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        net = make()
        model = wrap(net)
        x = torch.ones(2, 3)
        before = model(x)
        torch.manual_seed(1)
        change(net if by_module else model)
        after = model(x)
        after.sum().backward()
        state = {n: t.shape for n, t in model.state_dict().items()}
        gradients = {n: p.grad for n, p in model.named_parameters()}
        assert model.training == net.training
        seen.append((before, after, state, gradients))
    (before, after, state, gradients), (*ours, our_state, our_gradients) = seen
    torch.testing.assert_close(ours, [before, after])
    assert our_state == state
    torch.testing.assert_close(our_gradients, gradients)


def test_copies_share_what_copies_of_modules_share() -> None:
    model = ORTModule(Scaled())
    copied = copy.copy(model)
    assert isinstance(copied, ORTModule) and copied.module is not model.module
    assert copied.linear is model.linear
    copied.training, copied.scale = False, 5.0
    assert model.training and model.scale == 2.0
    x = torch.ones(2, 3)
    torch.testing.assert_close(copied(x) / 5, model(x) / 2)
    deep = copy.deepcopy(model)
    assert deep.linear is not model.linear and deep.module.__dict__ is deep.__dict__


def test_a_forward_of_ones_own_is_the_ortmodules_alone() -> None:
    model = ORTModule(Scaled())
    x = torch.ones(2, 3)
    expected, original = model(x), model.forward
    model.forward = lambda x: original(x) + 1
    assert "forward" not in model.__dict__
    torch.testing.assert_close(model(x), expected + 1)
    torch.testing.assert_close(model.module(x), expected)
    del model.forward
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(AttributeError):
        del model.forward
    model.module.forward = lambda x: x * 3
    torch.testing.assert_close(model(x), x * 3)


def test_what_accelerate_puts_on_one_is_not_on_another() -> None:
    net = Scaled()
    first, second = ORTModule(net), ORTModule(net)
    first._is_accelerate_prepared = True
    assert first._is_accelerate_prepared and not second._is_accelerate_prepared
    assert not getattr(net, "_is_accelerate_prepared", False)
    x = torch.ones(2, 3)
    expected = first(x)
    first._original_forward = first.forward
    wrapped = functools.wraps(first.forward.__func__)(
        lambda self, x: type(self).forward(self, x) + 1
    )
    first.forward = types.MethodType(wrapped, first)
    torch.testing.assert_close(first(x), expected + 1)
    torch.testing.assert_close(second(x), expected)
    # As extract_model_from_parallel: down to the innermost function.
    assert first.__dict__.pop("_original_forward", None) is not None
    first.forward = types.MethodType(inspect.unwrap(first.forward), first)
    torch.testing.assert_close(first(x), expected)
    assert first._ortrain_forward is None


class Named(nn.Module):
    """Has names that ORTModules have."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.report = nn.Linear(3, 3), nn.Linear(3, 3)
        self.profile = 3.0
        self.closed: list[bool] = []

    def __del__(self) -> None:
        self.closed.append(True)

    def save_graphs(self) -> int:
        return 7

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x) + self.report(x) * self.profile * self.save_graphs()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).relu() + 1


def test_names_of_the_modules_own_come_first() -> None:
    net = Named()
    model, x = ORTModule(net), torch.ones(2, 3)
    torch.testing.assert_close(model.encode(x), net.encode(x))
    torch.testing.assert_close(model(x), net(x))
    assert model.memory_plan() is not None and model._ortrain_module is net
    del model
    gc.collect()
    assert not net.closed, "the module lives"
    averaged = ORTModule(torch.optim.swa_utils.AveragedModel(Scaled()))
    averaged.update_parameters(Scaled())


def test_a_class_of_ortmodules_has_a_forward_of_its_own() -> None:
    class Doubled(ORTModule):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    net, x = Scaled(), torch.ones(2, 3)
    model = Doubled(net)
    torch.testing.assert_close(model(x), net(x) * 2)
    assert model.report().native_share == 1.0
    assert inspect.signature(model.forward) == inspect.signature(net.forward)


def test_replicas_are_modules() -> None:
    net = nn.Linear(3, 2)
    replica = ORTModule(net)._replicate_for_data_parallel()
    assert type(replica) is nn.Linear and replica.in_features == 3
    assert replica._parameters == {} and len(net._parameters) == 2

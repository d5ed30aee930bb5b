# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tensors that are in no table of a layer, and those that a trace makes and somebody keeps."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.surviving_fakes import FakesMade


class Student(nn.Module):
    def __init__(self, teacher: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.teacher = teacher

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.teacher[0](x)
        return (self.layer(x) - target).square().mean()


def averaged(teacher: nn.Module, student: nn.Module) -> None:
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
            a.lerp_(b, 0.5)


def through_data(teacher: nn.Module, student: nn.Module) -> None:
    for a, b in zip(teacher.parameters(), student.parameters(), strict=True):
        a.data = a.data * 0.5 + b.data


def through_numpy(teacher: nn.Module, student: nn.Module) -> None:
    for a in teacher.parameters():
        a.detach().numpy()[...] *= 0.5


@pytest.mark.parametrize("update", [averaged, through_data, through_numpy])
def test_a_teacher_in_a_list_is_followed(update: Callable[..., None]) -> None:
    torch.manual_seed(0)
    teacher = nn.Linear(3, 3)
    plain = Student([teacher])
    ours = Student([copy.deepcopy(teacher)])
    ours.layer.load_state_dict(plain.layer.state_dict())
    wrapped = ORTModule(ours)
    for _ in range(4):
        x = torch.randn(2, 3)
        for module, called in ((plain, plain), (ours, wrapped)):
            module.zero_grad()
            called(x).backward()
        torch.testing.assert_close(ours.layer.weight.grad, plain.layer.weight.grad)
        for module in (plain, ours):
            with torch.no_grad():
                module.layer.weight -= 0.1 * module.layer.weight.grad
            update(module.teacher[0], module.layer)
    assert wrapped.report().native_share == 1.0
    if update is not through_data:  # which makes another tensor of another kind of nothing
        assert len(wrapped.report().captures) == 1


class Scaled(nn.Module):
    def __init__(self, read: Callable[[], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.read()


def test_shapes_and_types_of_outside_tensors_are_guarded() -> None:
    scale = torch.ones(3)
    model = Scaled(lambda: scale)
    wrapped = ORTModule(model)
    x = torch.randn(2, 3)
    for changed in (scale, torch.ones(1), torch.ones(3, dtype=torch.int64), torch.ones(2, 3) * 2):
        if changed is not scale:
            scale = changed
        torch.testing.assert_close(wrapped(x), model(x))
    scale.data = torch.full((2, 1), 3.0)
    torch.testing.assert_close(wrapped(x), model(x))


def test_arrays_behind_tensors_are_compared() -> None:
    array = np.ones(3, dtype=np.float32)
    model = Scaled(lambda: torch.from_numpy(array))
    wrapped = ORTModule(model)
    x = torch.randn(2, 3)
    for value in (1.0, 1.0, 4.0):
        array[:] = value
        torch.testing.assert_close(wrapped(x), model(x))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "read", [lambda t: t.item(), float, lambda t: t.tolist(), lambda t: float(t.numpy())]
)
def test_values_that_python_reads_are_read_each_time(read: Callable[..., Any]) -> None:
    value = torch.tensor(2.0)
    model = Scaled(lambda: torch.ones(3) * read(value))
    wrapped = ORTModule(model)
    x = torch.randn(2, 3)
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), model(x))
        value.data.mul_(2)
    assert any("reads values" in c.fallback for c in wrapped.report().captures)


@pytest.mark.filterwarnings("ignore")
def test_a_write_of_the_trace_to_an_outside_tensor_is_undone() -> None:
    norm, count = nn.BatchNorm1d(3), torch.zeros(3)

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            count.add_(1)
            return norm(self.layer(x))

    wrapped = ORTModule(Normalized())
    for call in range(1, 4):
        wrapped(torch.randn(4, 3))
        assert norm.num_batches_tracked == call and torch.equal(count, torch.full((3,), 1.0 * call))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["lru_cache", "dictionary", "tuples"])
def test_caches_hold_no_tensors_of_a_trace(kind: str) -> None:
    held: dict[int, Any] = {}

    @functools.lru_cache
    def cached(length: int) -> torch.Tensor:
        return torch.arange(float(length))

    def looked_up(length: int) -> torch.Tensor:
        table = hidden()
        if length not in table:
            made = torch.arange(float(length))
            table[length] = (made,) if kind == "tuples" else made
        found = table[length]
        return found[0] if kind == "tuples" else found

    hidden = functools.partial(dict.setdefault, {0: held}, 0, None)
    read = cached if kind == "lru_cache" else looked_up
    model = Scaled(lambda: read(3))
    wrapped = ORTModule(model)
    x = torch.randn(2, 3)
    for _ in range(3):
        torch.testing.assert_close(wrapped(x), model(x))
    assert torch.equal(read(3) + 1, torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize("is_frozen", [True, False])
def test_what_is_older_loses_what_a_trace_has_put_there(
    is_frozen: bool, request: pytest.FixtureRequest
) -> None:
    if gc.get_freeze_count() and not is_frozen:
        gc.unfreeze()
        request.addfinalizer(gc.freeze)
    elif is_frozen:
        gc.freeze()
    from torch._subclasses.fake_tensor import FakeTensorMode

    table: dict[str, Any] = {"kept": 1}
    rows: list[Any] = [1]
    home = [table]  # a dictionary of numbers is unknown to the collector
    fakes, found = FakesMade(), []
    with fakes.taken_back(found), FakeTensorMode(), fakes.recording():
        made = torch.ones(3)
        table["made"] = made
        rows.append((made, 2))
        own = {"made": made}
    assert home == [{"kept": 1}] and rows == [1]
    assert sorted(found) == ["a dictionary", "a list"]
    assert list(own) == ["made"]
    assert bool(gc.get_freeze_count()) == is_frozen


@pytest.mark.parametrize("hook", ["register_hook", "retain_grad"])
def test_hooks_that_a_forward_sets_are_called(hook: str) -> None:
    class Reverses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.layer(x)
            if hook == "register_hook":
                z.register_hook(lambda gradient: -3 * gradient)
            else:
                z.retain_grad()
            return z * 2

    model = Reverses()
    wrapped = ORTModule(model)
    x = torch.randn(2, 3)
    model(x).sum().backward()
    expected = model.layer.weight.grad.clone()
    for _ in range(2):
        model.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wrapped(x).sum().backward()
        torch.testing.assert_close(model.layer.weight.grad, expected)

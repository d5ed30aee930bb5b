# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards that say something of tensors, or enter something, that is no operator: as in PyTorch at each call."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import Linear
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule


class Model(Linear):
    """Runs a function; has a teacher, which nobody trains, and a number of calls."""

    def __init__(self, run: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run, self.calls = run, 0
        self.teacher = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def followed(
    run: Callable[[Any, torch.Tensor], Any],
    wrap: Callable[[nn.Module], Any],
    between: Callable[[Model, int], object],
    make: Callable[[int], torch.Tensor],
) -> list[Any]:
    """Return all that can be seen of five steps."""
    torch.manual_seed(3)
    net = Model(run)
    model, seen = wrap(net), []
    for step in range(5):
        between(net, step)
        torch.manual_seed(step)
        x = make(step)
        result = model(x)
        seen.append((result.requires_grad, result.is_inference(), result.dtype, vars(result)))
        if result.requires_grad:
            (result * torch.arange(1.0, result.numel() + 1).view_as(result)).sum().backward()
        seen += [result.detach().clone(), x.requires_grad, x.grad]
        for name, parameter in net.named_parameters():
            grad = parameter.grad
            seen += [name, parameter.requires_grad, None if grad is None else grad.clone()]
        seen.append((torch.rand(()), torch.get_default_dtype(), torch.get_num_threads()))
    return seen


def assert_equal(mine: Any, theirs: Any, where: str = "") -> None:
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(mine, theirs, msg=lambda m: f"{where}: {m}")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs)
        for i, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(a, b, f"{where}.{i}")
    else:
        assert mine == theirs, where


def of_numbers(step: int) -> torch.Tensor:
    return torch.randn(3, 4, requires_grad=True)


def nothing(net: Model, step: int) -> None:
    del net, step


def item(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    return y * y.mean().item() * x[0].tolist()[0] + torch.full((4,), y.sum().item())


def gain_as_a_number(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * net.gain.item()


def detached_in_place(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = net.linear(x).tanh()
    kept = h
    h.detach_()
    return net.teacher(h) + kept


def truncated(net: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.zeros_like(x)
    for i in range(4):
        if i % 2 == 0:
            h.detach_()
        h = torch.tanh(net.linear(x) + h)
    return h


def argument_detached_in_place(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear((x * 1).detach_()) + net.teacher(x)


def inference(net: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        wanted = net.teacher(x.detach())
    return (net.linear(x) - wanted.clone()) ** 2


@torch.inference_mode()
def _decorated(net: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = net.linear(x)
    return result


def frozen(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.linear.weight.requires_grad_(False)
    return net.linear(x)


def frozen_by_mode(net: Any, x: torch.Tensor) -> torch.Tensor:
    for parameter in net.linear.parameters():
        parameter.requires_grad = net.training
    return net.linear(x) + x


def argument_wants_a_gradient(net: Any, x: torch.Tensor) -> torch.Tensor:
    x.requires_grad_()
    return net.linear(x)


def leaf_made(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x).detach().requires_grad_()


def leaf_from_a_factory(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.linear(x)
    return torch.zeros(3, 4, requires_grad=True)


def gradients_dropped(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.linear.zero_grad()
    return net.linear(x)


def gradient_set(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.linear.weight.grad = torch.ones(4, 4)
    return net.linear(x)


def attribute_of_an_argument(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * getattr(x, "scale", 1.0)


def attribute_of_a_parameter(net: Any, x: torch.Tensor) -> torch.Tensor:
    weight = net.linear.weight
    weight.calls = getattr(weight, "calls", 0) + 1
    return net.linear(x) * weight.calls


def attribute_of_a_result(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    y.tag = "mine"
    return y


def power_of_nothing(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) ** 0


def filled(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x).fill_(2.0)


def all_dropped(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(net.linear(x), 1.0)


class _Doubled(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.ops.aten.tanh.default else result


def mode_of_ones_own(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    with _Doubled():
        return y.tanh()


def default_dtype_left(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x) * torch.ones(4)
    torch.set_default_dtype(torch.float64)
    return y


def threads_left(net: Any, x: torch.Tensor) -> torch.Tensor:
    torch.set_num_threads(3)
    return net.linear(x)


def checkpoint_in_pieces(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.calls += 1
    return checkpoint(lambda y: F.dropout(net.linear(y), 0.5), x, use_reentrant=False)


def reentrant_checkpoint(net: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: F.dropout(net.linear(y), 0.5), x, use_reentrant=True)


def halved_saves(net: Any, x: torch.Tensor) -> torch.Tensor:
    y = net.linear(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t):
        return y * y


def moved(net: Any, x: torch.Tensor) -> torch.Tensor:
    net.linear.to(torch.float32)
    return net.linear(x)


def new_parameter(net: Any, x: torch.Tensor) -> torch.Tensor:
    return F.linear(net.linear(x), nn.Parameter(torch.ones(2, 4)))


SCALES = {"scale": 1.0}


class Named:
    """Asks a global by each special method."""

    def __getattr__(self, name: str) -> float:
        if name.startswith("__"):
            raise AttributeError(name)
        return SCALES["scale"]

    def __getitem__(self, name: str) -> float:
        return SCALES["scale"] * 2

    def __len__(self) -> int:
        return int(SCALES["scale"])

    def __mul__(self, other: torch.Tensor) -> torch.Tensor:
        return other * SCALES["scale"]

    def __enter__(self) -> float:
        SCALES["entered"] = SCALES.get("entered", 0.0) + 1
        return SCALES["scale"]

    def __exit__(self, *error: object) -> None:
        pass


NAMED = Named()


def by_attribute(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * NAMED.scale


def by_item(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * NAMED["scale"]


def by_length(net: Any, x: torch.Tensor) -> torch.Tensor:
    return net.linear(x) * len(NAMED)


def by_product(net: Any, x: torch.Tensor) -> torch.Tensor:
    return NAMED * net.linear(x)


def by_context(net: Any, x: torch.Tensor) -> torch.Tensor:
    with NAMED as scale:
        return net.linear(x) * scale * SCALES["entered"]


def scaled(net: Model, step: int) -> None:
    SCALES["scale"] = 1.0 + step


def switched(net: Model, step: int) -> None:
    net.train(step % 2 == 1)


def without_gradient(step: int) -> torch.Tensor:
    return torch.randn(3, 4)


def with_a_scale(step: int) -> torch.Tensor:
    x = torch.randn(3, 4, requires_grad=True)
    if step > 1:
        x.scale = 1.0 + step  # type: ignore[attr-defined]
    return x


CASES: list[tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = [
    *((run, nothing, of_numbers) for run in (item, gain_as_a_number, detached_in_place, moved)),
    *((run, nothing, of_numbers) for run in (truncated, new_parameter)),
    *((run, nothing, of_numbers) for run in (argument_detached_in_place, inference, _decorated)),
    *((run, nothing, of_numbers) for run in (frozen, leaf_made, leaf_from_a_factory)),
    (frozen_by_mode, switched, of_numbers),
    (argument_wants_a_gradient, nothing, without_gradient),
    *((run, nothing, of_numbers) for run in (gradients_dropped, gradient_set)),
    (attribute_of_an_argument, nothing, with_a_scale),
    *((run, nothing, of_numbers) for run in (attribute_of_a_parameter, attribute_of_a_result)),
    *((run, nothing, of_numbers) for run in (power_of_nothing, filled, all_dropped)),
    *((run, nothing, of_numbers) for run in (mode_of_ones_own, default_dtype_left, threads_left)),
    *((run, nothing, of_numbers) for run in (checkpoint_in_pieces, reentrant_checkpoint)),
    (halved_saves, nothing, of_numbers),
    *((run, scaled, of_numbers) for run in (by_attribute, by_item, by_length, by_product)),
    (by_context, scaled, of_numbers),
]


@contextlib.contextmanager
def settings_set_back() -> Iterator[None]:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    SCALES.clear()
    SCALES["scale"] = 1.0
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("run", "between", "make"), CASES, ids=lambda f: f.__name__)
def test_steps_are_those_of_pytorch(
    run: Callable[..., Any], between: Callable[..., Any], make: Callable[..., Any]
) -> None:
    def reset(net: Model, step: int) -> None:
        torch.set_default_dtype(torch.float32)
        between(net, step)

    with settings_set_back():
        theirs = followed(run, lambda net: net, reset, make)
    with settings_set_back():
        mine = followed(run, lambda net: ORTModule(net, random="pytorch"), reset, make)
    assert_equal(mine, theirs)


@pytest.mark.parametrize(
    "run", [item, gain_as_a_number, detached_in_place, truncated, new_parameter]
)
def test_what_a_graph_can_hold_is_one(run: Callable[..., Any]) -> None:
    model = ORTModule(Model(run))
    model(torch.randn(3, 4, requires_grad=True)).sum().backward()
    assert model.report().captures[0].fallback == ""


def test_a_layer_that_the_first_call_makes_is_part_of_a_graph_from_then_on() -> None:
    def made(net: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(net, "late"):
            net.late = nn.Linear(4, 2)
        return net.late(net.linear(x))

    model = ORTModule(Model(made))
    for _ in range(2):
        model(torch.randn(3, 4)).sum().backward()
    first, second = model.report().captures
    assert first.first_call and "makes" in first.fallback
    assert second.fallback == "" and second.native_nodes > 0


def test_whatever_the_path_that_pytorch_was_imported_by(tmp_path: Path) -> None:
    (tmp_path / "packages").symlink_to(Path(torch.__file__).parents[1])
    program = (
        "import torch, ortrain\n"
        "assert 'packages' in torch.__file__\n"
        "model = ortrain.ORTModule(torch.nn.Linear(4, 4))\n"
        "model(torch.ones(2, 4)).sum().backward()\n"
        "assert model.report().native_share == 1, model.report()\n"
    )
    path = os.pathsep.join([str(tmp_path / "packages"), os.environ.get("PYTHONPATH", "")])
    subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=True
    )


def test_classes_are_as_before_a_trace() -> None:
    before = {name: id(value) for name, value in vars(torch.Tensor).items()}
    with pytest.warns(RuntimeWarning, match="wants a gradient"):
        ORTModule(Model(frozen))(torch.randn(3, 4))
    assert {name: id(value) for name, value in vars(torch.Tensor).items()} == before


@pytest.mark.parametrize("dropout", [F.dropout, lambda x, p: torch.native_dropout(x, p, True)[0]])
def test_what_a_full_dropout_leaves_of_infinity_is_no_number(dropout: Callable[..., Any]) -> None:
    model = ORTModule(Model(lambda net, x: dropout(x * net.gain, 1.0)))
    x = torch.tensor([1.0, torch.inf, torch.nan], requires_grad=True)
    result = model(x)
    assert result.detach().isnan().tolist() == [False, True, True]
    result.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0.0, 0.0, 0.0]
    assert model.report().captures[0].fallback == ""


def test_nested_tensors_run_in_pytorch() -> None:
    plain = nn.Linear(4, 3)
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(5, 4)])
    with pytest.warns(RuntimeWarning, match="layout nested"):
        result = ORTModule(plain)(x)
    for mine, theirs in zip(result.unbind(), plain(x).unbind(), strict=True):
        torch.testing.assert_close(mine, theirs)

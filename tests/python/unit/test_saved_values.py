# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What changes in place between forward and backward: refused, or of no matter for the gradients."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule
from ortrain.capture.export import capture
from ortrain.capture.saved_inputs import inputs_not_saved

Gradients = tuple[torch.Tensor | None, ...]
REFUSED = r"modified by an inplace operation: it is at version \d+, expected version \d+"


def gradients(
    module: nn.Module, inputs: dict[str, torch.Tensor], changed: str | None = None
) -> Gradients | str:
    """Return the gradients of all outputs, or what was raised.

    Args:
      module: Gives a tensor or a tuple of tensors.
      inputs: Its arguments.
      changed: What is changed in place in between: an argument, a parameter, or ``out<number>``.
    """
    inputs = {
        name: value.detach().clone().requires_grad_(value.requires_grad)
        for name, value in inputs.items()
    }
    parameters = dict(module.named_parameters())
    outputs = module(**inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    places = {**inputs, **parameters}
    places |= {f"out{i}": output.detach() for i, output in enumerate(outputs)}
    before = None if changed is None else places[changed].detach().clone()
    live = [output for output in outputs if output.requires_grad]
    wanted = [t for t in (*inputs.values(), *parameters.values()) if t.requires_grad]
    weights = [torch.full_like(output, 1.0 + i) for i, output in enumerate(live)]
    try:
        with torch.no_grad():
            if changed is not None:
                places[changed].add_(0.7)
        return torch.autograd.grad(live, wanted, weights, allow_unused=True)
    except RuntimeError as error:
        return str(error)
    finally:
        if changed in parameters:
            with torch.no_grad():
                parameters[changed].copy_(before)


def are_close(found: Gradients, expected: Gradients) -> bool:
    for a, b in zip(found, expected, strict=True):
        given = [t for t in (a, b) if t is not None]
        zeros = [torch.zeros_like(given[0])] * (2 - len(given)) if given else []
        if given and not torch.allclose(*given, *zeros, rtol=1e-4, atol=1e-5, equal_nan=True):
            return False
    return True


def check_all_changes(plain: nn.Module, ours: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Change each tensor in turn: where PyTorch gives gradients they are ours too.

    Where PyTorch raises, the engine does, or it gives the gradients by what the forward has read.
    """
    expected = gradients(plain, inputs)
    assert not isinstance(expected, str)
    for _ in range(2):  # at first the outputs that the backward starts from are a guess
        found = gradients(ours, inputs)
        assert not isinstance(found, str)
    assert are_close(found, expected)
    outputs = plain(**inputs)
    count = len(outputs) if isinstance(outputs, tuple) else 1
    names = [*inputs, *dict(plain.named_parameters()), *(f"out{i}" for i in range(count))]
    for name in names:
        theirs, found = gradients(plain, inputs, name), gradients(ours, inputs, name)
        if isinstance(found, str):
            assert isinstance(theirs, str), f"'{name}' may be changed in PyTorch: {found}"
            assert "modified by an inplace operation" in found
            continue
        assert are_close(found, expected), f"'{name}' was changed"


# --- random programs

UNARY: list[Callable[[torch.Tensor], torch.Tensor]] = [
    torch.exp,
    torch.tanh,
    torch.relu,
    torch.sin,
    torch.neg,
    torch.square,
    torch.abs,
    F.gelu,
    F.silu,
    torch.clone,
    lambda t: (t.abs() + 1).sqrt(),
    lambda t: t.softmax(-1),
    lambda t: t.log_softmax(-1),
    lambda t: 2 * t,
    lambda t: t + 1,
    lambda t: t.contiguous(),
    lambda t: t.reshape(-1).view(t.shape),
    lambda t: t.transpose(0, 1).reshape(t.shape),
    lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    lambda t: t.repeat(t.shape[0], 1)[: t.shape[0]],
    lambda t: t[:1].repeat(t.shape[0], 1),
    lambda t: t[:1].expand(t.shape[0], -1) * 1,
    lambda t: t[: t.shape[0]],
    lambda t: torch.cat([t[:, :1], t[:, 1:]], 1),
    lambda t: torch.cat([t]),
    lambda t: t.flip(0),
    lambda t: t - t.sum(0, keepdim=True),
    lambda t: t / (t.abs().mean() + 1),
    lambda t: t.cumsum(0),
    lambda t: t.amax(0, keepdim=True) * t,
    lambda t: F.layer_norm(t, t.shape[-1:]),
    lambda t: t.clamp(-0.5, 0.5),
    lambda t: t.detach() * t,
    lambda t: torch.cat(t.split([1, 2], 1), 1),
]
BINARY: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    torch.add,
    torch.sub,
    torch.mul,
    torch.maximum,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: a @ b.t() @ b,
    lambda a, b: torch.where(a > 0, a, b),
    lambda a, b: torch.addcmul(a, a, b),
]


class Program(nn.Module):
    """A few operators drawn by a seed, on two arguments and two parameters."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(3, generator=generator))
        self.v = nn.Parameter(torch.randn(1, 3, generator=generator))
        self.steps: list[tuple[Any, ...]] = []
        made = 4
        for _ in range(draw.randint(1, 6)):
            if draw.random() < 0.5:
                self.steps.append((draw.choice(UNARY), draw.randrange(made)))
            else:
                places = draw.randrange(made), draw.randrange(made)
                self.steps.append((draw.choice(BINARY), *places))
            made += 1
        others = [draw.randrange(4, made) for _ in range(draw.randint(0, 2))]
        self.outputs = sorted({made - 1, *others})

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x, y, self.w.expand(x.shape[0], -1) * 1, self.v.repeat(x.shape[0], 1)]
        for function, *places in self.steps:
            values.append(function(*(values[place] for place in places)))
        return (values[2] * x, *(values[i] for i in self.outputs))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(60))
def test_random_programs(seed: int) -> None:
    plain = Program(seed)
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (4, 2, 1):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, 3, generator=generator).requires_grad_()
        y = torch.randn(rows, 3, generator=generator)
        check_all_changes(plain, ours, {"x": x, "y": y})


# --- single cases


class Of(nn.Module):
    """A function of the argument and a parameter."""

    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([0.5, -1.0, 2.0]))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, self.w)


def argument(rows: int, columns: int = 3) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return {"x": torch.randn(rows, columns, generator=generator).requires_grad_()}


# What shows the bytes of its operand at some shapes, or at all, and is multiplied then.
SHOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the argument": lambda x: x,
    "repeat": lambda x: x.repeat(x.shape[0], 1),
    "repeat_interleave": lambda x: x.repeat_interleave(x.shape[0], 0),
    "expand": lambda x: x[:1].expand(x.shape[0], -1),
    "reshape": lambda x: x.reshape(-1, 3),
    "reshape of columns": lambda x: x.t().reshape(-1, 3),
    "contiguous": lambda x: x.contiguous(),
    "columns made contiguous": lambda x: x.t().contiguous().t(),
    "slice": lambda x: x[: x.shape[0]],
    "first row": lambda x: x[:1],
    "flip": lambda x: x.flip(0),
    "clone": lambda x: x.clone(),
    "cat": lambda x: torch.cat([x]),
    "stack": lambda x: torch.stack([x]),
    "sum": lambda x: x.sum(0),
    "amax": lambda x: x.amax(0),
    "there and back": lambda x: x.double().float(),
    "copy_": lambda x: torch.empty_like(x).copy_(x),
    "detach": lambda x: x.detach(),
    "parts": lambda x: torch.cat(x.chunk(2, 0), 0),
}


@pytest.mark.parametrize("name", SHOWN)
def test_values_that_show_the_bytes_of_others(name: str) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return SHOWN[name](x) * w, SHOWN[name](x * 2).exp()

    plain = Of(function)
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (4, 1, 4):
        check_all_changes(plain, ours, argument(rows))


def test_one_repeat_of_a_parameter_at_a_later_shape() -> None:
    plain = Of(lambda x, w: x * w.repeat(x.shape[0], 1))
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (4, 1):
        expected = gradients(plain, argument(rows))
        assert are_close(gradients(ours, argument(rows), "w"), expected)


def test_what_the_backward_does_not_read_may_change() -> None:
    ours = ORTModule(Of(lambda x, w: x + w))
    expected = gradients(ours, argument(4))
    for name in ("x", "w", "out0"):
        assert are_close(gradients(ours, argument(4), name), expected)


@pytest.mark.parametrize("name", ["x", "w"])
def test_what_the_backward_reads_is_refused_by_name(name: str) -> None:
    ours = ORTModule(Of(lambda x, w: x * w))
    inputs = argument(4)
    out = ours(**inputs)
    with torch.no_grad():
        (inputs | {"w": ours.w})[name].add_(1)
    with pytest.raises(RuntimeError, match=f"^'{name}' is needed for the gradient .*{REFUSED}$"):
        out.sum().backward()


def test_large_outputs_that_the_backward_reads_are_refused() -> None:
    ours = ORTModule(Of(lambda x, w: (x * w[0]).exp()))
    large = argument(200, 200)  # 160 kB
    out = ours(**large)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match=f"^output 0 is needed for the gradient .*{REFUSED}$"):
        out.sum().backward()


def test_small_outputs_that_pytorch_reads_are_refused_too() -> None:
    plain = Of(lambda x, w: (x * w).exp())
    assert "modified by an inplace operation" in gradients(plain, argument(4), "out0")
    found = gradients(ORTModule(plain), argument(4), "out0")
    assert found.startswith("output 0 is needed for the gradient")


def test_small_outputs_are_otherwise_their_takers() -> None:
    ours = ORTModule(Of(lambda x, w: (x * w).relu() + 1))
    expected = gradients(ours, argument(4))
    assert are_close(gradients(ours, argument(4), "out0"), expected)


def test_parts_of_a_backward_read_what_they_say() -> None:
    """With hooks that wait for single gradients, a parameter may change once it has its own."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(640, 640, bias=False) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    torch.manual_seed(0)
    plain = Chain()
    x = torch.randn(4, 640)
    plain(x).sum().backward()
    ours = ORTModule(copy.deepcopy(plain))
    ours.zero_grad()
    found: dict[str, torch.Tensor] = {}

    def step(name: str) -> Callable[[torch.Tensor], None]:
        def hook(parameter: torch.Tensor) -> None:
            found[name] = parameter.grad.clone()
            with torch.no_grad():
                parameter.zero_()

        return hook

    for name, parameter in ours.named_parameters():
        parameter.register_post_accumulate_grad_hook(step(name))
    ours(x).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-4)
    out = ours(x)
    first = ours.layers[0].weight

    def spoil(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            ours.layers[1].weight.add_(1)

    ours.layers[2].weight.register_post_accumulate_grad_hook(spoil)
    first.grad = None
    with pytest.raises(RuntimeError, match=rf"^'layers\.1\.weight' is needed .*{REFUSED}$"):
        out.sum().backward()


def test_a_checkpoint_reads_its_inputs_where_they_are() -> None:
    """Copies of what it reads again would take the memory that it saves."""
    ours = ORTModule(Of(lambda x, w: checkpoint(lambda y: (y + w).sin(), x, use_reentrant=False)))
    inputs = argument(4)
    out = ours(**inputs)
    with torch.no_grad():
        ours.w.add_(1)
    with pytest.raises(RuntimeError, match=f"^'w' is needed for the gradient .*{REFUSED}$"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("function", "unsaved"),
    [
        (lambda x, w: x + w, {"x", "w"}),
        (lambda x, w: x * w, set()),
        (lambda x, w: x.clone() * w, {"x"}),
        (lambda x, w: F.linear(x, torch.ones(2, 3), w[:2]), {"x", "w"} - {"x"}),
        (lambda x, w: x.t().contiguous().sin().sum() + w, {"x", "w"}),
        (lambda x, w: x.view(-1).sin().sum() + w, {"w"}),
        (lambda x, w: torch.cat([x, w[None]]).exp(), {"x", "w"}),
    ],
)
def test_inputs_of_which_pytorch_keeps_nothing(function: Any, unsaved: set[str]) -> None:
    captured = capture(Of(function), (), argument(4), known=lambda target: True)
    names = {p.node: p.name for p in captured.placeholders if p.role.value != "constant"}
    found = {
        names[n.name] for n in inputs_not_saved(captured.graph_module.graph) if n.name in names
    }
    assert found == unsaved


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.norm(self.body(x)).tanh()
        return self.first(h), self.second(h)


def step_past_versions(model: Any, x: torch.Tensor) -> None:
    first, second = model(x)
    first.square().sum().backward(retain_graph=True)
    for p in model.parameters():
        if p.grad is not None:
            p.data.add_(p.grad, alpha=-0.1)
    second.sum().backward()


def scale_past_versions(model: Any, x: torch.Tensor) -> None:
    loss = sum(y.sum() for y in model(x))
    loss.backward(retain_graph=True)
    for p in model.parameters():
        p.data.mul_(1.5)
    loss.backward()


def clip_past_versions(model: Any, x: torch.Tensor) -> None:
    x = x.clone().requires_grad_()
    first, second = model(x)
    torch.autograd.grad(first.sum(), x, retain_graph=True)
    for p in model.parameters():
        p.data.clamp_(-0.01, 0.01)
    second.sum().backward()


def refill_shared_memory(model: Any, x: torch.Tensor) -> None:
    array = x.numpy().copy()
    first, second = model(torch.from_numpy(array))
    first.sum().backward(retain_graph=True)
    array[:] = 3
    second.sum().backward()


@pytest.mark.parametrize(
    "change",
    [step_past_versions, scale_past_versions, clip_past_versions, refill_shared_memory],
)
def test_a_forward_does_not_run_again_with_what_was_changed_past_its_version(
    change: Callable[[Any, torch.Tensor], None],
) -> None:
    ours, x = ORTModule(TwoHeads()), torch.linspace(-1, 1, 24).reshape(4, 6)
    with pytest.raises(RuntimeError, match=r"'(body.weight|x)' .* modified past its version"):
        for _ in range(3):
            change(ours, x)


def test_a_forward_runs_again_where_nothing_was_changed() -> None:
    torch.manual_seed(0)  # some weights leave rounding alone behind the norm
    plain = TwoHeads()
    ours, x = ORTModule(copy.deepcopy(plain)), torch.linspace(-1, 1, 24).reshape(4, 6)
    for _ in range(3):
        for model in (plain, ours):
            first, second = model(x)
            first.sum().backward(retain_graph=True)
            second.sum().backward()
    for (name, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)

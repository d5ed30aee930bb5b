# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random modules against eager PyTorch: values, gradients and another size of the batch.

A program is a list of steps over a pool of tensors that begins with an input, parameters and a
buffer. Steps are drawn so that shapes fit; Hypothesis draws them and shrinks what goes wrong.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Sequence

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as drawn_from
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule

WIDTH = 6
RTOL, ATOL = 1e-4, 1e-5

# Tensors are [batch, k] or [batch, k, WIDTH]; a step keeps the batch.
Step = Callable[..., torch.Tensor]

_UNARY: dict[str, Step] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "softplus": F.softplus,
    "elu": F.elu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "sin": torch.sin,
    "erf": torch.erf,
    "abs": torch.abs,
    "neg": torch.neg,
    "square": torch.square,
    "exp": lambda x: x.clamp(max=2).exp(),
    "log1p": lambda x: x.abs().log1p(),
    "sqrt": lambda x: (x.square() + 0.1).sqrt(),
    "rsqrt": lambda x: (x.square() + 0.1).rsqrt(),
    "clamp": lambda x: x.clamp(-1, 0.5),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "softmax_1": lambda x: x.softmax(1),
    "cumsum": lambda x: x.cumsum(1),
    "flip": lambda x: x.flip(1),
    "roll": lambda x: x.roll(1, 1),
    "tril": lambda x: x.tril() if x.dim() == 3 else x,
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "normalize": lambda x: F.normalize(x, dim=-1, eps=1e-3),
    "mean_keep": lambda x: x - x.mean(1, keepdim=True),
    "amax_keep": lambda x: x - x.amax(-1, keepdim=True).detach(),
    "logsumexp": lambda x: x - x.logsumexp(1, keepdim=True),
    "var_keep": lambda x: x / (x.var(-1, keepdim=True, unbiased=False) + 1),
    "sort": lambda x: x.sort(-1).values,
    "topk": lambda x: x.topk(2, dim=-1).values.sum(-1, keepdim=True) + x,
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "masked_fill": lambda x: x.masked_fill(x < -1, 0.0),
    "chunk": lambda x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
    "slice": lambda x: torch.cat((x[..., 1:], x[..., :1]), -1),
    "stride": lambda x: x[:, ::2].repeat_interleave(2, 1)[:, : x.shape[1]],
    "pad": lambda x: F.pad(x, (1, 2))[..., 1:-2],
    "unfold": lambda x: x.unfold(-1, 2, 1).sum(-1).repeat(*(1,) * (x.dim() - 1), 1)[..., :1] + x,
    "transpose": lambda x: x.transpose(1, 2).contiguous().view(x.shape) if x.dim() == 3 else x,
    "reshape": lambda x: x.reshape(x.shape[0], -1).view_as(x),
    "permute": lambda x: x.permute(*range(1, x.dim()), 0).movedim(-1, 0) * 1.5,
    "expand": lambda x: x.unsqueeze(1).expand(-1, 3, *x.shape[1:]).mean(1),
    "in_place": lambda x: x.clone().mul_(2).add_(1),
    "slice_write": lambda x: _with_zeros(x),
    "gather": lambda x: x.gather(-1, x.argsort(-1)),
    "index_select": lambda x: x.index_select(1, torch.arange(x.shape[1], device=x.device).flip(0)),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add(
        1,
        (torch.arange(x.shape[1], device=x.device) % 2)
        .view(1, -1, *(1,) * (x.dim() - 2))
        .expand_as(x),
        x,
    ),
    "half_up": lambda x: x.double().mul(0.5).float(),
    "floor": lambda x: x - x.floor(),
    "round": lambda x: x + x.round(),
}
_BINARY: dict[str, Step] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 0.5),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "atan2": lambda a, b: torch.atan2(a, b + 3),
    "hypot": lambda a, b: torch.hypot(a, b + 2),
    "cat": lambda a, b: torch.cat((a, b), 1)[:, : a.shape[1]],
    "stack": lambda a, b: torch.stack((a, b), 1).sum(1),
    "where": lambda a, b: torch.where(a > b, a, b * 2),
    "mse": lambda a, b: a * F.mse_loss(a, b),
    "cosine": lambda a, b: a * F.cosine_similarity(a, b, dim=-1, eps=1e-3).unsqueeze(-1),
    "matmul": lambda a, b: (
        torch.matmul(a, b.transpose(1, 2)) @ b if a.dim() == 3 else (a * b).sum(-1, True) * b
    ),
    "attention": lambda a, b: (
        F.scaled_dot_product_attention(a, b, b) if a.dim() == 3 else a.sigmoid() * b
    ),
    "einsum": lambda a, b: (
        torch.einsum("bij,bkj->bik", a, b).softmax(-1) @ b if a.dim() == 3 else a + b
    ),
}


def _with_zeros(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, 0] = 0.5
    y[..., -1] += 1
    return y


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One step: its name, the positions of its operands from the end of the pool, a layer."""

    name: str
    first: int
    second: int


class Program(nn.Module):
    """Runs a list of instructions.

    Args:
      instructions: What it does.
      rank: Of the input: 2 or 3.
    """

    def __init__(self, instructions: Sequence[Instruction], rank: int) -> None:
        super().__init__()
        self.instructions = tuple(instructions)
        generator = torch.Generator().manual_seed(len(instructions))
        shape = (1, 4, WIDTH) if rank == 3 else (1, WIDTH)
        self.shift = nn.Parameter(torch.randn(shape, generator=generator) * 0.5)
        self.register_buffer("scale", torch.rand(shape, generator=generator) + 0.5)
        self.layers = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) for i in instructions if i.name == "linear"
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pool = [x, x * self.scale, x + self.shift]
        layers = iter(self.layers)
        for step in self.instructions:
            a = pool[-1 - step.first % len(pool)]
            b = pool[-1 - step.second % len(pool)]
            if step.name == "linear":
                made = next(layers)(a)
            elif step.name in _UNARY:
                made = _UNARY[step.name](a)
            else:
                made = _BINARY[step.name.removeprefix("2:")](a, b)
            pool.append(made)
        return torch.stack([p.float().mean() for p in pool[3:]]).sum() + pool[-1]


_NAMES = ["linear", *_UNARY, *(f"2:{name}" for name in _BINARY)]
_instructions = st.lists(
    st.builds(
        Instruction,
        name=st.sampled_from(_NAMES),
        first=st.integers(0, 5),
        second=st.integers(0, 5),
    ),
    min_size=1,
    max_size=10,
)


def _results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
    (y * weights).sum().backward()
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    assert x.grad is not None
    return [y.detach(), x.grad, *gradients]


def difference(
    instructions: Sequence[Instruction], rank: int, seed: int, device: str = "cpu"
) -> tuple[str, bool]:
    """Return what differs between the engine and PyTorch, and whether all of it was a graph.

    Where values are large, the engine may be as far from float64 as eager PyTorch, four times.
    """
    torch.manual_seed(seed)
    module = Program(instructions, rank).to(device)
    model = ORTModule(copy.deepcopy(module))
    for batch in (3, 5):
        shape = (batch, 4, WIDTH) if rank == 3 else (batch, WIDTH)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed + batch)).to(device)
        theirs = _results(module, x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mine = _results(model, x)
        exact: list[torch.Tensor] | None = None
        for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            if torch.allclose(a, b, rtol=RTOL, atol=ATOL, equal_nan=True):
                continue
            exact = exact or _results(copy.deepcopy(module).double(), x.double())
            errors = [float((v - exact[index]).abs().nan_to_num().max()) for v in (a, b)]
            scale = float(exact[index].abs().nan_to_num().max())
            if errors[0] > 4 * errors[1] + RTOL * scale:
                text = f"result {index} of batch {batch}: off by {errors[0]:.1e}, {errors[1]:.1e}"
                return text, True
    return "", not any(record.fallback for record in model.report().captures)


def check(programs: int, seed: int = 0, device: str = "cpu") -> int:
    """Run ``programs`` random programs; return how many ran as one graph.

    Args:
      programs: How many.
      seed: Of their weights and inputs; with another one, other programs are drawn.
      device: Where.

    Raises:
      AssertionError: One differs; it is shrunk first, and Hypothesis prints it.
    """

    whole = 0

    @drawn_from(seed)
    @settings(
        max_examples=programs,
        deadline=None,
        database=None,
        derandomize=seed == 0,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(instructions=_instructions, rank=st.sampled_from([2, 3]))
    def run(instructions: list[Instruction], rank: int) -> None:
        nonlocal whole
        found, is_graph = difference(instructions, rank, seed, device)
        assert not found, found
        whole += is_graph

    run()
    return whole

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Values at 0, 1, infinities and NaN, and of 16 bits where squares and counts leave their range: PyTorch's."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule

INF, NAN = float("inf"), float("nan")
GRID = [0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -2.0, INF, -INF, NAN, 1e-30, 1e30, 3.0, 7.5]

UNARY = {
    name: getattr(torch, name)
    for name in [
        "abs",
        "acos",
        "acosh",
        "asin",
        "asinh",
        "atan",
        "atanh",
        "ceil",
        "cos",
        "cosh",
        "deg2rad",
        "digamma",
        "erf",
        "erfc",
        "erfinv",
        "exp",
        "exp2",
        "expm1",
        "floor",
        "frac",
        "i0",
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "logit",
        "nan_to_num",
        "neg",
        "reciprocal",
        "round",
        "rsqrt",
        "sgn",
        "sigmoid",
        "sign",
        "sin",
        "sinc",
        "sinh",
        "sqrt",
        "square",
        "tan",
        "tanh",
        "trunc",
    ]
}
UNARY |= {
    name: getattr(torch.special, name)
    for name in ["entr", "erfcx", "i0e", "i1", "i1e", "ndtr", "log_ndtr", "ndtri"]
}
UNARY |= {
    name: getattr(F, name)
    for name in [
        "celu",
        "elu",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "leaky_relu",
        "logsigmoid",
        "mish",
        "relu",
        "relu6",
        "selu",
        "silu",
        "softplus",
        "softshrink",
        "softsign",
        "tanhshrink",
    ]
}
UNARY |= {
    "clamp": lambda x: x.clamp(-1, 1),
    "roots": lambda x: torch.stack([x**0.5, x**2, x**0, x**-1.0, 2**x, 0**x]),
}
BINARY = {
    name: getattr(torch, name)
    for name in [
        "add",
        "atan2",
        "copysign",
        "div",
        "fmax",
        "fmin",
        "hypot",
        "ldexp",
        "logaddexp",
        "maximum",
        "minimum",
        "mul",
        "pow",
        "sub",
        "xlogy",
        "float_power",
        "nextafter",
        "heaviside",
    ]
}
BINARY |= {
    "xlog1py": torch.special.xlog1py,
    "clamp by tensors": lambda a, b: torch.stack([a.clamp(min=b), a.clamp(max=b)]),
    "losses": lambda a, b: torch.stack(
        [
            f(a, b, reduction="none")
            for f in (F.kl_div, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.mse_loss)
        ]
    ),
    "lerp": lambda a, b: torch.lerp(a, b, torch.tensor(0.3)),
}
# Gradients that are PyTorch's at all points of the grid.
WITH_GRADIENT = [
    "abs",
    "erf",
    "erfc",
    "exp",
    "log",
    "log10",
    "log2",
    "sqrt",
    "rsqrt",
    "sin",
    "sinc",
    "tanh",
    "sigmoid",
    "entr",
    "silu",
    "mish",
    "softplus",
    "logsigmoid",
    "softshrink",
    "hardshrink",
    "xlogy",
    "xlog1py",
    "hypot",
    "copysign",
    "fmax",
    "fmin",
    "maximum",
    "minimum",
    "mul",
    "div",
    "pow",
]


class Called(nn.Module):
    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *arguments: torch.Tensor) -> torch.Tensor:
        return self.function(*arguments)


def assert_same(function: Callable[..., torch.Tensor], *given: torch.Tensor, **close: Any) -> None:
    gradients = close.pop("gradients", True)
    seen = []
    for module in (Called(function), ORTModule(Called(function))):
        inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
        result = module(*inputs)
        seen.append([result.detach()])
        if gradients and result.requires_grad:
            result.backward(torch.ones_like(result))
            seen[-1] += [x.grad for x in inputs if x.grad is not None]
    torch.testing.assert_close(seen[1], seen[0], equal_nan=True, **close)


@pytest.mark.sampled(25)
@pytest.mark.parametrize("name", UNARY)
def test_of_one(name: str) -> None:
    close = {"rtol": 1e-4, "atol": 1e-30}
    assert_same(UNARY[name], torch.tensor(GRID), gradients=name in WITH_GRADIENT, **close)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", BINARY)
def test_of_two(name: str) -> None:
    pairs = torch.tensor(list(itertools.product(GRID, repeat=2)))
    close = {"rtol": 1e-4, "atol": 1e-30}
    assert_same(BINARY[name], *pairs.T, gradients=name in WITH_GRADIENT, **close)


LONG = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
WIDE, SMALL = torch.tensor([300.0, 150.0, -20.0]), torch.tensor([1e-4, -1e-4, 2e-4])
PAIRS = torch.tensor([[300.0, 1.0], [0.0, 2.0]]), torch.tensor([[300.0, 2.0], [100.0, 2.0]])

NORMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]] = {
    **{
        f"{what} of {size}": (function, (x,))
        for what, function in {
            "norm": lambda x: x.norm(),
            "deviation": lambda x: x.std(),
            "variance": lambda x: x.div(4).var(unbiased=False),
            "both": lambda x: torch.stack(torch.std_mean(x)),
            "normalized": lambda x: F.normalize(x, dim=0),
        }.items()
        for size, x in {"wide": WIDE, "small": SMALL, "long": LONG}.items()
    },
    "cosine": (lambda x, y: F.cosine_similarity(x, y, dim=1), PAIRS),
    "distance": (F.pairwise_distance, PAIRS),
    "dist": (torch.dist, PAIRS),
    "triplet": (lambda x, y: F.triplet_margin_loss(x, y, x.flip(0)), PAIRS),
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_squares_and_counts_of_16_bits_are_computed_in_float(name: str, dtype: torch.dtype) -> None:
    function, given = NORMS[name]
    close = {"rtol": 1e-2 if dtype is torch.float16 else 8e-2, "atol": 1e-6}
    assert_same(function, *(x.to(dtype) for x in given), **close)


@pytest.mark.parametrize("order", [0.5, 1, 1.5, 2, 3, -0.5, -1, -2])
def test_norms_with_elements_that_are_zero(order: float) -> None:
    for x in (torch.tensor([0.0, 1.0, 4.0]), torch.tensor([2.0, -1.0, 4.0]), torch.zeros(3)):
        assert_same(lambda x: torch.linalg.vector_norm(x, order), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_cancel_near_zero(dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, 1e-40, -1e-30, 1e-12, 1e-5, 3.1e-3, 3.3e-3, 0.4], dtype=dtype)
    x.requires_grad_()
    ORTModule(Called(torch.sinc))(x).sum().backward()
    exact = x.detach().double()
    angle = torch.pi * exact
    slope = torch.where(
        angle.abs() < 0.02,
        torch.pi * (-angle / 3 + angle**3 / 30),
        torch.pi * (angle * angle.cos() - angle.sin()) / angle**2,
    )
    torch.testing.assert_close(x.grad.double(), slope, rtol=1e-4, atol=1e-12)


def test_a_mask_takes_away_gradients_where_there_is_no_result() -> None:
    x = torch.tensor([-3.0, -1.5, 1.5, 3.0])
    assert_same(lambda x: torch.where(x > 1, torch.acosh(x), x), x)


@pytest.mark.parametrize("reduce", ["amin", "amax"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("rank", [0, 2])
def test_gradients_are_shared_among_equal_updates(
    reduce: str, include_self: bool, rank: int
) -> None:
    generator = torch.Generator().manual_seed(4)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randint(-1, 2, sizes[:rank], generator=generator).float()

    infinite = drawn(6, 3)
    infinite = torch.where(infinite == 1, math.inf, infinite)
    for updates in (drawn(6, 3), infinite) if include_self else (drawn(6, 3),):
        index = torch.randint(0, 4 if rank else 1, updates.shape, generator=generator)
        assert_same(
            lambda x, updates, index=index: x.scatter_reduce(
                0, index, updates, reduce, include_self=include_self
            ),
            drawn(4, 3),
            updates,
        )


def test_powers_have_exact_logarithms() -> None:
    assert_same(lambda x: torch.log2(x).floor(), 2.0 ** torch.arange(-60, 64).float())
    for dtype in (torch.float32, torch.float64):
        assert_same(lambda x: torch.log10(x).floor(), 10.0 ** torch.arange(0, 30).to(dtype))
    assert_same(lambda x: torch.erfc(x).log(), torch.linspace(-2, 8, 21, dtype=torch.float64))


def test_gradients_of_no_logit_are_none() -> None:
    assert_same(torch.logit, torch.tensor([0.3, 1.5, -0.2, 0.0, 1.0, NAN, INF, -1.0, 1e-30]))
    assert_same(lambda x: torch.logit(x).nansum(), torch.tensor([0.3, 1.5, -0.2]))
    assert_same(lambda x: torch.logit(x, 1e-3), torch.tensor([0.3, 1.5, -0.2, 0.0, 1.0]))


def test_between_far_ends() -> None:
    ends = torch.full((4,), 1e8), torch.ones(4)
    assert_same(torch.lerp, *ends, torch.tensor([1.0, 0.75, 0.25, 0.0]))
    for weight in (0.0, 0.25, 0.75, 1.0):
        assert_same(lambda a, b, w=weight: torch.lerp(a, b, w), *ends)


@pytest.mark.long
def test_bins_and_grids_with_infinities() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0, INF]])
    assert_same(lambda x: F.adaptive_avg_pool1d(x, 3), x)
    assert_same(lambda x: F.adaptive_avg_pool2d(x, (3, 5)), torch.randn(2, 3, 7, 9))
    for right in (False, True):
        for edges in ([0.0, 1.0], [0.0, 1.0, NAN], [NAN]):
            assert_same(
                lambda x, r=right, e=edges: torch.bucketize(x, torch.tensor(e), right=r) * 1,
                torch.tensor(GRID),
            )
    volume, grid = torch.randn(1, 1, 3, 3, 3), torch.zeros(1, 1, 1, 2, 3)
    grid[..., 0, 0], grid[..., 1, 0] = NAN, INF
    assert_same(lambda g: F.grid_sample(volume, g, align_corners=False), grid, gradients=False)
    image = torch.randn(1, 2, 3, 3)
    for mode in ("bilinear", "nearest", "bicubic"):
        for at in (NAN, INF, -INF, 5.0, 0.3):
            grid = torch.tensor([[[[at, 0.1], [0.2, -0.4]]]])
            sample = lambda g, m=mode: F.grid_sample(image, g, mode=m, align_corners=False)  # noqa: E731
            assert_same(sample, grid, gradients=False)


PACKED = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]] * 2)


class Without(nn.Module):
    """Asks for no cache inside of the call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, **arguments: Any) -> Any:
        first = self.model(input_ids=input_ids, use_cache=False, **arguments)
        second = self.model(input_ids=input_ids, **arguments)
        first.loss = first.loss + second.loss
        first.past_key_values = None
        return first


class Body(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Any, position_ids: Any, labels: Any) -> Any:
        body = self.model.model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        logits = self.model.lm_head(body.last_hidden_state)
        return type("Result", (dict,), {})(loss=logits.square().mean(), logits=logits)


@pytest.mark.parametrize("kind", ["default", "asked", "inside", "body", "checkpoints", "eager"])
def test_positions_of_packed_sequences(kind: str) -> None:
    """With a cache by default transformers looks for no packed sequences in positions; without one it does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    theirs: nn.Module = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    if kind == "checkpoints":
        theirs.gradient_checkpointing_enable()  # type: ignore[operator]
        theirs.train()
    if kind == "eager":
        theirs.set_attn_implementation("eager")  # type: ignore[operator]
    theirs = {"inside": Without, "body": Body}.get(kind, lambda model: model)(theirs)
    ours = ORTModule(copy.deepcopy(theirs))
    ids = torch.randint(0, 64, (2, 8))
    asked = {"use_cache": False} if kind == "asked" else {}
    seen = []
    for model in (theirs, ours):
        result = model(input_ids=ids, position_ids=PACKED, labels=ids, **asked)
        result["loss"].backward()
        seen.append([result["loss"], result["logits"], *(p.grad for p in model.parameters())])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)

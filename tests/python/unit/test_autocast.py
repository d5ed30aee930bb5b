# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""torch.autocast around and inside of a module: the casts are those of eager PyTorch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ortrain import ORTModule
from ortrain.capture.prepare import prepare
from ortrain.capture.signature import CallSignature
from tests.python.processor import runs_lstm_in_16_bits

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Any]

# Operators by the list that they stand in for the CPU. Each takes a float32 and a 16-bit tensor of
# the shapes given.
LOWER: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "conv1d": (lambda x, w: F.conv1d(x, w, padding=1), (2, 3, 8), (4, 3, 3)),
    "conv2d": (lambda x, w: F.conv2d(x, w, padding="same"), (2, 3, 6, 5), (4, 3, 3, 3)),
    "conv3d": (F.conv3d, (1, 2, 4, 4, 4), (3, 2, 2, 2, 2)),
    "conv_transpose1d": (F.conv_transpose1d, (2, 3, 5), (3, 4, 3)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 3, 5, 4), (3, 4, 3, 3)),
    "bmm": (torch.bmm, (2, 3, 4), (2, 4, 5)),
    "mm": (torch.mm, (3, 4), (4, 5)),
    "vecdot": (torch.linalg.vecdot, (3, 4), (3, 4)),
    "addmm": (lambda x, w: torch.addmm(w, x, x.t()), (3, 4), (3,)),
    "baddbmm": (lambda x, w: torch.baddbmm(w, x, x.mT, beta=0.5, alpha=2), (2, 3, 4), (2, 3, 3)),
    "addbmm": (lambda x, w: torch.addbmm(w, x, x.mT), (2, 3, 4), (3, 3)),
    "linear": (lambda x, w: F.linear(x, w, w[:, 0]), (2, 3, 4), (5, 4)),
    "matmul": (torch.matmul, (2, 3, 4), (4, 5)),
    "prelu": (F.prelu, (2, 3, 4), (3,)),
    "attention": (lambda x, w: F.scaled_dot_product_attention(x, w, w), (2, 3, 4), (2, 5, 4)),
    # Composed of those above.
    "einsum": (lambda x, w: torch.einsum("bij,jk->bik", x, w), (2, 3, 4), (4, 5)),
    "tensordot": (lambda x, w: torch.tensordot(x, w.float(), 1), (2, 3, 4), (4, 5)),
    "chain_matmul": (lambda x, w: torch.linalg.multi_dot([x, w.float(), x]), (3, 4), (4, 3)),
    "inner": (lambda x, w: torch.inner(x, w.float()), (2, 3, 4), (5, 4)),
    "mha": (
        lambda x, w: F.multi_head_attention_forward(
            *(x, x, x, 4, 2, w, None, None, None, False, 0.0, w[:4], None)
        )[0],
        (3, 2, 4),
        (12, 4),
    ),
}
WIDE: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "mse_loss": (F.mse_loss, (3, 4), (3, 4)),
    "l1_loss": (F.l1_loss, (3, 4), (3, 4)),
    "smooth_l1_loss": (F.smooth_l1_loss, (3, 4), (3, 4)),
    "huber_loss": (F.huber_loss, (3, 4), (3, 4)),
    "nll_loss": (lambda x, h: F.nll_loss(h, torch.tensor([1, 0, 3])), (1,), (3, 4)),
    "cross_entropy": (lambda x, h: F.cross_entropy(h, torch.tensor([1, 0, 3])), (1,), (3, 4)),
    "bce": (lambda x, h: F.binary_cross_entropy(h.sign() / 4 + 0.5, x.sigmoid()), (3, 4), (3, 4)),
    "bce_with_logits": (
        lambda x, h: F.binary_cross_entropy_with_logits(h, x.sigmoid()),
        (3, 4),
        (3, 4),
    ),
    "kl_div": (lambda x, h: F.kl_div(h, x.sigmoid(), reduction="sum"), (3, 4), (3, 4)),
    "hinge_embedding_loss": (
        lambda x, h: F.hinge_embedding_loss(h, torch.where(x > 0, 1.0, -1.0)),
        (3, 4),
        (3, 4),
    ),
    "cosine_embedding_loss": (
        lambda x, h: F.cosine_embedding_loss(h, x, torch.tensor([1.0, -1.0, 1.0])),
        (3, 4),
        (3, 4),
    ),
    "margin_ranking_loss": (
        lambda x, h: F.margin_ranking_loss(h, x, torch.ones(3), 0.5),
        (3,),
        (3,),
    ),
    "soft_margin_loss": (lambda x, h: F.soft_margin_loss(h, x.detach().sign()), (3, 4), (3, 4)),
    "triplet_margin_loss": (lambda x, h: F.triplet_margin_loss(h, x, h * 2), (3, 4), (3, 4)),
    "poisson_nll_loss": (lambda x, h: F.poisson_nll_loss(h, x.abs()), (3, 4), (3, 4)),
    "prod": (lambda x, h: h.prod(1), (1,), (3, 4)),
    "trace": (lambda x, h: h.trace(), (1,), (4, 4)),
    "avg_pool3d": (lambda x, h: F.avg_pool3d(h, 2), (1,), (1, 2, 4, 4, 4)),
    "max_pool3d": (lambda x, h: F.max_pool3d(h, 2), (1,), (1, 2, 4, 4, 4)),
    "reflection_pad2d": (lambda x, h: F.pad(h, (1, 1), "reflect"), (1,), (1, 2, 4)),
    "replication_pad2d": (lambda x, h: F.pad(h, (1, 1, 1, 1), "replicate"), (1,), (1, 2, 4, 4)),
    "grid_sampler": (
        lambda x, h: F.grid_sample(h, x.tanh(), align_corners=False),
        (1, 3, 3, 2),
        (1, 2, 4, 4),
    ),
    "cdist": (torch.cdist, (3, 4), (5, 4)),
    "inverse": (lambda x, h: torch.linalg.inv(h + 4 * torch.eye(4)), (1,), (4, 4)),
}
PROMOTED: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "stack": (lambda x, h: torch.stack([x, h]), (3, 4), (3, 4)),
    "cat": (lambda x, h: torch.cat([h, x], 1), (3, 4), (3, 4)),
    "cat of 16 bits": (lambda x, h: torch.cat([h, h], 1), (1,), (3, 4)),
    "index_copy": (
        lambda x, h: x.index_copy(0, torch.tensor([2, 0]), h),
        (3, 4),
        (2, 4),
    ),
}
# In none of the lists: PyTorch's own promotion of types.
OTHERS: dict[str, tuple[Function, tuple[int, ...], tuple[int, ...]]] = {
    "add": (torch.add, (3, 4), (3, 4)),
    "mul": (lambda x, h: h * 3, (1,), (3, 4)),
    "where": (lambda x, h: torch.where(x > 0, x, h), (3, 4), (3, 4)),
    "softmax": (lambda x, h: F.softmax(h, 1), (1,), (3, 4)),
    "log_softmax": (lambda x, h: F.log_softmax(h, 1), (1,), (3, 4)),
    "layer_norm": (lambda x, h: F.layer_norm(h, (4,), h[0], h[1]), (1,), (3, 4)),
    "layer_norm of two types": (lambda x, h: F.layer_norm(h, (4,), x, x), (4,), (3, 4)),
    "group_norm": (lambda x, h: F.group_norm(h, 2), (1,), (3, 4, 2)),
    "batch_norm": (
        lambda x, h: F.batch_norm(h, None, None, x, x, True),
        (4,),
        (3, 4),
    ),
    "sum": (lambda x, h: h.sum(1), (1,), (3, 4)),
    "mean": (lambda x, h: h.mean(), (1,), (3, 4)),
    "exp": (lambda x, h: h.exp(), (1,), (3, 4)),
    "log": (lambda x, h: h.abs().log(), (1,), (3, 4)),
    "pow": (lambda x, h: h**2, (1,), (3, 4)),
    "gelu": (lambda x, h: F.gelu(h), (1,), (3, 4)),
    "avg_pool2d": (lambda x, h: F.avg_pool2d(h, 2), (1,), (1, 2, 4, 4)),
    "embedding": (lambda x, h: F.embedding(torch.tensor([2, 0]), h), (1,), (3, 4)),
    "bilinear": (lambda x, w: F.bilinear(x, x, w.float()), (3, 4), (5, 4, 4)),
    "cumsum": (lambda x, h: h.cumsum(1), (1,), (3, 4)),
    "norm": (lambda x, h: h.norm(dim=1), (1,), (3, 4)),
}
CASES = {**LOWER, **WIDE, **PROMOTED, **OTHERS}
# Nodes that run in PyTorch, of which a warning tells.
ESCAPES = {"bilinear", "cdist", "inverse"}
# PyTorch's kernel of bilinear calls products that autocast rounds; the node computes in float32. Without AVX-512 it
# sums the gradients of a convolution in 16 bits, and is further from the truth than the engine.
TOLERANCES = {"bilinear": 0.05, "conv2d": 0.05}


class Applied(nn.Module):
    """A function of a float32 and a 16-bit tensor, both made of parameters."""

    def __init__(self, name: str, dtype: torch.dtype, *, inside: bool) -> None:
        super().__init__()
        self.function, *shapes = CASES[name]
        generator = torch.Generator().manual_seed(5)
        self.x, self.w = (nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
        self.dtype, self.inside = dtype, inside

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        with torch.autocast(
            "cpu", self.dtype, enabled=self.inside or torch.is_autocast_enabled("cpu")
        ):
            return self.function(self.x * factor, (self.w * factor).to(self.dtype))


def run(model: nn.Module, *, around: bool, dtype: torch.dtype) -> Tensors:
    with torch.autocast("cpu", dtype, enabled=around):
        out = model(torch.ones(1))
    weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape)
    (out.float() * weights).sum().backward()
    return (out, *(p.grad for p in model.parameters() if p.grad is not None))


@pytest.mark.sampled(60)
@pytest.mark.parametrize(
    ("dtype", "inside"),
    [(torch.bfloat16, False), (torch.float16, True)],
    ids=["bfloat16 around", "float16 inside"],
)
@pytest.mark.parametrize("name", CASES)
def test_operator(name: str, dtype: torch.dtype, inside: bool) -> None:
    plain = Applied(name, dtype, inside=inside)
    ours = ORTModule(copy.deepcopy(plain))
    expected = run(plain, around=not inside, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("default" if name in ESCAPES else "error")
        got = run(ours, around=not inside, dtype=dtype)
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    for a, b in zip(got, expected, strict=True):
        tolerance = 1e-5 if name in WIDE and a is got[0] else TOLERANCES.get(name, 0.02)
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    if name in LOWER:
        assert got[0].dtype == dtype
    if name in WIDE:
        assert got[0].dtype == torch.float32


class Nested(nn.Module):
    """Regions inside of regions: off, and of another type."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.where = where

    def forward(self, x: torch.Tensor) -> Tensors:
        hidden = self.first(x)
        with torch.autocast("cpu", enabled=False):
            wide = torch.tanh(hidden.float())
            if self.where == "composite":
                wide = torch.einsum("bi,oi->bo", wide, self.second.weight)
            elif self.where == "other type":
                with torch.autocast("cpu", torch.float16):
                    wide = torch.einsum("bi,oi->bo", wide, self.second.weight)
            else:
                wide = F.linear(wide, self.second.weight, self.second.bias)
        if self.where == "decomposed":  # makes for another trace, which must not cast again
            wide = F.soft_margin_loss(wide.float(), torch.ones_like(wide), reduction="none")
        return hidden, wide, torch.einsum("bi,bi->b", hidden, hidden)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("where", ["", "composite", "other type", "decomposed"])
def test_regions_inside(where: str, around: bool) -> None:
    torch.manual_seed(0)
    plain = Nested(where)
    ours = ORTModule(copy.deepcopy(plain))
    results = []
    for model in (ours, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            outputs = model(torch.randn(3, 4, generator=torch.Generator().manual_seed(1)))
        sum(o.float().square().sum() for o in outputs).backward()
        results.append([*outputs, *(p.grad for p in model.parameters() if p.grad is not None)])
    got, expected = results
    assert [t.dtype for t in got] == [t.dtype for t in expected]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)
    if around and where in ("", "decomposed"):
        assert got[1].dtype == torch.float32
    assert ours.report().native_share == 1.0
    assert len(ours.report().captures) == 1


def test_weights_are_cast_once() -> None:
    """A weight that three products read has one cast, and its gradient comes back in float32."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.layer(x))
            return x

    torch.manual_seed(0)
    plain = Shared()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 64)
    for model in (ours, plain):
        with torch.autocast("cpu", torch.bfloat16):
            model(x).float().sum().backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        graph = prepare(plain, CallSignature(plain.forward).flatten((x,), {}), (x,), {}, {}).graph
    # The weight, the bias, the input.
    assert graph.text().count("Cast <") == 3


class Recurrent(nn.Module):
    """Recurrent layers, behind a linear layer or not, under autocast of their own or not."""

    def __init__(
        self, layer: type[nn.RNNBase], projected: bool, inside: bool, **options: Any
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.project = nn.Linear(5, 5) if projected else nn.Identity()
        self.layer = layer(5, 7, **options)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> Tensors:
        with torch.autocast("cpu", enabled=self.inside or torch.is_autocast_enabled("cpu")):
            y, states = self.layer(self.project(x))
        return y, *([states] if isinstance(states, torch.Tensor) else states)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("projected", [False, True], ids=["float32", "projected"])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "batch_first": True}], ids=["1", "2x2"]
)
def test_recurrent_layers_stay_whole_with_dtypes_of_pytorch(
    layer: type[nn.RNNBase], projected: bool, inside: bool, options: dict[str, Any]
) -> None:
    if layer is nn.LSTM and not projected and not runs_lstm_in_16_bits():
        pytest.skip("PyTorch refuses it on this processor")
    plain = Recurrent(layer, projected, inside, **options)
    exact = copy.deepcopy(plain).double()
    exact.inside = False
    ours = ORTModule(copy.deepcopy(plain))
    for shape in [(4, 3, 5), (6, 2, 5)]:
        x = torch.randn(shape)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            results, expected = ours(x), plain(x)
        truth = exact(x.double())
        assert [r.dtype for r in results] == [r.dtype for r in expected]
        for result, right in zip(results, truth, strict=True):
            torch.testing.assert_close(result.double(), right, atol=0.02, rtol=0)
        for made in (results, truth):
            sum((r.to(torch.float64) ** 2).sum() for r in made).backward()
    for made, right in zip(ours.parameters(), exact.parameters(), strict=True):
        error = (made.grad.double() - right.grad).norm() / right.grad.norm()
        assert error < 0.03
    assert ours.report().native_share == 1.0, str(ours.report())


class _NoGradInRegion(nn.Module):
    """Turns gradients off inside a region of autocast, which may change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = x.relu()
            with torch.no_grad():
                z = self.fc(y).softmax(-1)
            y = y + z
        return y * 2


@pytest.mark.parametrize("around", [True, False])
def test_gradients_turned_off_inside_a_region(around: bool) -> None:
    torch.manual_seed(0)
    eager = _NoGradInRegion()
    module = ORTModule(copy.deepcopy(eager))
    gradients = []
    for each in (eager, module):
        x = torch.ones(2, 8, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            each(x).float().square().sum().backward()
        assert all(p.grad is None for p in each.parameters())
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)


class Repeated(nn.Module):
    """Uses a weight eight times, in a region of autocast of its own or not."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.layer, self.inside = nn.Linear(64, 64, bias=False), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        on = self.inside or torch.is_autocast_enabled("cpu")
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            for _ in range(8):
                x = self.layer(x)
        return x.float()


@pytest.mark.parametrize("backward_within", [False, True])
@pytest.mark.parametrize("keeps_casts", [True, False])
@pytest.mark.parametrize("where", ["inside", "around", "around a region inside"])
def test_gradients_of_gradients_cast_weights_as_often(
    where: str, keeps_casts: bool, backward_within: bool
) -> None:
    """The forward runs again in PyTorch, where autocast keeps the casts of weights."""
    torch.manual_seed(0)
    plain = Repeated(inside="inside" in where)
    ours = ORTModule(copy.deepcopy(plain))
    seen = []
    for model in (plain, ours):
        x = torch.linspace(-1, 1, 512).view(8, 64).requires_grad_()
        with torch.autocast(
            "cpu", torch.bfloat16, enabled="around" in where, cache_enabled=keeps_casts
        ):
            loss = model(x).sum()
            if backward_within:
                (g,) = torch.autograd.grad(loss, model.layer.weight, create_graph=True)
        if not backward_within:
            (g,) = torch.autograd.grad(loss, model.layer.weight, create_graph=True)
        g.square().sum().backward()
        seen.append([g.detach(), x.grad, model.layer.weight.grad])
    torch.testing.assert_close(seen[1], seen[0])

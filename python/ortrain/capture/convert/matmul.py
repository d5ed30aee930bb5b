# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Linear layers and matrix products."""

from __future__ import annotations

from typing import Any

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.registry import converts


@converts("aten.linear.default")
def linear(e: Emitter, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Value:
    if weight.rank == 1:
        result = e.node("MatMul", x, weight)
        return result if bias is None else e.node("Add", result, bias)
    if bias is not None and bias.shape != weight.shape[:1]:  # broadcast, as PyTorch does
        return e.node("Add", e.node("Linear", x, weight, domain="ortrain"), bias)
    return e.node("Linear", x, weight, bias, domain="ortrain")


@converts("aten.matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default")
def matmul(e: Emitter, x: Tensor, y: Tensor) -> Value:
    return e.node("MatMul", x, y)


@converts("aten.dot.default", "aten.vdot.default", "aten.inner.default")
def dot(e: Emitter, x: Tensor, y: Tensor) -> Value:
    if x.rank != 1 or y.rank != 1:
        raise e.unsupported("operands that are not vectors")
    return e.node("MatMul", x, y)


@converts("aten.outer.default", "aten.ger.default")
def outer(e: Emitter, x: Tensor, y: Tensor) -> Value:
    return e.node("Mul", *e.operands(_column(e, x), y, dtype=e.common_dtype(x, y)))


def _column(e: Emitter, x: Tensor) -> Tensor:
    return Tensor(e.unsqueeze(x, [1]), x.dtype, (*x.shape, 1))


def _is_number(value: Any, number: int) -> bool:
    return isinstance(value, (int, float)) and value == number


def _require_factor(e: Emitter, alpha: Any, beta: Any) -> None:
    """Leave an alpha that is 0, or may be, to PyTorch: it forms no product then, NaN or not."""
    e.require_finite(alpha, beta)
    if alpha == 0:
        raise e.unsupported("an alpha of 0")


def _weighted(e: Emitter, base: Tensor, product: Value, beta: Any, alpha: Any) -> Value:
    """Return beta * base + alpha * product; a beta of 0 leaves base out, nan or not."""
    if not _is_number(alpha, 1):
        product = e.node("Mul", product, e.scalar(alpha, base.dtype))
    if _is_number(beta, 0):
        return product
    held = base.value
    if not _is_number(beta, 1):
        held = e.node("Mul", held, e.scalar(beta, base.dtype))
    return e.node("Add", held, product)


@converts("aten.addmm.default")
def addmm(
    e: Emitter, base: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    _require_factor(e, alpha, beta)
    if base.dtype.is_floating_point:
        third = None if beta == 0 else base
        return e.node("Gemm", x, y, third, alpha=float(alpha), beta=float(beta))
    return _weighted(e, base, e.node("MatMul", x, y), beta, alpha)


@converts("aten.baddbmm.default", "aten.addmv.default")
def baddbmm(
    e: Emitter, base: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    _require_factor(e, alpha, beta)
    return _weighted(e, base, e.node("MatMul", x, y), beta, alpha)


@converts("aten.addbmm.default")
def addbmm(
    e: Emitter, base: Tensor, x: Tensor, y: Tensor, *, beta: Any = 1, alpha: Any = 1
) -> Value:
    _require_factor(e, alpha, beta)
    total = e.reduce("ReduceSum", e.node("MatMul", x, y), [0])
    return _weighted(e, base, total, beta, alpha)


@converts("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
def grouped_mm(
    e: Emitter,
    x: Tensor,
    weight: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Value:
    """Multiply rows of x by the matrix of their group; offs holds the end of each group."""
    if x.rank != 2 or weight.rank != 3 or offs is None:
        raise e.unsupported("only rows [T, K] by matrices [E, K, N] with offsets")
    if bias is not None:
        raise e.unsupported("a bias")
    result = e.node("GroupedMatMul", x, weight, e.cast(offs, torch.int64), domain="ortrain")
    return e.cast(result, out_dtype or x.dtype)

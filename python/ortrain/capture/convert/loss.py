# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Losses."""

from __future__ import annotations

from typing import Any

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.indexing import checked_indices
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size

_REDUCTIONS = ("none", "mean", "sum")


def _reduced(e: Emitter, loss: Value, reduction: int) -> Value:
    if reduction == 0:
        return loss
    return e.reduce("ReduceMean" if reduction == 1 else "ReduceSum", loss, None)


@converts("aten.cross_entropy_loss.default")
def cross_entropy_loss(
    e: Emitter,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: Size = -100,
    label_smoothing: float = 0.0,
) -> Value:
    if target.dtype.is_floating_point:
        return _probability_cross_entropy(e, x, target, weight, reduction, label_smoothing)
    logits, labels = x.value, e.cast(target, torch.int64)
    if x.rank == 1:
        logits = e.unsqueeze(x, [0])
        labels = e.reshape(labels, [1], target.shape) if target.rank else e.unsqueeze(labels, [0])
    loss, _ = e.nodes(
        "CrossEntropy",
        2,
        logits,
        labels,
        None if weight is None else e.cast(weight, x.dtype),
        reduction=_REDUCTIONS[reduction],
        ignore_index=int(ignore_index),
        label_smoothing=float(label_smoothing),
        domain="ortrain",
    )
    return e.squeeze(loss, [0]) if x.rank == 1 and reduction == 0 and not target.rank else loss


def _probability_cross_entropy(
    e: Emitter, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float
) -> Value:
    axis = 0 if x.rank == 1 else 1
    goal = e.cast(target, x.dtype)
    if smoothing:
        classes = x.shape[axis]
        share = e.node("Div", e.scalar(smoothing, x.dtype), e.scalar(classes, x.dtype))
        goal = e.node("Add", e.node("Mul", goal, e.scalar(1 - smoothing, x.dtype)), share)
    terms = e.node("Mul", e.node("LogSoftmax", x, axis=axis), goal)
    if weight is not None:
        factor = e.unsqueeze(e.cast(weight, x.dtype), range(1, x.rank - axis))
        terms = e.node("Mul", terms, factor)
    loss = e.node("Neg", e.reduce("ReduceSum", terms, [axis]))
    if reduction != 1:
        return _reduced(e, loss, reduction)
    # The mean is per sample, not per class.
    count = e.numel(x, [a for a in range(x.rank) if a != axis])
    return e.node("Div", e.reduce("ReduceSum", loss, None), e.scalar(count, x.dtype))


def _nll(
    e: Emitter, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: Any
) -> tuple[Value, Value]:
    """Return the loss and the total weight."""
    axis = 0 if x.rank == 1 else 1
    labels = e.cast(target, torch.int64)
    ignored = e.node("Equal", labels, e.scalar(int(ignore_index), torch.int64))
    zero = e.scalar(0, x.dtype)
    rows = e.where(ignored, e.scalar(0, torch.int64), labels)
    rows = checked_indices(e, rows, x, axis)
    flat_target = x.rank == 1 and target.rank == 1
    places = rows if flat_target else e.unsqueeze(rows, [axis])
    picked = e.node("GatherElements", x, places, axis=axis)
    picked = picked if flat_target else e.squeeze(picked, [axis])
    factor = e.scalar(1, x.dtype)
    if weight is not None:
        factor = e.node("Gather", e.cast(weight, x.dtype), rows, axis=0)
    loss = e.where(ignored, zero, e.node("Neg", e.node("Mul", picked, factor)))
    total = e.reduce("ReduceSum", e.where(ignored, zero, factor), None)
    if reduction == 0:
        return loss, e.scalar(0, x.dtype)
    loss = e.reduce("ReduceSum", loss, None)
    return (e.node("Div", loss, total) if reduction == 1 else loss), total


@converts("aten.nll_loss.default", "aten.nll_loss_nd.default", "aten.nll_loss2d.default")
def nll_loss(
    e: Emitter,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: Size = -100,
) -> Value:
    return _nll(e, x, target, weight, reduction, ignore_index)[0]


@converts("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def nll_loss_forward(
    e: Emitter,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: Size,
) -> tuple[Value, Value]:
    return _nll(e, x, target, weight, reduction, ignore_index)


@converts("aten.mse_loss.default")
def mse_loss(e: Emitter, x: Tensor, target: Tensor, reduction: int = 1) -> Value:
    difference = e.node("Sub", *e.operands(x, target))
    return _reduced(e, e.node("Mul", difference, difference), reduction)


@converts("aten.l1_loss.default")
def l1_loss(e: Emitter, x: Tensor, target: Tensor, reduction: int = 1) -> Value:
    return _reduced(e, e.node("Abs", e.node("Sub", *e.operands(x, target))), reduction)


@converts("aten.smooth_l1_loss.default")
def smooth_l1_loss(
    e: Emitter, x: Tensor, target: Tensor, reduction: int = 1, beta: float = 1.0
) -> Value:
    e.require_finite(beta)
    if beta == 0:
        return l1_loss(e, x, target, reduction)
    dtype = e.common_dtype(x, target)
    difference = e.node("Sub", *e.operands(x, target))
    size, edge = e.node("Abs", difference), e.scalar(beta, dtype)
    half, is_far = e.scalar(0.5, dtype), e.node("GreaterOrEqual", size, edge)
    near = e.node("Div", e.node("Mul", half, _near_square(e, difference, is_far)), edge)
    far = e.node("Sub", size, e.node("Mul", half, edge))
    return _reduced(e, e.where(is_far, far, near), reduction)


def _near_square(e: Emitter, value: Value, is_far: Value) -> Value:
    """Return the square of what is not far; that of infinity would have a gradient of NaN."""
    held = e.where(is_far, e.scalar(0, e.dtype_of(value)), value)
    return e.node("Mul", held, held)


@converts("aten.huber_loss.default")
def huber_loss(
    e: Emitter, x: Tensor, target: Tensor, reduction: int = 1, delta: float = 1.0
) -> Value:
    if isinstance(delta, (int, float)):
        e.require_finite(delta)
    dtype = e.common_dtype(x, target)
    difference = e.node("Sub", *e.operands(x, target))
    size, edge = e.node("Abs", difference), e.scalar(delta, dtype)
    half, is_far = e.scalar(0.5, dtype), e.node("Greater", size, edge)
    near = e.node("Mul", half, _near_square(e, difference, is_far))
    # An edge beyond the dtype's range is infinite, and would make NaN of a gradient of 0.
    edge = e.where(is_far, edge, e.scalar(0, dtype))
    far = e.node("Mul", edge, e.node("Sub", size, e.node("Mul", half, edge)))
    return _reduced(e, e.where(is_far, far, near), reduction)


@converts("aten.binary_cross_entropy_with_logits.default")
def binary_cross_entropy_with_logits(
    e: Emitter,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: int = 1,
) -> Value:
    """(1 - t) x + (1 + (p - 1) t) softplus(-x)."""
    dtype = e.common_dtype(x, target)
    value, goal = e.operands(x, target)
    one = e.scalar(1, dtype)
    penalty = e.node("Softplus", e.node("Neg", value))
    if pos_weight is not None:
        excess = e.node("Sub", e.cast(pos_weight, dtype), one)
        penalty = e.node("Mul", e.node("Add", e.node("Mul", excess, goal), one), penalty)
    loss = e.node("Add", e.node("Mul", e.node("Sub", one, goal), value), penalty)
    if weight is not None:
        loss = e.node("Mul", loss, e.cast(weight, dtype))
    return _reduced(e, loss, reduction)


def _checked(e: Emitter, given: Value, dtype: torch.dtype, value: Value, name: str) -> Value:
    """Return ``value``; where one of ``given`` lies outside of [0, 1], or is NaN, the step is refused."""
    inside = e.node(
        "And",
        e.node("GreaterOrEqual", given, e.scalar(0, dtype)),
        e.node("LessOrEqual", given, e.scalar(1, dtype)),
    )
    zeros = e.node(
        "CheckIndices",
        e.cast(e.node("Not", inside), torch.int64),
        e.scalar(1, torch.int64),
        domain="ortrain",
        message=f"all elements of {name} should be between 0 and 1",
    )
    return e.node("Sub", value, e.cast(zeros, dtype))


@converts("aten.binary_cross_entropy.default")
def binary_cross_entropy(
    e: Emitter, x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1
) -> Value:
    """Logarithms are bounded below by -100 and the gradient's divisor by 1e-12, as in PyTorch."""
    dtype = x.dtype
    given, goal = e.operands(x, target, dtype=dtype)
    one, floor = e.scalar(1, dtype), e.scalar(-100, dtype)
    value = e.node("StopGradient", given, domain="ortrain")
    value = _checked(e, value, dtype, value, "input")
    value = _checked(e, e.node("StopGradient", goal, domain="ortrain"), dtype, value, "target")

    def log(v: Value) -> Value:
        return e.node("Clip", e.node("Log", v), floor, None)

    yes = e.node("Mul", goal, log(value))
    no = e.node("Mul", e.node("Sub", one, goal), log(e.node("Sub", one, value)))
    loss = e.node("Neg", e.node("Add", yes, no))
    divisor = e.node("Mul", value, e.node("Sub", one, value))
    bounded = e.node("Max", divisor, e.scalar(1e-12, dtype))
    wanted = e.node("StopGradient", goal, domain="ortrain")
    slope = e.node("Div", e.node("Sub", value, wanted), bounded)
    # 0, with that gradient.
    loss = e.node("Add", loss, e.node("Mul", e.node("Sub", given, value), slope))
    if weight is not None:
        loss = e.node("Mul", loss, e.cast(weight, dtype))
    return _reduced(e, loss, reduction)


@converts("aten.kl_div.default")
def kl_div(
    e: Emitter, x: Tensor, target: Tensor, reduction: int = 1, *, log_target: bool = False
) -> Value:
    dtype = e.common_dtype(x, target)
    value, goal = e.operands(x, target)
    if log_target:
        loss = e.node("Mul", e.node("Exp", goal), e.node("Sub", goal, value))
        return _reduced(e, loss, reduction)
    zero = e.scalar(0, dtype)
    # t log t is 0 at t = 0, and NaN below.
    at_zero = e.node("Equal", goal, zero)
    safe = e.where(at_zero, e.scalar(1, dtype), goal)
    entropy = e.where(at_zero, zero, e.node("Mul", goal, e.node("Log", safe)))
    return _reduced(e, e.node("Sub", entropy, e.node("Mul", goal, value)), reduction)

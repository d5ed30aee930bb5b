# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Comparisons, boolean and bitwise operators, choices."""

from __future__ import annotations

from typing import Any

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Operand, Tensor
from ortrain.capture.convert.registry import converts

_COMPARISONS = {
    "eq": "Equal",
    "lt": "Less",
    "le": "LessOrEqual",
    "gt": "Greater",
    "ge": "GreaterOrEqual",
}


def _compared(e: Emitter, op: str, x: Operand, y: Operand) -> Value:
    dtype = e.common_dtype(x, y)
    if dtype is torch.bool and op != "Equal":
        dtype = torch.uint8
    return e.node(op, *e.operands(x, y, dtype=dtype))


def _register_comparison(name: str, op: str) -> None:
    @converts(f"aten.{name}.Tensor", f"aten.{name}.Scalar")
    def comparison(e: Emitter, x: Tensor, y: Operand) -> Value:
        return _compared(e, op, x, y)


for _name, _op in _COMPARISONS.items():
    _register_comparison(_name, _op)


@converts("aten.ne.Tensor", "aten.ne.Scalar", "aten.not_equal.Tensor", "aten.not_equal.Scalar")
def ne(e: Emitter, x: Tensor, y: Operand) -> Value:
    return e.node("Not", _compared(e, "Equal", x, y))


_LOGICAL = {"and": "And", "or": "Or", "xor": "Xor"}


def _register_logical(name: str, op: str) -> None:
    @converts(f"aten.logical_{name}.default")
    def logical(e: Emitter, x: Tensor, y: Tensor) -> Value:
        return e.node(op, e.cast(x, torch.bool), e.cast(y, torch.bool))

    @converts(
        f"aten.bitwise_{name}.Tensor",
        f"aten.bitwise_{name}.Scalar",
        f"aten.__{name}__.Tensor",
        f"aten.__{name}__.Scalar",
    )
    def bitwise(e: Emitter, x: Tensor, y: Operand) -> Value:
        dtype = e.common_dtype(x, y)
        return e.node(op if dtype is torch.bool else f"Bitwise{op}", *e.operands(x, y, dtype=dtype))


for _name, _op in _LOGICAL.items():
    _register_logical(_name, _op)


@converts("aten.logical_not.default")
def logical_not(e: Emitter, x: Tensor) -> Value:
    return e.node("Not", e.cast(x, torch.bool))


@converts("aten.bitwise_not.default")
def bitwise_not(e: Emitter, x: Tensor) -> Value:
    return e.node("Not" if x.dtype is torch.bool else "BitwiseNot", x)


@converts("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def where(e: Emitter, condition: Tensor, x: Operand, y: Operand) -> Value:
    return e.where(e.cast(condition, torch.bool), *e.operands(x, y))


@converts("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def masked_fill(e: Emitter, x: Tensor, mask: Tensor, value: Any) -> Value:
    return e.where(mask, *e.operands(value, x, dtype=x.dtype))

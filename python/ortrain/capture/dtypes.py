# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""torch dtypes, their codes in ONNX's TensorProto, and PyTorch's type promotion."""

from __future__ import annotations

from collections.abc import Iterable

import torch

ONNX_CODE: dict[torch.dtype, int] = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
TORCH_DTYPE: dict[int, torch.dtype] = {code: dtype for dtype, code in ONNX_CODE.items()}

LOW_PRECISION = frozenset({torch.float16, torch.bfloat16})


def onnx_code(dtype: torch.dtype) -> int:
    """Return TensorProto's code of ``dtype``; raises TypeError for a dtype without a graph form."""
    try:
        return ONNX_CODE[dtype]
    except KeyError:
        raise TypeError(f"dtype {dtype} has no form in a graph") from None


def category(dtype: torch.dtype) -> int:
    """Return the kind that decides a promotion: 0 bool, 1 integer, 2 float, 3 complex."""
    if dtype is torch.bool:
        return 0
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else 1


def promote(operands: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the common dtype of operands as torch.result_type does.

    Args:
      operands: (dtype, rank) per operand; rank -1 stands for a Python number, whose dtype is then
        one of bool, int64 and the default float.
    """
    by_priority: list[torch.dtype | None] = [None, None, None]
    for dtype, rank in operands:
        group = 0 if rank > 0 else 1 if rank == 0 else 2
        held = by_priority[group]
        by_priority[group] = dtype if held is None else torch.promote_types(held, dtype)
    result: torch.dtype | None = None
    for dtype in by_priority:
        if dtype is not None and (result is None or category(dtype) > category(result)):
            result = dtype
    if result is None:
        raise ValueError("promotion of no operands")
    return result

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers that PyTorch refuses to make an element of: 300 among int8."""

from __future__ import annotations

import math
from typing import Any

import sympy
import torch

# Of these each number is made an element of the result, or compared with one. Sums and products wrap around.
_MAKE_ELEMENTS = frozenset(
    f"aten.{name}"
    for name in [
        "addcdiv",
        "addcmul",
        "clamp",
        "clamp_max",
        "clamp_min",
        "clip",
        "constant_pad_nd",
        "fill",
        "full",
        "full_like",
        "hardtanh",
        "masked_fill",
        "new_full",
        "pad",
        "pow",
        "scalar_tensor",
        "threshold",
        "where",
    ]
)
# Of these those behind the first two: an axis goes before, or an operand.
_BEHIND_TWO = frozenset({"aten.add", "aten.index_fill", "aten.rsub", "aten.scatter", "aten.sub"})


def number_out_of_range(
    target: str, args: list[Any], kwargs: dict[str, Any], dtype: torch.dtype
) -> Any:
    """Return a number among an operator's arguments that is, or may be, no element of its result; None without one.

    Args:
      target: The operator.
      args: Its arguments.
      kwargs: Its keyword arguments.
      dtype: That of its result.
    """
    name = target.rpartition(".")[0]
    if name == "aten.where" and dtype.is_floating_point:  # becomes infinite there
        return None
    if name not in _MAKE_ELEMENTS and name not in _BEHIND_TWO:
        return None
    numbers = [*args[2 * (name in _BEHIND_TWO) :], *kwargs.values()]
    return next((n for n in numbers if not _fits(n, dtype)), None)


def _fits(number: Any, dtype: torch.dtype) -> bool:
    if dtype is torch.bool:
        return True
    if isinstance(
        number, sympy.Basic
    ):  # known at the call alone; larger types are taken to hold it
        return dtype.itemsize > 2 or dtype is torch.bfloat16
    if type(number) not in (int, float):
        return True
    if not math.isfinite(number):
        return dtype.is_floating_point
    limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
    return bool(limits.min <= number <= limits.max)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a change of something that an installed package keeps is."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Container
from typing import Any, NamedTuple

import torch


class Change(NamedTuple):
    """What a trace has made of what a package keeps at one place.

    Attributes:
      where: The place, in words.
      is_counted: Whether it will be another one at each call: a number, a tensor or a state in the place of another.
      set_back: Makes it what it was.
    """

    where: str
    is_counted: bool
    set_back: Callable[[], None]


def is_counted(cls: type) -> bool:
    """Tell whether values of a class may be counts or averages, and not flags that something was done."""
    if (numpy := sys.modules.get("numpy")) and issubclass(cls, (numpy.number, numpy.ndarray)):
        return True
    return issubclass(cls, (int, float, complex, *_OF_TRACES)) and cls is not bool


def is_another_count(before: Any, now: Any) -> bool:
    """Tell whether a number or a tensor has taken the place of another one."""
    if now is before or not (is_counted(type(before)) and is_counted(type(now))):
        return False
    if any(isinstance(each, _OF_TRACES) or hasattr(each, "__array__") for each in (before, now)):
        return True
    return bool((type(now), now) != (type(before), before))


_OF_TRACES = torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool


Seen = Callable[[str, Container[str]], "Change | None"]


class _AnyName:
    def __contains__(self, _: object) -> bool:
        return True


ANY_NAME = _AnyName()
_EMPTY = types.CellType()


def cells_of(function: types.FunctionType) -> list[types.CellType]:
    """Return the cells of what a function closes over that hold something."""
    return [cell for cell in function.__closure__ or () if cell != _EMPTY]


def nothing() -> None:
    pass

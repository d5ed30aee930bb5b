# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The functions of PyTorch that a forward calls, one after the other, to compare one call with another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

# Stands for a number that depends on the sizes of the arguments.
_SIZE = "size"


class CallPath(TorchFunctionMode):
    """Records while it is entered.

    Attributes:
      steps: Of each call the function and its numbers, flags and names, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        self.steps.append((resolve_name(func) or repr(func), *_plain(args), *_plain(kwargs)))
        return func(*args, **kwargs)

    def follows(self, earlier: CallPath) -> bool:
        """Tell whether this path is one that was traced, with sizes of its own."""
        if not earlier.steps or len(self.steps) != len(earlier.steps):
            return False
        return all(map(_is_same, self.steps, earlier.steps))


def _plain(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        return
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _plain(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _plain(item)
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield _SIZE
    elif isinstance(value, slice):
        yield from _plain((value.start, value.stop, value.step))
    elif value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype)):
        yield value
    else:
        yield type(value).__qualname__


def _is_same(now: tuple[Any, ...], traced: tuple[Any, ...]) -> bool:
    return len(now) == len(traced) and all(
        b == _SIZE or (type(a) is type(b) and (a == b or (a != a and b != b)))
        for a, b in zip(now, traced, strict=True)
    )

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions and methods of PyTorch in whose place somebody has put his own.

Under a mode, as in a trace, a function of PyTorch hands itself over by its public name, which leads to the replacement:
one that calls the function it replaces would run once more for each mode.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ortrain.capture.errors import ReplacedFunctionError
from ortrain.capture.source_files import TORCH_ROOT, real_path
from ortrain.capture.torch_internals import replaced

_HOMES = torch, nn.functional, torch.functional, torch.Tensor
# By the name that code must mention to reach them.
_PARTS = {"linalg": torch.linalg, "special": torch.special, "fft": torch.fft}
# That syntax stands for.
_OPERATORS = frozenset(
    f"__{name}__"
    for name in (
        *("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul"),
        *("pow", "neg", "getitem", "setitem", "lt", "gt", "eq"),
    )
)
_METHODS = frozenset(name for name in dir(torch.Tensor) if not name.startswith("__"))


def functions_named(names: frozenset[str] | set[str]) -> list[tuple[Any, str]]:
    """Return what code with these names may call of PyTorch: a dictionary or a class, and the name in it."""
    homes = [vars(torch), vars(nn.functional)]
    homes += [vars(home) for part, home in _PARTS.items() if part in names]
    found = [(home, name) for home in homes for name in sorted(names & home.keys())]
    return found + [(torch.Tensor, name) for name in sorted(names & _METHODS | _OPERATORS)]


def _is_replaced(value: Any) -> bool:
    if isinstance(value, types.FunctionType):
        file = real_path(value.__code__.co_filename)
        return not file.startswith((TORCH_ROOT, "<"))
    return isinstance(value, (functools.partial, types.MethodType))


def _watched(name: str, value: Callable[..., Any]) -> Callable[..., Any]:
    thread, running = threading.get_ident(), [0]

    @functools.wraps(value, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return value(*args, **kwargs)
        if running[0] and sys._getframe(1).f_code.co_name == "__torch_function__":
            raise ReplacedFunctionError(
                f"{name} was replaced by a function that calls it, which it would do in a trace over "
                "and over"
            )
        running[0] += 1
        try:
            return value(*args, **kwargs)
        finally:
            running[0] -= 1

    return call


@contextlib.contextmanager
def replacements_watched() -> Iterator[None]:
    """Raise ReplacedFunctionError where a trace in the context runs a replacement within itself."""
    homes = (*_HOMES, *_PARTS.values())
    found = [(h, n, v) for h in homes for n, v in list(vars(h).items()) if _is_replaced(v)]

    def watching(home: Any, name: str, value: Any) -> Any:
        call = _watched(f"{home.__name__}.{name}", value)
        is_bound = not isinstance(home, type) or isinstance(value, types.FunctionType)
        return call if is_bound else staticmethod(call)

    with replaced((home, name, watching(home, name, value)) for home, name, value in found):
        yield

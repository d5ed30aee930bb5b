# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The conversions, keyed by ATen operator and overload."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

Conversion = Callable[..., Any]

_conversions: dict[str, Conversion] = {}


def converts(*targets: str) -> Callable[[Conversion], Conversion]:
    """Register a conversion for the named overloads, such as ``aten.add.Tensor``.

    The function takes an Emitter and then the operator's arguments under ATen's order and keyword
    names; device, layout and memory format are left out. It returns a value, or a tuple of them.
    """

    def register(function: Conversion) -> Conversion:
        for target in targets:
            if target in _conversions:
                raise ValueError(f"{target} has two conversions")
            _conversions[target] = function
        return function

    return register


@functools.cache
def _load() -> None:
    package = importlib.import_module(__package__)
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{__package__}.{module.name}")


def conversion(target: Any) -> Conversion | None:
    """Return the conversion of an FX target, or None."""
    _load()
    return _conversions.get(str(target))


def targets() -> list[str]:
    """Return the names of all operators that have a conversion, sorted."""
    _load()
    return sorted(_conversions)

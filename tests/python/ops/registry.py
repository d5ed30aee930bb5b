# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""References that are independent of our kernels, one per operator of domain ``ortrain``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np

Reference = Callable[[list[Any], dict[str, Any]], list[np.ndarray]]

_references: dict[str, Reference] = {}


def reference(op: str) -> Callable[[Reference], Reference]:
    """Register a function (inputs, attributes) -> outputs as the truth for ``op``."""

    def register(function: Reference) -> Reference:
        if op in _references:
            raise ValueError(f"{op} has two references")
        _references[op] = function
        return function

    return register


def find_reference(op: str) -> Reference | None:
    """Return the reference of ``op``, or None."""
    package = importlib.import_module("tests.python.ops")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name.startswith("reference_"):
            importlib.import_module(f"tests.python.ops.{module.name}")
    return _references.get(op)

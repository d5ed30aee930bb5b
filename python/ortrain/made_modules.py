# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The ORTModules that a program makes, for tools that run programs of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["collect", "tell"]

_collections: list[list[Any]] = []


@contextmanager
def collect() -> Iterator[list[Any]]:
    """Keep every ORTModule that is made while the context is open, oldest first.

    They stay alive, with their graphs and plans, for as long as the list does.
    """
    made: list[Any] = []
    _collections.append(made)
    try:
        yield made
    finally:
        # By identity: two lists may be equal.
        index = next(i for i, known in enumerate(_collections) if known is made)
        del _collections[index]


def tell(module: Any) -> None:
    """Hand a module that has just been made to whoever collects."""
    for made in _collections:
        made.append(module)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a trace may spend on sizes as symbols, and which sizes stay symbols.

Paddings and windows that depend on an image's size make expressions that grow from layer to layer;
PyTorch then spends a minute on arithmetic where the trace itself takes two seconds. Operations are
counted, not seconds, so that a program is captured alike on every machine.
"""

from __future__ import annotations

import contextlib
import enum
import weakref
from collections.abc import Iterator

import sympy
from torch import nn

from ortrain import progress
from ortrain.capture.errors import SymbolicBudgetError
from ortrain.capture.size_arithmetic import sizes_computed_once

# Terms that a size may have at no charge: what a long model of simple sizes computes is no fault.
_FREE_TERMS = 12
# Terms beyond those, of all sizes that a trace computes, each as often as it comes up: about 4 s of
# a Zen 5. Transformers of 12 to 30 layers come to 3000 to 16000, ResNet-50 to 280000.
LIMIT = 1_000_000


class Freedom(enum.IntEnum):
    """Which sizes of the inputs may differ from those of the call that was captured."""

    ALL = 0
    FIRST = 1  # the first axis of each input, of the batch as a rule
    NONE = 2

    @property
    def fixed(self) -> str:
        """The sizes that are fixed, in words; empty where none is."""
        return ("", "all sizes but the first of each input", "all sizes")[self]


class SymbolicBudget:
    """Counts the terms of long sizes that a trace computes, and ends it at a limit.

    Args:
      limit: Terms; None for no end.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.spent = 0
        # By where the formulas lie, with them: SymPy compares part by part.
        self._terms: dict[int, tuple[int, sympy.Basic]] = {}

    @property
    def is_exceeded(self) -> bool:
        """Whether the limit was passed, also where somebody caught what ended the trace."""
        return self.limit is not None and self.spent > self.limit

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread computes.

        Raises:
          SymbolicBudgetError: From inside of the trace, at each size beyond the limit.
        """
        with sizes_computed_once(self._count):
            yield
        self._terms.clear()

    def _count(self, expression: sympy.Basic) -> None:
        terms = self._terms_of(expression)
        if terms > _FREE_TERMS:
            self.spent += terms - _FREE_TERMS
        if self.limit is not None and self.spent > self.limit:
            raise SymbolicBudgetError(f"sizes took more than {self.limit} symbolic terms")

    def _terms_of(self, expression: sympy.Basic) -> int:
        known = self._terms.get(id(expression))
        if known is None:
            terms = 1 + sum(map(self._terms_of, expression.args))
            known = self._terms[id(expression)] = terms, expression
        return known[0]


# What was left of the freedom of modules whose sizes took too long.
_left: weakref.WeakKeyDictionary[nn.Module, Freedom] = weakref.WeakKeyDictionary()


def freedom_of(module: nn.Module) -> Freedom:
    """Return the freedom that a capture of the module is tried with first."""
    return _left.get(module, Freedom.ALL)


def restrict_further(module: nn.Module, reason: str) -> None:
    """Let the captures of the module that follow have less freedom than those before, and say so.

    Args:
      module: The module.
      reason: What stands in the way of the freedom that it has.
    """
    left = _left[module] = Freedom(min(freedom_of(module) + 1, Freedom.NONE))
    progress.note(f"{type(module).__name__}: {left.fixed} are fixed from now on, since {reason}")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a trainer computes in 16 bits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

# The lists of operators, as options and the engine name them.
LISTS = ("allow", "deny", "promote")

_TYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
TYPE_NAMES = " or ".join(f"'{name}'" for name in _TYPES)


def half_type(given: object) -> torch.dtype | None:
    """Return the 16-bit float type of a name or a torch.dtype; None for anything else."""
    if isinstance(given, str):
        return _TYPES.get(given)
    return next((dtype for dtype in _TYPES.values() if given is dtype), None)


@dataclasses.dataclass(frozen=True, slots=True)
class MixedPrecision:
    """A 16-bit type and the operators that leave the lists of their definitions.

    Attributes:
      dtype: torch.bfloat16 or torch.float16.
      allow: Names of operators that are computed in it.
      deny: Names of those that are computed in float32.
      promote: Names of those that are computed in the widest type that they are given.
    """

    dtype: torch.dtype
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    promote: tuple[str, ...] = ()

    @property
    def by_lists(self) -> bool:
        """Whether an operator leaves its list."""
        return self.first_list is not None

    @property
    def first_list(self) -> str | None:
        """The first list that has a name in it; None where each operator keeps its list."""
        return next((key for key in LISTS if getattr(self, key)), None)

    def apply(self, graph: Any) -> bool:
        """Rewrite a forward graph; return whether it changed.

        Raises:
          InvalidModelError: A name is no operator, stands in two lists, or is allowed and not
            computed in 16 bits.
        """
        name = str(self.dtype).removeprefix("torch.")
        changed: bool = graph.mixed_precision(
            name, list(self.allow), list(self.deny), list(self.promote)
        )
        return changed

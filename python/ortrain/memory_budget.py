# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""How much memory the plan of a step may take: the option ``max_memory``."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{prefix}B": 1000**power for power, prefix in enumerate("KMGT", start=1)}
_UNITS |= {f"{prefix}IB": 1024**power for power, prefix in enumerate("KMGT", start=1)}
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")
_EXPECTED = (
    'a number of bytes, a text such as "2GiB" or "800MB", or a share of what the plan takes '
    'without recomputation such as "0.3x"'
)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What ``MemoryPlan.total_bytes`` may be; one of the two is above 0.

    Attributes:
      bytes: That many; 0 where a share is given.
      share: Of what the plan takes that computes nothing again, or the largest one of the graph so
        far; above 0, up to 1; 0 where bytes are given.
    """

    bytes: int = 0
    share: float = 0.0

    @staticmethod
    def parse(value: Any, name: str = "max_memory") -> MemoryBudget | None:
        """Read the value of an option.

        Args:
          value: Bytes as an int, a text of bytes with a unit (B, kB, MB, GB, TB of powers of 1000;
            KiB, MiB, GiB, TiB of 1024; capitals or not), a share such as "0.3x", or None.
          name: The option, for errors.

        Returns:
          The budget; None for None.

        Raises:
          TypeError: It is neither an int nor a text.
          ValueError: The text says nothing of that kind, or the number is out of range.
        """
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise TypeError(f"{name} is {value!r}, expected {_EXPECTED}")
        if isinstance(value, int):
            return MemoryBudget(bytes=_checked_bytes(value, value, name))
        found = _TEXT.fullmatch(value)
        unit = found[2].upper() if found else None
        if found is None or (unit not in _UNITS and unit != "X"):
            raise ValueError(f"{name} is {value!r}, expected {_EXPECTED}")
        number = float(found[1])
        if unit == "X":
            if not 0 < number <= 1:
                raise ValueError(f"{name} is {value!r}, expected a share above 0, up to 1")
            return MemoryBudget(share=number)
        return MemoryBudget(bytes=_checked_bytes(math.floor(number * _UNITS[unit]), value, name))

    @property
    def session_options(self) -> dict[str, Any]:
        """The arguments of `_core.Session`, and keys of `_core.TrainingProgram`'s options."""
        return {"max_bytes": self.bytes, "max_share": self.share}


def _checked_bytes(count: int, given: Any, name: str) -> int:
    if not 1 <= count < 2**63:
        raise ValueError(f"{name} is {given!r}, expected at least one byte and less than 2^63")
    return count

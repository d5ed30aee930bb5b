# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which calls of a module are verified: by count, never by the clock, so that ranks agree."""

from __future__ import annotations

import os

_VARIABLE = "ORTRAIN_VERIFY_STEPS"
_EVERY_POWER = "sampled"
# Calls in a row of which PyTorch ran all, before such a call counts as verified.
_MOST_POSTPONED = 8


def parse(verify: str | int | None) -> int | str:
    """Return what to verify: a number of first steps, or "sampled".

    Args:
      verify: "first", "sampled", a number of steps, 0 for none; None for what ORTRAIN_VERIFY_STEPS
        says.

    Raises:
      ValueError: Neither of these.
    """
    if verify is None:
        text = os.environ.get(_VARIABLE, "").strip().lower()
        if text in ("", "off"):
            return 0
        if text.isdecimal():
            return int(text)
        return _of_word(text, f"{_VARIABLE}={text}")
    if isinstance(verify, int) and not isinstance(verify, bool) and verify >= 0:
        return verify
    return _of_word(verify, f"verify={verify!r}")


def _of_word(word: object, given: str) -> int | str:
    if word == "first":
        return 1
    if word == _EVERY_POWER:
        return _EVERY_POWER
    raise ValueError(f"{given}: expected 'first', 'sampled' or a number of steps")


class Schedule:
    """Counts calls and says which of them are verified.

    Args:
      verify: As `parse` returns it.

    Attributes:
      step: Number of the present call, from 1.
    """

    def __init__(self, verify: int | str) -> None:
        self._verify = verify
        self._postponed = 0
        self.step = 0
        self._due = 0
        self._plan(1)

    def advance(self) -> bool:
        """Count a call; tell whether it is to be verified."""
        self.step += 1
        return self.step == self._due

    def put_off(self) -> None:
        """Take the present call back: it was none of the module's own."""
        self.step -= 1

    def done(self) -> None:
        """Take note that the present call was verified."""
        self._postponed = 0
        self._plan(self.step + 1)

    def postpone(self) -> bool:
        """Let the next call take the place of one that PyTorch ran; False after many in a row."""
        self._postponed += 1
        if self._postponed >= _MOST_POSTPONED:
            self.done()
            return False
        self._due = self.step + 1
        return True

    def _plan(self, earliest: int) -> None:
        """Set the next step to verify; 0 where there is none."""
        if self._verify == _EVERY_POWER:
            self._due = 1 << (earliest - 1).bit_length()
        else:
            self._due = earliest if earliest <= self._limit() else 0

    def _limit(self) -> int:
        return self._verify if isinstance(self._verify, int) else 0

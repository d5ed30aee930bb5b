# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tells during a trace, not only behind it, that a forward draws Python's or NumPy's random numbers."""

from __future__ import annotations

import random
import sys
from typing import Any

from ortrain.capture.shallow_copies import is_equal

# A look compares 5 KB; a trace takes far longer for as many tensors.
_TENSORS_PER_LOOK = 16


class GeneratorsUsedError(Exception):
    """A forward has used a generator that no graph draws from; it may yet set it back."""


class GeneratorWatch:
    """Ends a trace soon after its forward has used the generators of Python or NumPy.

    A trace with sizes as symbols takes seconds for what one with numbers refuses in a tenth of the time.

    Attributes:
      has_ended: Whether a trace was ended, also where the forward caught the error.
    """

    def __init__(self) -> None:
        self.has_ended = False
        self._until_look = _TENSORS_PER_LOOK
        self._numpy = sys.modules.get("numpy")
        self._before = self._states()

    def look(self) -> None:
        """Be told of a tensor of the trace.

        Raises:
          GeneratorsUsedError: A generator is not where it was, now or earlier.
        """
        self._until_look -= 1
        if not self.has_ended and self._until_look > 0:
            return
        self._until_look = _TENSORS_PER_LOOK
        if self.has_ended or not is_equal(self._states(), self._before):
            self.has_ended = True
            raise GeneratorsUsedError("random numbers of Python or NumPy were drawn")

    def _states(self) -> tuple[Any, ...]:
        # A hash: comparing 625 numbers one by one takes longer than all the rest.
        return hash(random.getstate()), self._numpy and self._numpy.random.get_state(legacy=False)

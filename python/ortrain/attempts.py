# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What looking for graphs has come to of late, and when calls are better left alone."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable

from ortrain.capture.errors import ChangingAttributeError, EverNewCallError

# Captures in a row, no call in between finding a graph, after which a module is left to PyTorch.
_MOST_MISSES = 8
# Calls for each graph that had to go for another one, before there is a further one: of more kinds of calls than graphs
# are kept each would be captured again and again.
_CALLS_PER_DROPPED = 256
# Captures in a row, each finding that the forward changes attributes, before a module is left alone for a while.
_MOST_CHANGES = 3
# Calls in a row for which there is no graph, after which others are not looked at for a while: what a look takes is
# lost, and PyTorch is right in any case.
_MOST_REFUSALS = 4
# Calls that a pause is long at first, and at most.
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 2048
# Kinds of calls without a graph that are remembered in case that they come back.
_MOST_DECLINED = 256

Runs = Callable[..., object]


class Attempts:
    """Counts captures and refusals of one module.

    Args:
      name: The module's class, for errors.

    Attributes:
      left_to: What runs calls without a look for a graph; None while they are looked at.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.left_to: Runs | None = None
        self._calls_left = 0  # of the pause; 0 for one without end
        self._kind: Hashable = None  # of the calls that are left alone; None for any
        self._misses = self._misses_of_states = 0  # in a row
        self._changes = self._refusals = 0  # in a row
        self._calls_to_wait = 0  # before there may be another capture
        self._pause = self._pause_of_refused = _FIRST_PAUSE
        self._state_captured = 0
        self._declined: collections.OrderedDict[Hashable, None] = collections.OrderedDict()

    def run_of(self, kind: Hashable) -> Runs | None:
        """Return what runs a call in a pause; None where it is to be looked at.

        Args:
          kind: What tells calls apart at a glance.
        """
        if self._kind in (None, kind):
            self._calls_left -= 1
            if self._calls_left != 0:
                return self.left_to
        if self._kind is None:  # what changed may have come to rest
            self._changes, self._misses = _MOST_CHANGES - 1, 0
            self._misses_of_states = _MOST_MISSES - 2
        self.left_to = self._kind = None
        return None

    def leave_to(self, run: Runs) -> None:
        """Have all calls run without a look for a graph from now on."""
        self.left_to, self._calls_left, self._kind = run, 0, None

    def found(self, *, is_graph: bool) -> None:
        """Take note of a call for which there was a graph, or a refusal, already."""
        self._misses = self._misses_of_states = 0
        self._calls_to_wait -= 1
        if is_graph:
            self._changes = self._refusals = 0

    def missed(self, state_of_call: int, state: int) -> None:
        """Take note of a call for which there was none.

        Args:
          state_of_call: Number of the module's state in which it was looked for.
          state: Number of the present one.
        """
        self._misses += 1
        self._misses_of_states += state_of_call != self._state_captured
        self._state_captured = state

    @property
    def is_waiting(self) -> bool:
        """Whether the next call that has no graph gets none."""
        return self._calls_to_wait > 0

    def dropped(self) -> None:
        """Take note that a graph had to go for another one."""
        self._calls_to_wait = _CALLS_PER_DROPPED

    def found_changes(self, run: Runs) -> None:
        """Take note of a capture that found a forward changing attributes.

        Args:
          run: To run calls by for a while, if there have been many.
        """
        self._changes += 1
        if self._changes >= _MOST_CHANGES or self._misses_of_states >= _MOST_MISSES:
            self.left_to, self._calls_left = run, self._pause
            self._pause *= 4

    def refused(self, run: Runs, kind: Hashable, *, may_pause: bool) -> None:
        """Take note of a call that has no graph for good.

        Args:
          run: To run calls like it by for a while, if no call has found a graph for some time.
          kind: What tells calls apart at a glance.
          may_pause: Whether calls may be left alone.
        """
        self._refusals += 1
        if self._refusals >= _MOST_REFUSALS and may_pause:
            self.left_to, self._kind = run, kind
            self._calls_left = self._pause_of_refused
            self._pause_of_refused = min(4 * self._pause_of_refused, _LONGEST_PAUSE)

    def refuse_ever_new_calls(self, kind: Hashable) -> None:
        """Raise CaptureError where capturing goes on and on, and no call finds a graph.

        A kind of call that comes back is captured then, unless graphs take turns.
        """
        if self.is_waiting:
            self._calls_to_wait -= 1
            raise EverNewCallError(
                "calls of more kinds take turns than graphs are kept, so that some of them have none",
                module=self._name,
            )
        if self._misses < _MOST_MISSES:
            return
        if kind in self._declined:
            self.found(is_graph=False)
            return
        self._declined[kind] = None
        if len(self._declined) > _MOST_DECLINED:
            self._declined.popitem(last=False)
        if self._misses_of_states >= _MOST_MISSES:
            raise ChangingAttributeError(
                "its attributes or those of its layers change from call to call, and a graph "
                "holds for one state only",
                module=self._name,
            )
        raise EverNewCallError(
            f"each of the last {self._misses} calls needed a graph of its own, since numbers or "
            "flags among the arguments, or sizes that it holds fixed, differ",
            module=self._name,
        )

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Say what the engine is doing, to the log and to whoever listens.

The engine wraps each stage of preparing a model in :func:`stage`. Nothing is printed: a user
interface calls :func:`listen`, everybody else reads the ``ortrain`` logger.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from ortrain import logs

__all__ = ["Listener", "State", "add_listener", "listen", "note", "stage"]

State = Literal["begin", "end", "failed", "note"]
Listener = Callable[[str, float, State], None]

_logger = logs.get_logger("ortrain")
_listeners: list[Listener] = []


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Call a listener at the begin and end of every stage while the context is open.

    Args:
        listener: Called with (stage, seconds, state). State is "begin" (seconds is 0), "end" or
            "failed"; or "note", with a sentence in place of the stage. An exception that it raises
            reaches the code that runs the stage.
    """
    _listeners.append(listener)
    try:
        yield
    finally:
        # By identity: two listeners may compare equal.
        index = next(i for i, known in enumerate(_listeners) if known is listener)
        del _listeners[index]


def add_listener(listener: Listener) -> None:
    """Call a listener, as in ``listen``, for as long as the process lives."""
    _listeners.append(listener)


def note(sentence: str) -> None:
    """Log why something is done at INFO, and tell the listeners."""
    _logger.info("%s", sentence)
    _tell(sentence, 0.0, "note")


@contextmanager
def stage(name: str) -> Iterator["Timing"]:
    """Time one stage, log its begin and end at INFO and tell the listeners.

    Args:
        name: Short name, e.g. "capture". Stages may nest.

    Returns:
        A Timing whose ``seconds`` is set when the stage ends, also when it fails.
    """
    timing = Timing(name)
    _logger.info("%s begins", name)  # a capture may take many seconds
    _tell(name, 0.0, "begin")
    started = time.perf_counter()
    state: State = "failed"
    try:
        yield timing
        state = "end"
    finally:
        timing.seconds = time.perf_counter() - started
        _logger.info("%s %s in %.3f s", name, "done" if state == "end" else state, timing.seconds)
        _tell(name, timing.seconds, state)


class Timing:
    """Name and duration of one stage."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seconds = 0.0


def _tell(name: str, seconds: float, state: State) -> None:
    for listener in tuple(_listeners):
        listener(name, seconds, state)

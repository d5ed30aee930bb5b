# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward prints and logs: a graph would not."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from ortrain.capture.class_facts import Facet
from ortrain.capture.names_in_code import named_with_place
from ortrain.capture.source_files import (
    OWN_ROOT,
    is_installed,
    is_standard,
    package_of,
    real_path,
)

# What these packages write and log, whoever asked them to has: they say nothing of themselves.
_SPEAK_FOR_OTHERS = frozenset(
    {"absl", "click", "icecream", "loguru", "rich", "structlog", "termcolor", "tqdm"}
)
_STREAMS = "stdout", "stderr", "__stdout__", "__stderr__"
_NEVER = sys.maxsize


class LogThreshold(Facet):
    """The level from which on a logger's records are shown."""

    @property
    def level(self) -> int:
        """The least level of which a handler takes records."""
        if self.of.disabled:
            return _NEVER
        levels = [handler.level for handler in _handlers_of(self.of)]
        if not levels:
            levels = [_NEVER if logging.lastResort is None else logging.lastResort.level]
        return max(min(levels), self.of.getEffectiveLevel(), self.of.manager.disable + 1)


def _handlers_of(logger: logging.Logger) -> Iterator[logging.Handler]:
    each: logging.Logger | None = logger
    while each is not None:
        yield from each.handlers
        each = each.parent if each.propagate else None


@dataclasses.dataclass(slots=True)
class Announcements:
    """What a thread's user code would have said.

    Attributes:
      printed: The functions that would have printed.
      logged: Those whose records would have been shown.
      loggers: What decides whether records of the loggers that were asked are shown.
      held: Each says one of the things that were kept back.
    """

    printed: list[str] = dataclasses.field(default_factory=list)
    logged: list[str] = dataclasses.field(default_factory=list)
    loggers: dict[int, LogThreshold] = dataclasses.field(default_factory=dict)
    held: list[Callable[[], object]] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        """What was said and where, "" for nothing."""
        if self.printed:
            return f"prints in {self.printed[0]}"
        return f"logs in {self.logged[0]}" if self.logged else ""

    def let_go(self) -> None:
        """Say what was kept back, as it is after all said once."""
        for say in self.held:
            say()
        self.held.clear()


def _speaker(frame: types.FrameType | None) -> str:
    """Return the user's function that has something printed or logged; "" where a package does.

    Args:
      frame: Of the function that was called to do so.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        # Warnings are shown once; what this package says is none of the forward's.
        if file == warnings.__file__ or (file != __file__ and real_path(file).startswith(OWN_ROOT)):
            return ""
        speaks_for_others = is_standard(file) or package_of(file) in _SPEAK_FOR_OTHERS
        if not speaks_for_others and file != __file__:
            break
        frame = frame.f_back
    if frame is None or is_installed(frame.f_code.co_filename):
        return ""
    return named_with_place(frame.f_code)


class _WatchedOutput:
    """A standard stream, but for what a thread's user code prints, by whatever name and function."""

    def __init__(self, stream: Any, said: Announcements) -> None:
        self._stream, self._said = stream, said
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or take note of who would have written it."""
        speaker = "" if threading.get_ident() != self._thread else _speaker(sys._getframe(1))
        if not speaker:
            return int(self._stream.write(text))
        self._said.printed.append(speaker)
        self._said.held.append(lambda: self._stream.write(text))
        return len(text)


@contextlib.contextmanager
def announcements_held_back(*, logs: bool = True) -> Iterator[Announcements]:
    """Keep this thread's user code from printing and logging, which would show what stands for its tensors.

    Args:
      logs: Whether records of loggers are kept back too.
    """
    found = Announcements()
    with contextlib.ExitStack() as stack:
        for name in _STREAMS:
            stack.enter_context(_stream_watched(name, found))
        if logs:
            stack.enter_context(_loggers_watched(found))
        yield found


@contextlib.contextmanager
def _stream_watched(name: str, said: Announcements) -> Iterator[None]:
    original = getattr(sys, name)
    watched: Any = None if original is None else _WatchedOutput(original, said)
    setattr(sys, name, watched)
    try:
        yield
    finally:
        if getattr(sys, name) is watched:  # else somebody has redirected it
            setattr(sys, name, original)


@contextlib.contextmanager
def _loggers_watched(found: Announcements) -> Iterator[None]:
    thread = threading.get_ident()
    is_enabled: Callable[..., bool] = logging.Logger.isEnabledFor
    call_handlers: Callable[..., None] = logging.Logger.callHandlers

    def is_enabled_for(logger: logging.Logger, level: int) -> bool:
        # PyTorch asks its own thousands of times.
        is_pytorchs = logger.name.startswith("torch.")
        if not is_pytorchs and threading.get_ident() == thread and _speaker(sys._getframe(1)):
            found.loggers[id(logger)] = LogThreshold.about(logger)
        return is_enabled(logger, level)

    def call_or_hold(logger: logging.Logger, record: logging.LogRecord) -> None:
        speaker = "" if threading.get_ident() != thread else _speaker(sys._getframe(1))
        if not speaker:
            call_handlers(logger, record)
        elif record.levelno >= LogThreshold.about(logger).level:
            found.logged.append(speaker)
            found.held.append(lambda: call_handlers(logger, record))

    # A class of its own may go another way to its handlers, but this far.
    with mock.patch.multiple(
        logging.Logger, isEnabledFor=is_enabled_for, callHandlers=call_or_hold
    ):
        yield

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward prints: a graph would not."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ortrain.capture.source_files import is_installed, is_standard


class _WatchedOutput:
    """The standard output, but for what a thread's user code prints, by whatever name and function."""

    def __init__(self, stream: Any, found: list[str]) -> None:
        self._stream, self._found = stream, found
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write a text, or take note of who would have written it."""
        if threading.get_ident() != self._thread:
            return int(self._stream.write(text))
        frame = sys._getframe(1)
        while frame.f_back is not None and is_standard(frame.f_code.co_filename):
            frame = frame.f_back
        code = frame.f_code
        if is_installed(code.co_filename):
            return int(self._stream.write(text))
        name = getattr(code, "co_qualname", code.co_name)
        self._found.append(f"{name} ({code.co_filename}:{code.co_firstlineno})")
        return len(text)


@contextlib.contextmanager
def prints_held_back() -> Iterator[list[str]]:
    """Keep this thread's user code from printing, which would show what stands for its tensors.

    Yields:
      Takes the functions that would have printed.
    """
    found: list[str] = []
    original = sys.stdout
    watched: Any = None if original is None else _WatchedOutput(original, found)
    sys.stdout = watched
    try:
        yield found
    finally:
        if sys.stdout is watched:  # else somebody has redirected it
            sys.stdout = original

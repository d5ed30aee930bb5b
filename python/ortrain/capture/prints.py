# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward prints: a graph would not."""

from __future__ import annotations

import builtins
import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ortrain.capture.source_files import is_installed


@contextlib.contextmanager
def prints_held_back() -> Iterator[list[str]]:
    """Keep this thread's user code from printing, which would show what stands for its tensors.

    Yields:
      Takes the functions that would have printed.
    """
    original, thread = builtins.print, threading.get_ident()
    found: list[str] = []

    def noted(*args: Any, **kwargs: Any) -> None:
        code = sys._getframe(1).f_code
        if threading.get_ident() != thread or is_installed(code.co_filename):
            original(*args, **kwargs)
        else:
            name = getattr(code, "co_qualname", code.co_name)
            found.append(f"{name} ({code.co_filename}:{code.co_firstlineno})")

    builtins.print = noted
    try:
        yield found
    finally:
        builtins.print = original

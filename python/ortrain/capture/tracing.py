# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which thread traces, and whether this one does."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator

from ortrain.capture.dynamo_internals import nothing_compiles

# Tracing patches classes and settings of PyTorch for all threads. Taken before the lock of an engine.
one_thread_traces = threading.RLock()
_LONGEST_WAIT = 120.0  # seconds
_thread = threading.local()
# What a child process makes anew, where threads that it has not may have held locks.
_renewed_in_children: weakref.WeakSet[RenewedInChildren] = weakref.WeakSet()


class RenewedInChildren:
    """Has locks, which a thread may hold while another one forks."""

    def __init__(self) -> None:
        _renewed_in_children.add(self)

    def renew_locks(self) -> None:
        """Make the locks anew, in a child process."""
        raise NotImplementedError


def _wait_for_traces() -> None:
    """Let no process begin in the middle of a trace by another thread, which would never end there."""
    _thread.waited = one_thread_traces.acquire(timeout=_LONGEST_WAIT)


def _let_trace() -> None:
    if _thread.waited:
        one_thread_traces.release()


def _begin_in_child() -> None:
    _let_trace()
    for each in list(_renewed_in_children):
        each.renew_locks()


os.register_at_fork(
    before=_wait_for_traces, after_in_parent=_let_trace, after_in_child=_begin_in_child
)


@contextlib.contextmanager
def tracing_alone() -> Iterator[bool]:
    """Keep other threads from tracing; gives False where one of them does so for too long.

    Such a thread may be waiting for this one.
    """
    mine = one_thread_traces.acquire(timeout=_LONGEST_WAIT)
    try:
        yield mine
    finally:
        if mine:
            one_thread_traces.release()


def is_capturing() -> bool:
    """Tell whether this thread is inside of a capture, running some module on tensors without data."""
    return getattr(_thread, "captures", 0) > 0


@contextlib.contextmanager
def modules_run_themselves() -> Iterator[None]:
    """Let this thread's ORTModules run in PyTorch for a while, as they do inside of a capture."""
    _thread.captures = getattr(_thread, "captures", 0) + 1
    try:
        yield
    finally:
        _thread.captures -= 1


@contextlib.contextmanager
def capturing_alone() -> Iterator[None]:
    """Enter a capture, once no other thread traces or compiles."""
    with one_thread_traces, nothing_compiles(), modules_run_themselves():
        yield

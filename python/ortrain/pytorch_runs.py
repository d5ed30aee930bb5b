# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What an engine leaves to PyTorch: whole calls, or what is between the pieces of a module."""

from __future__ import annotations

import collections
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ortrain import _core, devices, logs, progress
from ortrain.capture.dynamo_internals import may_compile
from ortrain.capture.dynamo_misreads import misread_by_dynamo
from ortrain.capture.errors import (
    CacheWantedError,
    CaptureError,
    ChangingAttributeError,
    EverNewCallError,
    FailedRunError,
    FirstCallError,
)
from ortrain.capture.guards import sizes_of
from ortrain.capture.signature import FlatCall
from ortrain.capture.tracing import tracing_alone
from ortrain.entry import Entry
from ortrain.errors import VerificationError
from ortrain.fallback import (
    Refused,
    Sizes,
    StateBefore,
    is_refusal,
    is_strict,
    tell_fallback,
)
from ortrain.input_errors import input_error
from ortrain.memory_budget import MemoryBudget
from ortrain.module_states import ModuleStates
from ortrain.random_numbers import DropoutSource
from ortrain.report import CaptureRecord

_log = logs.get_logger("ortrain")

# Graphs for the sizes of one call each, beside one that holds for more and does not run them.
_MOST_FIXED = 4
# Calls in a row for which there is no graph, after which others are not looked at for a while: what a look takes is
# lost, and PyTorch is right in any case.
_REFUSED_CALLS = 4
_LONGEST_PAUSE = 2048
# Calls whose pieces raise where PyTorch does not, after which a module runs there as a whole.
_MOST_FAILURES = 2
# Kinds of calls without a graph that are remembered in case that they come back.
MOST_DECLINED = 256
# What PyTorch's operators raise for arguments that they do not take.
_ERRORS_OF_OPERATORS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)
# Found before anything runs.
_OF_SHAPES = (_core.UnsupportedError, _core.ShapeError, _core.DTypeError)
# Kind of the call, number of the module's state, modes of PyTorch.
Key = tuple[Hashable, int, Hashable]


class Cut(Protocol):
    """Runs a module in pieces, with an engine for each (`ortrain.pieces`)."""

    @property
    def engines(self) -> Sequence[Any]:
        """One per piece."""

    @property
    def breaks(self) -> Sequence[str]:
        """Why the module was cut."""

    @property
    def loss(self) -> str:
        """Why calls like the last one are better left to PyTorch; empty where they are not."""

    @property
    def is_settled(self) -> bool:
        """Whether the last call ran through code that was there."""

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward."""


class PyTorchRuns:
    """The part of an engine that runs calls in PyTorch, and says so; the attributes are the engine's."""

    module: nn.Module
    dropout: DropoutSource
    budget: MemoryBudget | None
    records: list[CaptureRecord]
    _cut: Callable[[nn.Module, DropoutSource], Cut] | None
    _pieces: Cut | None
    _uncut: dict[bool, str]
    _tells: bool
    _told: set[str]
    _told_of_ever_new_calls: bool
    _failures_of_pieces: int
    _left_to: Callable[..., Any] | None
    _left_kind: Hashable
    _refused_calls: int
    _pause_of_refused: int
    _calls_left: int
    _pause: int
    _entries: collections.OrderedDict[Key, list[Entry | Refused]]
    _states: ModuleStates
    _lock: threading.RLock
    _captured: Callable[[], Iterator[Entry]]
    _key: Callable[[FlatCall], Key]
    _keep: Callable[[Key, Entry | Refused], None]
    _piece_engines: Callable[[], Sequence[Any]]

    def _run_instead(
        self,
        entry: Entry,
        call: FlatCall,
        error: Exception,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a call in PyTorch that a graph holds for and has not run; nothing has changed yet.

        Calls of these sizes get a graph of their own, if they come back and it runs them.

        Raises:
          Exception: The engine's error, where PyTorch raises too or may not be asked.
        """
        # What a device finds in values comes late: it may be of another step, whose result is lost.
        late = devices.provider_of(entry.device) != "cpu" and not isinstance(error, _OF_SHAPES)
        if is_strict() or late or not is_refusal(error):
            raise error
        if self.budget is not None:
            if isinstance(error, _core.UnsupportedError):
                self._refuse_outside(error)
            raise error
        try:
            with tracing_alone():
                result = self.module.forward(*args, **kwargs)
        except Exception as refusal:
            if type(refusal) not in _ERRORS_OF_OPERATORS or not isinstance(
                error, (_core.OrtrainError, IndexError)
            ):
                raise
            if isinstance(error, IndexError):  # it names the operator and the index
                raise error from refusal
            raise input_error(
                type(self.module).__name__, refusal, call, self._captured()
            ) from refusal
        with self._lock:
            self._leave_sizes(entry, call, error)
        self.tell_failed_run(error, "shapes that no kernel takes")
        return result

    def _leave_sizes(self, entry: Entry, call: FlatCall, error: Exception) -> None:
        """Keep calls of these sizes away from a graph, and from another capture if it is of no use."""
        sizes = tuple(sizes_of(call.tensors))
        kept = next(
            (e for e in self._entries.items() if any(entry is other for other in e[1])), None
        )
        if len(entry.failed) >= MOST_DECLINED:
            entry.failed.clear()
        entry.failed.add(sizes)
        if kept is None:
            return
        key, entries = kept
        if entry.fixed or has_enough_fixed(entries):
            self._refuse_sizes(key, sizes, error)

    def _refuse_sizes(self, key: Key, sizes: Sizes, error: Exception) -> Refused:
        """Leave calls of these sizes to PyTorch."""
        entries = self._entries.setdefault(key, [])
        refused = next((e for e in entries if isinstance(e, Refused) and e.sizes), None)
        if refused is None:
            failed = FailedRunError(str(error), module=type(self.module).__name__)
            refused = Refused(failed, "", shown=True, sizes=set())
            entries.append(refused)
        refused.sizes.add(sizes)
        if len(refused.sizes) > MOST_DECLINED:
            refused.sizes.pop()
        return refused

    def tell_failed_run(self, error: Exception, reason: str) -> None:
        """Record, and tell, that PyTorch has run what a graph has not; once for each cause."""
        cause = f"{reason}: {re.sub(r'[0-9]+', '#', str(error))}"
        if cause not in self._told:
            self._told.add(cause)
            self._fall_back(error, reason, whole=True)

    def _run_in_pytorch(
        self, refused: Refused, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the module itself; the first time, say so, or say which argument is at fault."""
        whole = isinstance(refused.error, CaptureError) and not refused.error.may_be_cut
        run = self._run_forward if whole else self._run_module
        # Others may be captured yet.
        is_final = not isinstance(refused.error, (EverNewCallError, FirstCallError))
        if refused.shown:
            if is_final:
                self._count_refused(run, args, kwargs)
            return run(args, kwargs)
        try:
            with tracing_alone():  # a trace takes in what other threads run in PyTorch
                result = run(args, kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            if type(error) not in _ERRORS_OF_OPERATORS:
                raise
            name = type(self.module).__name__
            raise input_error(name, error, call, self._captured()) from error
        self._fall_back(refused.error, refused.reason, whole=whole)
        self._told_of_ever_new_calls |= isinstance(refused.error, EverNewCallError)
        refused.shown = True
        if is_final:
            with self._lock:
                self._keep(self._key(call), refused)
        return result

    def _count_refused(
        self, run: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Leave calls like this one alone for a while, if no call has found a graph for some time."""
        self._refused_calls += 1
        if self._refused_calls >= _REFUSED_CALLS and not is_strict() and self.budget is None:
            self._left_to, self._left_kind = run, self._kind(args, kwargs)
            self._calls_left = self._pause_of_refused
            self._pause_of_refused = min(4 * self._pause_of_refused, _LONGEST_PAUSE)

    def _kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """Return what tells calls apart at a glance."""
        return (self.module.training, torch.is_grad_enabled(), len(args), *kwargs)

    def _has_told(self, error: Exception) -> bool:
        return any(record.fallback.startswith(str(error)) for record in self.records)

    def _leave_for_a_while(self) -> None:
        """Run calls in pieces, each time for longer, without looking for a graph."""
        self._left_to = self._run_module
        self._calls_left = self._pause
        self._pause *= 4

    def _run_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.module.forward(*args, **kwargs)

    def _run_module(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module itself, in pieces where it can be cut."""
        with_gradients = torch.is_grad_enabled()
        if self._cut is None or with_gradients in self._uncut or not may_compile():
            return self._run_forward(args, kwargs)
        with self._lock:
            if self._pieces is None and self._cut is not None:
                name, misread = (
                    type(self.module).__name__,
                    misread_by_dynamo(self.module, (args, kwargs)),
                )
                if misread:
                    _log.info("%s runs whole: %s", name, misread)
                    self._cut = None
                else:
                    progress.note(f"{name} is cut in pieces")
                    self._pieces = self._cut(self.module, self.dropout)
            pieces = self._pieces
        if pieces is None:
            return self._run_forward(args, kwargs)
        # A forward may ask whether it is traced, and do then what PyTorch refuses.
        may_ask = not pieces.is_settled and not is_strict()
        before = StateBefore(self.module, args, kwargs) if may_ask else None
        try:
            result = pieces.run(args, kwargs)
        except VerificationError:
            raise
        except _ERRORS_OF_OPERATORS as error:
            if before is None or not before.is_unchanged():
                raise
            before.restore_generators()
            try:
                result = self._run_forward(args, kwargs)
            except Exception:
                raise error from None
            self._failures_of_pieces += 1
            if self._failures_of_pieces >= _MOST_FAILURES:
                self._pieces, self._cut = None, None
            self.tell_failed_run(error, "its pieces raise where PyTorch does not")
            return result
        if pieces.loss:
            self._uncut[with_gradients] = pieces.loss
            _log.info("%s is left to PyTorch: %s", type(self.module).__name__, pieces.loss)
        return result

    def _refuse_outside(self, reason: Exception | str) -> None:
        """Raise UnsupportedError under a budget: what runs outside of a graph has no plan."""
        if self.budget is not None:
            raise _core.UnsupportedError(
                f"max_memory holds for what is one graph, and {type(self.module).__name__} is none "
                f"for this call: {reason}"
            ) from (reason if isinstance(reason, Exception) else None)

    def _fall_back(self, error: Exception, reason: str, *, whole: bool = False) -> None:
        """Record, and tell, that a kind of call runs in PyTorch or in pieces; after its first run.

        Args:
          error: What stands in the way of a graph.
          reason: Why a capture was tried.
          whole: Whether all of the module runs in PyTorch.
        """
        if isinstance(error, ChangingAttributeError) and self._has_told(error):
            return  # another of the states that the forward goes through
        pieces, with_gradients = self._pieces, torch.is_grad_enabled()
        native = sum(any(r.native_nodes for r in e.records) for e in self._piece_engines())
        if native == 0 and pieces is not None:
            self._uncut.setdefault(with_gradients, "")  # nothing is gained
        loss = self._uncut.get(with_gradients)
        whole = whole or loss is not None
        record = CaptureRecord(
            reason=reason,
            training=with_gradients,
            native_nodes=0,
            fallback=f"{error}; {loss}" if loss else str(error),
            aten_nodes=0,
            stages={},
            pieces=0 if whole else native,
            breaks=() if whole or pieces is None else tuple(pieces.breaks),
            first_call=isinstance(error, FirstCallError),
        )
        self.records.append(record)
        if record.first_call:
            _log.info("one call runs in PyTorch: %s", error)
        elif isinstance(error, CacheWantedError):
            _log.info("calls like this one run in PyTorch: %s", error)
        elif self._tells:
            tell_fallback(type(self.module).__name__, record)


def has_enough_fixed(entries: Iterable[Entry | Refused]) -> bool:
    """Tell whether no further call gets a graph for its sizes alone."""
    return sum(isinstance(e, Entry) and e.fixed for e in entries) >= _MOST_FIXED

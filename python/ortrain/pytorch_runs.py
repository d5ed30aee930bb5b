# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Calls of a module that PyTorch runs: whole, or what is between its pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from ortrain import _core, logs, progress
from ortrain.capture.dynamo_internals import may_compile
from ortrain.capture.dynamo_misreads import misread_by_dynamo
from ortrain.capture.errors import CacheWantedError, ChangingAttributeError, FirstCallError
from ortrain.capture.tracing import RenewedInChildren
from ortrain.errors import VerificationError
from ortrain.fallback import StateBefore, is_strict, tell_fallback, without_numbers
from ortrain.memory_budget import MemoryBudget
from ortrain.random_numbers import DropoutSource
from ortrain.report import CaptureRecord

_log = logs.get_logger("ortrain")

# Calls whose pieces raise where PyTorch does not, after which a module runs there as a whole.
_MOST_FAILURES = 2
# What PyTorch's operators raise for arguments that they do not take.
ERRORS_OF_OPERATORS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)


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


class PyTorchRuns(RenewedInChildren):
    """Runs calls of one module in PyTorch, and says so.

    Args:
      module: The module.
      cut: Makes what runs it in pieces; None for never.
      dropout: Who draws the masks of dropout in pieces.
      tells: Whether to warn of what runs in PyTorch; it is recorded in any case.
      budget: Under one nothing runs here.

    Attributes:
      records: Of what was captured, and of what was not; the engine adds to them.
    """

    def __init__(
        self,
        module: nn.Module,
        cut: Callable[[nn.Module, DropoutSource], Cut] | None,
        dropout: DropoutSource,
        *,
        tells: bool,
        budget: MemoryBudget | None,
    ) -> None:
        super().__init__()
        self.records: list[CaptureRecord] = []
        self._module, self._name = module, type(module).__name__
        self._cut, self._dropout = cut, dropout
        self._tells, self._budget = tells, budget
        self._pieces: Cut | None = None
        # Why calls with gradients (True), or without, are not cut any more.
        self._uncut: dict[bool, str] = {}
        self._failures = 0
        self._told: set[str] = set()  # of runs that have failed, numbers left out
        self._warned: set[tuple[bool, str]] = set()  # of whole runs or not, numbers left out
        self.renew_locks()

    def renew_locks(self) -> None:
        """Make the lock anew, in a child process."""
        self._lock = threading.RLock()

    @property
    def engines(self) -> Sequence[Any]:
        """Of the pieces."""
        return self._pieces.engines if self._pieces is not None else ()

    def whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run all of the module in PyTorch."""
        return self._module.forward(*args, **kwargs)

    def in_pieces(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module in pieces where it can be cut, else whole."""
        with_gradients = torch.is_grad_enabled()
        if self._cut is None or with_gradients in self._uncut or not may_compile():
            return self.whole(args, kwargs)
        with self._lock:
            if self._pieces is None and self._cut is not None:
                if misread := misread_by_dynamo(self._module, (args, kwargs)):
                    _log.info("%s runs whole: %s", self._name, misread)
                    self._cut = None
                else:
                    progress.note(f"{self._name} is cut in pieces")
                    self._pieces = self._cut(self._module, self._dropout)
            pieces = self._pieces
        if pieces is None:
            return self.whole(args, kwargs)
        # A forward may ask whether it is traced, and do then what PyTorch refuses.
        may_ask = not pieces.is_settled and not is_strict()
        before = StateBefore(self._module, args, kwargs) if may_ask else None
        try:
            result = pieces.run(args, kwargs)
        except VerificationError:
            raise
        except ERRORS_OF_OPERATORS as error:
            if before is None or not before.is_unchanged():
                raise
            before.restore_generators()
            try:
                result = self.whole(args, kwargs)
            except Exception:
                raise error from None
            self._failures += 1
            if self._failures >= _MOST_FAILURES:
                self._pieces, self._cut = None, None
            self.tell_failed_run(error, "its pieces raise where PyTorch does not")
            return result
        if pieces.loss:
            self._uncut[with_gradients] = pieces.loss
            _log.info("%s is left to PyTorch: %s", self._name, pieces.loss)
        return result

    def refuse(self, reason: Exception | str) -> None:
        """Raise UnsupportedError under a budget: what runs outside of a graph has no plan."""
        if self._budget is not None:
            raise _core.UnsupportedError(
                f"max_memory holds for what is one graph, and {self._name} is none "
                f"for this call: {reason}"
            ) from (reason if isinstance(reason, Exception) else None)

    def has_told(self, error: Exception) -> bool:
        """Tell whether the records have an error."""
        return any(record.fallback.startswith(str(error)) for record in self.records)

    def tell_failed_run(self, error: Exception, reason: str) -> None:
        """Record, and tell, that PyTorch has run what a graph has not; once for each cause."""
        cause = without_numbers(f"{reason}: {error}")
        if cause not in self._told:
            self._told.add(cause)
            self.tell(error, reason, whole=True)

    def tell(self, error: Exception, reason: str, *, whole: bool = False) -> None:
        """Record, and tell, that a kind of call runs in PyTorch or in pieces; after its first run.

        Args:
          error: What stands in the way of a graph.
          reason: Why a capture was tried.
          whole: Whether all of the module runs in PyTorch.
        """
        if isinstance(error, ChangingAttributeError) and self.has_told(error):
            return  # another of the states that the forward goes through
        pieces, with_gradients = self._pieces, torch.is_grad_enabled()
        native = sum(any(r.native_nodes for r in e.records) for e in self.engines)
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
        elif self._tells and (cause := (whole, without_numbers(str(error)))) not in self._warned:
            self._warned.add(cause)  # other states, sizes and numbers have the same
            tell_fallback(self._name, record)

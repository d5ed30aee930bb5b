# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Captured graphs of one module, and running them under PyTorch's autograd."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from ortrain import _core, logs, progress
from ortrain.capture.cache import CacheSlot
from ortrain.capture.captured import environment_key
from ortrain.capture.dynamo_internals import may_compile
from ortrain.capture.errors import (
    CacheWantedError,
    CaptureError,
    ChangingAttributeError,
    EverNewCallError,
    FirstCallError,
    UnseenStateError,
)
from ortrain.capture.export import is_capturing, tracing_alone
from ortrain.capture.guards import sizes_of
from ortrain.capture.names_read import NamesRead
from ortrain.capture.prepare import (
    prepare,
    refuse_hooks,
    refuse_inference_tensors,
    refuse_modes,
)
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.signature import CallSignature, FlatCall
from ortrain.capture.torch_internals import is_fake
from ortrain.entry import Entry
from ortrain.fallback import Refused, is_strict, tell_escapes, tell_fallback
from ortrain.forward_again import ForwardAgain
from ortrain.input_errors import check_devices, input_error
from ortrain.memory_budget import MemoryBudget
from ortrain.module_states import ModuleStates, Tensors
from ortrain.program import Program
from ortrain.random_numbers import DropoutSource
from ortrain.report import CaptureRecord, MemoryPlan
from ortrain.step import execute

_log = logs.get_logger("ortrain")

# Captures in a row, no call in between finding a graph, after which a module is left to PyTorch.
_MOST_MISSES = 8
# Kinds of calls without a graph that are remembered in case that they come back.
_MOST_DECLINED = 256
# What PyTorch's operators raise for arguments that they do not take.
_ERRORS_OF_OPERATORS = (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError)
# Kind of the call, number of the module's state, modes of PyTorch.
_Key = tuple[Hashable, int, Hashable]


class Cut(Protocol):
    """Runs a module in pieces, with an engine for each (`ortrain.pieces`)."""

    @property
    def engines(self) -> Sequence[Engine]:
        """One per piece."""

    @property
    def breaks(self) -> Sequence[str]:
        """Why the module was cut."""

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward."""


class Engine:
    """Runs one module: captures a graph per kind of call, keeps a bounded number of them.

    Args:
      module: The module; its parameters and buffers are used where they are.
      max_graphs: Captured graphs kept per module, the least recently used goes first.
      cut: Makes what runs the module in pieces where no graph holds all of it; None leaves such
        calls to PyTorch.
      tells: Whether to warn of what runs in PyTorch; it is recorded in any case.
      budget: What a plan may take; None for any memory. What would run in PyTorch, where nobody
        knows its memory beforehand, is refused then.
      dropout: Who draws the masks of dropout.
    """

    def __init__(
        self,
        module: nn.Module,
        max_graphs: int = 16,
        *,
        cut: Callable[[nn.Module, DropoutSource], Cut] | None = None,
        tells: bool = True,
        budget: MemoryBudget | None = None,
        dropout: DropoutSource = DropoutSource.ENGINE,
    ) -> None:
        self.module = module
        self.dropout = dropout
        self.budget = budget
        self.max_graphs = max_graphs
        self.records: list[CaptureRecord] = []
        self._cut = cut
        self._pieces: Cut | None = None
        self._tells = tells
        self.last_plan: MemoryPlan | None = None
        self._forward: Callable[..., Any] = module.forward  # that the signature is of
        self.signature = CallSignature(module.forward)
        self._entries: collections.OrderedDict[_Key, list[Entry | Refused]] = (
            collections.OrderedDict()
        )
        self._states = ModuleStates(module)
        # Captures in a row, and for how many states of the module.
        self._misses = self._state_misses = 0
        self._told_of_ever_new_calls = False
        self._declined: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
        self._captured_state = 0
        self._captured_once = False
        # What runs all calls once no graph ever holds for a second one.
        self._left_to: Callable[..., Any] | None = None
        self._lock = threading.RLock()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward on the engine; the result is what the module would return."""
        module = self.module
        if is_capturing():  # a module around this one is
            return module.forward(*args, **kwargs)
        if self._left_to is not None and not is_strict():
            return self._left_to(args, kwargs)
        try:
            refuse_modes()
            if module.forward != self._forward:  # another one was put in its place
                self._forward = module.forward
                self.signature = CallSignature(self._forward)
            if self.signature.asks_for_cache(args, kwargs):
                raise CacheWantedError(
                    "it is asked for a key-value cache, which grows from call to call",
                    module=type(module).__name__,
                )
            call = self.signature.flatten(args, kwargs)
            refuse_inference_tensors(call)
        except CaptureError as error:
            if is_strict():
                raise
            self._refuse_outside(error)
            whole = not error.may_be_cut
            run = self._run_forward if whole else self._run_module
            result = run(args, kwargs)
            if not any(record.fallback == str(error) for record in self.records):
                self._fall_back(error, "", whole=whole)
            return result
        if any(map(is_fake, call.tensors)):  # another thread's capture has handed them to this one
            return module.forward(*args, **kwargs)
        check_devices(call)
        with self._lock:  # while a thread traces, the module holds other tensors
            tensors = self._look_at_module()
            entry = self._find(self._key(call), call)
            if entry is not None:
                self._misses = self._state_misses = 0
        if entry is None:
            with tracing_alone() as alone, self._lock:
                if not alone:
                    _log.warning("another thread captures for long; this call runs in PyTorch")
                    return module.forward(*args, **kwargs)
                self._look_at_module()
                key = self._key(call)
                entry = self._find(key, call) or self._make_entry(key, call, args, kwargs)
                tensors = self._look_at_module()  # tracing may have made some
        if isinstance(entry, Refused):
            return self._run_in_pytorch(entry, call, args, kwargs)
        if entry.writes_to_shared_memory(call):
            self._refuse_outside("it writes to an argument of which another one is a view")
            return module.forward(*args, **kwargs)
        try:
            inputs, targets = entry.inputs(call, tensors), entry.update_targets(call, tensors)
            again = ForwardAgain(self, entry, call) if entry.preferred else None
            outputs = execute(entry, inputs, targets, self._remember_plan, again)
        except _core.UnsupportedError as error:
            if is_strict():
                raise
            self._refuse_outside(error)
            if str(error) not in entry.refused_plans:
                entry.refused_plans.add(str(error))
                self._fall_back(error, "shapes that no kernel takes", whole=True)
            return module.forward(*args, **kwargs)
        except IndexError:  # no target is written yet; PyTorch writes up to the one that it raises
            if not targets or is_strict() or self.budget is not None or entry.record.escapes:
                raise
            return module.forward(*args, **kwargs)
        return entry.results(call, tensors, outputs)

    def owns(self, entry: Entry) -> bool:
        """Tell whether a graph is one of the module itself, and not of a piece or of another module."""
        return any(entry is captured for captured in self._captured())

    def exclusively(self) -> contextlib.AbstractContextManager[Any]:
        """Return what keeps other threads from looking at the module, whose state is another meanwhile."""
        return self._lock

    @property
    def state(self) -> int:
        """The number of the module's state at the last look."""
        return self._states.present

    def is_in_state(self, state: int) -> bool:
        """Tell whether the module is in a state that a call has seen it in."""
        with self._lock:
            self._look_at_module()
            return self._states.present == state

    def places(self) -> dict[str, int]:
        """Return where graphs find each parameter and buffer, by all of its names."""
        with self._lock:
            return self._states.positions()

    @property
    def piece_records(self) -> list[CaptureRecord]:
        """What was captured, and what was not, of the pieces of the module."""
        return [record for engine in self._piece_engines() for record in engine.records]

    def profiles(self) -> list[dict[str, Any]]:
        """Return what was recorded of each graph that is kept, while profiling was on."""
        return [program.session.profile() for program in self._programs()]

    def clear_profiles(self) -> None:
        """Drop what was recorded so far."""
        for program in self._programs():
            program.session.clear_profile()

    def _captured(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from (entry for entry in entries if isinstance(entry, Entry))

    def _piece_engines(self) -> Sequence[Engine]:
        pieces = self._pieces
        return pieces.engines if pieces is not None else ()

    def made_programs(self) -> Iterator[tuple[Entry, Program]]:
        """Return each program of the graphs that are kept, with its graph; those of pieces too."""
        for entry in self._captured():
            yield from ((entry, program) for program in entry.programs.values())
        for engine in self._piece_engines():
            yield from engine.made_programs()

    def _programs(self) -> Iterator[Program]:
        return (program for _, program in self.made_programs())

    def save_graphs(self, folder: Path, prefix: str) -> list[Path]:
        """Write the first graph of each kind as ONNX files, as captured and as it runs."""
        written: dict[str, Path] = {}
        for entry in self._captured():
            kind = "training" if entry.preferred else "inference"
            for stage, graph in (
                ("torch_exported", entry.captured.graph),
                ("execution_model", entry.program(entry.preferred).graph),
            ):
                name = f"{prefix}_{stage}_{kind}.onnx"
                if name not in written:
                    folder.mkdir(parents=True, exist_ok=True)
                    written[name] = folder / name
                    graph.save(folder / name)
        return list(written.values())

    def _remember_plan(self, run: Any) -> None:
        self.last_plan = MemoryPlan.of(run.memory_plan)

    # --- looking up and capturing

    def _look_at_module(self) -> Tensors:
        """Return the module's tensors; forget the states that no kept graph is for."""
        tensors, changed = self._states.look()
        if changed:
            self._states.keep(state for _, state, _ in self._entries)
        return tensors

    def _key(self, call: FlatCall) -> _Key:
        """Return what a captured graph depends on, sizes of the arguments aside."""
        return (call.key, self._states.present, environment_key())

    def _find(self, key: _Key, call: FlatCall) -> Entry | Refused | None:
        entries = self._entries.get(key)
        if entries is None:
            return None
        self._entries.move_to_end(key)
        return next((entry for entry in entries if entry.fits(call)), None)

    def _make_entry(
        self, key: _Key, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Entry | Refused:
        reason = "first call"
        if self._captured_once:
            others = self._entries.get(key)
            if others and isinstance(others[0], Entry):
                broken = others[0].captured.guards.violated(sizes_of(call.tensors))
                reason = f"sizes: {', '.join(broken)}"
            else:
                reason = "the arguments, flags or parameters differ from earlier calls"
            progress.note(f"capturing again: {reason}")
        read = NamesRead()
        try:
            self._refuse_ever_new_calls(key, call)
            entry = self._capture(call, args, kwargs, reason, read)
        except _core.OrtrainError as error:
            if is_strict() or isinstance(error, _core.OutOfMemoryError):
                raise
            if not isinstance(error, FirstCallError):
                self._refuse_outside(error)
            if isinstance(error, ChangingAttributeError):
                self._left_to = self._run_module
            elif isinstance(error, UnseenStateError):
                self._left_to = self._run_forward
            if read.has_begun:
                self._note_reads(read.names())
            self._count_miss(key)
            told = isinstance(error, EverNewCallError) and self._told_of_ever_new_calls
            return Refused(error, reason, shown=told)
        if self._tells or is_strict():
            tell_escapes(type(self.module).__name__, entry.record.escapes)
        self._captured_once = True
        self._count_miss(key)
        self._keep(self._key(call), entry)
        self.records.append(entry.record)
        return entry

    def _refuse_ever_new_calls(self, key: _Key, call: FlatCall) -> None:
        """Raise CaptureError where capturing goes on and on, and no call finds a graph.

        A kind of call that comes back is captured then.
        """
        if self._misses < _MOST_MISSES:
            return
        kind = (key, tuple(sizes_of(call.tensors)))
        if kind in self._declined:
            self._misses = self._state_misses = 0
            return
        self._declined[kind] = None
        if len(self._declined) > _MOST_DECLINED:
            self._declined.popitem(last=False)
        name = type(self.module).__name__
        if self._state_misses >= _MOST_MISSES:
            raise ChangingAttributeError(
                "its attributes or those of its layers change from call to call, and a graph "
                "holds for one state only",
                module=name,
            )
        raise EverNewCallError(
            f"each of the last {self._misses} calls needed a graph of its own, since numbers or "
            "flags among the arguments, or sizes that it holds fixed, differ",
            module=name,
        )

    def _count_miss(self, key: _Key) -> None:
        """Count a call for which there was no graph, and whether the module's state was new."""
        self._misses += 1
        self._state_misses += key[1] != self._captured_state
        self._captured_state = self._states.present

    def _keep(self, key: _Key, entry: Entry | Refused) -> None:
        self._entries.setdefault(key, []).append(entry)
        while sum(map(len, self._entries.values())) > self.max_graphs:
            oldest = next(iter(self._entries))
            self._entries[oldest].pop(0)
            if not self._entries[oldest]:
                del self._entries[oldest]
        self._states.keep(state for _, state, _ in self._entries)

    def _note_reads(
        self, names: frozenset[str] | None, outside: Iterable[torch.Tensor] = ()
    ) -> None:
        """Let states differ in what forwards have read; graphs of the present one stay."""
        before = self._states.present
        variables = ReachableState(self.module, (), keeps_contents=False).variables_named(names)
        self._states.reads(names, variables, outside)
        now = self._states.present
        if now != before:
            kept = (
                (k if k[1] != before else (k[0], now, k[2]), v) for k, v in self._entries.items()
            )
            self._entries = collections.OrderedDict(kept)

    def _capture(
        self,
        call: FlatCall,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        reason: str,
        read: NamesRead,
    ) -> Entry:
        refuse_hooks(self.module)
        stages: dict[str, float] = {}
        slot = CacheSlot(self.module, call, self.dropout)
        prepared = slot.load(stages)
        if prepared is None:
            prepared = prepare(
                self.module, call, args, kwargs, stages, read, self.dropout, standalone=False
            )
            slot.save(prepared)
        # Tracing may have added attributes that a layer makes at its first call.
        self._look_at_module()
        self._note_reads(prepared.names_read, prepared.outside.values())
        return Entry.of(prepared, call, self._states, reason, stages, self.budget)

    # --- running in PyTorch

    def _run_in_pytorch(
        self, refused: Refused, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the module itself; the first time, say so, or say which argument is at fault."""
        whole = isinstance(refused.error, CaptureError) and not refused.error.may_be_cut
        run = self._run_forward if whole else self._run_module
        if refused.shown:
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
        if not isinstance(refused.error, (EverNewCallError, FirstCallError)):  # may be captured yet
            with self._lock:
                self._keep(self._key(call), refused)
        return result

    def _run_forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.module.forward(*args, **kwargs)

    def _run_module(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module itself, in pieces where it can be cut."""
        if self._cut is None or not may_compile():
            return self._run_forward(args, kwargs)
        with self._lock:
            if self._pieces is None and self._cut is not None:
                progress.note(f"{type(self.module).__name__} is cut in pieces")
                self._pieces = self._cut(self.module, self.dropout)
            pieces = self._pieces
        return self._run_forward(args, kwargs) if pieces is None else pieces.run(args, kwargs)

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
        pieces = self._pieces
        native = sum(any(r.native_nodes for r in e.records) for e in self._piece_engines())
        if native == 0 and pieces is not None:
            with self._lock:
                self._cut = self._pieces = pieces = None  # nothing is gained
        record = CaptureRecord(
            reason=reason,
            training=torch.is_grad_enabled(),
            native_nodes=0,
            fallback=str(error),
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

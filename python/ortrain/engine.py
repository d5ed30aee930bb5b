# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Captured graphs of one module, and running them under PyTorch's autograd."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortrain import logs, progress
from ortrain.capture.cache import CacheSlot
from ortrain.capture.captured import environment_key
from ortrain.capture.errors import (
    CacheWantedError,
    CaptureError,
    ChangingAttributeError,
    EverNewCallError,
    FailedRunError,
    FirstCallError,
    UnseenStateError,
)
from ortrain.capture.guards import sizes_of
from ortrain.capture.live_numbers import (
    EveryPath,
    LiveAttributes,
    LiveNumbers,
    fixed_numbers,
)
from ortrain.capture.names_read import NamesRead
from ortrain.capture.prepare import (
    empty_extents,
    prepare,
    refuse_hooks,
    refuse_inference_tensors,
    refuse_modes,
)
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.signature import CallSignature, FlatCall, holds_cache
from ortrain.capture.torch_internals import is_fake
from ortrain.capture.tracing import is_capturing, tracing_alone
from ortrain.entry import Entry
from ortrain.fallback import (
    OUT_OF_MEMORY,
    Refused,
    is_strict,
    tell_escapes,
)
from ortrain.forward_again import ForwardAgain
from ortrain.input_errors import check_devices
from ortrain.memory_budget import MemoryBudget
from ortrain.module_states import ModuleStates, Tensors
from ortrain.program import Program
from ortrain.pytorch_runs import MOST_DECLINED, Cut, Key, PyTorchRuns, has_enough_fixed
from ortrain.random_numbers import DropoutSource
from ortrain.report import CaptureRecord, MemoryPlan
from ortrain.step import ForwardError, execute

_log = logs.get_logger("ortrain")

# Captures in a row, no call in between finding a graph, after which a module is left to PyTorch.
_MOST_MISSES = 8
_IS_CACHE = "its configuration asks for a key-value cache, which grows from call to call"
# Captures in a row, each finding that the forward changes attributes, before a module is left alone for
# a while, and for how many calls at first.
_MOST_CHANGES = 3
_FIRST_PAUSE = 32


class Engine(PyTorchRuns):
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
      any_sizes: Whether graphs are to hold for other sizes than those of their first call.
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
        any_sizes: bool = True,
    ) -> None:
        self.module = module
        self._any_sizes = any_sizes
        self.dropout = dropout
        self.budget = budget
        self.max_graphs = max_graphs
        self.records: list[CaptureRecord] = []
        self._cut = cut
        self._pieces: Cut | None = None
        # Why calls with gradients (True), or without, are not cut any more.
        self._uncut: dict[bool, str] = {}
        self._tells = tells
        self.last_plan: MemoryPlan | None = None
        self._last_plan_id = -1
        self._forward: Callable[..., Any] = module.forward  # that the signature is of
        self.signature = CallSignature(module.forward)
        self._entries: collections.OrderedDict[Key, list[Entry | Refused]] = (
            collections.OrderedDict()
        )
        self._states = ModuleStates(module)
        # Captures in a row, and for how many states of the module.
        self._misses = self._state_misses = 0
        self._told_of_ever_new_calls = False
        self._numbers, self._attributes = LiveNumbers(), LiveAttributes()
        self._told: set[str] = set()  # of runs that have failed, numbers left out
        self._declined: collections.OrderedDict[Hashable, None] = collections.OrderedDict()
        self._captured_state = 0
        self._captured_once = False
        # Whether calls without gradients give a cache for which the configuration asks; None before one.
        self._gives_cache: bool | None = None
        self._failures_of_pieces = 0
        self._changes = 0  # captures in a row that found a forward changing attributes
        # What runs calls without a look at the module, how many of them (0 for all), and of what kind.
        self._left_to: Callable[..., Any] | None = None
        self._calls_left, self._pause = 0, _FIRST_PAUSE
        self._left_kind: Hashable = None  # None for any
        self._refused_calls = 0  # in a row
        self._pause_of_refused = _FIRST_PAUSE
        self._lock = threading.RLock()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward on the engine; the result is what the module would return."""
        module = self.module
        if is_capturing():  # a module around this one is
            return module.forward(*args, **kwargs)
        if self._left_to is not None and not is_strict():
            if self._left_kind in (None, self._kind(args, kwargs)):
                self._calls_left -= 1
                if self._calls_left != 0:
                    return self._left_to(args, kwargs)
            if self._left_kind is None:  # what changed may have come to rest
                self._changes, self._misses = _MOST_CHANGES - 1, 0
                self._state_misses = _MOST_MISSES - 2
            self._left_to = self._left_kind = None
        if (
            self.signature.takes_cache
            and self._gives_cache is not False
            and self._may_give_cache(kwargs)
        ):
            result = module.forward(*args, **kwargs)
            if self._gives_cache is None:
                self._gives_cache = holds_cache(result)
            if self._gives_cache and not any(_IS_CACHE in r.fallback for r in self.records):
                self._fall_back(CacheWantedError(_IS_CACHE), "", whole=True)
            return result
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
            call = self._flatten(args, kwargs)
            refuse_inference_tensors(call)
        except CaptureError as error:
            if is_strict():
                raise
            self._refuse_outside(error)
            whole = not error.may_be_cut
            run = self._run_forward if whole else self._run_module
            result = run(args, kwargs)
            if not self._has_told(error):
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
                if isinstance(entry, Entry):
                    self._changes = self._refused_calls = 0
        if entry is None:
            with tracing_alone() as alone, self._lock:
                if not alone:
                    _log.warning("another thread captures for long; this call runs in PyTorch")
                    return module.forward(*args, **kwargs)
                self._look_at_module()
                call, entry = self._find_or_make(call, args, kwargs)
                tensors = self._look_at_module()  # tracing may have made some
        if isinstance(entry, Refused):
            return self._run_in_pytorch(entry, call, args, kwargs)
        if entry.writes_to_shared_memory(call):
            self._refuse_outside("it writes to an argument of which another one is a view")
            return module.forward(*args, **kwargs)
        inputs, targets = entry.inputs(call, tensors), entry.update_targets(call, tensors)
        again = ForwardAgain(self, entry, call) if entry.preferred else None
        try:
            outputs = execute(entry, inputs, targets, self._remember_plan, again)
        except ForwardError as error:
            failed = error
        else:
            return entry.results(call, tensors, outputs)
        del inputs, targets, again
        return self._run_instead(entry, call, failed.cause, args, kwargs)

    def _may_give_cache(self, kwargs: Mapping[str, Any]) -> bool:
        may = self.signature.may_give_cache(self.module, kwargs)
        return may and self.budget is None and not is_strict()

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
        if run.plan_id != self._last_plan_id:
            self._last_plan_id = run.plan_id
            self.last_plan = MemoryPlan.of(run.memory_plan)

    # --- looking up and capturing

    def _look_at_module(self) -> Tensors:
        """Return the module's tensors; forget the states that no kept graph is for."""
        if self._attributes.are_any:
            with self._attributes.held():
                tensors, changed = self._states.look()
        else:
            tensors, changed = self._states.look()
        if changed:
            self._states.keep(state for _, state, _ in self._entries)
        return tensors

    def _key(self, call: FlatCall) -> Key:
        """Return what a captured graph depends on, sizes of the arguments aside."""
        return (call.key, self._states.present, environment_key())

    def _find(self, key: Key, call: FlatCall) -> Entry | Refused | None:
        entries = self._entries.get(key)
        if entries is None:
            return None
        self._entries.move_to_end(key)
        return next((entry for entry in entries if entry.fits(call)), None)

    def _find_or_make(
        self, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[FlatCall, Entry | Refused]:
        """Return a graph for a call, and the call as it takes it: numbers may be live from now on."""
        entry = self._find(self._key(call), call)
        if entry is not None:
            return call, entry
        more = self._numbers.changed_by(self.signature.flatten(args, kwargs, EveryPath()))
        if self._attributes.changed_in(self.module, self._states.names) or more:
            self._look_at_module()
            call = self._flatten(args, kwargs)
            entry = self._find(self._key(call), call)
        if entry is None and call.numbers:
            entry = self._make_live_entry(call, args, kwargs)
            if entry is None:
                self._look_at_module()
                call = self._flatten(args, kwargs)
        key = self._key(call)
        return call, entry or self._find(key, call) or self._make_entry(key, call, args, kwargs)

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
        return self.signature.flatten(args, kwargs, self._numbers.paths, self._attributes.present())

    def _give_up(self, paths: Collection[str]) -> None:
        self._numbers.give_up(paths)
        self._attributes.give_up(paths)

    def _make_live_entry(
        self, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Entry | None:
        """Capture a call with its numbers as inputs; give up those that a graph does not take so."""
        read, reason = NamesRead(), f"{', '.join(call.numbers)} may be any number"
        try:
            self._refuse_ever_new_calls(self._key(call), call)
            entry = self._capture(call, args, kwargs, reason, read)
        except Exception as error:
            if isinstance(error, OUT_OF_MEMORY):
                raise
            _log.info("numbers stay fixed: %s", error)
            self._give_up(call.numbers)
            return None
        fixed = fixed_numbers(entry.captured.guards, call)
        if read.compares_classes_of_numbers():
            fixed = list(call.numbers)
        if fixed:
            self._give_up(fixed)
            return None
        self._take(entry, self._key(call))
        return entry

    def _make_entry(
        self, key: Key, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Entry | Refused:
        reason = "first call"
        others = self._entries.get(key)
        sizes = tuple(sizes_of(call.tensors))
        failing = next(
            (e for e in others or () if isinstance(e, Entry) and sizes in e.failed), None
        )
        if self._captured_once:
            if failing is not None:
                reason = "sizes that another graph does not run"
            elif others and isinstance(others[0], Entry):
                broken = others[0].captured.guards.violated(sizes_of(call.tensors))
                reason = f"sizes: {', '.join(broken) or 'other extents are 0 or 1'}"
            else:
                reason = "the arguments, flags or parameters differ from earlier calls"
            progress.note(f"capturing again: {reason}")
        read, name = NamesRead(), type(self.module).__name__
        try:
            if failing is not None and has_enough_fixed(others or ()):
                raise FailedRunError("other sizes have graphs of their own", module=name)
            self._refuse_ever_new_calls(key, call)
            entry = self._capture(
                call, args, kwargs, reason, read, dynamic=self._any_sizes and failing is None
            )
        except Exception as error:
            if is_strict() or isinstance(error, OUT_OF_MEMORY):
                raise
            if failing is not None and self.budget is None:
                return self._refuse_sizes(key, sizes, error)
            if not isinstance(error, FirstCallError):
                self._refuse_outside(error)
            if isinstance(error, ChangingAttributeError):
                self._changes += 1
                if self._changes >= _MOST_CHANGES or self._state_misses >= _MOST_MISSES:
                    self._leave_for_a_while()
            elif isinstance(error, UnseenStateError):
                self._left_to = self._run_forward
            if read.has_begun:
                self._note_reads(read.names())
            self._count_miss(key)
            told = isinstance(error, EverNewCallError) and self._told_of_ever_new_calls
            return Refused(error, reason, shown=told)
        self._count_miss(key)
        self._take(entry, self._key(call))
        return entry

    def _take(self, entry: Entry, key: Key) -> None:
        """Keep a graph, and tell of it."""
        if self._tells or is_strict():
            tell_escapes(type(self.module).__name__, entry.record.escapes)
        self._captured_once = True
        self._keep(key, entry)
        self.records.append(entry.record)

    def _refuse_ever_new_calls(self, key: Key, call: FlatCall) -> None:
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
        if len(self._declined) > MOST_DECLINED:
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

    def _count_miss(self, key: Key) -> None:
        """Count a call for which there was no graph, and whether the module's state was new."""
        self._misses += 1
        self._state_misses += key[1] != self._captured_state
        self._captured_state = self._states.present

    def _keep(self, key: Key, entry: Entry | Refused) -> None:
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
        with self._attributes.held():
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
        *,
        dynamic: bool = True,
    ) -> Entry:
        refuse_hooks(self.module)
        stages: dict[str, float] = {}
        varies = dynamic and not any(empty_extents(call))
        kept = varies and not call.numbers
        slot = CacheSlot(self.module, call, self.dropout) if kept else None
        prepared = None if slot is None else slot.load(stages)
        if prepared is None:
            prepared = prepare(
                *(self.module, call, args, kwargs, stages, read, self.dropout),
                dynamic=varies,
                standalone=False,
            )
            if slot is not None:
                slot.save(prepared)
        # Tracing may have added attributes that a layer makes at its first call.
        self._look_at_module()
        self._note_reads(prepared.names_read, prepared.outside.values())
        entry = Entry.of(prepared, call, self._states, reason, stages, self.budget)
        entry.fixed = not dynamic
        return entry

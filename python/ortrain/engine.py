# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Captured graphs of one module, and running them under PyTorch's autograd."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from ortrain import _core, devices, logs, progress
from ortrain.attempts import Attempts
from ortrain.capture.branches import BranchError
from ortrain.capture.cache import CacheSlot
from ortrain.capture.captured import environment_key
from ortrain.capture.compared_state import variables_of
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
from ortrain.capture.library_reads import Variable
from ortrain.capture.live_numbers import (
    EveryPath,
    LiveAttributes,
    LiveNumbers,
    fixed_numbers,
)
from ortrain.capture.names_read import NamesRead, OthersFunctions
from ortrain.capture.prepare import (
    empty_extents,
    prepare,
    refuse_encoder_fast_path,
    refuse_hooks,
    refuse_inference_tensors,
    refuse_modes,
)
from ortrain.capture.signature import CallSignature, FlatCall, holds_cache
from ortrain.capture.source_files import take_for_own
from ortrain.capture.torch_internals import has_hooks_of_saved_tensors, is_fake
from ortrain.capture.tracing import RenewedInChildren, is_capturing, tracing_alone
from ortrain.entry import Entry
from ortrain.fallback import (
    OUT_OF_MEMORY,
    Refused,
    is_refusal,
    is_strict,
    tell_escapes,
)
from ortrain.forward_again import ForwardAgain
from ortrain.input_errors import input_error, is_raised_by_code, unsupported_device
from ortrain.kept_graphs import KeptGraphs, Key
from ortrain.known_branches import KnownBranches
from ortrain.memory_budget import MemoryBudget
from ortrain.module_states import ModuleStates, Tensors
from ortrain.program import Program
from ortrain.pytorch_runs import ERRORS_OF_OPERATORS, Cut, PyTorchRuns
from ortrain.random_numbers import DropoutSource
from ortrain.report import CaptureRecord, MemoryPlan
from ortrain.step import ForwardError, execute

_log = logs.get_logger("ortrain")

_IS_CACHE = "its configuration asks for a key-value cache, which grows from call to call"
# Found before anything runs.
_OF_SHAPES = (_core.UnsupportedError, _core.ShapeError, _core.DTypeError)


class Engine(RenewedInChildren):
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
      any_gradients: Whether a graph is taken whose results want other gradients than PyTorch's: who compares the
        two wants to see that. Such graphs are not kept on disk.
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
        any_gradients: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self._any_sizes = any_sizes
        self._any_gradients = any_gradients
        self.dropout = dropout
        self.budget = budget
        self._pytorch = PyTorchRuns(module, cut, dropout, tells=tells, budget=budget)
        self.records: list[CaptureRecord] = self._pytorch.records
        self.saves: tuple[Path, str] | None = (
            None  # where graphs are written when they are captured
        )
        self._tells = tells
        self.last_plan: MemoryPlan | None = None
        self._last_plan_id = -1
        self._forward: Callable[..., Any] = module.forward  # that the signature is of
        self.signature = _signature_of(module.forward)
        name = type(module).__name__
        self._states = ModuleStates(module)
        self._graphs = KeptGraphs(name, max_graphs, self._states)
        self._attempts = Attempts(name)
        self._branches = KnownBranches()
        self._told_of_ever_new_calls = False
        self._told_escapes: set[str] = set()
        self._numbers, self._attributes = LiveNumbers(), LiveAttributes()
        self._captured_once = False
        # Whether calls without gradients give a cache for which the configuration asks; None before one.
        self._gives_cache: bool | None = None
        self.renew_locks()

    def renew_locks(self) -> None:
        """Make the lock anew, in a child process."""
        self._lock = threading.RLock()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward on the engine; the result is what the module would return."""
        module = self.module
        # A module around this one is captured, or TorchScript records PyTorch's operators.
        if is_capturing() or torch.jit.is_tracing():
            return module.forward(*args, **kwargs)
        if self._attempts.left_to is not None and not is_strict():
            run_it = self._attempts.run_of(self._kind(args, kwargs))
            if run_it is not None:
                return run_it(args, kwargs)
        if (
            self.signature.takes_cache
            and self._gives_cache is not False
            and self._may_give_cache(kwargs)
        ):
            result = module.forward(*args, **kwargs)
            if self._gives_cache is None:
                self._gives_cache = holds_cache(result)
            if self._gives_cache and not any(_IS_CACHE in r.fallback for r in self.records):
                self._pytorch.tell(CacheWantedError(_IS_CACHE), "", whole=True)
            return result
        try:
            refuse_modes()
            if module.forward != self._forward:  # another one was put in its place
                self._forward = module.forward
                self.signature = _signature_of(self._forward)
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
            self._pytorch.refuse(error)
            whole = not error.may_be_cut
            run = self._pytorch.whole if whole else self._pytorch.in_pieces
            result = run(args, kwargs)
            if not self._pytorch.has_told(error):
                self._pytorch.tell(error, "", whole=whole)
            return result
        if any(map(is_fake, call.tensors)):  # another thread's capture has handed them to this one
            return module.forward(*args, **kwargs)
        if device := unsupported_device(call, module):
            return self._run_for_once(device, "device", args, kwargs)
        with self._lock:  # while a thread traces, the module holds other tensors
            tensors = self._look_at_module()
            entry = self._graphs.find(self._key(call), call)
            if entry is not None:
                self._attempts.found(is_graph=isinstance(entry, Entry))
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
        if entry.writes_to_shared_memory(call, tensors):
            text = "it writes to memory in which another of its tensors lies"
            return self._run_for_once(text, "shared memory", args, kwargs)
        if entry.takes_for_dense(call):
            text = entry.captured.HAS_GAPS
            return self._run_for_once(text, "memory of arguments", args, kwargs)
        if entry.updates and has_hooks_of_saved_tensors():
            text = "it writes to a buffer under hooks of saved tensors: a checkpoint does so twice"
            return self._run_for_once(text, "checkpoint", args, kwargs)
        inputs, targets = entry.inputs(call, tensors), entry.update_targets(call, tensors)
        again = ForwardAgain(self, entry, call) if entry.preferred else None
        try:
            outputs = execute(entry, inputs, targets, self._remember_plan, again)
        except ForwardError as error:
            failure = error.cause
        else:
            return entry.results(call, tensors, outputs)
        del inputs, targets, again
        # The way that values do not go may also raise.
        if entry.captured.branches and is_refusal(failure):
            return self._run_other_way(entry, call, failure, args, kwargs)
        return self._run_instead(entry, call, failure, args, kwargs)

    def _run_for_once(
        self, reason: str, kind: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run this call in PyTorch, for a reason that is none of the graph's."""
        error = CaptureError(reason, module=type(self.module).__name__)
        self._pytorch.refuse(error)
        result = self.module.forward(*args, **kwargs)
        self._pytorch.tell_failed_run(error, kind)
        return result

    def _may_give_cache(self, kwargs: Mapping[str, Any]) -> bool:
        may = self.signature.may_give_cache(self.module, kwargs)
        return may and self.budget is None and not is_strict()

    def owns(self, entry: Entry) -> bool:
        """Tell whether a graph is one of the module itself, and not of a piece or of another module."""
        return any(entry is captured for captured in self._graphs)

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
        return [record for engine in self.piece_engines for record in engine.records]

    def profiles(self) -> list[dict[str, Any]]:
        """Return what was recorded of each graph that is kept, while profiling was on."""
        return [program.session.profile() for program in self._programs()]

    def clear_profiles(self) -> None:
        """Drop what was recorded so far."""
        for program in self._programs():
            program.session.clear_profile()

    def graphs(self) -> Iterator[Entry]:
        """Return each graph of the module itself that is kept."""
        return iter(self._graphs)

    @property
    def piece_engines(self) -> Sequence[Engine]:
        """One for each piece that the module has been cut into."""
        return self._pytorch.engines

    def made_programs(self) -> Iterator[tuple[Entry, Program]]:
        """Return each program of the graphs that are kept, with its graph; those of pieces too."""
        for entry in self._graphs:
            yield from ((entry, program) for program in entry.programs.values())
        for engine in self.piece_engines:
            yield from engine.made_programs()

    def _programs(self) -> Iterator[Program]:
        return (program for _, program in self.made_programs())

    def save_graphs(self, folder: Path, prefix: str) -> list[Path]:
        """Write the first graph of each kind as ONNX files: as captured, with its backward, as it runs."""
        written: list[Path] = []
        kinds: set[str] = set()
        for entry in self._graphs:
            kind = "training" if entry.preferred else "inference"
            if kind in kinds:
                continue
            kinds.add(kind)
            folder.mkdir(parents=True, exist_ok=True)
            captured = entry.captured.graph
            graphs = {"torch_exported": captured, "optimized": captured}
            if entry.preferred:
                graphs |= {"optimized_pre_grad": captured, "optimized": captured.copy()}
                graphs["optimized"].build_backward(list(entry.preferred))
            graphs["execution_model"] = entry.program(entry.preferred).graph
            for stage, graph in graphs.items():
                written.append(folder / f"{prefix}_{stage}_{kind}.onnx")
                graph.save(written[-1])
        return written

    def _remember_plan(self, run: Any) -> None:
        if run.plan_id != self._last_plan_id:
            self._last_plan_id = run.plan_id
            self.last_plan = MemoryPlan.of(run.memory_plan)

    # --- runs in PyTorch

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
                self._pytorch.refuse(error)
            raise error
        try:
            with tracing_alone():
                result = self._pytorch.whole(args, kwargs)
        except Exception as refusal:
            is_operators = type(refusal) in ERRORS_OF_OPERATORS and not is_raised_by_code(refusal)
            if not is_operators or not isinstance(error, (_core.OrtrainError, IndexError)):
                raise
            if isinstance(error, IndexError):  # it names the operator and the index
                raise type(refusal)(str(error)) from refusal
            raise self._input_error(refusal, call) from refusal
        with self._lock:
            self._graphs.leave_sizes(entry, call, error)
        self._pytorch.tell_failed_run(error, "shapes that no kernel takes")
        return result

    def _run_other_way(
        self,
        entry: Entry,
        call: FlatCall,
        error: Exception,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run a call in PyTorch whose values branch another way than those that its graph was made for."""
        error.__traceback__ = None  # it holds what the run has made
        with self._lock:
            if not self._branches.are_worth_it(entry):
                self._branches.forget(self._branch_key(call))
                self._graphs.drop(entry)
                _log.info("%s, as often before: such calls have no graph any more", error)
        result = self._pytorch.whole(args, kwargs)
        _log.info("one call runs in PyTorch: %s", error)
        return result

    def tell_failed_run(self, error: Exception, reason: str) -> None:
        """Record, and tell, that PyTorch has run what a graph has not; once for each cause."""
        self._pytorch.tell_failed_run(error, reason)

    def _input_error(self, error: Exception, call: FlatCall) -> Exception:
        return input_error(type(self.module).__name__, error, call, self._graphs)

    def _run_in_pytorch(
        self, refused: Refused, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the module itself; the first time, say so, or say which argument is at fault."""
        whole = isinstance(refused.error, CaptureError) and not refused.error.may_be_cut
        run = self._pytorch.whole if whole else self._pytorch.in_pieces
        # Others may be captured yet.
        is_final = not isinstance(refused.error, (EverNewCallError, FirstCallError))
        if refused.shown:
            if is_final:
                may_pause = not is_strict() and self.budget is None
                self._attempts.refused(run, self._kind(args, kwargs), may_pause=may_pause)
            return run(args, kwargs)
        looks = isinstance(refused.error, BranchError)
        seen = (
            self._branches.recorded(self._branch_key(call)) if looks else contextlib.nullcontext()
        )
        try:
            # A trace takes in what other threads run in PyTorch.
            with tracing_alone() as alone, seen if alone else contextlib.nullcontext():
                result = run(args, kwargs)
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            if type(error) not in ERRORS_OF_OPERATORS or is_raised_by_code(error):
                raise
            raise self._input_error(error, call) from error
        self._pytorch.tell(refused.error, refused.reason, whole=whole)
        self._told_of_ever_new_calls |= isinstance(refused.error, EverNewCallError)
        refused.shown = True
        if is_final:
            with self._lock:
                self._graphs.keep(self._key(call), refused)
        return result

    def _kind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
        """Return what tells calls apart at a glance."""
        return (self.module.training, torch.is_grad_enabled(), len(args), *kwargs)

    def _branch_key(self, call: FlatCall) -> Hashable:
        """Return what tells calls apart whose branches may be others."""
        flags = tuple(layer.training for layer in self.module.modules())
        return (call.key, flags, torch.is_grad_enabled())

    # --- looking up and capturing

    def _look_at_module(self) -> Tensors:
        """Return the module's tensors; forget the states that no kept graph is for."""
        if self._attributes.are_any:
            with self._attributes.held():
                tensors, changed = self._states.look()
        else:
            tensors, changed = self._states.look()
        if changed:
            self._graphs.forget_states()
        return tensors

    def _key(self, call: FlatCall) -> Key:
        """Return what a captured graph depends on, sizes of the arguments aside."""
        return (call.key, self._states.present, environment_key())

    def _find_or_make(
        self, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[FlatCall, Entry | Refused]:
        """Return a graph for a call, and the call as it takes it: numbers may be live from now on."""
        entry = self._graphs.find(self._key(call), call)
        if entry is not None:
            return call, entry
        more = self._numbers.changed_by(self.signature.flatten(args, kwargs, EveryPath()))
        if self._attributes.changed_in(self.module, self._states.names) or more:
            self._look_at_module()
            call = self._flatten(args, kwargs)
            entry = self._graphs.find(self._key(call), call)
        if entry is None and call.numbers:
            entry = self._make_live_entry(call, args, kwargs)
            if entry is None:
                self._look_at_module()
                call = self._flatten(args, kwargs)
        key = self._key(call)
        entry = entry or self._graphs.find(key, call)
        return call, entry or self._make_entry(key, call, args, kwargs)

    def _flatten(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> FlatCall:
        return self.signature.flatten(args, kwargs, self._numbers.paths, self._attributes.present())

    def _give_up(self, paths: Collection[str]) -> None:
        self._numbers.give_up(paths)
        self._attributes.give_up(paths)

    def _make_live_entry(
        self, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Entry | Refused | None:
        """Capture a call with its numbers as inputs; give up those that a graph does not take so."""
        if self._attempts.is_waiting:
            return None
        read, reason = NamesRead(), f"{', '.join(call.numbers)} may be any number"
        try:
            self._attempts.refuse_ever_new_calls((self._key(call), tuple(sizes_of(call.tensors))))
            entry = self._capture(call, args, kwargs, reason, read)
        except Exception as error:
            if isinstance(error, OUT_OF_MEMORY):
                raise
            if self._looks_for_branches(call, error):
                return self._refused(_seen_in_pytorch(error), reason, read, self._key(call))
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
        others = self._graphs.of(key)
        sizes = tuple(sizes_of(call.tensors))
        failing = next((e for e in others if isinstance(e, Entry) and sizes in e.failed), None)
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
            if failing is not None and self._graphs.has_enough_fixed(key):
                raise FailedRunError("other sizes have graphs of their own", module=name)
            self._attempts.refuse_ever_new_calls((key, sizes))
            entry = self._capture(
                call, args, kwargs, reason, read, dynamic=self._any_sizes and failing is None
            )
        except Exception as error:
            if is_strict() or isinstance(error, OUT_OF_MEMORY):
                raise
            if failing is not None and self.budget is None:
                return self._graphs.refuse_sizes(key, sizes, error)
            if self._looks_for_branches(call, error):
                error = _seen_in_pytorch(error)
            if not isinstance(error, FirstCallError):
                self._pytorch.refuse(error)
            if isinstance(error, ChangingAttributeError):
                self._attempts.found_changes(self._pytorch.in_pieces)
            elif isinstance(error, UnseenStateError):
                self._attempts.leave_to(self._pytorch.whole)
            return self._refused(error, reason, read, key)
        self._attempts.missed(key[1], self._states.present)
        self._take(entry, self._key(call))
        return entry

    def _refused(self, error: Exception, reason: str, read: NamesRead, key: Key) -> Refused:
        """Take note of a call without a graph, and of what its trace has read."""
        if read.has_begun:
            self._note_reads(read.names())
        if not isinstance(error, BranchError) or not self._branches.looks_are_few:
            self._attempts.missed(key[1], self._states.present)
        told = isinstance(error, EverNewCallError) and self._told_of_ever_new_calls
        return Refused(error, reason, shown=told)

    def _looks_for_branches(self, call: FlatCall, error: Exception) -> TypeGuard[CaptureError]:
        """Tell whether a capture has failed since nobody knows yet how branches on values go."""
        if self.budget is not None or is_strict():
            return False
        return self._branches.may_help(self._branch_key(call), call, error)

    def _take(self, entry: Entry, key: Key) -> None:
        """Keep a graph, and tell of it."""
        if self._tells or is_strict():
            tell_escapes(type(self.module).__name__, entry.record.escapes, self._told_escapes)
        self._captured_once = True
        has_dropped = self._graphs.keep(key, entry)
        if has_dropped and self.budget is None and not is_strict():
            self._attempts.dropped()
        self.records.append(entry.record)
        if self.saves is not None:
            self.save_graphs(*self.saves)

    def _note_reads(
        self,
        names: frozenset[str] | None,
        outside: Iterable[torch.Tensor] = (),
        variables: Iterable[Variable] | None = None,
        others: OthersFunctions = OthersFunctions(),  # noqa: B008
    ) -> None:
        """Let states differ in what forwards have read; graphs of the present one stay."""
        before = self._states.present
        if variables is None:
            variables = variables_of(self.module, names, others)
        with self._attributes.held():
            self._states.reads(names, variables, outside)
        now = self._states.present
        if now != before:
            self._graphs.renumber(before, now)

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
        take_for_own(type(layer) for layer in self.module.modules())  # before anything is keyed
        refuse_hooks(self.module)
        refuse_encoder_fast_path(self.module)
        stages: dict[str, float] = {}
        varies = dynamic and not any(empty_extents(call))
        branches = self._branches.of(self._branch_key(call))
        kept = varies and not (call.numbers or self._any_gradients or branches)
        slot = CacheSlot(self.module, call, self.dropout) if kept else None
        prepared = None if slot is None else slot.load(stages)
        with read.making():
            if prepared is None:
                prepared = prepare(
                    *(self.module, call, args, kwargs, stages, read, self.dropout),
                    dynamic=varies,
                    standalone=False,
                    any_gradients=self._any_gradients,
                    branches=branches,
                )
                if slot is not None:
                    slot.save(prepared)
            # Tracing may have added attributes that a layer makes at its first call.
            self._look_at_module()
            variables = None if slot is None else slot.variables
            outside = prepared.outside.values()
            self._note_reads(prepared.names_read, outside, variables, prepared.others)
            entry = Entry.of(prepared, call, self._states, reason, stages, self.budget)
        entry.fixed = not dynamic
        return entry


def _seen_in_pytorch(error: CaptureError) -> BranchError:
    return BranchError(error.reason, module=error.module, source=error.source)


def _signature_of(forward: Callable[..., Any]) -> CallSignature:
    """Return the signature of a forward; one of any arguments where Python finds none (TorchScript, odd callables)."""
    try:
        return CallSignature(forward)
    except ValueError:

        def takes_any(*args: Any, **kwargs: Any) -> None: ...

        return CallSignature(takes_any)

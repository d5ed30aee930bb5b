# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Captured graphs of one module, and running them under PyTorch's autograd."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ortrain import _core
from ortrain.capture.cache import CacheSlot
from ortrain.capture.captured import environment_key
from ortrain.capture.errors import CaptureError, ChangingAttributeError
from ortrain.capture.guards import sizes_of
from ortrain.capture.prepare import prepare, refuse_hooks
from ortrain.capture.signature import CallSignature, FlatCall
from ortrain.entry import Entry
from ortrain.fallback import Refused, fall_back, is_strict, tell_escapes
from ortrain.input_errors import check_devices, input_error
from ortrain.module_states import ModuleStates, Tensors
from ortrain.program import Program
from ortrain.report import CaptureRecord, MemoryPlan
from ortrain.step import execute

_log = logging.getLogger("ortrain")

# Captures in a row, no call in between finding a graph, after which a module is left to PyTorch.
_MOST_MISSES = 8
# Kind of the call, number of the module's state, modes of PyTorch.
_Key = tuple[Hashable, int, Hashable]


class Engine:
    """Runs one module: captures a graph per kind of call, keeps a bounded number of them.

    Args:
      module: The module; its parameters and buffers are used where they are.
      max_graphs: Captured graphs kept per module, the least recently used goes first.
    """

    def __init__(self, module: nn.Module, max_graphs: int = 16) -> None:
        self.module = module
        self.max_graphs = max_graphs
        self.records: list[CaptureRecord] = []
        self.last_plan: MemoryPlan | None = None
        self._signature = CallSignature(module.forward)
        self._entries: collections.OrderedDict[_Key, list[Entry | Refused]] = (
            collections.OrderedDict()
        )
        self._states = ModuleStates(module)
        # Captures in a row for as many states of the module.
        self._misses = 0
        self._captured_state = 0
        self._captured_once = False
        self._changes_attributes = False
        self._lock = threading.RLock()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward on the engine; the result is what the module would return."""
        module = self.module
        if self._changes_attributes and not is_strict():
            return module.forward(*args, **kwargs)
        try:
            call = self._signature.flatten(args, kwargs)
        except CaptureError as error:
            if is_strict():
                raise
            if not any(record.fallback == str(error) for record in self.records):
                self._fall_back(error, "")
            return module.forward(*args, **kwargs)
        check_devices(call)
        with self._lock:  # while a thread traces, the module holds other tensors
            tensors = self._look_at_module()
            key = self._key(call)
            entry = self._find(key, call)
            if entry is not None:
                self._misses = 0
            else:
                entry = self._make_entry(key, call, args, kwargs)
                tensors = self._look_at_module()  # tracing may have made some
        if isinstance(entry, Refused):
            return self._run_in_pytorch(entry, call, args, kwargs)
        if entry.writes_to_shared_memory(call):
            return module.forward(*args, **kwargs)
        try:
            inputs, targets = entry.inputs(call, tensors), entry.update_targets(call, tensors)
            outputs = execute(entry, inputs, targets, self._remember_plan)
        except _core.UnsupportedError as error:
            if is_strict():
                raise
            if str(error) not in entry.refused_plans:
                entry.refused_plans.add(str(error))
                self._fall_back(error, "shapes that no kernel takes")
            return module.forward(*args, **kwargs)
        return entry.captured.output_tree.rebuild(outputs)

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

    def _programs(self) -> Iterator[Program]:
        for entry in self._captured():
            yield from entry.programs.values()

    def _remember_plan(self, run: Any) -> None:
        self.last_plan = MemoryPlan(**run.memory_plan)

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
            _log.info("capturing again: %s", reason)
        try:
            if self._misses >= _MOST_MISSES:
                raise ChangingAttributeError(
                    "its attributes or those of its layers change from call to call, and a graph "
                    "holds for one state only",
                    module=type(self.module).__name__,
                )
            entry = self._capture(call, args, kwargs, reason)
        except _core.OrtrainError as error:
            if is_strict() or isinstance(error, _core.OutOfMemoryError):
                raise
            self._changes_attributes = isinstance(error, ChangingAttributeError)
            self._count_miss(key)
            return Refused(error, reason)
        tell_escapes(type(self.module).__name__, entry.record.escapes)
        self._captured_once = True
        self._count_miss(key)
        self._keep(call, entry)
        self.records.append(entry.record)
        return entry

    def _count_miss(self, key: _Key) -> None:
        """Count a state of the module for which there was no graph, if it is a new one."""
        self._misses += key[1] != self._captured_state
        self._captured_state = self._states.present

    def _keep(self, call: FlatCall, entry: Entry | Refused) -> None:
        self._entries.setdefault(self._key(call), []).append(entry)
        while sum(map(len, self._entries.values())) > self.max_graphs:
            oldest = next(iter(self._entries))
            self._entries[oldest].pop(0)
            if not self._entries[oldest]:
                del self._entries[oldest]
        self._states.keep(state for _, state, _ in self._entries)

    def _capture(
        self, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str
    ) -> Entry:
        refuse_hooks(self.module)
        stages: dict[str, float] = {}
        slot = CacheSlot(self.module, call)
        prepared = slot.load(stages)
        if prepared is None:
            prepared = prepare(self.module, call, args, kwargs, stages)
            slot.save(prepared)
        # Tracing may have added attributes that a layer makes at its first call.
        self._look_at_module()
        return Entry.of(prepared, call, self._states, reason, stages)

    # --- running in PyTorch

    def _run_in_pytorch(
        self, refused: Refused, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run the module itself; the first time, say so, or say which argument is at fault."""
        if refused.shown:
            return self.module.forward(*args, **kwargs)
        try:
            result = self.module.forward(*args, **kwargs)
        except Exception as error:
            name = type(self.module).__name__
            raise input_error(name, error, call, self._captured()) from error
        self._fall_back(refused.error, refused.reason)
        refused.shown = True
        with self._lock:
            self._keep(call, refused)
        return result

    def _fall_back(self, error: Exception, reason: str) -> None:
        self.records.append(fall_back(type(self.module).__name__, error, reason))

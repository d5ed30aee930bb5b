# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Captured graphs of one module, and running them under PyTorch's autograd."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import os
import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortrain import _core, progress
from ortrain.capture.cache import CacheSlot
from ortrain.capture.convert import convert
from ortrain.capture.convert.registry import conversion
from ortrain.capture.dtypes import TORCH_DTYPE
from ortrain.capture.errors import CaptureError, ChangingAttributeError
from ortrain.capture.export import CapturedModule, capture, environment_key
from ortrain.capture.guards import sizes_of
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.signature import CallSignature, FlatCall
from ortrain.capture.torch_internals import has_global_module_hooks, is_fake
from ortrain.module_states import ModuleStates
from ortrain.report import CaptureRecord, MemoryPlan
from ortrain.row_selection import RowSelection

_log = logging.getLogger("ortrain")

# Captures in a row, no call in between finding a graph, after which a module is left to PyTorch.
_MOST_MISSES = 8
_SUPPORTED_DEVICES = frozenset({"cpu"})
_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# Operators whose result may share the memory of their first input.
_VIEWS = frozenset(
    {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "StopGradient", "Slice", "Split"}
    | {"Transpose", "Expand", "SumToShape"}
)


# Kind of the call, number of the module's state, modes of PyTorch.
_Key = tuple[Hashable, int, Hashable]
# Which graph of an entry: None for all rows, else the packed one with or without causal masks.
_Form = bool | None


class _Program:
    """A graph ready to run: forward only, or with the gradient of some of its outputs."""

    def __init__(self, graph: Any, outputs: tuple[int, ...], form: _Form) -> None:
        self.gradient_of = outputs
        self.form = form
        stages: dict[str, float] = {}
        graph = graph.copy()
        if outputs:
            with progress.stage("autodiff") as timing:
                graph.build_backward(list(outputs))
            stages["autodiff"] = timing.seconds
        with progress.stage("passes") as timing:
            graph.run_passes("fuse")
        stages["passes"] = timing.seconds
        self.stages = stages
        self.num_nodes = graph.num_nodes
        self.session = _core.Session(graph)
        self.graph = graph
        # Positions: which outputs get a gradient handed in, which inputs get one handed out.
        names = [o["name"] for o in graph.outputs if o["role"] == "user"]
        self.incoming = [names.index(i["target"]) for i in graph.inputs if i["role"] == "gradient"]
        inputs = [i["name"] for i in graph.inputs if i["role"] != "gradient"]
        self.outgoing = [
            inputs.index(o["target"]) for o in graph.outputs if o["role"] == "gradient"
        ]
        late = _values_read_by_backward(graph)
        self.late_inputs = [i for i, name in enumerate(inputs) if name in late]
        user = [o["value"] for o in graph.outputs if o["role"] == "user"]
        self.late_outputs = [i for i, name in enumerate(user) if name in late]


def _values_read_by_backward(graph: Any) -> set[str]:
    """Return the names of the values whose memory backward nodes read, through views too."""
    nodes = graph.nodes()
    reading = [n for n in nodes if n["phase"] == "backward" and n["op"] != "Shape"]
    late = {name for node in reading for name in node["inputs"]}
    views = [node for node in nodes if node["op"] in _VIEWS]
    for node in reversed(views):
        if not late.isdisjoint(node["outputs"]):
            late.add(node["inputs"][0])
    for node in views:
        if node["inputs"][0] in late:
            late.update(node["outputs"])
    return late


@dataclasses.dataclass(slots=True)
class _Entry:
    """One captured graph with the programs made of it, or a signature that runs in PyTorch."""

    captured: PreparedGraph | None
    graph: Any
    tensors: list[tuple[str, Any]]  # per graph input: ("user", index), ("module", slot), ("seed",)
    differentiable: list[bool]  # per user output
    updates: list[tuple[int, str, Any]]  # (position among outputs, "buffer" | "input", where)
    num_user_outputs: int
    programs: dict[tuple[_Form, tuple[int, ...]], _Program]
    preferred: tuple[int, ...]
    record: CaptureRecord
    planned: bool = False
    # Finds the rows that a call needs, where not all of them can be seen outside.
    rows: RowSelection | None = None
    # Which extents of the inputs are 1, where the graph depends on that; else None.
    ones: tuple[Any, ...] | None = None
    # Why it runs in PyTorch, until PyTorch has shown that it takes the call.
    refusal: Exception | None = None
    # What the plan of some shapes was refused for; those calls run in PyTorch.
    refused_plans: set[str] = dataclasses.field(default_factory=set)

    def fits(self, call: FlatCall) -> bool:
        if self.captured is None:
            return True
        if self.ones is not None and self.ones != _extents_of_one(call):
            return False
        return self.captured.guards.holds(sizes_of(call.tensors))

    def program(self, gradient_of: tuple[int, ...], form: _Form = None) -> _Program:
        made = self.programs.get((form, gradient_of))
        if made is None:
            graph = self.graph
            if form is not None and self.rows is not None:
                graph = self.rows.packed(form)
            made = self.programs[form, gradient_of] = _Program(graph, gradient_of, form)
            for name, seconds in made.stages.items():
                self.record.stages[name] = self.record.stages.get(name, 0.0) + seconds
        return made


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
        self._entries: collections.OrderedDict[_Key, list[_Entry]] = collections.OrderedDict()
        self._states = ModuleStates(module)
        # Captures in a row for as many states of the module.
        self._misses = 0
        self._captured_state = 0
        self._captured_once = False
        self._changes_attributes = False

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the module's forward on the engine; the result is what the module would return."""
        module = self.module
        if self._changes_attributes and not _strict():
            return module.forward(*args, **kwargs)
        try:
            call = self._signature.flatten(args, kwargs)
        except CaptureError as error:
            if _strict():
                raise
            if not any(record.fallback == str(error) for record in self.records):
                self._warn(error)
                self.records.append(
                    CaptureRecord("", torch.is_grad_enabled(), 0, str(error), 0, {})
                )
            return module.forward(*args, **kwargs)
        self._check_devices(call)
        self._look_at_module()
        key = self._key(call)
        entry = self._find(key, call)
        if entry is not None:
            self._misses = 0
        else:
            entry = self._make_entry(key, call, args, kwargs)
        if entry.captured is None:
            return self._run_in_pytorch(entry, call, args, kwargs)
        tensors = self._states.tensors
        inputs = [self._input(source, call, tensors) for source in entry.tensors]
        try:
            outputs = self._execute(entry, inputs)
        except _core.UnsupportedError as error:
            if _strict():
                raise
            if str(error) not in entry.refused_plans:
                entry.refused_plans.add(str(error))
                self._warn(error)
                training = torch.is_grad_enabled()
                reason = "shapes that no kernel takes"
                self.records.append(CaptureRecord(reason, training, 0, str(error), 0, {}))
            return module.forward(*args, **kwargs)
        return entry.captured.output_tree.rebuild(outputs)

    def profiles(self) -> list[dict[str, Any]]:
        """Return what was recorded of each graph that is kept, while profiling was on."""
        return [program.session.profile() for program in self._programs()]

    def clear_profiles(self) -> None:
        """Drop what was recorded so far."""
        for program in self._programs():
            program.session.clear_profile()

    def _programs(self) -> Iterator[_Program]:
        for entries in self._entries.values():
            for entry in entries:
                yield from entry.programs.values()

    # --- looking up and capturing

    def _look_at_module(self) -> None:
        """Notice what of the module has changed; forget states that no kept graph is for."""
        if self._states.look():
            self._states.keep(state for _, state, _ in self._entries)

    def _key(self, call: FlatCall) -> _Key:
        """Return what a captured graph depends on, sizes of the arguments aside."""
        return (call.key, self._states.present, environment_key())

    def _find(self, key: _Key, call: FlatCall) -> _Entry | None:
        entries = self._entries.get(key)
        if entries is None:
            return None
        self._entries.move_to_end(key)
        return next((entry for entry in entries if entry.fits(call)), None)

    def _make_entry(
        self, key: _Key, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> _Entry:
        reason = "first call"
        if self._captured_once:
            others = self._entries.get(key)
            if others and others[0].captured is not None:
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
        except (CaptureError, _core.UnsupportedError) as error:
            fallback = self._fallback(error, reason)
            self._changes_attributes = isinstance(error, ChangingAttributeError)
            return fallback
        self._captured_once = True
        self._misses += key[1] != self._captured_state
        self._captured_state = self._states.present
        self._keep(self._key(call), entry)
        return entry

    def _keep(self, key: _Key, entry: _Entry) -> None:
        self._entries.setdefault(key, []).append(entry)
        self.records.append(entry.record)
        while sum(map(len, self._entries.values())) > self.max_graphs:
            oldest = next(iter(self._entries))
            self._entries[oldest].pop(0)
            if not self._entries[oldest]:
                del self._entries[oldest]
        self._states.keep(state for _, state, _ in self._entries)

    def _capture(
        self, call: FlatCall, args: Sequence[Any], kwargs: Mapping[str, Any], reason: str
    ) -> _Entry:
        module = self.module
        for path, part in module.named_modules():
            if path and _has_hooks(part):
                raise CaptureError("the layer has hooks, which a graph would lose", module=path)
        if has_global_module_hooks():
            raise CaptureError("hooks for all modules are registered, which a graph would lose")
        stages: dict[str, float] = {}
        slot = CacheSlot(module, call)
        prepared = slot.load(stages)
        if prepared is None:
            prepared = self._prepare(call, args, kwargs, stages)
            slot.save(prepared)
        graph = prepared.graph
        # Tracing may have added attributes that a layer makes at its first call.
        self._look_at_module()

        index_of_user = dict(prepared.user_inputs)
        sources: list[tuple[str, Any]] = []
        requires_grad: dict[str, bool] = {}
        tensors, positions = self._states.tensors, self._states.positions()
        for described in graph.inputs:
            name, role = described["name"], described["role"]
            if role == "user":
                sources.append(("user", index_of_user[name]))
                requires_grad[name] = call.tensors[index_of_user[name]].requires_grad
            elif role == "seed":
                sources.append(("seed", None))
            elif described["target"] in positions:
                position = positions[described["target"]]
                sources.append(("module", position))
                requires_grad[name] = role == "parameter" and tensors[position].requires_grad
            else:
                raise CaptureError(f"'{described['target']}' is no tensor of the module")
        graph.set_requires_grad(requires_grad)

        user = [o for o in graph.outputs if o["role"] == "user"]
        differentiable = graph.differentiable_outputs()
        updates: list[tuple[int, str, Any]] = []
        for position, output in enumerate(graph.outputs):
            if output["role"] == "buffer_update":
                updates.append((position, "module", positions[output["target"]]))
            elif output["role"] == "input_update":
                target = index_of_user[output["target"]]
                if call.tensors[target].requires_grad:
                    raise CaptureError(
                        f"it writes to its argument '{output['target']}', which has a gradient",
                        module=type(module).__name__,
                    )
                updates.append((position, "user", target))
        training = prepared.grad_enabled and any(differentiable)
        entry = _Entry(
            captured=prepared,
            graph=graph,
            tensors=sources,
            differentiable=differentiable if training else [False] * len(user),
            updates=updates,
            num_user_outputs=len(user),
            programs={},
            preferred=_likely_roots(user, differentiable) if training else (),
            record=CaptureRecord(
                reason=reason,
                training=training,
                native_nodes=0,
                fallback="",
                aten_nodes=prepared.aten_nodes,
                stages=stages,
                from_disk="load" in stages,
            ),
        )
        entry.ones = _extents_of_one(call) if prepared.squeezes else None
        entry.rows = RowSelection.of(graph)
        program = entry.program(entry.preferred)
        entry.record = dataclasses.replace(entry.record, native_nodes=program.num_nodes)
        return entry

    def _prepare(
        self,
        call: FlatCall,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        stages: dict[str, float],
    ) -> PreparedGraph:
        """Capture the module and convert it."""
        module = self.module
        with (
            progress.stage("capture") as timing,
            _without_root_hooks(module),
            _nothing_added(module),
        ):
            captured = _capture(module, args, kwargs)
            # squeeze drops extents of 1 only, and a symbolic extent is taken for a larger one.
            nodes = captured.graph_module.graph.nodes
            squeezes = any(str(node.target).startswith("aten.squeeze") for node in nodes)
            if squeezes and captured.dynamic and any(map(any, _extents_of_one(call))):
                captured = _capture(module, args, kwargs, dynamic=False)
        stages["capture"] = timing.seconds
        with progress.stage("convert") as timing:
            converted = convert(captured, _core.GraphBuilder(type(module).__name__))
            converted.graph.run_passes("simplify")
        stages["convert"] = timing.seconds
        return PreparedGraph(
            graph=converted.graph,
            user_inputs=converted.user_inputs,
            aten_nodes=converted.nodes,
            guards=captured.guards,
            input_names=captured.input_names,
            output_tree=captured.output_tree,
            grad_enabled=captured.grad_enabled,
            squeezes=squeezes,
        )

    def _fallback(self, error: Exception, reason: str) -> _Entry:
        """Return an entry that runs in PyTorch."""
        if _strict():
            raise error
        training = torch.is_grad_enabled()
        record = CaptureRecord(reason, training, 0, str(error), 0, {})
        return _Entry(None, None, [], [], [], 0, {}, (), record, refusal=error)

    def _run_in_pytorch(
        self,
        entry: _Entry,
        call: FlatCall,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Run the module itself; the first time, say so, or say which argument is at fault."""
        if entry.refusal is None:
            return self.module.forward(*args, **kwargs)
        try:
            result = self.module.forward(*args, **kwargs)
        except Exception as refusal:
            raise self._input_error(refusal, call) from refusal
        self._warn(entry.refusal)
        entry.refusal = None
        self._keep(self._key(call), entry)
        return result

    def _input_error(self, refusal: Exception, call: FlatCall) -> Exception:
        """Return a typed error for arguments that PyTorch refuses, naming the one at fault."""
        given = ", ".join(
            f"'{name}' {str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
            for name, t in zip(call.names, call.tensors, strict=True)
        )
        text = f"{type(self.module).__name__}.forward cannot take {given}: {refusal}"
        for entries in self._entries.values():
            for entry in entries:
                if entry.captured is None or entry.captured.input_names != call.names:
                    continue
                for name, tensor, described in self._user_inputs(entry, call):
                    expected = str(TORCH_DTYPE[described["dtype"]]).removeprefix("torch.")
                    actual = str(tensor.dtype).removeprefix("torch.")
                    if actual != expected:
                        return _core.DTypeError(
                            f"argument '{name}' is {actual}, expected {expected}; {text}"
                        )
                    if tensor.dim() != len(described["shape"]):
                        return _core.ShapeError(
                            f"argument '{name}' has rank {tensor.dim()} {list(tensor.shape)}, "
                            f"expected rank {len(described['shape'])}; {text}"
                        )
        if isinstance(refusal, IndexError):
            return IndexError(text)
        if isinstance(refusal, TypeError):
            return _core.DTypeError(text)
        return _core.ShapeError(text)

    @staticmethod
    def _user_inputs(entry: _Entry, call: FlatCall) -> Iterator[tuple[str, torch.Tensor, Any]]:
        described = [i for i in entry.graph.inputs if i["role"] != "gradient"]
        for (kind, where), description in zip(entry.tensors, described, strict=True):
            if kind == "user":
                yield call.names[where], call.tensors[where], description

    def _warn(self, error: Exception) -> None:
        warnings.warn(
            f"{type(self.module).__name__} runs in PyTorch, not in Ortrain: {error}",
            RuntimeWarning,
            stacklevel=6,
        )

    def _check_devices(self, call: FlatCall) -> None:
        for name, tensor in zip(call.names, call.tensors, strict=True):
            if tensor.device.type not in _SUPPORTED_DEVICES:
                raise _core.DeviceError(
                    f"argument '{name}' is on device '{tensor.device}', expected 'cpu'"
                )

    @staticmethod
    def _input(source: tuple[str, Any], call: FlatCall, tensors: Sequence[Any]) -> torch.Tensor:
        kind, where = source
        if kind == "user":
            tensor = call.tensors[where]
            return tensor.resolve_neg() if tensor.is_neg() else tensor
        if kind == "module":
            return tensors[where]
        return torch.empty((), dtype=torch.int64).random_()

    # --- running

    def _execute(self, entry: _Entry, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        form: _Form = None
        selected = entry.rows.select(inputs) if entry.rows is not None else None
        if selected is not None:
            form, derived = selected
            inputs = [*inputs, *derived]
        program = entry.program(entry.preferred, form)
        if not entry.planned:
            with progress.stage("plan") as timing:
                program.session.plan([list(t.shape) for t in _with_gradients(program, inputs)])
            entry.record.stages["plan"] = timing.seconds
            entry.planned = True
        if program.gradient_of:
            outputs = _Step.apply(self, entry, program, inputs, *inputs)
        else:
            run = _core.Run(program.session)
            outputs = run.forward(inputs)
            self._remember_plan(run)
            self._apply_updates(entry, inputs, outputs)
        return list(outputs[: entry.num_user_outputs])

    def _remember_plan(self, run: Any) -> None:
        self.last_plan = MemoryPlan(**run.memory_plan)

    @staticmethod
    def _apply_updates(
        entry: _Entry, inputs: list[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        if not entry.updates:
            return
        with torch.no_grad():
            for position, kind, where in entry.updates:
                inputs[entry.tensors.index((kind, where))].copy_(outputs[position])


def _has_hooks(part: nn.Module) -> bool:
    return any(getattr(part, table, None) for table in _HOOK_TABLES)


def _capture(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, dynamic: bool = True
) -> CapturedModule:
    return capture(
        module,
        args,
        kwargs,
        known=lambda target: conversion(target) is not None,
        dynamic=dynamic,
    )


def _extents_of_one(call: FlatCall) -> tuple[Any, ...]:
    return tuple(tuple(size == 1 for size in t.shape) for t in call.tensors)


def _with_gradients(program: _Program, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor per graph input; a scalar stands where a gradient will come in."""
    given = iter(inputs)
    filler = torch.empty(())
    return [filler if i["role"] == "gradient" else next(given) for i in program.graph.inputs]


def _likely_roots(outputs: list[Any], differentiable: list[bool]) -> tuple[int, ...]:
    """Guess which outputs backward will start from: the scalars, else all of them."""
    candidates = [i for i, yes in enumerate(differentiable) if yes]
    scalars = [i for i in candidates if not outputs[i]["shape"]]
    return tuple(scalars or candidates)


@contextlib.contextmanager
def _without_root_hooks(module: nn.Module) -> Iterator[None]:
    """Keep the module's own hooks out of the graph; its wrapper runs them."""
    saved = {table: getattr(module, table) for table in _HOOK_TABLES}
    try:
        for table in _HOOK_TABLES:
            module.__dict__[table] = collections.OrderedDict()
        yield
    finally:
        module.__dict__.update(saved)


def _tensor_tables(part: nn.Module) -> tuple[Any, Any]:
    return part._parameters, part._buffers


@contextlib.contextmanager
def _nothing_added(module: nn.Module) -> Iterator[None]:
    """Take out of the layers what tracing put into them, tensors without contents; refuse it then.

    A forward that makes layers or tensors at its first call does so in PyTorch; later calls find
    them there.
    """
    # By keys(): the tables of a scripted layer are no dictionaries.
    before = [
        (part.__dict__, set(part.__dict__), [(t, set(t.keys())) for t in _tensor_tables(part)])
        for part in module.modules()
    ]
    layers = [(part._modules, set(part._modules.keys())) for part in module.modules()]
    added: list[str] = []
    try:
        yield
    finally:
        for attributes, names, tables in before:
            for table, known in [*tables, (attributes, names)]:
                fake = {name for name in set(table.keys()) - known if is_fake(table[name])}
                for name in sorted(fake):
                    del table[name]
                    added.append(name)
        for table, known in layers:
            for name in sorted(set(table.keys()) - known):
                del table[name]
                added.append(name)
    if added:
        raise CaptureError(
            f"its forward makes {', '.join(map(repr, added))} at its first call",
            module=type(module).__name__,
        )


def _strict() -> bool:
    return os.environ.get("ORTRAIN_STRICT", "0").lower() in ("1", "true", "on", "yes")


_ANCHOR = torch.empty(0)


class _Step(torch.autograd.Function):
    """One forward and backward of a program as a node of PyTorch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        engine: Engine,
        entry: _Entry,
        program: _Program,
        inputs: list[torch.Tensor],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # Aliases keep the memory that this step reads, whatever `.data` is set to meanwhile.
        inputs = [t.detach() for t in inputs]
        for _, kind, where in entry.updates:  # backward may run the forward again
            position = entry.tensors.index((kind, where))
            inputs[position] = inputs[position].clone()
        run = _core.Run(program.session)
        outputs = run.forward(inputs)
        engine._remember_plan(run)
        engine._apply_updates(entry, list(tensors), outputs)
        ctx.entry, ctx.program, ctx.run, ctx.inputs = entry, program, run, inputs
        ctx.save_for_backward(_ANCHOR)  # PyTorch frees it, and refuses a second backward then
        ctx.versions = [t._version for t in inputs]
        user = outputs[: entry.num_user_outputs]
        # Aliases share the version counter but not the history: no reference cycle.
        ctx.outputs = [t.detach() for t in user]
        ctx.output_versions = [t._version for t in ctx.outputs]
        ctx.set_materialize_grads(False)
        fixed = [t for t, yes in zip(user, entry.differentiable, strict=True) if not yes]
        ctx.mark_non_differentiable(*fixed, *outputs[entry.num_user_outputs :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        with torch.no_grad():
            result = _Step._gradients(ctx, gradients)
        if torch.is_grad_enabled():  # create_graph=True
            present = [g for g in result if g is not None]
            marked = iter(_SecondDerivative.apply(torch.empty(0, requires_grad=True), *present))
            result = [None if g is None else next(marked) for g in result]
        return (None, None, None, None, *result)

    @staticmethod
    def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Run the backward; one gradient, or None, per input."""
        entry, program, run = ctx.entry, ctx.program, ctx.run
        given = tuple(
            i
            for i, gradient in enumerate(gradients[: entry.num_user_outputs])
            if gradient is not None and entry.differentiable[i]
        )
        if given != program.gradient_of:
            # Other outputs than guessed: run the forward of the program for these, with the same
            # seed, and expect them from now on. Zeros for the others would not do: they turn into
            # NaN where a derivative is infinite, and None into a gradient.
            entry.preferred = given
            program = entry.program(given, program.form)
            run = _core.Run(program.session)
        else:
            _check_versions(ctx, program.late_inputs)
            _check_output_versions(ctx, program.late_outputs)
        if not run.can_run_backward:
            _check_versions(ctx, range(len(ctx.inputs)))
            run.forward(ctx.inputs)
        made = run.backward([gradients[i] for i in program.incoming])
        result: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for position, gradient in zip(program.outgoing, made, strict=True):
            result[position] = gradient
        return result


class _SecondDerivative(torch.autograd.Function):
    """Stands in a graph that create_graph=True asks for, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "a gradient of a gradient through ORTModule is not supported; run the module itself, "
            "ORTModule.module, where second derivatives are needed"
        )


def _check_versions(ctx: Any, positions: Iterable[int]) -> None:
    """Refuse inputs that were written to since the forward read them."""
    for position in positions:
        tensor, version = ctx.inputs[position], ctx.versions[position]
        if tensor._version != version:
            # Only here: describing the graph's inputs costs more than the whole check.
            described = [i for i in ctx.program.graph.inputs if i["role"] != "gradient"]
            name = described[position]["target"] or described[position]["name"]
            raise RuntimeError(
                f"'{name}' is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )


def _check_output_versions(ctx: Any, positions: Iterable[int]) -> None:
    """Refuse outputs that were written to: backward reads them where they are."""
    for i in positions:
        tensor, version = ctx.outputs[i], ctx.output_versions[i]
        if tensor._version != version:
            raise RuntimeError(
                f"output {i} is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )

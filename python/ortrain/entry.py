# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Captured graphs as a module keeps them: where their inputs come from, their programs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ortrain import _core
from ortrain.capture.branches import refuse_other_branches
from ortrain.capture.captured import AutocastState
from ortrain.capture.errors import CaptureError
from ortrain.capture.guards import sizes_of
from ortrain.capture.prepare import empty_extents
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.result_views import in_order_of
from ortrain.capture.signature import FlatCall
from ortrain.devices import common_device
from ortrain.gradient_groups import Groups, groups_of
from ortrain.memory_budget import MemoryBudget
from ortrain.module_states import ModuleStates
from ortrain.overlap import any_overlap, overlaps_itself, views_of_one
from ortrain.program import Form, Program
from ortrain.report import CaptureRecord
from ortrain.row_selection import RowSelection

# Sizes of calls that are remembered to fit a graph or not.
_MOST_SIZES = 256
_NO_SEED = torch.zeros((), dtype=torch.int64)


@dataclasses.dataclass(slots=True)
class Entry:
    """One captured graph with the programs made of it.

    Attributes:
      captured: The graph as it was captured and converted.
      tensors: Where each input comes from: ("user", index), ("module", position), ("outside", tensor),
        ("seed", None).
      differentiable: Whether each user output has a gradient.
      updates: (position among the outputs, "module" | "user", where) of what is written in place.
      programs: By the form and the outputs that get a gradient.
      preferred: The outputs that backward is expected to start from.
      record: What the report says of it.
      device: Where its tensors are.
      rows: Finds the rows that a call needs, where not all of them can be seen outside.
      copied_inputs: Positions of the inputs that a call writes to, or of which the module uses copies
        alone: its backward needs them as they were.
      with_gradient: Positions of the inputs that require a gradient.
      unreached: Positions of the inputs that require a gradient outside, and get none.
      fitting: Whether it holds for sizes seen of late.
      planned: Whether its memory has been planned once.
      budget: What the plans of its programs may take; None for any memory.
      places: Of parameters and buffers that are results, their positions among the module's tensors.
      seed_at: Position of the engine's seed among the inputs; None where there is none.
      autocast: The autocast state that it was captured in.
      other_arguments: Positions, among the tensors of a call, of those that are no input of it.
      dependences: Positions of the inputs that outputs depend on.
      reads: Of some outputs those that PyTorch's backward from them would read.
      failed: Sizes of calls that it has not run, though its conditions hold.
      told_of_hooks: Results of whose hooks the user knows that they do not see all gradients.
      fixed: Whether it was captured for the sizes of one call, which another graph did not run.
      empty: Which extents of the arguments are 0.
      orders: Of outputs that lie in memory in another order for the caller.
      groups: Inputs by the outputs that reach them; None where all reach the same.
      runs: How often it has run, where it branches on values.
      lost_runs: How often that was for nothing, as a branch went another way.
    """

    captured: PreparedGraph
    tensors: list[tuple[str, Any]]
    differentiable: list[bool]
    updates: list[tuple[int, str, Any]]
    preferred: tuple[int, ...]
    record: CaptureRecord
    device: torch.device
    rows: RowSelection | None
    copied_inputs: list[int]
    unreached: list[int]
    with_gradient: list[int]
    programs: dict[tuple[Form, tuple[int, ...]], Program] = dataclasses.field(default_factory=dict)
    fitting: dict[tuple[torch.Size, ...], bool] = dataclasses.field(default_factory=dict)
    planned: bool = False
    budget: MemoryBudget | None = None
    places: dict[str, int] = dataclasses.field(default_factory=dict)
    seed_at: int | None = None
    autocast: AutocastState = dataclasses.field(default_factory=AutocastState.current)
    other_arguments: tuple[int, ...] = ()
    dependences: dict[tuple[int, ...], list[int]] = dataclasses.field(default_factory=dict)
    reads: dict[tuple[int, ...], list[int]] = dataclasses.field(default_factory=dict)
    failed: set[tuple[torch.Size, ...]] = dataclasses.field(default_factory=set)
    told_of_hooks: set[int] = dataclasses.field(default_factory=set)
    fixed: bool = False
    empty: tuple[tuple[int, ...], ...] = ()
    orders: dict[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    groups: Groups | None = None
    runs: int = 0
    lost_runs: int = 0

    @staticmethod
    def of(
        prepared: PreparedGraph,
        call: FlatCall,
        states: ModuleStates,
        reason: str,
        stages: dict[str, float],
        budget: MemoryBudget | None = None,
    ) -> Entry:
        """Make an entry of a graph, with its first program.

        Args:
          prepared: The graph.
          call: The call that it was captured for.
          states: Knows the module's tensors at this moment.
          reason: Why it was captured, for the report.
          stages: Seconds per stage so far.
          budget: What its plans may take; None for any memory.

        Raises:
          CaptureError: It writes to an argument that has a gradient, or takes no tensor of the
            module.
          UnsupportedError: No kernel runs one of its nodes.
        """
        graph = prepared.graph
        index_of_user = dict(prepared.user_inputs)
        sources: list[tuple[str, Any]] = []
        inputs: list[str] = []
        requires_grad: dict[str, bool] = {}
        tensors, positions = states.tensors, states.positions()
        for described in graph.inputs:
            name, role, target = described["name"], described["role"], described["target"]
            inputs.append(name)
            if role == "user":
                sources.append(("user", index_of_user[name]))
                requires_grad[name] = call.tensors[index_of_user[name]].requires_grad
            elif role == "seed":
                sources.append(("seed", None))
            elif target in positions:
                sources.append(("module", positions[target]))
                tensor = tensors[positions[target]]
                requires_grad[name] = tensor.requires_grad
            elif target in prepared.outside:
                sources.append(("outside", prepared.outside[target]))
                requires_grad[name] = False
            else:
                raise CaptureError(f"'{target}' is no tensor of the module")
        graph.set_requires_grad(requires_grad)
        # What no output's gradient reaches is no part of PyTorch's graph: it may belong to an earlier step.
        writes = {o["target"] for o in graph.outputs if o["role"] == "input_update"}
        unreached = [name for name in _unreached(graph, requires_grad) if name not in writes]
        requires_grad.update(dict.fromkeys(unreached, False))
        graph.set_requires_grad(requires_grad)
        if prepared.grad_enabled and (written := graph.differentiable_input_updates()):
            raise CaptureError(
                f"it writes what depends on a parameter to {', '.join(map(repr, written))}, which "
                "has a gradient from then on",
                module=type(states.module).__name__,
            )

        updates: list[tuple[int, str, Any]] = []
        for position, output in enumerate(graph.outputs):
            if output["role"] == "buffer_update":
                updates.append((position, "module", positions[output["target"]]))
            elif output["role"] == "input_update":
                target = index_of_user[output["target"]]
                if call.tensors[target].requires_grad:
                    raise CaptureError(
                        f"it writes to its argument '{output['target']}', which has a gradient",
                        module=type(states.module).__name__,
                    )
                updates.append((position, "user", target))

        updated = {(kind, where) for _, kind, where in updates}
        user = [o for o in graph.outputs if o["role"] == "user"]
        names = states.positions()
        device = common_device(
            [(f"parameter '{n}'", tensors[p]) for n, p in names.items() if tensors[p] is not None]
            + [(f"argument '{n}'", t) for n, t in zip(call.names, call.tensors, strict=True)]
        )
        differentiable = graph.differentiable_outputs()
        training = prepared.grad_enabled and any(differentiable)
        entry = Entry(
            captured=prepared,
            tensors=sources,
            differentiable=differentiable if training else [False] * len(user),
            updates=updates,
            preferred=_likely_roots(user, differentiable) if training else (),
            record=CaptureRecord(
                reason=reason,
                training=training,
                native_nodes=0,
                fallback="",
                aten_nodes=prepared.aten_nodes,
                stages=stages,
                from_disk="load" in stages,
                escapes=tuple(prepared.escapes),
                fixed=prepared.fixed,
                read_once=prepared.read_once,
                branches=tuple(map(str, prepared.branches)),
            ),
            device=device,
            rows=RowSelection.of(graph, device),
            empty=empty_extents(call),
            copied_inputs=[
                i
                for i, (source, name) in enumerate(zip(sources, inputs, strict=True))
                if source in updated or name in prepared.cloned
            ],
            unreached=[inputs.index(name) for name in unreached],
            with_gradient=[i for i, name in enumerate(inputs) if requires_grad.get(name)],
            budget=budget,
            places=positions if prepared.views is not None else {},
            orders=prepared.views.orders() if prepared.views is not None else {},
            other_arguments=tuple(
                i for i in range(len(call.tensors)) if ("user", i) not in sources
            ),
            seed_at=next((i for i, source in enumerate(sources) if source[0] == "seed"), None),
            groups=groups_of(graph, differentiable) if training else None,
        )
        entry._refuse_branches_on_masks()
        program = entry.program(entry.preferred)
        entry.record = dataclasses.replace(
            entry.record, native_nodes=program.num_native, escaped_nodes=program.num_escaped
        )
        return entry

    @property
    def num_user_outputs(self) -> int:
        """Outputs that the caller gets; updates stand behind them."""
        return len(self.differentiable)

    def results_behind(self, index: int) -> list[int]:
        """Return the results whose gradients go through one of them, given by its index."""
        graph = self.captured.graph
        values = [output["value"] for output in graph.outputs if output["role"] == "user"]
        reached = {values[index]}
        for node in graph.nodes():
            passes = (node["domain"], node["op"]) not in _operators_without_gradients()
            if passes and not reached.isdisjoint(node["inputs"]):
                reached.update(node["outputs"])
        return [i for i, value in enumerate(values) if i != index and value in reached]

    def fits(self, call: FlatCall) -> bool:
        """Tell whether the graph holds for the sizes of a call of its kind."""
        sizes = tuple(sizes_of(call.tensors))
        if sizes in self.failed:
            return False
        holds = self.fitting.get(sizes)
        if holds is None:
            holds = self.empty == empty_extents(call)
            holds = holds and self.captured.guards.holds(sizes)
            if len(self.fitting) >= _MOST_SIZES:
                self.fitting.clear()
            self.fitting[sizes] = holds
        return holds

    def inputs(self, call: FlatCall, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Return the inputs of the graph for a call, given the tensors of the module.

        Where the seed stands, there is a tensor that ``execute`` replaces.
        """
        inputs = [_input(source, call, tensors, self.device) for source in self.tensors]
        for i in self.unreached:
            inputs[i] = inputs[i].detach()
        return inputs

    def laid_out(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what the graph gave, those that lie otherwise for the caller as copies."""
        if not self.orders:
            return outputs
        laid_out = list(outputs)
        for i, order in self.orders.items():
            laid_out[i] = in_order_of(laid_out[i], order)
        return laid_out

    def _refuse_branches_on_masks(self) -> None:
        """Raise CaptureError where a condition depends on dropout that the engine draws.

        PyTorch would draw another mask where the branch goes another way, which then happens too seldom.
        """
        count, first = self.num_user_outputs, self.num_user_outputs - len(self.captured.branches)
        conditions = tuple(range(first, count))
        if conditions and self.seed_at in self.inputs_of(conditions, len(self.tensors)):
            raise CaptureError("it branches on values that depend on dropout")

    def refuse_other_branches(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise OtherBranchError where values branch another way in a run than in the graph."""
        branches = self.captured.branches
        if branches:
            self.runs += 1
            last = self.num_user_outputs
            refuse_other_branches(branches, outputs[last - len(branches) : last])

    def results(
        self,
        call: FlatCall,
        tensors: Sequence[torch.Tensor | None],
        outputs: Sequence[torch.Tensor],
    ) -> Any:
        """Return what the module would, given what the graph gave."""
        views = self.captured.views
        if views is not None:

            def value_of(kind: str, where: Any) -> Any:
                if kind == "output":
                    return outputs[where]
                if kind == "user":
                    return call.tensors[where]
                if kind == "outside":
                    return self.captured.outside[where]
                return tensors[self.places[where]]

            outputs = views(call.tensors, value_of)
        return self.captured.output_tree.rebuild(outputs)

    def program(self, gradient_of: tuple[int, ...], form: Form = None) -> Program:
        """Return the program with the gradient of some outputs; made where there is none yet."""
        made = self.programs.get((form, gradient_of))
        if made is None:
            graph = self.captured.graph
            if form is not None and self.rows is not None:
                graph = self.rows.packed(form)
            made = self.programs[form, gradient_of] = Program(
                graph,
                gradient_of,
                form,
                self.device,
                self.budget,
                # Copies would count against a budget.
                self.captured.unsaved_inputs if self.budget is None else (),
            )
            for name, seconds in made.stages.items():
                self.record.stages[name] = self.record.stages.get(name, 0.0) + seconds
        return made

    def inputs_of(self, outputs: tuple[int, ...], count: int) -> list[int]:
        """Return the positions of the inputs, ``count`` with derived ones, that outputs depend on."""
        found = self.dependences.get(outputs)
        if found is None:
            graph = self.captured.graph
            user = [o["value"] for o in graph.outputs if o["role"] == "user"]
            needed = {user[i] for i in outputs}
            for node in reversed(graph.nodes()):
                if not needed.isdisjoint(node["outputs"]):
                    needed.update(node["inputs"])
            names = [described["name"] for described in graph.inputs]
            found = self.dependences[outputs] = [i for i, n in enumerate(names) if n in needed]
        return [*found, *range(len(self.tensors), count)]

    def results_read(self, outputs: tuple[int, ...]) -> list[int]:
        """Return the outputs that PyTorch's backward from some would read."""
        found = self.reads.get(outputs)
        if found is None:
            needed = self.captured.needed_results
            found = self.reads[outputs] = sorted(set().union(*(needed[i] for i in outputs)))
        return found

    def update_targets(
        self, call: FlatCall, tensors: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor]:
        """Return what a call writes to, in the order of `updates`; not all of it is an input."""
        return [
            _input((kind, where), call, tensors, self.device) for _, kind, where in self.updates
        ]

    def writes_to_shared_memory(
        self, call: FlatCall, tensors: Sequence[torch.Tensor | None]
    ) -> bool:
        """Tell whether a call writes to memory in which another tensor lies that it reads or writes.

        The graph knows of what was shared when it was captured at most. Elements of the written one
        count as well: one write to an expanded tensor is several. Where a backward may follow, so do
        other views of one tensor, which a write makes newer than what was saved of them.
        """
        if not self.updates:
            return False
        names = {(kind, where) for _, kind, where in self.updates}
        written = [_given(source, call, tensors) for source in names]
        read = [
            _given(s, call, tensors)
            for s in self.tensors
            if s[0] != "seed" and (s[0] == "outside" or s not in names)
        ]
        return (
            any_overlap(written, read)
            or any(map(overlaps_itself, written))
            or (bool(self.preferred) and views_of_one(written, read))
        )

    def takes_for_dense(self, call: FlatCall) -> bool:
        """Tell whether a call has an argument with gaps whose memory the forward asks for, returns or writes to."""
        if not (self.updates or any(self.captured.asks_of_memory)):
            return False  # as nearly always
        written = [where for _, kind, where in self.updates if kind == "user"]
        return self.captured.takes_for_dense(call.tensors, written)

    def apply_updates(
        self, targets: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        """Write to the buffers and arguments that the module writes to."""
        if not self.updates:
            return
        with torch.no_grad():
            for target, (position, _, _) in zip(targets, self.updates, strict=True):
                target.copy_(outputs[position])


def _given(source: tuple[str, Any], call: FlatCall, tensors: Sequence[Any]) -> torch.Tensor:
    """Return the tensor that a source names, as the caller, the module or somebody else holds it."""
    kind, where = source
    if kind == "outside":
        return where  # type: ignore[no-any-return]
    return call.tensors[where] if kind == "user" else tensors[where]  # type: ignore[no-any-return]


def _input(
    source: tuple[str, Any], call: FlatCall, tensors: Sequence[Any], device: torch.device
) -> torch.Tensor:
    if source[0] == "seed":
        return _NO_SEED
    tensor = _given(source, call, tensors)
    if source[0] == "user" and tensor.is_neg():
        tensor = tensor.resolve_neg()
    # PyTorch takes single values on the CPU among tensors of a device.
    return tensor.to(device) if tensor.device != device and tensor.dim() == 0 else tensor


@functools.cache
def _operators_without_gradients() -> frozenset[tuple[str, str]]:
    return frozenset(
        (op["domain"], op["name"]) for op in _core.ops() if op["gradient"] == "none by definition"
    )


def _unreached(graph: Any, requires_grad: dict[str, bool]) -> list[str]:
    """Return the inputs with a gradient that no output depends on; hooks of theirs are not called."""
    reached = {name for paths in graph.gradient_paths() for name in paths}
    return [n for n, wanted in requires_grad.items() if wanted and n not in reached]


def _likely_roots(outputs: list[Any], differentiable: list[bool]) -> tuple[int, ...]:
    """Guess which outputs backward will start from: the scalars, else all of them."""
    candidates = [i for i, yes in enumerate(differentiable) if yes]
    scalars = [i for i in candidates if not outputs[i]["shape"]]
    return tuple(scalars or candidates)

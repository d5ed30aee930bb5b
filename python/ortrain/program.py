# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Graphs made ready to run: differentiated, rewritten and compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ortrain import _core, devices, progress
from ortrain.memory_budget import MemoryBudget

# Operators that run outside of the engine.
ESCAPES = frozenset({"External", "ExternalGrad"})

# Bytes of gradients that a part of a backward makes at least, parts at most, plans remembered.
_LEAST_PART = 1 << 20
_MOST_PARTS = 64
_MOST_PLANS = 64

# Which rows a program computes: None for all, else the packed ones with or without causal masks.
Form = bool | None


@dataclasses.dataclass(frozen=True, slots=True)
class CallersMemory:
    """What a backward reads where others can write to it in the meantime, by position.

    Attributes:
      inputs: Of the inputs, those which PyTorch's backward would not read aside.
      outputs: Of the user outputs.
      copied: Those inputs: the backward reads a copy of them.
    """

    inputs: list[int]
    outputs: list[int]
    copied: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardPart:
    """A stretch of the backward.

    Attributes:
      end: Step of the plan behind its last one.
      positions: The inputs whose gradients are final then.
      reads: What it or a later part reads.
    """

    end: int
    positions: list[int]
    reads: CallersMemory


class Program:
    """A graph ready to run: forward only, or with the gradient of some of its outputs.

    Args:
      graph: The captured graph; a copy is changed.
      outputs: Positions of the outputs that get a gradient; none for the forward alone.
      form: Which rows it computes.
      device: Where its tensors are.
      budget: What its plans may take; None for any memory.
      unsaved: Names of the inputs of which PyTorch's backward would read nothing.

    Attributes:
      session: Runs it.
      stages: Seconds that making it took, per stage.
      num_native: Nodes that Ortrain runs.
      num_escaped: Nodes that PyTorch runs.
      incoming: The outputs that get a gradient handed in, in order.
      outgoing: The inputs that get one handed out, in order.
    """

    def __init__(
        self,
        graph: Any,
        outputs: tuple[int, ...],
        form: Form,
        device: torch.device = devices.CPU,
        budget: MemoryBudget | None = None,
        unsaved: Collection[str] = (),
    ) -> None:
        self.gradient_of = outputs
        self.form = form
        stages: dict[str, float] = {}
        graph = graph.copy()
        if outputs:
            with progress.stage("autodiff") as timing:
                graph.build_backward(list(outputs))
            stages["autodiff"] = timing.seconds
        unfused = graph.copy() if budget is not None else None
        provider = devices.provider_of(device)
        with progress.stage("passes") as timing:
            graph.run_passes("fuse", provider)
        stages["passes"] = timing.seconds
        self.stages = stages
        nodes = graph.nodes()
        self.num_escaped = sum(node["op"] in ESCAPES for node in nodes)
        self.num_native = len(nodes) - self.num_escaped
        limits = {} if budget is None else budget.session_options
        self.session = _core.Session(graph, device=provider, unfused=unfused, **limits)
        self.graph = graph
        names = [o["name"] for o in graph.outputs if o["role"] == "user"]
        self.incoming = [names.index(i["target"]) for i in graph.inputs if i["role"] == "gradient"]
        inputs = [i["name"] for i in graph.inputs if i["role"] != "gradient"]
        self.outgoing = [
            inputs.index(o["target"]) for o in graph.outputs if o["role"] == "gradient"
        ]
        self._unsaved = frozenset(i for i, name in enumerate(inputs) if name in unsaved)
        self._parts: dict[int, list[BackwardPart]] = {}
        self._reads: dict[int, CallersMemory] = {}

    def reads(self, run: Any) -> CallersMemory:
        """Return what the backward of a run reads whose forward has run.

        That depends on its shapes, at which an operator may give out the memory of what it takes.
        """
        found = self._reads.get(run.plan_id)
        if found is None:
            if len(self._reads) >= _MOST_PLANS:
                self._reads.clear()
            found = self._reads[run.plan_id] = self._reads_behind(run, 0)
        return found

    def _reads_behind(self, run: Any, begin: int) -> CallersMemory:
        """Return what the steps of a run's plan read from one of the backward on."""
        inputs, outputs = ([p for p, end in of if end > begin] for of in run.backward_reads)
        return CallersMemory(
            [p for p in inputs if p not in self._unsaved],
            outputs,
            [p for p in inputs if p in self._unsaved],
        )

    def parts(self, run: Any) -> list[BackwardPart]:
        """Return the parts of the backward of a run whose forward has run."""
        found = self._parts.get(run.plan_id)
        if found is None:
            if len(self._parts) >= _MOST_PLANS:
                self._parts.clear()
            size = max(_LEAST_PART, run.memory_plan["gradient_bytes"] // _MOST_PARTS)
            found = self._parts[run.plan_id] = []
            begin = 0
            for end, gradients in run.backward_parts(size):
                positions = [self.outgoing[g] for g in gradients]
                found.append(BackwardPart(end, positions, self._reads_behind(run, begin)))
                begin = end
        return found


def explain_passes(program: Program, unfused: Any) -> tuple[list[Any], list[Any]] | None:
    """Make the graph of a program again, and return what each pass did.

    Args:
      program: The program.
      unfused: The graph that it was made of; a copy is changed.

    Returns:
      A row per pass, and the rewrites that were taken and refused, whose node ids are those of the
      program's graph. None where passes have been added or switched off since, so that another
      graph comes out.
    """
    graph = unfused.copy()
    if program.gradient_of:
        graph.build_backward(list(program.gradient_of))
    passes, notes = graph.explain_passes("fuse", program.session.device)
    return (passes, notes) if graph.text() == program.graph.text() else None


def inputs_with_gradients(program: Program, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one tensor per graph input; a scalar stands where a gradient will come in."""
    given = iter(inputs)
    filler = torch.empty(())
    return [filler if i["role"] == "gradient" else next(given) for i in program.graph.inputs]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""All that ORTModules can tell of themselves after a program has run them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from ortrain.module import ORTModule
from ortrain.profile import Profile
from ortrain.program import explain_passes
from ortrain.report import CaptureRecord, ModuleReport

__all__ = [
    "Buffer",
    "GraphFindings",
    "GraphNode",
    "ModuleFindings",
    "Plan",
    "Refusal",
    "findings_of",
    "merged_name",
]

_NUMBER = re.compile(r"(?<=\.)\d+(?=[./]|$)|^\d+(?=[./]|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a finished graph.

    Attributes:
      op: Operator.
      name: Path of its layer and its operator before fusion, "encoder.layer.0/Tanh".
      phase: "forward" or "backward".
      inputs: Names of the values that it reads; empty strings are absent ones.
      outputs: Names of the values that it makes.
      parts: The operators that became this node, where several did.
      kernel: What runs it in the latest plan; empty where it is a view, or was computed with it.
      shapes: Its results in the latest plan, "float32[2, 3]".
      seconds: Wall time of a run, on average; None where none was timed.
    """

    op: str
    name: str
    phase: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    parts: tuple[str, ...] = ()
    kernel: str = ""
    shapes: tuple[str, ...] = ()
    seconds: float | None = None

    @property
    def layer(self) -> str:
        """Path of the layer, empty where it belongs to none."""
        return self.name.rpartition("/")[0]


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """A rewrite that a pass did not make.

    Attributes:
      rewrite: Name of the pass.
      nodes: Positions in ``GraphFindings.nodes`` of what stays apart, the maker of a value first.
      labels: What they were when the pass looked: operator and name.
      reason: Why.
    """

    rewrite: str
    nodes: tuple[int, ...]
    labels: tuple[tuple[str, str], ...]
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """A rectangle of a memory plan: bytes of the arena, held from step to step, both included.

    Attributes:
      name: The first value in it; empty for a node's workspace.
      first_step: Step that makes it.
      last_step: Step that reads it for the last time.
      offset: Bytes from the start of the arena.
      bytes: Its size.
      values: How many results took this memory in turn.
    """

    name: str
    first_step: int
    last_step: int
    offset: int
    bytes: int
    values: int


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The latest memory plan of a graph; sizes in bytes, as in ``ortrain.report.MemoryPlan``.

    Attributes:
      arena_bytes: Intermediate values.
      arena_lower_bound: Bytes alive at the worst step.
      constant_bytes: Made while planning.
      forward_output_bytes: Results.
      gradient_bytes: Gradients.
      total_bytes: All but the lower bound.
      steps: Operator and layer of each step.
      num_forward_steps: Those of the forward, which come first.
      buffers: What is in the arena, by first step.
    """

    arena_bytes: int
    arena_lower_bound: int
    constant_bytes: int
    forward_output_bytes: int
    gradient_bytes: int
    total_bytes: int
    steps: tuple[tuple[str, str], ...]
    num_forward_steps: int
    buffers: tuple[Buffer, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class GraphFindings:
    """One finished graph.

    Attributes:
      title: What it is for.
      nodes: In the order in which they run.
      passes: (name, nodes before, nodes after, seconds) of each rewrite of the finished graph.
      refusals: What these did not do; empty, like ``passes``, where it cannot be told any more.
      is_explained: Whether it could.
      plan: None where it has not run.
    """

    title: str
    nodes: tuple[GraphNode, ...]
    passes: tuple[tuple[str, int, int, float], ...]
    refusals: tuple[Refusal, ...]
    is_explained: bool
    plan: Plan | None

    @property
    def num_fused(self) -> int:
        """Nodes that stand for several."""
        return sum(bool(node.parts) for node in self.nodes)


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleFindings:
    """One ORTModule.

    Attributes:
      name: Its class.
      report: Captures, and what runs in PyTorch.
      graphs: Of it and of its pieces.
      profile: What its nodes took while they were timed.
    """

    name: str
    report: ModuleReport
    graphs: tuple[GraphFindings, ...]
    profile: Profile


def findings_of(module: ORTModule) -> ModuleFindings:
    """Return what an ORTModule can tell of itself now."""
    engine = module._ortrain_engine
    graphs = tuple(_graph(entry, program) for entry, program in engine.made_programs())
    return ModuleFindings(
        type(module).__name__, module.report(), graphs, Profile(engine.profiles())
    )


def merged_name(name: str) -> str:
    """Return a layer path with stars for its numbers: repeated layers are one."""
    return _NUMBER.sub("*", name)


def _graph(entry: Any, program: Any) -> GraphFindings:
    unfused = entry.captured.graph
    if program.form is not None and entry.rows is not None:
        unfused = entry.rows.packed(program.form)
    explained = explain_passes(program, unfused)
    passes, notes = explained if explained is not None else ([], [])
    plan = program.session.latest_plan()
    rows = program.graph.nodes()
    stands_for, parts = _joined(notes)
    positions = {row["id"]: position for position, row in enumerate(rows)}
    refusals = []
    for note in notes:
        if note["taken"]:
            continue
        nodes = [positions.get(_final(stands_for, id)) for id, _, _ in note["nodes"]]
        known = tuple(node for node in nodes if node is not None)
        # A later pass may have taken both into one node after all.
        if len(known) == len(nodes) and len(set(known)) == len(nodes):
            labels = tuple((op, name) for _, op, name in note["nodes"])
            refusals.append(Refusal(note["pass"], known, labels, note["reason"]))
    return GraphFindings(
        title=_title(entry.record, program.form),
        nodes=_nodes(rows, parts, plan, program.session.profile()["steps"]),
        passes=tuple(
            (p["name"], p["nodes_before"], p["nodes_after"], p["seconds"]) for p in passes
        ),
        refusals=tuple(refusals),
        is_explained=explained is not None,
        plan=_plan(plan) if plan is not None else None,
    )


def _title(record: CaptureRecord, form: bool | None) -> str:
    kind = "training" if record.training else "inference"
    packed = "" if form is None else ", padding left out"
    return f"{kind}{packed}; {record.reason}"


def _joined(notes: Sequence[Any]) -> tuple[dict[int, int], dict[int, list[str]]]:
    """Return which node each one became a part of, and the operators of those with parts."""
    stands_for: dict[int, int] = {}
    parts: dict[int, list[str]] = {}
    for note in notes:
        if not note["taken"]:
            continue
        result = note["result"]
        ops: list[str] = []
        for id, op, _ in note["nodes"]:
            ops += parts.pop(id, [op])
            if id != result:
                stands_for[id] = result
        parts[result] = ops
    return stands_for, parts


def _final(stands_for: dict[int, int], node: int) -> int:
    while node in stands_for:
        node = stands_for[node]
    return node


def _nodes(
    rows: Sequence[Any], parts: dict[int, list[str]], plan: Any, timed: Sequence[Any]
) -> tuple[GraphNode, ...]:
    steps = {step["node"]: step for step in plan["steps"]} if plan is not None else {}
    runs: dict[tuple[str, str, str], int] = {}
    seconds: dict[tuple[str, str, str], float] = {}
    for row in timed:
        key = (row["op"], row["layer"], row["phase"])
        runs[key] = runs.get(key, 0) + row["runs"]
        seconds[key] = seconds.get(key, 0.0) + row["seconds"]
    nodes = []
    for row in rows:
        step = steps.get(row["id"])
        key = (row["op"], row["name"], row["phase"])
        nodes.append(
            GraphNode(
                op=row["op"],
                name=row["name"],
                phase=row["phase"],
                inputs=tuple(row["inputs"]),
                outputs=tuple(row["outputs"]),
                parts=tuple(parts.get(row["id"], ())),
                kernel=step["kernel"] if step is not None else "",
                shapes=tuple(filter(None, step["shapes"])) if step is not None else (),
                seconds=seconds[key] / runs[key] if runs.get(key) else None,
            )
        )
    return tuple(nodes)


def _plan(plan: Any) -> Plan:
    return Plan(
        arena_bytes=plan["arena_bytes"],
        arena_lower_bound=plan["arena_lower_bound"],
        constant_bytes=plan["constant_bytes"],
        forward_output_bytes=plan["forward_output_bytes"],
        gradient_bytes=plan["gradient_bytes"],
        total_bytes=plan["total_bytes"],
        steps=tuple((step["op"], step["name"]) for step in plan["steps"]),
        num_forward_steps=plan["num_forward_steps"],
        buffers=tuple(
            Buffer(
                b["value"],
                b["first_step"],
                b["last_step"],
                b["offset"],
                b["bytes"],
                b["num_values"],
            )
            for b in plan["buffers"]
        ),
    )

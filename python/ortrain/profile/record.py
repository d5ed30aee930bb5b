# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Timing nodes, and what was measured."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ortrain import _core

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTime:
    """One node of a graph, summed over its runs.

    Attributes:
      op: Operator.
      layer: Path of the layer it belongs to, empty where it belongs to none.
      kernel: Name of the kernel that ran it.
      phase: "forward" or "backward".
      runs: How often it ran.
      seconds: Wall time of all runs.
      bytes: Read and written in all runs, by the shapes.
      flops: Of matrix products in all runs; 0 for other nodes.
    """

    op: str
    layer: str
    kernel: str
    phase: str
    runs: int
    seconds: float
    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Nodes with something in common.

    Attributes:
      name: What they have in common.
      runs: How often they ran, in all.
      seconds: Their wall time.
      share: Of the time of all nodes, from 0 to 1.
      bytes: Read and written.
      flops: Of the matrix products among them.
      product_seconds: Wall time of the matrix products among them.
    """

    name: str
    runs: int
    seconds: float
    share: float
    bytes: float
    flops: float
    product_seconds: float

    @property
    def gflops(self) -> float:
        """Rate of the matrix products in GFLOP/s; 0 where there are none."""
        return self.flops / self.product_seconds / 1e9 if self.product_seconds > 0 else 0.0

    @property
    def gbytes(self) -> float:
        """Bytes moved per second, in GB/s."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One run of one node; times in nanoseconds of one clock, ``node`` without times of its own."""

    node: NodeTime
    graph: int
    step: int
    thread: int
    start: int
    duration: int


class Profile:
    """What the nodes of some graphs took.

    Args:
      snapshots: What the engine recorded, one dict per graph.

    Attributes:
      nodes: One row per node, slowest first.
      events: Single runs of nodes, the latest of each graph, by start.
      graphs: Names of the graphs; ``Event.graph`` counts in them.
    """

    def __init__(self, snapshots: Iterable[Mapping[str, Any]] = ()) -> None:
        self.nodes: list[NodeTime] = []
        self.events: list[Event] = []
        self.graphs: list[str] = []
        self._fill(snapshots)

    def _fill(self, snapshots: Iterable[Mapping[str, Any]]) -> None:
        merged: dict[tuple[str, ...], NodeTime] = {}
        events: list[Event] = []
        self.graphs = []
        for number, snapshot in enumerate(snapshots):
            self.graphs.append(snapshot["graph"])
            single = []
            for row in snapshot["steps"]:
                node = NodeTime(
                    row["op"],
                    _layer_of(row["layer"]),
                    row["kernel"],
                    row["phase"],
                    row["runs"],
                    row["seconds"],
                    row["bytes"] * row["runs"],
                    row["flops"] * row["runs"],
                )
                single.append(
                    dataclasses.replace(
                        node, runs=1, seconds=0.0, bytes=row["bytes"], flops=row["flops"]
                    )
                )
                key = (str(number), row["op"], row["layer"], row["kernel"], row["phase"])
                merged[key] = _sum(merged[key], node) if key in merged else node
            events += [
                Event(single[step], number, step, thread, start, duration)
                for step, thread, start, duration in snapshot["events"]
            ]
        self.nodes = sorted(merged.values(), key=lambda node: -node.seconds)
        self.events = sorted(events, key=lambda event: event.start)

    @property
    def seconds(self) -> float:
        """Wall time of all nodes."""
        return sum(node.seconds for node in self.nodes)

    @property
    def elapsed(self) -> float:
        """Seconds from the start of the first kept event to the end of the last."""
        if not self.events:
            return 0.0
        end = max(event.start + event.duration for event in self.events)
        return (end - self.events[0].start) * 1e-9

    def by_op(self) -> list[Group]:
        """Return the operators, slowest first; forward and backward apart."""
        return self._groups(lambda node: f"{node.op} {node.kernel}, {node.phase}")

    def by_layer(self, *, merge_repeated: bool = True) -> list[Group]:
        """Return the layers, slowest first.

        Args:
          merge_repeated: Take layers that differ in a number only as one: ``encoder.layer.*``.
        """

        def name(node: NodeTime) -> str:
            path = _NUMBER.sub("*", node.layer) if merge_repeated else node.layer
            return f"{path or '(no layer)'}, {node.phase}"

        return self._groups(name)

    def _groups(self, name_of: Callable[[NodeTime], str]) -> list[Group]:
        members: dict[str, list[NodeTime]] = {}
        for node in self.nodes:
            members.setdefault(name_of(node), []).append(node)
        total = self.seconds
        groups = []
        for name, nodes in members.items():
            seconds = sum(node.seconds for node in nodes)
            groups.append(
                Group(
                    name,
                    sum(node.runs for node in nodes),
                    seconds,
                    seconds / total if total > 0 else 0.0,
                    sum(node.bytes for node in nodes),
                    sum(node.flops for node in nodes),
                    sum(node.seconds for node in nodes if node.flops > 0),
                )
            )
        return sorted(groups, key=lambda group: -group.seconds)

    def last_step(self) -> list[Event]:
        """Return the events of the latest run of the graph that ran last, in order."""
        chosen: list[Event] = []
        seen: set[int] = set()
        for event in reversed(self.events):
            if chosen and event.graph != chosen[0].graph:
                continue
            if event.step in seen:
                break
            seen.add(event.step)
            chosen.append(event)
        return chosen[::-1]

    def trace(self) -> dict[str, Any]:
        """Return a trace in the format of Chrome and Perfetto, ready for JSON."""
        start = self.events[0].start if self.events else 0
        lanes: dict[tuple[int, int, str], int] = {}
        rows: list[dict[str, Any]] = []
        for event in self.events:
            node = event.node
            lane = lanes.setdefault((event.graph, event.thread, node.phase), len(lanes) + 1)
            facts = {"layer": node.layer, "kernel": node.kernel, "bytes": node.bytes}
            if node.flops > 0 and event.duration > 0:
                facts |= {"flops": node.flops, "GFLOP/s": node.flops / event.duration}
            rows.append(
                {
                    "name": node.op,
                    "cat": node.phase,
                    "ph": "X",
                    "pid": event.graph + 1,
                    "tid": lane,
                    "ts": (event.start - start) / 1e3,
                    "dur": event.duration / 1e3,
                    "args": facts,
                }
            )
        names = [
            _named("process_name", graph + 1, 0, name) for graph, name in enumerate(self.graphs)
        ]
        names += [
            _named("thread_name", graph + 1, lane, f"{phase}, thread {thread}")
            for (graph, thread, phase), lane in lanes.items()
        ]
        return {"traceEvents": names + rows, "displayTimeUnit": "ms"}

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write ``trace()`` to a file; open it at chrome://tracing or ui.perfetto.dev."""
        Path(path).write_text(json.dumps(self.trace()), encoding="utf-8")

    def save_html(self, path: str | os.PathLike[str], title: str = "Ortrain profile") -> None:
        """Write tables and a timeline of the latest step as one page without anything to fetch."""
        from ortrain.profile.page import page

        Path(path).write_text(page(self, title), encoding="utf-8")

    def tables(self, top: int = 15, *, merge_repeated: bool = True) -> str:
        """Return the slowest operators and layers as text."""
        from ortrain.profile.text import tables

        return tables(self, top, merge_repeated=merge_repeated)

    def __str__(self) -> str:
        return self.tables()


@contextlib.contextmanager
def profile(model: nn.Module | None = None) -> Iterator[Profile]:
    """Time every node that runs inside of a ``with``.

    Args:
      model: An ORTModule, or a module that contains some; None takes all of the process. What was
        recorded before is dropped.

    Yields:
      A Profile, filled when the ``with`` ends.

    Raises:
      TypeError: There is no ORTModule in ``model``.
    """
    from ortrain.module import ORTModule

    engines = None
    if model is not None:
        wrapped = [part for part in model.modules() if isinstance(part, ORTModule)]
        if not wrapped:
            raise TypeError(f"there is no ORTModule in this {type(model).__name__}")
        engines = [part._ortrain_engine for part in wrapped]
    for engine in engines or ():
        engine.clear_profiles()
    if engines is None:
        _core.clear_profiles()
    result = Profile()
    before = _core.set_profiling(True)
    try:
        yield result
    finally:
        _core.set_profiling(before)
        if engines is None:
            snapshots: Sequence[Mapping[str, Any]] = _core.profiles()
        else:
            snapshots = [snapshot for engine in engines for snapshot in engine.profiles()]
        result._fill(snapshots)


def _sum(a: NodeTime, b: NodeTime) -> NodeTime:
    return dataclasses.replace(
        a,
        runs=a.runs + b.runs,
        seconds=a.seconds + b.seconds,
        bytes=a.bytes + b.bytes,
        flops=a.flops + b.flops,
    )


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _layer_of(name: str) -> str:
    """Return the layer path of a node's name, "encoder.layer.0/MatMul"."""
    return name.rpartition("/")[0]

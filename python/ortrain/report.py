# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a module did: captures, what runs natively, memory, time per node."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ortrain import report_page
from ortrain.capture.escapes import Escape

_MOST_SHOWN = 6  # of what was read once, on a line


@dataclasses.dataclass(frozen=True, slots=True)
class CaptureRecord:
    """One captured graph, or one call signature that is none.

    Attributes:
      reason: Why it was captured ("first call", "no captured graph fits: ...").
      training: Whether it has a backward.
      native_nodes: Nodes of the optimized graph that Ortrain runs.
      fallback: Why it is no graph, and runs in PyTorch or in pieces; empty where it is one.
      aten_nodes: ATen operators in the captured graph; 0 where none was captured.
      stages: Seconds per stage: capture and convert, or load, then autodiff, passes, plan.
      from_disk: Whether the graph of an earlier process was used (ORTRAIN_CACHE_DIR).
      escapes: The operators of the captured graph that run in PyTorch.
      escaped_nodes: Nodes of the optimized graph that run in PyTorch.
      pieces: Graphs that the module had been cut into after the first such call, each with a record
        of its own; 0 where all of it runs in PyTorch.
      breaks: Why it had been cut by then, and where.
      fixed: The sizes that the graph holds for as they were, since symbols for them take too long, in
        words.
      first_call: Whether PyTorch ran one call alone, which makes what later calls find.
      read_once: What installed packages hold that the graph has as it was at the capture, whatever becomes of it:
        contents of tables that hold tables or objects, of deques and arrays, generators.
      branches: Where the forward branches on values: the graph counts while each goes as it did before the capture.
    """

    reason: str
    training: bool
    native_nodes: int
    fallback: str
    aten_nodes: int
    stages: dict[str, float]
    from_disk: bool = False
    escapes: tuple[Escape, ...] = ()
    escaped_nodes: int = 0
    pieces: int = 0
    breaks: tuple[str, ...] = ()
    first_call: bool = False
    fixed: str = ""
    read_once: tuple[str, ...] = ()
    branches: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleReport:
    """What an ORTModule has done so far.

    Attributes:
      captures: One record per captured graph of the module, oldest first.
      total_nodes: Nodes of all graphs; a signature that is no graph counts as one.
      native_nodes: Those that Ortrain runs.
      pieces: The same of the pieces of a module that cannot be captured whole.
      memory: The plan of the latest forward under ``max_memory``; None without.
      verified: Which steps were compared with PyTorch, in words; empty where none is to be.
    """

    captures: list[CaptureRecord]
    pieces: list[CaptureRecord] = dataclasses.field(default_factory=list)
    memory: MemoryPlan | None = None
    verified: str = ""

    @property
    def _records(self) -> list[CaptureRecord]:
        return self.captures + self.pieces

    @property
    def native_nodes(self) -> int:
        """Nodes that Ortrain runs."""
        return sum(record.native_nodes for record in self._records)

    @property
    def total_nodes(self) -> int:
        """All nodes; a call signature that is no graph counts as one, a first call alone as none."""
        records = [record for record in self._records if not record.first_call]
        return sum(record.native_nodes + record.escaped_nodes or 1 for record in records)

    @property
    def native_share(self) -> float:
        """Share of nodes that Ortrain runs, from 0 to 1; 0 before the first call."""
        return self.native_nodes / self.total_nodes if self.total_nodes else 0.0

    def to_html(self, title: str = "Ortrain report") -> str:
        """Return the same as a page of its own, with a picture of the share and of the stages."""
        return report_page.page(self, title)

    def __str__(self) -> str:
        lines = [
            f"{self.native_nodes} of {self.total_nodes} nodes native "
            f"({100 * self.native_share:.1f} %)"
        ]
        for record in self._records:
            kind = "training" if record.training else "inference"
            what = record.fallback or f"{record.native_nodes} nodes"
            if record.pieces:
                what = f"in {record.pieces} pieces: {what}"
            if record.fixed:
                what += f" for these sizes alone ({record.fixed} are fixed)"
            if record.from_disk:
                what += " from disk cache"
            times = ", ".join(f"{k} {v:.2f} s" for k, v in record.stages.items())
            lines.append(f"  {kind}: {what}; {record.reason}" + (f"; {times}" if times else ""))
            lines += [f"    in PyTorch: {escape}" for escape in record.escapes]
            lines += [f"    cut: {cause}" for cause in record.breaks]
            if record.branches:
                shown = _some(tuple(dict.fromkeys(record.branches)))
                lines.append(f"    while branches on values go as before: {shown}")
            if record.read_once:
                lines.append(f"    read once: {_some(record.read_once)}")
        if self.memory is not None:
            lines.append(f"  memory: {_describe(self.memory)}")
        if self.verified:
            lines.append(f"  verified steps: {self.verified}")
        return "\n".join(lines)


def _some(names: Sequence[str]) -> str:
    """Return the first of some names."""
    more = len(names) - _MOST_SHOWN
    return ", ".join(names[:_MOST_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _describe(plan: MemoryPlan) -> str:
    """Return what a budget did to a plan, on one line."""
    made = plan.recomputation
    if made is None:
        return f"{_mib(plan.total_bytes)} MiB"
    budget = f"budget {_mib(made.budget_bytes)} MiB"
    if not made.nodes:
        return f"{_mib(plan.total_bytes)} MiB, {budget}; nothing is computed again"
    operators = ", ".join(f"{count} {op}" for op, count in sorted(made.nodes.items()))
    return (
        f"{_mib(plan.total_bytes)} MiB, {_mib(made.total_bytes_without)} without recomputation, "
        f"{budget}; {made.num_nodes} nodes ({operators}) of {_mib(made.bytes)} MiB run twice, "
        f"estimated {100 * (made.time_share - 1):+.0f} % of time"
    )


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """What a plan computes again in the backward so that it stays within ``max_memory``.

    Attributes:
      budget_bytes: What ``MemoryPlan.total_bytes`` may be.
      total_bytes_without: What it is without recomputation.
      arena_bytes_without: The arena without recomputation.
      nodes: Nodes that run twice, by operator, as they are before fusion; empty where the plan fits
        as it is.
      bytes: Of the values that are computed again.
      time_share: Estimated time of the step, from bytes and FLOPs, as a share of the step without.
    """

    budget_bytes: int
    total_bytes_without: int
    arena_bytes_without: int
    nodes: dict[str, int]
    bytes: int
    time_share: float

    @property
    def num_nodes(self) -> int:
        """Nodes that run twice."""
        return sum(self.nodes.values())


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory that one forward and backward take from the engine, known before they run.

    Attributes:
      arena_bytes: Intermediate values, packed by lifetime.
      arena_lower_bound: Bytes alive at the worst moment: no packing can be smaller.
      constant_bytes: Values that follow from the shapes alone, made while planning.
      forward_output_bytes: Results handed to the caller.
      gradient_bytes: Gradients handed to the caller.
      total_bytes: All but the lower bound.
      steps: Kernel calls per forward and backward.
      recomputation: What is computed again for a budget; None without ``max_memory``.
    """

    arena_bytes: int
    arena_lower_bound: int
    constant_bytes: int
    forward_output_bytes: int
    gradient_bytes: int
    total_bytes: int
    steps: int
    recomputation: Recomputation | None = None

    @staticmethod
    def of(sizes: Mapping[str, Any]) -> MemoryPlan:
        """Return a plan as the engine describes it."""
        made = sizes.get("recomputation")
        recomputation = None if made is None else Recomputation(**made)
        return MemoryPlan(**{**sizes, "recomputation": recomputation})

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What an ORTModule did, as text: ``ortrain explain``."""

from __future__ import annotations

import collections
from collections.abc import Iterator

from ortrain.profile.text import duration
from ortrain.report import CaptureRecord
from ortrain.tools.findings import GraphFindings, ModuleFindings
from ortrain.tools.report.memory_picture import mebibytes

__all__ = ["text"]

# Reasons of refused fusions that are told, the most frequent first.
_MOST_REASONS = 8


def text(module: ModuleFindings) -> str:
    """Return it in lines: captures with their reasons and times, what runs in PyTorch, graphs."""
    report = module.report
    head = (
        f"{module.name}: {report.native_nodes} of {report.total_nodes} nodes native "
        f"({100 * report.native_share:.1f} %)"
    )
    lines = [head, "=" * len(head)]
    if not report.captures:
        lines.append("It has not been called.")
    for number, record in enumerate(report.captures, 1):
        lines += _capture(f"capture {number}", record)
    for number, record in enumerate(report.pieces, 1):
        lines += _capture(f"piece, capture {number}", record)
    for number, graph in enumerate(module.graphs, 1):
        lines += _graph(number, graph)
    return "\n".join(lines)


def _capture(title: str, record: CaptureRecord) -> Iterator[str]:
    kind = "training" if record.training else "inference"
    yield f"{title}, {kind}: {record.reason or 'a call that cannot be taken apart'}"
    if record.fallback:
        where = f"in {record.pieces} pieces" if record.pieces else "in PyTorch"
        yield f"  runs {where}: {record.fallback}"
    else:
        yield (
            f"  {record.aten_nodes} ATen operators became {record.native_nodes} native nodes"
            + (f" and {record.escaped_nodes} in PyTorch" if record.escaped_nodes else "")
            + (", from the cache on disk" if record.from_disk else "")
        )
    for escape, count in collections.Counter(record.escapes).items():
        yield f"  in PyTorch: {escape}" + (f" ({count} times)" if count > 1 else "")
    for cause in record.breaks:
        yield f"  cut: {cause}"
    if record.stages:
        total = duration(sum(record.stages.values()))
        stages = ", ".join(f"{name} {duration(took)}" for name, took in record.stages.items())
        yield f"  prepared in {total}: {stages}"


def _graph(number: int, graph: GraphFindings) -> Iterator[str]:
    yield f"graph {number}, {graph.title}"
    joined = sum(len(node.parts) for node in graph.nodes)
    yield f"  {len(graph.nodes)} nodes; {joined} were fused into {graph.num_fused}"
    reasons = collections.Counter(refusal.reason for refusal in graph.refusals)
    for reason, count in reasons.most_common(_MOST_REASONS):
        yield f"  not fused, {count} times: {reason}"
    rest = sum(reasons.values()) - sum(count for _, count in reasons.most_common(_MOST_REASONS))
    if rest:
        yield f"  not fused, {rest} times: other reasons"
    if not graph.is_explained:
        yield "  passes have changed since it was made: what they refused cannot be told"
    plan = graph.plan
    if plan is None:
        yield "  it has not run"
        return
    yield (
        f"  {len(plan.steps)} steps; memory by plan {mebibytes(plan.total_bytes)}: "
        f"arena {mebibytes(plan.arena_bytes)} ({mebibytes(plan.arena_lower_bound)} alive at once), "
        f"results {mebibytes(plan.forward_output_bytes)}, "
        f"gradients {mebibytes(plan.gradient_bytes)}, constants {mebibytes(plan.constant_bytes)}"
    )

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The page of ``ortrain report``."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from ortrain import env, report_page
from ortrain.profile import page as profile_page
from ortrain.profile.text import duration, summary
from ortrain.tools.findings import GraphFindings, ModuleFindings, merged_name
from ortrain.tools.report.graph_picture import LayerPicture, draw_layers
from ortrain.tools.report.memory_picture import MemoryPicture, draw_plan, mebibytes

__all__ = ["page"]

# More rows of one table help nobody.
_MOST_ROWS = 60
# Graphs of one module that are shown, those that need most memory; a module in many pieces has more.
_MOST_GRAPHS = 12


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """A fusion, or a refusal, and how often it came about."""

    cells: tuple[str, ...]
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Graph:
    findings: GraphFindings
    memory: MemoryPicture | None
    sizes: list[tuple[str, str]]
    layers: list[LayerPicture]
    taken: list[_Row]
    refused: list[_Row]


@dataclasses.dataclass(frozen=True, slots=True)
class _Module:
    findings: ModuleFindings
    graphs: list[_Graph]
    captures: Any  # Markup
    pieces: Any
    in_pytorch: Any
    timeline: Any
    by_op: Any
    by_layer: Any
    left_out: int
    profile_summary: str
    facts: list[tuple[str, str]]


def page(modules: Sequence[ModuleFindings], title: str) -> str:
    """Return the page.

    Args:
      modules: What there is to say of each ORTModule.
      title: Stands above it.

    Raises:
      ModuleNotFoundError: Jinja2 is not installed.
    """
    try:
        import jinja2
    except ImportError as error:
        raise ModuleNotFoundError("the report needs Jinja2: pip install jinja2") from error
    loader = jinja2.PackageLoader("ortrain.tools.report", "")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["duration"] = duration
    return environment.get_template("report.html.j2").render(
        title=title,
        modules=[_module(findings) for findings in modules],
        palette=profile_page.PALETTE,
        installation=_installation(),
        most_rows=_MOST_ROWS,
    )


def _installation() -> list[tuple[str, str]]:
    info = env.collect()
    machine, torch = info["machine"], info["torch"]
    shown = ("ortrain", "torch", "transformers", "python")
    versions = [f"{name} {info['versions'].get(name)}" for name in shown]
    return [
        ("versions", ", ".join(v for v in versions if not v.endswith(" None"))),
        ("processor", f"{machine['cpu']}, {machine['usable_cores']} cores usable"),
        ("threads", str(torch.get("threads", "unknown"))),
    ]


def _module(findings: ModuleFindings) -> _Module:
    from markupsafe import Markup

    report, profile = findings.report, findings.profile
    pieces = ""
    if report.pieces:
        pieces = report_page.captures_table("Captures of its pieces", report.pieces)
    steps = profile.last_step()
    return _Module(
        findings=findings,
        graphs=[_graph(graph) for graph in _biggest_first(findings.graphs)[:_MOST_GRAPHS]],
        left_out=max(0, len(findings.graphs) - _MOST_GRAPHS),
        # Made by functions that escape what they are given.
        captures=Markup(report_page.captures_table("Captures", report.captures)),
        pieces=Markup(pieces),
        in_pytorch=Markup(report_page.in_pytorch_table([*report.captures, *report.pieces])),
        timeline=Markup(profile_page.timeline(steps)),
        by_op=Markup(profile_page.table("operator, kernel, phase", profile.by_op())),
        by_layer=Markup(profile_page.table("layer, phase", profile.by_layer())),
        profile_summary=summary(profile) if profile.nodes else "",
        facts=_facts(findings),
    )


def _biggest_first(graphs: Sequence[GraphFindings]) -> list[GraphFindings]:
    return sorted(graphs, key=lambda graph: -(graph.plan.total_bytes if graph.plan else 0))


def _facts(findings: ModuleFindings) -> list[tuple[str, str]]:
    report = findings.report
    records = [*report.captures, *report.pieces]
    seconds = sum(sum(record.stages.values()) for record in records)
    plans = [graph.plan for graph in findings.graphs if graph.plan is not None]
    largest = max((plan.total_bytes for plan in plans), default=0)
    escapes = sum(len(record.escapes) for record in records)
    fallbacks = sum(bool(record.fallback) for record in records)
    joined = sum(len(node.parts) for graph in findings.graphs for node in graph.nodes)
    fused = sum(graph.num_fused for graph in findings.graphs)
    return [
        ("nodes native", f"{100 * report.native_share:.1f} %"),
        ("captures", str(len(records) - fallbacks)),
        ("time to prepare", duration(seconds)),
        ("memory by plan", mebibytes(largest)),
        ("nodes fused", f"{joined} into {fused}"),
        ("operators in PyTorch", str(escapes)),
        ("calls without a graph", str(fallbacks)),
    ]


def _graph(graph: GraphFindings) -> _Graph:
    plan = graph.plan
    sizes: list[tuple[str, str]] = []
    if plan is not None:
        over = plan.arena_bytes / plan.arena_lower_bound - 1 if plan.arena_lower_bound else 0.0
        bound = f"{mebibytes(plan.arena_bytes)}, {100 * over:.1f} % above what is alive at once"
        sizes = [
            ("arena", bound),
            ("results", mebibytes(plan.forward_output_bytes)),
            ("gradients", mebibytes(plan.gradient_bytes)),
            ("constants", mebibytes(plan.constant_bytes)),
            ("in all", mebibytes(plan.total_bytes)),
        ]
    return _Graph(
        findings=graph,
        memory=draw_plan(plan, len(profile_page.PALETTE)) if plan is not None else None,
        sizes=sizes,
        layers=draw_layers(graph),
        taken=_taken(graph),
        refused=_refused(graph),
    )


def _taken(graph: GraphFindings) -> list[_Row]:
    counts = collections.Counter(
        (node.op, ", ".join(node.parts), merged_name(node.layer), node.phase)
        for node in graph.nodes
        if node.parts
    )
    return [_Row(cells, count) for cells, count in counts.most_common()]


def _refused(graph: GraphFindings) -> list[_Row]:
    counts: collections.Counter[tuple[str, ...]] = collections.Counter()
    for refusal in graph.refusals:
        ops = " → ".join(op for op, _ in refusal.labels)
        layers = " → ".join(merged_name(name.rpartition("/")[0]) for _, name in refusal.labels)
        counts[refusal.rewrite, ops, refusal.reason, layers] += 1
    return [_Row(cells, count) for cells, count in counts.most_common()]

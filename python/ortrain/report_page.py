# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A module's report as one HTML page without anything to fetch."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ortrain.report import CaptureRecord, ModuleReport

# Seconds until a first step, in the order in which they pass.
_STAGES = {
    "load": "#6b7885",
    "capture": "#3b6ea5",
    "convert": "#4fa3a0",
    "autodiff": "#2f7d4f",
    "passes": "#d08c3f",
    "plan": "#8a5fa8",
}
_OTHER_STAGE = "#8d8440"
_NATIVE, _IN_PYTORCH = "#2f7d4f", "#b8505a"

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
  color: #1d2733; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100% }
th, td { padding: .25em .7em; text-align: left; border-bottom: 1px solid #dde3e9;
  vertical-align: top }
th.number, td.number { text-align: right }
code { white-space: pre-wrap; overflow-wrap: anywhere }
.bar { display: flex; height: 1em; background: #eef1f4 } .bar i { display: block; height: 100% }
.legend i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
"""


def page(report: ModuleReport, title: str) -> str:
    """Return the page: share of native nodes, captures with their times, what runs in PyTorch."""
    escaped_nodes = report.total_nodes - report.native_nodes
    share = bar([(_NATIVE, report.native_nodes), (_IN_PYTORCH, escaped_nodes)])
    sections = [captures_table("Captures of the module", report.captures)]
    if report.pieces:
        sections.append(captures_table("Its pieces", report.pieces))
    sections.append(in_pytorch_table([*report.captures, *report.pieces]))
    sections.append(read_once_list([*report.captures, *report.pieces]))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{report.native_nodes} of {report.total_nodes} nodes native ({100 * report.native_share:.1f} %).</p>
{share}
{"".join(sections)}
</body></html>
"""


def bar(parts: Sequence[tuple[str, float]]) -> str:
    """Return a bar of (colour, size) parts."""
    total = sum(size for _, size in parts) or 1
    drawn = "".join(
        f'<i style="background:{colour};width:{100 * size / total:.2f}%"></i>'
        for colour, size in parts
    )
    return f'<div class="bar">{drawn}</div>'


def captures_table(title: str, records: Sequence[CaptureRecord]) -> str:
    """Return a table of captured graphs, why they were captured, and the time of each stage."""
    if not records:
        return f"<h2>{title}</h2><p>None so far: the module has not been called.</p>"
    names = list(dict.fromkeys(name for record in records for name in record.stages))
    legend = "".join(
        f'<i style="background:{_STAGES.get(name, _OTHER_STAGE)}"></i>{html.escape(name)}'
        for name in names
    )
    rows = "".join(_row(record) for record in records)
    return (
        f"<h2>{title}</h2><table><tr><th>kind</th><th>why</th>"
        '<th class="number">nodes</th><th class="number">in PyTorch</th>'
        f'<th class="number">seconds</th><th style="width:30%">stages</th></tr>{rows}</table>'
        f'<p class="legend">{legend}</p>'
    )


def _row(record: CaptureRecord) -> str:
    kind = "training" if record.training else "inference"
    if record.from_disk:
        kind += ", from disk"
    if record.fallback:
        kind += f", {record.pieces} pieces" if record.pieces else ", in PyTorch"
    parts = [(_STAGES.get(n, _OTHER_STAGE), seconds) for n, seconds in record.stages.items()]
    return (
        f"<tr><td>{html.escape(kind)}</td><td>{html.escape(record.reason)}</td>"
        f'<td class="number">{record.native_nodes}</td>'
        f'<td class="number">{record.escaped_nodes}</td>'
        f'<td class="number">{sum(record.stages.values()):.2f}</td>'
        f"<td>{bar(parts) if parts else ''}</td></tr>"
    )


def in_pytorch_table(records: Sequence[CaptureRecord]) -> str:
    """Return a table of what runs in PyTorch, why, and the line of code it comes from."""
    rows: list[tuple[str, str, str, str]] = []
    for record in records:
        if record.fallback:
            rows.append(("whole call", "", record.fallback, ""))
        rows += [("cut", "", cause, "") for cause in record.breaks]
        rows += [(e.target, e.layer, e.reason, e.source) for e in record.escapes]
    if not rows:
        return "<h2>In PyTorch</h2><p>Nothing.</p>"
    body = "".join(
        "<tr>" + "".join(f"<td><code>{html.escape(text)}</code></td>" for text in row) + "</tr>"
        for row in dict.fromkeys(rows)
    )
    return (
        "<h2>In PyTorch</h2><table><tr><th>what</th><th>layer</th><th>why</th><th>line</th></tr>"
        f"{body}</table>"
    )


def read_once_list(records: Sequence[CaptureRecord]) -> str:
    """Return a list of what of installed packages graphs have as it was when they were captured; "" for nothing."""
    found = dict.fromkeys(name for record in records for name in record.read_once)
    if not found:
        return ""
    items = "".join(f"<li><code>{html.escape(name)}</code></li>" for name in found)
    return (
        "<h2>Read once</h2><p>What installed packages keep here was read when a graph was captured; the graph does not "
        f"follow what becomes of it.</p><ul>{items}</ul>"
    )

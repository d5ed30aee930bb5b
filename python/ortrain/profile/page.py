# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A profile as one HTML page without anything to fetch."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ortrain.profile.record import Event, Group, Profile
from ortrain.profile.text import COLUMNS, cells, summary

PALETTE = (
    "#2f7d4f",
    "#3b6ea5",
    "#d08c3f",
    "#8a5fa8",
    "#b8505a",
    "#4fa3a0",
    "#8d8440",
    "#6b7885",
)
_WIDTH, _LEFT, _LANE = 1000, 80, 34

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em;
  color: #1d2733; background: #fff }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15em .7em; text-align: right; border-bottom: 1px solid #dde3e9 }
th:first-child, td:first-child { text-align: left; font-family: ui-monospace, monospace }
td.bar { padding: 0; width: 160px } td.bar i { display: block; height: .8em; background: #2f7d4f }
svg { max-width: 100%; height: auto } svg text { font: 12px system-ui, sans-serif; fill: #1d2733 }
rect:hover { stroke: #000 }
.legend i { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
"""


def page(profile: Profile, title: str) -> str:
    """Return the page: summary, timeline of the latest step, operators, layers."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{html.escape(title)}</h1>
<p>{html.escape(summary(profile) if profile.nodes else "no node has run")}.</p>
<h2>Latest step</h2>
{timeline(profile.last_step())}
<h2>By operator</h2>
{table("operator, kernel, phase", profile.by_op())}
<h2>By layer</h2>
{table("layer, phase", profile.by_layer())}
<details><summary>Each layer by itself</summary>
{table("layer, phase", profile.by_layer(merge_repeated=False))}
</details>
</body></html>
"""


def table(title: str, groups: Sequence[Group]) -> str:
    """Return a table of groups, with a bar for the share of each."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in (title, *COLUMNS))
    rows = []
    for group in groups:
        texts = "".join(f"<td>{html.escape(text)}</td>" for text in (group.name, *cells(group)))
        bar = f'<td class="bar"><i style="width:{100 * group.share:.1f}%"></i></td>'
        rows.append(f"<tr>{texts}{bar}</tr>")
    return f"<table><tr>{head}<th></th></tr>{''.join(rows)}</table>"


def timeline(events: Sequence[Event]) -> str:
    """Draw each node as a bar, forward above backward; each lane begins at its own start."""
    if not events:
        return "<p>Nothing was recorded.</p>"
    totals: dict[str, int] = {}
    for event in events:
        totals[event.node.op] = totals.get(event.node.op, 0) + event.duration
    ranked = sorted(totals, key=lambda op: -totals[op])
    colour = {op: PALETTE[min(i, len(PALETTE) - 1)] for i, op in enumerate(ranked)}
    lanes = [(p, [e for e in events if e.node.phase == p]) for p in ("forward", "backward")]
    lanes = [(phase, members) for phase, members in lanes if members]
    spans = [max(e.start + e.duration for e in m) - m[0].start for _, m in lanes]
    scale = (_WIDTH - _LEFT) / max(max(spans), 1)
    drawn = []
    for row, ((phase, members), span) in enumerate(zip(lanes, spans, strict=True)):
        y = row * _LANE
        drawn.append(f'<text x="0" y="{y + 17}">{phase}</text>')
        for event in members:
            x = _LEFT + (event.start - members[0].start) * scale
            text = (
                f"{event.node.op} {event.node.layer}: {event.duration / 1e3:.1f} µs, "
                f"{event.node.bytes / 2**20:.2f} MiB"
            )
            if event.node.flops > 0 and event.duration > 0:
                text += f", {event.node.flops / event.duration:.1f} GFLOP/s"
            drawn.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(event.duration * scale, 0.1):.2f}" '
                f'height="24" fill="{colour[event.node.op]}"><title>{html.escape(text)}</title>'
                "</rect>"
            )
        drawn.append(f'<text x="0" y="{y + 30}">{span / 1e6:.1f} ms</text>')
    legend = "".join(
        f'<i style="background:{colour[op]}"></i>{html.escape(op)}'
        for op in ranked[: len(PALETTE) - 1]
    )
    others = f'<i style="background:{PALETTE[-1]}"></i>others' if len(ranked) > 7 else ""
    height = _LANE * len(lanes)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="Timeline of the latest step">{"".join(drawn)}</svg>'
        f'<p class="legend">{legend}{others}</p>'
    )

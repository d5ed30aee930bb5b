# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of the suite as one HTML page without anything to fetch."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare import ratio
from benchmarks.table import mib, seconds

_COLOURS = {"eager": "#9aa5b1", "tuned": "#5b7083", "compile": "#d08c3f", "ortrain": "#2f7d4f"}
_BAR, _GAP, _LEFT, _WIDTH = 16, 18, 210, 900

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1040px; margin: 2em auto; padding: 0 1em;
  color: #1d2733; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .2em .7em; text-align: right; border-bottom: 1px solid #dde3e9 }
th:first-child, td:first-child { text-align: left }
.failed { text-align: left; color: #a33 }
svg { max-width: 100%; height: auto } svg text { font: 13px system-ui, sans-serif; fill: #1d2733 }
.note { color: #5b6773 }
"""


def page(document: Mapping[str, Any]) -> str:
    """Return the page for what the suite wrote."""
    machine = document["environment"]["machine"]
    versions = document["environment"]["versions"]
    results = document["workloads"]
    threads = {side.get("threads") for r in results for side in r["sides"].values()} - {None}
    facts = (
        f"{machine['cpu']}, {machine['usable_cores']} cores, "
        f"{', '.join(map(str, sorted(threads)))} threads, PyTorch {versions['torch']}, "
        f"Python {versions['python']}"
    )
    tables = "\n".join(_table(result) for result in results)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Ortrain: training steps</title>
<style>{_STYLE}</style></head><body>
<h1>Training steps per time, stock eager PyTorch = 1</h1>
<p class="note">{html.escape(facts)}. Medians of whole steps: forward, loss, backward, clipping,
AdamW, zero_grad. Sides take turns, each in a process of its own. Black marks: what is aimed at.</p>
{_bars(results)}
{tables}
</body></html>
"""


def _bars(results: Sequence[Mapping[str, Any]]) -> str:
    """Draw a group of bars per workload: the speed of each side, in eager's."""
    drawn: list[str] = []
    speeds = [
        {p: s for p in r["sides"] if (s := ratio(dict(r), "eager", p)) is not None} for r in results
    ]
    aims = [r["targets"].get("eager") for r in results]
    top = max([1.0, *(v for s in speeds for v in s.values()), *(a for a in aims if a)]) * 1.05
    scale = (_WIDTH - _LEFT - 60) / top
    y = 24
    for result, speed, aim in zip(results, speeds, aims, strict=True):
        if not speed:
            continue
        height = _BAR * len(speed)
        label = html.escape(result["workload"]["name"])
        drawn.append(f'<text x="{_LEFT - 10}" y="{y + 13}" text-anchor="end">{label}</text>')
        for row, (peer, value) in enumerate(speed.items()):
            at = y + row * _BAR
            width = value * scale
            drawn.append(
                f'<rect x="{_LEFT}" y="{at}" width="{width:.1f}" height="{_BAR - 2}" '
                f'fill="{_COLOURS.get(peer, "#888")}"/>'
                f'<text x="{_LEFT + width + 5:.1f}" y="{at + 12}">{value:.2f}</text>'
            )
        if aim and "ortrain" in speed:
            at = y + list(speed).index("ortrain") * _BAR
            x = _LEFT + aim * scale
            drawn.append(f'<path d="M{x:.1f} {at - 2}v{_BAR + 2}" stroke="#000" stroke-width="2"/>')
        y += height + _GAP
    present = list(dict.fromkeys(p for s in speeds for p in s))
    legend = "".join(
        f'<rect x="{_LEFT + 110 * i}" y="2" width="12" height="12" '
        f'fill="{_COLOURS.get(p, "#888")}"/><text x="{_LEFT + 110 * i + 17}" y="13">'
        f"{html.escape(p)}</text>"
        for i, p in enumerate(present)
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {y}" width="{_WIDTH}" height="{y}" role="img" '
        f'aria-label="Speed of each side by workload">{legend}{"".join(drawn)}</svg>'
    )


def _table(result: Mapping[str, Any]) -> str:
    rate = max(result["gemm"].values())
    titles = ("side", "median", "min", "CPU median", "η", "first step", "peak", "faults per step")
    rows = []
    for name, side in result["sides"].items():
        if "error" in side:
            rows.append(
                f'<tr><td>{html.escape(name)}</td><td class="failed" colspan="{len(titles) - 1}">'
                f"{html.escape(side['error'])}</td></tr>"
            )
            continue
        cells = (
            name + (" (in PyTorch)" if side.get("fallback") else ""),
            seconds(side["wall"]["median"]),
            seconds(side["wall"]["min"]),
            seconds(side["cpu"]["median"]),
            f"{side['eta']:.2f}",
            seconds(side["first_step"]["wall"]),
            mib(side["peak_bytes"]),
            f"{side['faults_per_step']:.0f}",
        )
        rows.append("<tr>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells) + "</tr>")
    head = "".join(f"<th>{html.escape(t)}</th>" for t in titles)
    return (
        f"<h2>{html.escape(result['workload']['name'])}</h2>"
        f'<p class="note">{result["flops"] / 1e9:.4g} GFLOP of matrix products per step, best '
        f"library {rate / 1e9:.1f} GFLOP/s, {html.escape(result['settings']['dtype'])}</p>"
        f"<table><tr>{head}</tr>{''.join(rows)}</table>"
    )

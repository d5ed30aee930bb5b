# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A profile as tables of plain text."""

from __future__ import annotations

from collections.abc import Sequence

from ortrain.profile.record import Group, Profile

COLUMNS = ("self", "share", "calls", "moved", "GB/s", "GFLOP/s")


def cells(group: Group) -> tuple[str, ...]:
    """Return the texts of one row, in the order of ``COLUMNS``."""
    return (
        duration(group.seconds),
        f"{100 * group.share:.1f} %",
        str(group.runs),
        f"{group.bytes / 2**20:.1f} MiB",
        f"{group.gbytes:.1f}",
        f"{group.gflops:.1f}" if group.flops > 0 else "",
    )


def summary(profile: Profile) -> str:
    """Return one sentence on the whole."""
    flops = sum(node.flops for node in profile.nodes)
    products = sum(node.seconds for node in profile.nodes if node.flops > 0)
    text = f"{duration(profile.seconds)} in {sum(n.runs for n in profile.nodes)} node runs"
    if products > 0:
        share = products / profile.seconds
        text += f", {100 * share:.0f} % in matrix products at {flops / products / 1e9:.1f} GFLOP/s"
    if profile.events:
        text += f"; {duration(profile.elapsed)} from the first to the last"
    return text


def tables(profile: Profile, top: int, *, merge_repeated: bool = True) -> str:
    """Return the summary and the slowest operators and layers."""
    if not profile.nodes:
        return "no node has run"
    by_layer = profile.by_layer(merge_repeated=merge_repeated)
    parts = [summary(profile)]
    for title, groups in (("operator", profile.by_op()), ("layer", by_layer)):
        parts.append(_table(title, groups, top))
    return "\n\n".join(parts)


def _table(title: str, groups: Sequence[Group], top: int) -> str:
    rows = [(title, *COLUMNS)]
    rows += [(group.name, *cells(group)) for group in groups[:top]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = row
        right = [text.rjust(width) for text, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *right]).rstrip())
    if len(groups) > top:
        rest = sum(group.seconds for group in groups[top:])
        lines.append(f"{len(groups) - top} more, {duration(rest)}")
    return "\n".join(lines)


def duration(value: float) -> str:
    """Return seconds for people: "1.50 s", "2.30 ms"."""
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.2f} ms" if value >= 1e-3 else f"{value * 1e6:.1f} µs"

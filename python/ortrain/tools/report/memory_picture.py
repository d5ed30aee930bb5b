# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A memory plan as a picture: steps to the right, bytes of the arena upwards."""

from __future__ import annotations

import dataclasses
import itertools

from ortrain.tools.findings import Buffer, Plan, merged_name

__all__ = ["MemoryPicture", "Rectangle", "draw_plan"]

WIDTH, HEIGHT = 1000.0, 420.0


@dataclasses.dataclass(frozen=True, slots=True)
class Rectangle:
    """A buffer in the picture; x and y count from the upper left corner, in the picture's units."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryPicture:
    """What the page draws of a plan.

    Attributes:
      rectangles: One per buffer.
      alive: Points "x,y" of the line of bytes in use.
      boundary: Where the backward begins; None without one.
      peak: x of the step with the most bytes in use.
      lines: (y, label) of horizontal lines.
      marks: (x, label) of steps.
    """

    rectangles: list[Rectangle]
    alive: str
    boundary: float | None
    peak: float
    lines: list[tuple[float, str]]
    marks: list[tuple[float, str]]
    width: float = WIDTH
    height: float = HEIGHT


def draw_plan(plan: Plan, colours: int) -> MemoryPicture | None:
    """Return the picture of a plan, None where the arena is empty.

    Args:
      plan: The plan.
      colours: How many there are. Layers take turns; where there are more of them, those that
        differ in a number only have the same.
    """
    count = len(plan.steps)
    if not plan.buffers or count == 0:
        return None
    across, up = WIDTH / count, HEIGHT / max(plan.arena_bytes, 1)
    layers = [name.rpartition("/")[0] for _, name in plan.steps]
    if len(set(layers)) > colours:
        layers = [merged_name(layer) for layer in layers]
    colour_of: dict[str, int] = {}
    rectangles = []
    change = [0] * (count + 1)
    for buffer in plan.buffers:
        op, name = plan.steps[buffer.first_step]
        colour = colour_of.setdefault(layers[buffer.first_step], len(colour_of)) % colours
        change[buffer.first_step] += buffer.bytes
        change[buffer.last_step + 1] -= buffer.bytes
        rectangles.append(
            Rectangle(
                x=buffer.first_step * across,
                y=HEIGHT - (buffer.offset + buffer.bytes) * up,
                width=(buffer.last_step + 1 - buffer.first_step) * across,
                height=buffer.bytes * up,
                colour=colour,
                text=_text(buffer, op, name),
            )
        )
    alive = list(itertools.accumulate(change))[:count]
    points = []
    for step, total in enumerate(alive):
        y = HEIGHT - total * up
        points += [f"{step * across:.1f},{y:.1f}", f"{(step + 1) * across:.1f},{y:.1f}"]
    has_backward = 0 < plan.num_forward_steps < count
    return MemoryPicture(
        rectangles=rectangles,
        alive=" ".join(points),
        boundary=plan.num_forward_steps * across if has_backward else None,
        peak=(max(range(count), key=alive.__getitem__) + 0.5) * across,
        lines=[(HEIGHT - size * up, mebibytes(size)) for size in _scale(plan.arena_bytes, (2,))],
        marks=[(step * across, str(step)) for step in _scale(count, (5, 2))],
    )


def mebibytes(size: float) -> str:
    """Return a number of bytes for people: "12.5 MiB"."""
    if size < 2**20:
        return f"{size / 2**10:.3g} KiB" if size >= 2**10 else f"{size:.0f} bytes"
    digits = 2 if size < 10 * 2**20 else 1 if size < 100 * 2**20 else 0
    return f"{size / 2**20:,.{digits}f} MiB"


def _text(buffer: Buffer, op: str, name: str) -> str:
    held = buffer.name or f"workspace of {op}"
    text = f"{held}\n{mebibytes(buffer.bytes)} at offset {buffer.offset:,}\n"
    text += f"steps {buffer.first_step} to {buffer.last_step}, made by {op}"
    layer = name.rpartition("/")[0]
    if layer:
        text += f"\nlayer {layer}"
    if buffer.values > 1:
        text += f"\n{buffer.values} results took this place in turn"
    return text


def _scale(end: int, factors: tuple[int, ...]) -> list[int]:
    """Return up to six round numbers until ``end``; the factors lead from one to a rounder one."""
    step = 1
    for factor in itertools.cycle(factors):
        if end / step <= 6:
            break
        step *= factor
    return list(range(step, end + 1, step))

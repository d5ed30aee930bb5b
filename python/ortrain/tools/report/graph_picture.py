# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A finished graph as pictures: one per layer and direction, repeated layers drawn once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from ortrain.tools.findings import GraphFindings, GraphNode, merged_name

__all__ = ["Arrow", "Box", "LayerPicture", "draw_layers"]

# Up to so many nodes a graph is one picture per direction.
_SMALL = 40
# Boxes side by side, at most.
_ACROSS = 5
_BOX_WIDTH, _BOX_HEIGHT, _GAP_X, _GAP_Y = 172.0, 30.0, 10.0, 26.0
_FIRST_NUMBER = re.compile(r"^(?:[^.]*\.)*?\d+(?=\.|$)")
_ESCAPES = ("External", "ExternalGrad")


@dataclasses.dataclass(frozen=True, slots=True)
class Box:
    """A node in a picture.

    Attributes:
      x: Left edge.
      y: Upper edge.
      label: Operator, and how many are in it.
      kind: "fused", "plain", "view" (no step of its own) or "escape" (runs in PyTorch).
      text: All there is to say.
    """

    x: float
    y: float
    label: str
    kind: str
    text: str
    width: float = _BOX_WIDTH
    height: float = _BOX_HEIGHT


@dataclasses.dataclass(frozen=True, slots=True)
class Arrow:
    """A value that goes from one node to another; ``text`` says why they are not one, if asked."""

    path: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class LayerPicture:
    """The nodes of a layer, or of several that are alike.

    Attributes:
      title: The layers.
      phase: "forward" or "backward".
      seconds: Wall time of all of them in a step, as far as it is known.
      num_nodes: Of one of them.
      num_hidden: Nodes among those that only compute shapes, and are not drawn.
      num_fused: Nodes among those that stand for several.
      boxes: The other nodes of the first one.
      arrows: The values between them.
      width: Of the picture.
      height: Of the picture.
    """

    title: str
    phase: str
    seconds: float
    num_nodes: int
    num_hidden: int
    num_fused: int
    boxes: list[Box]
    arrows: list[Arrow]
    width: float
    height: float


def draw_layers(graph: GraphFindings) -> list[LayerPicture]:
    """Return the pictures of a graph, in the order in which their first nodes run."""
    whole = len(graph.nodes) <= _SMALL
    members: dict[tuple[str, str], list[int]] = {}
    for position, node in enumerate(graph.nodes):
        layer = "" if whole else _layer_group(node.layer)
        members.setdefault((node.phase, layer), []).append(position)
    maker = {
        name: position for position, node in enumerate(graph.nodes) for name in node.outputs if name
    }
    alike: dict[object, list[tuple[str, list[int]]]] = {}
    for (phase, layer), positions in members.items():
        key = (phase, merged_name(layer), _signature(graph.nodes, positions, maker))
        alike.setdefault(key, []).append((layer, positions))
    apart = _apart(graph)
    hidden = _only_shapes(graph.nodes, maker) if graph.plan is not None else set()
    return [
        _picture(
            graph.nodes,
            "all layers" if whole else _title([layer for layer, _ in group]),
            [positions for _, positions in group],
            maker,
            apart,
            hidden,
        )
        for group in alike.values()
    ]


def _only_shapes(nodes: Sequence[GraphNode], maker: dict[str, int]) -> set[int]:
    """Return the nodes without a step of their own that compute shapes, and nothing else."""
    found: set[int] = set()
    for position, node in enumerate(nodes):
        if node.kernel or not node.inputs:
            continue
        sources = [maker[name] for name in node.inputs if name in maker]
        first_is_made = node.inputs[0] in maker
        if node.op in ("Shape", "Size") or (first_is_made and found.issuperset(sources)):
            found.add(position)
    return found


def _layer_group(layer: str) -> str:
    """Return the path down to its first number, else its first part."""
    found = _FIRST_NUMBER.match(layer)
    return found.group(0) if found else layer.partition(".")[0]


def _signature(nodes: Sequence[GraphNode], positions: list[int], maker: dict[str, int]) -> object:
    """Return what is equal where two layers have the same picture."""
    local = {position: number for number, position in enumerate(positions)}
    return tuple(
        (
            nodes[p].op,
            nodes[p].parts,
            nodes[p].kernel,
            tuple(local.get(maker.get(name, -1), -1) for name in nodes[p].inputs),
        )
        for p in positions
    )


def _apart(graph: GraphFindings) -> dict[tuple[int, ...], list[str]]:
    """Return why pairs of nodes are not one, and why single ones were left as they are."""
    reasons: dict[tuple[int, ...], list[str]] = {}
    for refusal in graph.refusals:
        told = reasons.setdefault(refusal.nodes, [])
        if refusal.reason not in told:
            told.append(refusal.reason)
    return reasons


def _picture(
    nodes: Sequence[GraphNode],
    title: str,
    instances: list[list[int]],
    maker: dict[str, int],
    apart: dict[tuple[int, ...], list[str]],
    hidden: set[int],
) -> LayerPicture:
    positions = [p for p in instances[0] if p not in hidden]
    places = _places(nodes, positions, maker)
    others: dict[int, list[str]] = {}
    for pair, reasons in apart.items():
        inside = [p for p in pair if p in places]
        if len(inside) == 1:
            outside = [nodes[p] for p in pair if p not in places]
            apart_from = (
                f"apart from {outside[0].op} {outside[0].name}" if outside else "left as is"
            )
            others.setdefault(inside[0], []).append(f"{apart_from}: {', '.join(reasons)}")
    boxes = [_box(nodes[p], *places[p], others.get(p, [])) for p in positions]
    arrows = []
    for reader in positions:
        for source in dict.fromkeys(maker.get(name) for name in nodes[reader].inputs):
            if source in places and source != reader:
                reasons = apart.get((source, reader), [])
                why = f"{nodes[source].op} and {nodes[reader].op} stay apart: {', '.join(reasons)}"
                arrows.append(Arrow(_curve(places[source], places[reader]), why if reasons else ""))
    return LayerPicture(
        title=title,
        phase=nodes[instances[0][0]].phase,
        seconds=sum(nodes[p].seconds or 0.0 for group in instances for p in group),
        num_nodes=len(instances[0]),
        num_hidden=len(instances[0]) - len(positions),
        num_fused=sum(bool(nodes[p].parts) for p in positions),
        boxes=boxes,
        arrows=arrows,
        width=max((x for x, _ in places.values()), default=0.0) + 1.2 * _BOX_WIDTH,
        height=max((y for _, y in places.values()), default=0.0) + _BOX_HEIGHT + 1,
    )


def _title(layers: list[str]) -> str:
    if len(layers) == 1:
        return layers[0] or "outside of numbered layers"
    return f"{layers[0]} to {layers[-1]}, {len(layers)} alike"


def _places(
    nodes: Sequence[GraphNode], positions: list[int], maker: dict[str, int]
) -> dict[int, tuple[float, float]]:
    """Put each node below those that it reads, and near them from left to right."""
    inside = set(positions)
    sources = {
        p: [maker[name] for name in nodes[p].inputs if maker.get(name) in inside] for p in positions
    }
    rank: dict[int, int] = {}
    for p in positions:
        rank[p] = 1 + max((rank[s] for s in sources[p] if s in rank), default=-1)
    places: dict[int, tuple[float, float]] = {}
    y = 1.0
    for level in range(max(rank.values(), default=-1) + 1):
        row = [p for p in positions if rank[p] == level]
        wished = {
            p: sum(places[s][0] for s in sources[p]) / len(sources[p]) if sources[p] else 0.0
            for p in row
        }
        row.sort(key=lambda p: wished[p])
        for start in range(0, len(row), _ACROSS):
            x = 1.0
            part = row[start : start + _ACROSS]
            for number, p in enumerate(part):
                rest = (_ACROSS - (len(part) - number)) * (_BOX_WIDTH + _GAP_X) + 1
                x = max(x, min(wished[p], rest))
                places[p] = (x, y)
                x += _BOX_WIDTH + _GAP_X
            y += _BOX_HEIGHT + _GAP_Y
    return places


def _curve(source: tuple[float, float], reader: tuple[float, float]) -> str:
    x0, y0 = source[0] + _BOX_WIDTH / 2, source[1] + _BOX_HEIGHT
    x1, y1 = reader[0] + _BOX_WIDTH / 2, reader[1]
    if y1 - y0 > _BOX_HEIGHT + 2 * _GAP_Y and abs(x1 - x0) < _BOX_WIDTH:
        beside = max(x0, x1) + 0.8 * _BOX_WIDTH  # else it would run below the boxes between
        return f"M{x0:.0f},{y0:.0f}C{beside:.0f},{y0 + 30:.0f} {beside:.0f},{y1 - 30:.0f} {x1:.0f},{y1:.0f}"
    middle = (y0 + y1) / 2
    return f"M{x0:.0f},{y0:.0f}C{x0:.0f},{middle:.0f} {x1:.0f},{middle:.0f} {x1:.0f},{y1:.0f}"


def _box(node: GraphNode, x: float, y: float, apart: list[str]) -> Box:
    if node.op in _ESCAPES:
        kind = "escape"
    elif node.parts:
        kind = "fused"
    else:
        kind = "plain" if node.kernel else "view"
    label = f"{node.op} ({len(node.parts)})" if node.parts else node.op
    lines = [f"{node.op} {node.name}"]
    if node.parts:
        lines.append(f"made of {', '.join(node.parts)}")
    lines += [f"gives {', '.join(node.shapes)}"] if node.shapes else []
    if node.kernel:
        took = f", {node.seconds * 1e3:.3f} ms" if node.seconds is not None else ""
        lines.append(f"kernel {node.kernel}{took}")
    else:
        lines.append("no step of its own: a view, or known from the shapes")
    lines += apart
    return Box(x, y, label if len(label) <= 24 else label[:23] + "…", kind, "\n".join(lines))

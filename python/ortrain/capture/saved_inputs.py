# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Inputs of a captured graph of which PyTorch would keep nothing for its backward.

Where PyTorch makes a copy of an input and keeps that, a graph may do with the input itself.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import size_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.aliases import memories_of


def inputs_not_saved(graph: fx.Graph) -> set[fx.Node]:
    """Return the placeholders whose memory no operator's gradient reads in eager PyTorch."""
    owners = {
        memory: node
        for node in graph.nodes
        if node.op == "placeholder"
        for memory in memories_of(node)
    }
    unsaved = set(owners.values())
    known: dict[Hashable, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        made = set(memories_of(node))
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, fx.Node):
                continue
            for memory in memories_of(leaf):
                if memory in made or owners.get(memory) not in unsaved:
                    continue  # a view, which keeps nothing, or known already
                # Which of its arguments an operator keeps does not depend on their sizes.
                key = (node.target, place, len(leaves))
                if key not in known:
                    known[key] = _saves(node, memory)
                if known[key]:
                    unsaved.discard(owners[memory])
    return unsaved


def _saves(node: fx.Node, memory: int) -> bool:
    """Tell whether the gradient of an operator reads an argument's memory."""
    stand_ins: dict[fx.Node, Any] = {}
    asked: set[int] = set()

    def stand_in(source: fx.Node) -> Any:
        if source not in stand_ins:
            stand_ins[source] = pytree.tree_map(without_contents, source.meta["val"])
            for before, now in zip(
                memories_of(source), pytree.tree_leaves(stand_ins[source]), strict=False
            ):
                if before == memory:
                    asked.add(internals.storage_identity(now))
        return stand_ins[source]

    saved: set[int] = set()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.add(internals.storage_identity(tensor))
        return tensor

    args, kwargs = pytree.tree_map_only(
        (torch.SymInt, torch.SymFloat, torch.SymBool),
        hint,
        fx.map_arg((node.args, node.kwargs), stand_in),
    )
    try:
        with (
            torch.enable_grad(),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            node.target(*args, **{k: v for k, v in kwargs.items() if k != "device"})  # type: ignore[operator]
    except Exception:
        return True  # not every operator takes tensors without contents
    return not asked.isdisjoint(saved)


def hint(number: Any) -> Any:
    """Return a number, or what one that depends on sizes is for the sample."""
    return number if isinstance(number, (bool, int, float)) else number.node.hint


def without_contents(value: Any) -> Any:
    """Return a tensor with a gradient that stands for one of the graph, or its number.

    Raises:
      CaptureError: Its sizes depend on values.
    """
    if not isinstance(value, torch.Tensor):
        return hint(value)
    made = torch.empty_strided(
        [size_internals.size_hint(size) for size in value.shape],
        [size_internals.size_hint(stride) for stride in value.stride()],
        dtype=value.dtype,
        device="meta",
    )
    return made.requires_grad_(made.is_floating_point())

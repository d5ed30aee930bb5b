# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which outputs of a captured graph PyTorch can differentiate one after the other.

A backward frees what the nodes on its way have saved. Another backward fails where it meets such a
node, and works where it meets none: from outputs of parts that have nothing in common, or nothing
that a gradient reads.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture.aliases import is_floating
from ortrain.capture.saved_inputs import hint, without_contents


def outputs_with_common_saves(
    graph: fx.Graph, tracked: Iterable[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[frozenset[int], ...]:
    """Return for each output the outputs, itself among them, whose backward frees what it needs.

    Args:
      graph: The graph.
      tracked: Its placeholders with a gradient.
      outputs: The nodes that are outputs.
    """
    everything = frozenset(range(len(outputs)))
    if len(outputs) < 2:
        return (everything,) * len(outputs)
    with_history, saving = set(tracked), set[fx.Node]()
    known: dict[Hashable, tuple[bool, bool]] = {}
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    for node in nodes:
        if with_history.isdisjoint(node.all_input_nodes) or not is_floating(node):
            continue
        leaves = pytree.tree_leaves((node.args, node.kwargs))
        tensors = [leaf in with_history if isinstance(leaf, fx.Node) else None for leaf in leaves]
        key = (node.target, *tensors)
        if key not in known:
            known[key] = _history_of(node, with_history)
        has_history, saves = known[key]
        if has_history:
            with_history.add(node)
        if saves:
            saving.add(node)
    reaching: dict[fx.Node, int] = {}  # by bits: the outputs whose backward comes to a node
    for i, node in enumerate(outputs):
        reaching[node] = reaching.get(node, 0) | 1 << i
    for node in reversed(nodes):
        for source in node.all_input_nodes if node in with_history and node in reaching else ():
            reaching[source] = reaching.get(source, 0) | reaching[node]
    common = {reaching[node] for node in saving if node in reaching}
    return tuple(
        frozenset(j for j in everything if any(bits >> i & 1 and bits >> j & 1 for bits in common))
        for i in range(len(outputs))
    )


def _history_of(node: fx.Node, with_history: set[fx.Node]) -> tuple[bool, bool]:
    """Tell whether what a node gives has a history in PyTorch, and whether that has saved tensors."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return True, node.target is not operator.getitem
    stand_ins: dict[fx.Node, Any] = {}

    def stand_in(source: fx.Node) -> Any:
        if source not in stand_ins:
            made = pytree.tree_map(without_contents, source.meta["val"])
            if source not in with_history:
                made = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)
            stand_ins[source] = made
        return stand_ins[source]

    args, kwargs = pytree.tree_map_only(
        (torch.SymInt, torch.SymFloat, torch.SymBool),
        hint,
        fx.map_arg((node.args, node.kwargs), stand_in),
    )
    try:
        with torch.enable_grad():
            made = node.target(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        results, leaves = _with_gradient(made), _with_gradient(list(stand_ins.values()))
        if not results:
            return False, False
        gradients = [torch.empty_like(result) for result in results]
        _differentiate(results, leaves, gradients)
    except Exception:
        return True, True  # not every operator takes tensors without contents
    try:
        _differentiate(results, leaves, gradients)
    except RuntimeError:
        return True, True
    return True, False


def _differentiate(
    results: list[torch.Tensor], leaves: list[torch.Tensor], gradients: list[torch.Tensor]
) -> None:
    with warnings.catch_warnings():
        # Of what stands for an autograd function, whose backward is none of the operator's.
        warnings.filterwarnings("ignore", message=".*an autograd kernel was not registered")
        torch.autograd.grad(results, leaves, gradients, allow_unused=True)


def _with_gradient(value: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(value)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

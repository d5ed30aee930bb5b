# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of a forward that PyTorch's backward reads, and which nobody may write to before it.

A graph may keep something else, and would go on where PyTorch raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import torch_internals as internals
from ortrain.capture.aliases import is_floating, memories_of
from ortrain.capture.checkpoints import checkpoint_of
from ortrain.capture.saved_inputs import hint, without_contents


def results_that_gradients_need(
    graph: fx.Graph, tracked: Iterable[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[frozenset[int], ...]:
    """Return for each output the outputs, by position, that its backward reads in eager PyTorch.

    Args:
      graph: The graph.
      tracked: Its placeholders with a gradient.
      outputs: The nodes that are outputs.
    """
    positions: dict[int, list[int]] = {}
    for i, node in enumerate(outputs):
        for memory in memories_of(node):
            positions.setdefault(memory, []).append(i)
    with_history = set(tracked)
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for node in nodes:
        if (
            not with_history.isdisjoint(node.all_input_nodes)
            and is_floating(node)
            and node.target is not torch.ops.aten.detach.default
        ):
            with_history.add(node)
    reaching: dict[fx.Node, int] = {}  # by bits: the outputs whose backward comes to a node
    for i, node in enumerate(outputs):
        reaching[node] = reaching.get(node, 0) | 1 << i
    needed: list[set[int]] = [set() for _ in outputs]
    of_outputs = {node: not positions.keys().isdisjoint(memories_of(node)) for node in graph.nodes}
    for node in reversed(nodes):
        if node not in with_history or node not in reaching:
            continue
        for source in node.all_input_nodes:
            reaching[source] = reaching.get(source, 0) | reaching[node]
        if not any(of_outputs[part] for part in (node, *node.all_input_nodes)):
            continue
        for memory in _saved(node, with_history):
            for i in range(len(outputs)):
                if reaching[node] >> i & 1:
                    needed[i].update(positions.get(memory, ()))
    return tuple(map(frozenset, needed))


def _saved(node: fx.Node, with_history: set[fx.Node]) -> set[int]:
    """Return the memories, of arguments and results, that an operator keeps for its gradient."""
    # A checkpoint keeps nothing of what it makes.
    if not isinstance(node.target, torch._ops.OpOverload) or checkpoint_of(node):
        return set()
    stand_ins: dict[fx.Node, Any] = {}

    def stand_in(source: fx.Node) -> Any:
        if source not in stand_ins:
            made = pytree.tree_map(without_contents, source.meta["val"])
            if source not in with_history:
                made = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, made)
            stand_ins[source] = made
        return stand_ins[source]

    kept: set[int] = set()
    alive: list[torch.Tensor] = []  # so that no address is used again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        kept.add(internals.storage_identity(tensor))
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
            made = node.target(*args, **{k: v for k, v in kwargs.items() if k != "device"})
    except Exception:
        return set()  # not every operator takes tensors without contents: nobody knows
    return {
        memory
        for part, now in [*stand_ins.items(), (node, made)]
        for memory, tensor in zip(memories_of(part), _tensors(now), strict=False)
        if internals.storage_identity(tensor) in kept
    }


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]

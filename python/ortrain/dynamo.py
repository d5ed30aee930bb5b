# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="ortrain")``: what Dynamo cuts a program into runs on the engine.

Dynamo looks after arguments, flags and control flow; each piece of it that is tensors in, tensors out
becomes a graph of the engine, with a backward, as a whole module does under ``ORTModule``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import torch_internals as internals
from ortrain.engine import Engine

_log = logging.getLogger("ortrain")


def backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None
) -> Callable[..., Any]:
    """Return a function that runs a piece of a program on the engine.

    Args:
      graph_module: The piece, as Dynamo hands it over.
      example_inputs: Its inputs of the first call; only their kinds matter.
      options: None are known.

    Raises:
      TypeError: An option was given.
    """
    if options:
        raise TypeError(f"the backend 'ortrain' takes no options, got {', '.join(sorted(options))}")
    if _gives_views(graph_module):
        _log.info("a piece runs in PyTorch: its results share memory")
        return graph_module.forward
    piece, kept = _with_sizes_of_tensors(graph_module)
    engine = Engine(piece)

    def run(*args: Any) -> Any:
        return engine.run([args[i] for i in kept], {})

    return internals.outside_compiled_code(run)


def _gives_views(piece: fx.GraphModule) -> bool:
    """Tell whether results share memory with each other or with inputs, which code behind may see."""
    (output,) = (node for node in piece.graph.nodes if node.op == "output")
    inputs = [node for node in piece.graph.nodes if node.op == "placeholder"]
    seen = {
        internals.storage_identity(value)
        for value in (node.meta.get("example_value") for node in inputs)
        if isinstance(value, torch.Tensor)
    }
    for node in pytree.tree_leaves(output.args):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor):
            memory = internals.storage_identity(value)
            if memory in seen:
                return True
            seen.add(memory)
    return False


def _with_sizes_of_tensors(piece: fx.GraphModule) -> tuple[fx.GraphModule, list[int]]:
    """Return the piece, reading sizes off its tensors, and which of its inputs that one takes.

    Dynamo passes sizes that vary as arguments of their own. Numbers among the arguments belong to
    one captured graph; a size of a tensor may vary.
    """
    inputs = [node for node in piece.graph.nodes if node.op == "placeholder"]
    axes: dict[Any, tuple[fx.Node, int]] = {}
    for node in inputs:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                axes.setdefault(internals.size_expression(size), (node, axis))
    sources = {
        node: axes.get(internals.size_expression(node.meta["example_value"]))
        for node in inputs
        if isinstance(node.meta.get("example_value"), torch.SymInt)
    }
    kept = [i for i, node in enumerate(inputs) if sources.get(node) is None]
    if len(kept) == len(inputs):
        return piece, kept
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for position in kept:
        copies[inputs[position]] = graph.node_copy(inputs[position])
    for node, source in sources.items():
        if source is not None:
            copies[node] = graph.call_method("size", (copies[source[0]], source[1]))
    for node in piece.graph.nodes:
        if node.op != "placeholder":
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(piece, graph), kept

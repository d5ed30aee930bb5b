# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators without a conversion, taken apart where they stand.

PyTorch takes operators apart by tracing the whole program again, twice for each level of parts. A
few of them among hundreds of others need no more than a trace of each by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from ortrain.capture import torch_internals as internals
from ortrain.capture.functional import is_harmless

_DEEPEST = 8  # levels of parts
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


class _CannotExpandError(Exception):
    """An operator that only a trace of the whole program takes apart."""


def expand_unknown(program: torch.export.ExportedProgram, known: Callable[[Any], bool]) -> None:
    """Put the parts of operators that have no conversion in their place.

    An operator stays as it is where one of its parts has no conversion either, where parts write, or
    where taking it apart would say something about sizes that the export has not.

    Args:
      program: As exported; changed in place.
      known: Tells whether an operator has a conversion.
    """
    parts: dict[fx.Node, fx.GraphModule] = {}
    for node in program.graph.nodes:
        if _is_unknown(node, known):
            try:
                parts[node] = _parts(node, known, _DEEPEST)
            except _CannotExpandError:
                continue
    if parts:
        _splice(program.graph, parts)
        program.graph_module.recompile()


def _is_unknown(node: fx.Node, known: Callable[[Any], bool]) -> bool:
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and not known(target)
    )


def _parts(node: fx.Node, known: Callable[[Any], bool], depth: int) -> fx.GraphModule:
    """Return the graph of what a node is made of, its inputs in the order of ``all_input_nodes``."""
    function = internals.decomposition(node.target) if depth > 0 else None
    if function is None:
        raise _CannotExpandError
    inputs = node.all_input_nodes
    values = [each.meta.get("val") for each in inputs]
    if not all(isinstance(v, (torch.Tensor, *_SIZES)) for v in values):
        raise _CannotExpandError  # an operator of several results, say

    def call(*given: Any) -> Any:
        found = dict(zip(inputs, given, strict=True))
        return function(
            *fx.map_arg(node.args, found.__getitem__), **fx.map_arg(node.kwargs, found.__getitem__)
        )

    traced = internals.trace_of_operators(call, values)
    if traced is None:
        raise _CannotExpandError
    inner: dict[fx.Node, fx.GraphModule] = {}
    for part in traced.graph.nodes:
        if _is_unknown(part, known):
            inner[part] = _parts(part, known, depth - 1)
        elif part.op == "get_attr" or not is_harmless(traced, part, known):
            raise _CannotExpandError
    if inner:
        _splice(traced.graph, inner)
    _results(traced, node)
    return traced


def _results(parts: fx.GraphModule, node: fx.Node) -> Any:
    """Return the node, or the sequence of nodes, that stands for the result of ``node``."""
    (result,) = next(n for n in parts.graph.nodes if n.op == "output").args
    several = isinstance(result, (list, tuple))
    made = list(result) if several else [result]
    if (
        all(isinstance(each, fx.Node) and each.op == "call_function" for each in made)
        and len(set(made)) == len(made)
        and (not several or all(user.target is operator.getitem for user in node.users))
    ):
        return result
    raise _CannotExpandError


def _splice(graph: fx.Graph, parts: Mapping[fx.Node, fx.GraphModule]) -> None:
    """Replace nodes of a graph by the graphs of what they are made of."""
    for node, body in parts.items():
        placeholders = (n for n in body.graph.nodes if n.op == "placeholder")
        held = dict(zip(placeholders, node.all_input_nodes, strict=True))
        # What tells the layer and the line.
        origin = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}
        with graph.inserting_before(node):
            for part in body.graph.nodes:
                if part.op not in ("placeholder", "output"):
                    held[part] = graph.node_copy(part, held.__getitem__)
                    held[part].meta = {**origin, "val": part.meta.get("val")}
        results = _results(body, node)
        if isinstance(results, fx.Node):
            _stand_in(node, held[results])
            continue
        for user in list(node.users):
            _stand_in(user, held[results[user.args[1]]])
        graph.erase_node(node)


def _stand_in(node: fx.Node, result: fx.Node) -> None:
    """Put ``result`` in the place of a node, which is erased, under its name and with its memory."""
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    result.name = node.name
    result.meta["val"] = node.meta.get("val")

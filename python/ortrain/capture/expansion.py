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

from ortrain.capture import operator_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.functional import is_harmless

_DEEPEST = 8  # levels of parts
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


class CannotExpandError(Exception):
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
            except CannotExpandError:
                continue
    if parts:
        splice(program.graph, parts)
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
    """Return the graph of what a node is made of."""
    function = operator_internals.decomposition(node.target) if depth > 0 else None
    if function is None:
        raise CannotExpandError
    traced = trace_of(node, function)
    inner: dict[fx.Node, fx.GraphModule] = {}
    for part in traced.graph.nodes:
        if _is_unknown(part, known):
            inner[part] = _parts(part, known, depth - 1)
        elif part.op == "get_attr" or not is_harmless(traced, part, known):
            raise CannotExpandError
    if inner:
        splice(traced.graph, inner)
    results_of(traced, node)
    return traced


def trace_of(node: fx.Node, function: Callable[..., Any]) -> fx.GraphModule:
    """Return the graph of a function of a node's arguments, its inputs in the order of ``all_input_nodes``.

    Raises:
      CannotExpandError: It has none, or only with another condition on sizes.
    """
    inputs = node.all_input_nodes
    values = [each.meta.get("val") for each in inputs]
    if not all(isinstance(v, (torch.Tensor, *_SIZES)) for v in values):
        raise CannotExpandError  # an operator of several results, say

    def call(*given: Any) -> Any:
        found = dict(zip(inputs, given, strict=True))
        return function(
            *fx.map_arg(node.args, found.__getitem__), **fx.map_arg(node.kwargs, found.__getitem__)
        )

    traced = internals.trace_of_operators(call, values)
    if traced is None:
        raise CannotExpandError
    # A trace has questions for sizes too, which are no operators.
    questions = [part for part in traced.graph.nodes if _is_question(part)]
    for part in reversed(questions):
        if part.users:
            raise CannotExpandError
        traced.graph.erase_node(part)
    return traced


def _is_question(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return _is_question(node.args[0])
    return isinstance(target, torch._ops.OpOverload) and not operator_internals.has_kernels(target)


def results_of(parts: fx.GraphModule, node: fx.Node) -> Any:
    """Return the node, or the sequence of nodes, that stands for the result of ``node``.

    Raises:
      CannotExpandError: None does.
    """
    (result,) = next(n for n in parts.graph.nodes if n.op == "output").args
    several = isinstance(result, (list, tuple))
    replaced = [user for user in node.users if user.target is operator.getitem]
    if several and len(replaced) != len(node.users):
        raise CannotExpandError
    pairs = [(user, result[user.args[1]]) for user in replaced] if several else [(node, result)]
    made = [each for _, each in pairs if isinstance(each, fx.Node) and each.op == "call_function"]
    for user, each in pairs:
        if not isinstance(each, fx.Node) or made.count(each) > 1:
            raise CannotExpandError
        # An operand keeps its name, by which the signature of the program knows its results.
        if each.op == "placeholder" and any(n.op == "output" for n in user.users):
            raise CannotExpandError
        if not _same_kind(user.meta.get("val"), each.meta.get("val")):
            raise CannotExpandError
    return result


def _same_kind(wanted: Any, made: Any) -> bool:
    if isinstance(wanted, torch.Tensor) and isinstance(made, torch.Tensor):
        return wanted.dtype == made.dtype
    return isinstance(wanted, torch.Tensor) == isinstance(made, torch.Tensor)


def splice(graph: fx.Graph, parts: Mapping[fx.Node, fx.GraphModule]) -> None:
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
        results = results_of(body, node)
        if isinstance(results, fx.Node):
            _stand_in(node, held[results], is_operand=results.op == "placeholder")
            continue
        for user in list(node.users):
            result = results[user.args[1]]
            _stand_in(user, held[result], is_operand=result.op == "placeholder")
        graph.erase_node(node)


def _stand_in(node: fx.Node, result: fx.Node, *, is_operand: bool) -> None:
    """Put ``result`` in the place of a node, which is erased.

    What is none of the node's operands gets its name and its memory.
    """
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    if not is_operand:
        result.name = node.name
        result.meta["val"] = node.meta.get("val")

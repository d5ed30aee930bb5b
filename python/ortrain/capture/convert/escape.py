# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators without a conversion as nodes that run in PyTorch."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import operator_internals, size_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.convert.control_flow import control_flow
from ortrain.capture.convert.emitter import Emitter
from ortrain.capture.convert.external import add_external
from ortrain.capture.errors import UnseenStateError, UnsupportedOperatorError
from ortrain.capture.escapes import Escape
from ortrain.capture.function_calls import FunctionCall
from ortrain.capture.locations import module_path, node_source
from ortrain.capture.random_internals import is_made_like, writing_form


@dataclasses.dataclass(frozen=True, slots=True)
class AddedEscape:
    """A node that was added, and what the report says of it."""

    results: Any
    escape: Escape


def add_escape(
    e: Emitter,
    node: fx.Node,
    function: FunctionCall | None,
    args: list[Any],
    kwargs: dict[str, Any],
    why: UnsupportedOperatorError,
) -> AddedEscape:
    """Add a node that runs the current operator in PyTorch.

    Args:
      e: Adds nodes.
      node: The operator in the captured graph.
      function: The autograd function that it stands for, if it does.
      args: Its arguments, tensors being values of the graph here.
      kwargs: Its keyword arguments, likewise.
      why: Why there is no native form.

    Raises:
      UnsupportedOperatorError: It is no function from tensors to tensors, ``why``.
    """
    flow = control_flow(node.target)
    if (
        function is None
        and flow is None
        and not (
            operator_internals.is_escapable(node.target)
            and operator_internals.has_dense_gradients(node)
        )
    ):
        raise why
    value = node.meta["val"]
    made = [v for v in (value if isinstance(value, (list, tuple)) else [value]) if v is not None]
    if not all(map(_is_dense, made)) or not all(_is_dense(n.meta["val"]) for n in _tensors(node)):
        raise why
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, fx.Node) or (isinstance(leaf, fx.GraphModule) and flow is None):
            raise why
    name = function.name if function is not None else e.target
    try:
        results = add_external(
            e,
            name,
            function or flow or writing_form(node.target) or node.target,
            args,
            kwargs,
            [(v.dtype, tuple(map(size_internals.size_expression, v.shape))) for v in made],
            draws=flow is not None
            or function is not None
            or operator_internals.draws_random_numbers(node.target),
        )
    except TypeError:  # a dtype that no graph has
        raise why from None
    reached = [True] * len(made) if flow else _reached_by_gradients(node, function, len(made))
    for index, is_reached in enumerate(reached):
        if not is_reached and made[index].is_floating_point():
            results[index] = e.node("StopGradient", results[index], domain="ortrain")
    if function is not None:
        reason = "an autograd function has a backward of its own"
    elif flow is not None:
        reason = "a value decides which graph runs, or how often"
    else:
        reason = why.reason.removeprefix(f"{e.target}: ")
    escape = Escape(name, e.path, reason, e.source)
    if not isinstance(value, (list, tuple)):
        return AddedEscape(results[0], escape)
    given = iter(results)
    nested = tuple(None if v is None else next(given) for v in value)
    return AddedEscape(nested, escape)


def _is_dense(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _tensors(node: fx.Node) -> list[fx.Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)]


def _reached_by_gradients(node: fx.Node, function: FunctionCall | None, count: int) -> list[bool]:
    """Tell which results have a gradient in PyTorch; all of them where it cannot be told."""
    if is_made_like(node.target):
        return [False] * count
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    run = node.target if function is None else function.on_fakes
    made = internals.fake_results_with_gradients(run, args, kwargs)
    if function is not None and function.writes_in_backward:
        raise UnseenStateError(
            f"the backward of autograd function '{function.name}' writes to an argument of its "
            "forward",
            module=module_path(node),
            source=node_source(node),
        )
    tensors = [t for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
    return [t.requires_grad for t in tensors] if len(tensors) == count else [True] * count

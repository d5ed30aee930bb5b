# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which tensors of an exported program share memory, and which nodes write to it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import torch_internals as internals
from ortrain.capture.trace_internals import bodies_of, nodes_of

_WINDOWS = (torch.ops.aten.unfold.default, torch.ops.aten.as_strided.default)


def memories_of(node: fx.Node) -> list[int]:
    """Return a number per tensor of a node's value; equal ones stand for the same memory."""
    return [
        internals.storage_identity(leaf)
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor)
    ]


def origin_of(node: fx.Node) -> tuple[fx.Node, bool]:
    """Return the first node with the memory of a node, and whether a detach stands between them.

    A region under no_grad detaches too.
    """
    detached = False
    while True:
        memories = set(memories_of(node))
        sources = [n for n in node.all_input_nodes if not memories.isdisjoint(memories_of(n))]
        if not sources:
            return node, detached
        region = node.target is internals.no_grad_region() and node.args[0] is False
        detached = detached or region or node.target is torch.ops.aten.detach.default
        node = sources[0]


def written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes whose tensors an operator writes to, as its schema says."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return
    schema = node.target._schema
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        yield from (leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node))


def writes_through_overlap(program: torch.export.ExportedProgram) -> fx.Node | None:
    """Return a node that writes by way of a view that shows memory more than once, or in part; None where none does.

    Args:
      program: As exported; regions of it have bodies of their own.
    """
    given: dict[fx.Node, fx.Node] = {}  # for what a body takes
    for owner in bodies_of(program):
        for node in owner.graph.nodes:
            for position, argument in enumerate(node.args):
                body = _body(owner, argument)
                if body is not None:
                    inner = body.graph.find_nodes(op="placeholder")
                    given.update(zip(inner, node.args[position + 1 :], strict=False))
    for node in nodes_of(program):
        for written in written_by(node):
            source: fx.Node | None = written
            while source is not None:
                if _shows_twice(source):
                    return node
                memories = set(memories_of(source))
                shared = (
                    n for n in source.all_input_nodes if not memories.isdisjoint(memories_of(n))
                )
                source = next(shared, given.get(source))
    return None


def _shows_twice(node: fx.Node) -> bool:
    if node.target in _WINDOWS:
        return True
    return any(
        stride == 0 and not (isinstance(size, int) and size == 1)
        for leaf in pytree.tree_leaves(node.meta.get("val"))
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
        for size, stride in zip(leaf.shape, leaf.stride(), strict=True)
        if isinstance(stride, int)
    )


def _body(owner: fx.GraphModule, argument: object) -> fx.GraphModule | None:
    """Return the body that an argument of a region names."""
    if not isinstance(argument, fx.Node) or argument.op != "get_attr":
        return None
    held = getattr(owner, str(argument.target), None)
    return held if isinstance(held, fx.GraphModule) else None


def is_cloned_alone(node: fx.Node) -> bool:
    """Tell whether nothing reads a tensor, itself or through views, but ``clone``.

    PyTorch's backward has the copy then: who writes to the tensor after the forward does no harm.
    """
    pending = [node]
    while pending:
        for user in pending.pop().users:
            target = user.target
            if not isinstance(target, torch._ops.OpOverload):
                return False
            if target.is_view or target is torch.ops.aten.detach.default:
                pending.append(user)
            elif target is not torch.ops.aten.clone.default:
                return False
    return True


def is_floating(node: fx.Node) -> bool:
    """Tell whether a node's value has floating point tensors, the ones that gradients belong to."""
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators that change how a tensor shows its memory, and leave the memory: ``squeeze_``, ``transpose_`` and the like."""

from __future__ import annotations

import torch

from ortrain.capture.errors import UnseenStateError
from ortrain.capture.locations import node_source
from ortrain.capture.trace_internals import nodes_of

_ATEN = torch.ops.aten
_VIEWS = {
    _ATEN.squeeze_.default: _ATEN.squeeze.default,
    _ATEN.squeeze_.dim: _ATEN.squeeze.dim,
    _ATEN.squeeze_.dims: _ATEN.squeeze.dims,
    _ATEN.unsqueeze_.default: _ATEN.unsqueeze.default,
    _ATEN.transpose_.default: _ATEN.transpose.int,
    _ATEN.swapaxes_.default: _ATEN.swapaxes.default,
    _ATEN.swapdims_.default: _ATEN.swapdims.default,
    _ATEN.t_.default: _ATEN.t.default,
}


# These may give back the very tensor that they were given.
_MAY_BE_ITSELF = frozenset(
    [
        *("to", "contiguous", "type_as", "flatten", "resolve_conj", "resolve_neg", "positive"),
        *("real", "atleast_1d", "atleast_2d", "atleast_3d", "lift_fresh", "dropout"),
        *("alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    ]
)


def take_for_views(program: torch.export.ExportedProgram) -> None:
    """Make them views: in a trace what follows takes their result, not what it was made of.

    Raises:
      UnseenStateError: An argument, a parameter, a buffer or what enters a region is changed so.
    """
    for node in nodes_of(program):
        if node.target not in _VIEWS:
            continue
        tensor = node.args[0]
        while tensor.op == "call_function" and _may_be_its_operand(tensor.target):
            tensor = tensor.args[0]
        if tensor.op == "placeholder":
            raise UnseenStateError(
                f"{node.target} changes the shape of what the forward was given",
                source=node_source(node),
            )
    for node in nodes_of(program):
        node.target = _VIEWS.get(node.target, node.target)


def _may_be_its_operand(target: object) -> bool:
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.returns:
        return False
    if target._opname in _MAY_BE_ITSELF:
        return True
    returned = target._schema.returns[0].alias_info
    return returned is not None and returned.is_write

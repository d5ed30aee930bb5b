# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Exported programs that are functional, so that PyTorch need not trace them again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ortrain.capture import torch_internals as internals
from ortrain.capture.autocast_regions import in_region
from ortrain.capture.trace_internals import bodies_of
from ortrain.capture.writes import (
    is_rewritable_write,
    replace_writes,
    updates_running_statistics,
)

# Operators that write to their running statistics without a word of it in their schema.
_HIDDEN_WRITES = frozenset(
    {
        "aten::cudnn_batch_norm",
        "aten::instance_norm",
        "aten::miopen_batch_norm",
        "aten::native_batch_norm",
        "aten::_native_batch_norm_legit",
        "aten::fused_moving_avg_obs_fake_quant",
        "aten::_fused_moving_avg_obs_fq_helper",
    }
)
_CHECKS = frozenset({"aten::_assert_tensor_metadata", "aten::_assert_scalar", "aten::sym_size"})
_NO_GRAD_BODY = 1  # after the grad mode
_AUTOCAST_BODY = 4  # after the device type, dtype, enabled and cache_enabled
_SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def make_functional(
    program: torch.export.ExportedProgram,
    known: Callable[[Any], bool],
    *,
    regions: bool = False,
    harmless: Callable[[Any], bool] | None = None,
) -> bool:
    """Let a program write to no tensor; tell whether it does so now, of known operators alone.

    Functionalizing and decomposing would change nothing that matters then: aliases are as good as
    copies where nothing is written.

    Args:
      program: As exported; changed in place where it can be.
      known: Tells whether an operator has a conversion.
      regions: Whether regions under autocast may stay.
      harmless: Tells of operators whether they may stay, if others do than those that are known.
    """
    nodes, owner = program.graph.nodes, program.graph_module
    others = [n for n in nodes if not is_harmless(owner, n, harmless or known, regions)]
    if not all(is_rewritable_write(node) for node in others):
        return False
    return not others or replace_writes(program, known)


def is_harmless(
    owner: fx.GraphModule, node: fx.Node, known: Callable[[Any], bool], regions: bool = False
) -> bool:
    """Tell whether a node of ``owner`` writes to nothing and is of known operators alone."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op == "get_attr":
        # Bodies of regions, which are looked at where they are called.
        return isinstance(getattr(owner, str(node.target), None), fx.GraphModule)
    if node.op != "call_function":
        return False
    target = node.target
    if is_region(node) and (regions or target is internals.no_grad_region()):
        body = body_of(owner, node)
        return all(is_harmless(body, inner, known, regions) for inner in body.graph.nodes)
    if isinstance(target, torch._ops.OpOverload):
        name = target.name().partition(".")[0]
        if name in _CHECKS:
            return True
        if name == "aten::batch_norm":
            return not updates_running_statistics(node) and known(target)
        return not target._schema.is_mutable and name not in _HIDDEN_WRITES and known(target)
    return target is operator.getitem or isinstance(node.meta.get("val"), _SIZES)


def keep_layers_in_regions(program: torch.export.ExportedProgram) -> None:
    """Let the nodes of regions tell their layer and source when the program is traced again.

    Called as a function, a region's body would lend all its nodes what the region's call has.
    """
    for owner in bodies_of(program):
        for call in owner.graph.nodes:
            if call.target is internals.no_grad_region():
                body = body_of(owner, call)
                body.forward = fx.Interpreter(body).run
            elif call.target is internals.autocast_region():
                body = body_of(owner, call)
                body.forward = in_region(fx.Interpreter(body).run)


def is_region(node: fx.Node) -> bool:
    """Tell whether a node calls a region with a grad mode or an autocast of its own."""
    return node.target in (internals.no_grad_region(), internals.autocast_region())


def _position_of_body(call: fx.Node) -> int:
    return _AUTOCAST_BODY if call.target is internals.autocast_region() else _NO_GRAD_BODY


def body_of(owner: fx.GraphModule, call: fx.Node) -> fx.GraphModule:
    """Return the graph of a region that a node of ``owner`` calls."""
    return getattr(owner, call.args[_position_of_body(call)].target)


def inline_regions(program: torch.export.ExportedProgram) -> None:
    """Put the nodes of regions in the place of the region's call.

    Nothing has to act on them any more, neither a grad mode nor autocast.
    """
    _inline_all(program.graph_module)


def _inline_all(owner: fx.GraphModule) -> None:
    regions = [node for node in owner.graph.nodes if is_region(node)]
    for call in regions:
        _inline_all(body_of(owner, call))
        _inline(owner, call)
    if regions:
        owner.recompile()


def _inline(owner: fx.GraphModule, call: fx.Node) -> None:
    body = body_of(owner, call)
    position = _position_of_body(call)
    arguments = iter(call.args[position + 1 :])
    held: dict[fx.Node, Any] = {}
    with owner.graph.inserting_before(call):
        for node in body.graph.nodes:
            if node.op == "placeholder":
                held[node] = next(arguments)
            elif node.op != "output":
                held[node] = owner.graph.node_copy(node, held.__getitem__)
    (results,) = next(n for n in body.graph.nodes if n.op == "output").args
    for user, index in list(_parts(call)):
        user.replace_all_uses_with(held[results[index]])
        owner.graph.erase_node(user)
    name = call.args[position]
    owner.graph.erase_node(call)
    if not name.users:
        owner.graph.erase_node(name)


def _parts(call: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    for user in call.users:
        if user.target is not operator.getitem:
            raise TypeError(f"{user.format_node()} uses a region as a whole")
        yield user, user.args[1]

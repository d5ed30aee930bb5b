# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Inputs, outputs and dynamic axes of an exported program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import sympy
import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from ortrain.capture import size_internals
from ortrain.capture.captured import Dimension, Output, OutputRole, Placeholder, Role
from ortrain.capture.errors import CaptureError
from ortrain.capture.guards import Guards
from ortrain.capture.locations import own_name
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.result_views import ResultView
from ortrain.capture.signature import FlatCall, OutputTree

# Where a tensor's elements lie, and how.
Place = tuple[int, torch.Size, tuple[int, ...], torch.dtype]

# What stays of ways to look into a tensor.
_READS = ("aten.resolve_conj.default", "aten.resolve_neg.default", "aten.item.default")


def user_values(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [
        nodes[spec.arg.name].meta["val"]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]


def _canonical_names(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Map each name of a shared tensor to the first name that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def placeholders_of(
    program: torch.export.ExportedProgram,
    module: nn.Module,
    call: FlatCall,
    outside: Mapping[Place, torch.Tensor],
) -> tuple[list[Placeholder], dict[str, torch.Tensor]]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    canonical = _canonical_names(iter((*parameters.items(), *buffers.items())))
    placeholders: list[Placeholder] = []
    constants: dict[str, torch.Tensor] = {}
    users = 0
    for spec in program.graph_signature.input_specs:
        node, target = spec.arg.name, own_name(spec.target or "")
        if spec.kind is InputKind.USER_INPUT:
            tensor = call.tensors[users]
            placeholders.append(
                Placeholder(node, Role.USER, call.names[users], tensor.requires_grad, users)
            )
            users += 1
        elif spec.kind is InputKind.PARAMETER:
            placeholders.append(
                Placeholder(
                    node, Role.PARAMETER, canonical[target], parameters[target].requires_grad
                )
            )
        elif spec.kind is InputKind.BUFFER:
            placeholders.append(
                Placeholder(node, Role.BUFFER, canonical[target], buffers[target].requires_grad)
            )
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[spec.target]
            if constant.requires_grad:
                raise CaptureError(
                    f"tensor '{target}' requires a gradient but is no registered parameter of the module"
                )
            constants[node] = outside.get(_memory(constant), constant)
            if _memory(constant) in outside:
                name = f"outside.{len(constants)}"
                placeholders.append(Placeholder(node, Role.OUTSIDE, name, False))
            else:
                placeholders.append(Placeholder(node, Role.CONSTANT, target, False))
        else:
            raise CaptureError(
                f"an input of kind {spec.kind.name} ({spec.target}) enters the graph"
            )
    return placeholders, constants


def outside_tensors(
    program: torch.export.ExportedProgram, reached: ReachableState
) -> dict[Place, torch.Tensor]:
    """Return the tensors that were there before the forward, in no table of a layer, by their memory.

    Args:
      program: As exported: further on nothing tells them from numbers that the forward has made tensors of.
      reached: What was there.

    Raises:
      CaptureError: Nobody knows whose a tensor is, or its values were read.
    """
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    found = {}
    for spec in program.graph_signature.input_specs:
        if spec.kind is not InputKind.CONSTANT_TENSOR:
            continue
        node, constant = nodes[spec.arg.name], program.constants[spec.target]
        if _is_made(node, constant):
            continue
        tensor = reached.tensor_at(constant)
        if tensor is None and reached.has_array_at(constant):
            continue  # made of an array, which guards compare
        if any(str(user.target) in _READS for user in _users(node)):
            raise CaptureError(f"its forward reads values of the tensor '{own_name(spec.target)}'")
        if tensor is None:
            raise CaptureError("it uses a tensor that neither the module nor its code leads to")
        found[_memory(constant)] = tensor
    return found


def _memory(tensor: torch.Tensor) -> Place:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_made(node: fx.Node, constant: torch.Tensor) -> bool:
    """Tell whether the forward itself makes a constant, of numbers; one of an array lies in the array's memory."""
    is_fresh = all(str(user.target).startswith("aten.lift_fresh") for user in _users(node))
    return is_fresh and (constant.numel() == 0 or constant.untyped_storage().resizable())


def _users(node: fx.Node) -> Iterator[fx.Node]:
    """Yield what uses a node, in regions (of no_grad, of autocast) too."""
    for user in node.users:
        body = next((a for a in user.args if isinstance(a, fx.Node) and a.op == "get_attr"), None)
        region = getattr(user.graph.owning_module, str(body.target)) if body is not None else None
        if not isinstance(region, fx.GraphModule):
            yield user
            continue
        operands = user.args[user.args.index(body) + 1 :]
        inner = (n for n in region.graph.nodes if n.op == "placeholder")
        for operand, placeholder in zip(operands, inner, strict=False):
            if operand is node:
                yield from _users(placeholder)


def outputs_of(
    program: torch.export.ExportedProgram,
    tree: OutputTree,
    call: FlatCall,
    views: Sequence[ResultView] | None = None,
) -> list[Output]:
    outputs: list[Output] = []
    given = set(range(len(tree.paths)))
    if views is not None:  # the first result of each output stands for it
        sources = [view.source for view in views]
        given = {i for i, s in enumerate(sources) if s[0] == "output" and s not in sources[:i]}
    users = 0
    taken: set[str] = set()
    input_nodes = [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    for spec in program.graph_signature.output_specs:
        node = spec.arg.name
        if spec.kind is OutputKind.USER_OUTPUT:
            name = tree.paths[users]
            users += 1
            while name in taken:
                name += "_"
            taken.add(name)
            role = OutputRole.USER if users - 1 in given else OutputRole.NONE
            outputs.append(Output(node, role, name))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            target = own_name(spec.target or "")
            outputs.append(Output(node, OutputRole.BUFFER_UPDATE, f"{target}.update", target))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            target = call.names[input_nodes.index(spec.target or "")]
            outputs.append(Output(node, OutputRole.INPUT_UPDATE, f"{target}.update", target))
        else:
            raise CaptureError(
                f"forward writes to {own_name(spec.target or node)} ({spec.kind.name})"
            )
    return outputs


def held_at_one(
    values: Sequence[torch.Tensor], guards: Guards, tensors: Sequence[torch.Tensor]
) -> frozenset[sympy.Symbol]:
    """Return the symbols for which a sample of 1 was traced as the number, so that no 2 fits."""
    held: set[sympy.Symbol] = set()
    for dimension in dimensions_of(values):
        if dimension.hint != 1:
            continue
        sizes = [
            [
                2 if size_internals.size_expression(size) == dimension.symbol else given
                for size, given in zip(value.shape, tensor.shape, strict=True)
            ]
            for value, tensor in zip(values, tensors, strict=True)
        ]
        if not guards.holds(sizes):
            held.add(dimension.symbol)
    return frozenset(held)


def dimensions_of(values: Sequence[torch.Tensor]) -> list[Dimension]:
    dims: dict[sympy.Symbol, Dimension] = {}
    for index, value in enumerate(values):
        for axis, size in enumerate(value.shape):
            expression = size_internals.size_expression(size)
            if isinstance(expression, sympy.Symbol) and expression not in dims:
                hint = size_internals.size_hint(size)
                dims[expression] = Dimension(expression, f"s{len(dims)}", index, axis, hint)
    return list(dims.values())

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What an exported program does behind the back of autograd: no_grad regions, detached writes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch.export.graph_signature import InputKind

from ortrain.capture import torch_internals as internals
from ortrain.capture.aliases import is_floating, memories_of, origin_of, written_by
from ortrain.capture.errors import CaptureError, UnseenStateError
from ortrain.capture.locations import module_path, node_source
from ortrain.capture.trace_internals import bodies_of, nodes_of


def detach_no_grad_regions(
    program: torch.export.ExportedProgram, copied: Collection[int] = ()
) -> None:
    """Detach what leaves each no_grad region: functionalizing forgets the region itself.

    Args:
      program: As exported.
      copied: Memory of which copies leave.

    Raises:
      UnseenStateError: Several results of a region lie in it.
    """
    region = internals.no_grad_region()
    for graph_module in bodies_of(program):
        for node in list(graph_module.graph.nodes):
            if node.op != "call_function" or node.target is not region or node.args[0] is not False:
                continue
            body = getattr(graph_module, node.args[1].target)
            _detach_outputs(body, copied)


def detach_anew(program: torch.export.ExportedProgram) -> None:
    """Let a tensor that is detached in place be another one from there on, as its later readers show it.

    Functionalizing would forget that gradients end there.
    """
    for node in nodes_of(program):
        if node.target is not torch.ops.aten.detach_.default:
            continue
        given = node.args[0]
        assert isinstance(given, torch.fx.Node)
        origin = origin_of(given)[0]
        if origin.op == "placeholder" and origin.meta["val"].requires_grad:
            raise UnseenStateError(
                "its forward detaches in place what it has not made",
                module=module_path(node),
                source=node_source(node),
            )
        node.target = torch.ops.aten.detach.default


def refuse_writes_through_detach(program: torch.export.ExportedProgram) -> None:
    """Refuse writes to a detached alias of a tensor that gradients flow through.

    PyTorch changes the numbers and keeps the gradient; functionalizing would cut it.
    """
    buffers = {
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.BUFFER
    }
    for node in program.graph.nodes:
        for written in filter(is_floating, written_by(node)):
            origin, detached = origin_of(written)
            if detached and origin.name not in buffers:
                raise CaptureError(
                    f"{node.target} writes, detached, into a tensor that gradients flow through",
                    module=module_path(node),
                    source=node_source(node),
                )


def refuse_regions_with_gradients(program: torch.export.ExportedProgram) -> None:
    """Refuse regions under enable_grad in a forward that runs without gradients: a graph has one mode."""
    for node in nodes_of(program):
        if node.target is internals.no_grad_region() and node.args[0] is True:
            raise CaptureError(
                "it turns gradients on where the caller has turned them off",
                module=module_path(node),
                source=node_source(node),
            )


def detached_before(place: torch.fx.Node, value: torch.fx.Node) -> torch.fx.Node:
    """Add a node before another one that detaches a value; layer and source are the value's."""
    with place.graph.inserting_before(place):
        detached = place.graph.call_function(torch.ops.aten.detach.default, (value,))
    kept = ("val", "nn_module_stack", "stack_trace")
    detached.meta.update({key: value.meta[key] for key in kept if key in value.meta})
    return detached


def _detach_outputs(body: torch.fx.GraphModule, copied: Collection[int]) -> None:
    graph = body.graph
    output = next(n for n in graph.nodes if n.op == "output")
    memories = [m for n in output.all_input_nodes for m in memories_of(n) if m in copied]
    if len(set(memories)) < len(memories):
        raise UnseenStateError("what shares memory leaves no_grad and is written to afterwards")

    def detached(node: torch.fx.Node) -> torch.fx.Node:
        value = node.meta.get("val")
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return node
        result = detached_before(output, node)
        if not set(memories_of(node)).isdisjoint(copied):
            with graph.inserting_before(output):
                copy = graph.call_function(torch.ops.aten.clone.default, (result,))
            made = internals.fake_result(torch.ops.aten.clone.default, (value,), {})
            copy.meta.update(result.meta | {"val": made})
            return copy
        return result

    output.args = tuple(torch.fx.map_arg(a, detached) for a in output.args)
    body.recompile()

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What an exported program does behind the back of autograd: no_grad regions, detached writes."""

from __future__ import annotations

import torch
from torch.export.graph_signature import InputKind

from ortrain.capture import torch_internals as internals
from ortrain.capture.errors import CaptureError
from ortrain.capture.locations import module_path, node_source


def _is_written_in_place(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def detach_no_grad_regions(program: torch.export.ExportedProgram) -> None:
    """Detach what leaves each no_grad region: functionalizing forgets the region itself."""
    region = internals.no_grad_region()
    graphs = [g for g in program.graph_module.modules() if isinstance(g, torch.fx.GraphModule)]
    for graph_module in graphs:
        for node in list(graph_module.graph.nodes):
            if node.op != "call_function" or node.target is not region or node.args[0] is not False:
                continue
            body = getattr(graph_module, node.args[1].target)
            _refuse_writes_to_tracked(body, node)
            _detach_outputs(body)


def _refuse_writes_to_tracked(body: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    outer = dict(
        zip((n for n in body.graph.nodes if n.op == "placeholder"), call.args[2:], strict=True)
    )
    for node in body.graph.nodes:
        if node.op != "call_function" or not _is_written_in_place(node) or not node.args:
            continue
        source = outer.get(node.args[0])
        value = node.meta.get("val")
        if (
            isinstance(source, torch.fx.Node)
            and source.op != "placeholder"
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
        ):
            raise CaptureError(
                f"{node.target} writes, under no_grad, into a tensor that gradients flow through",
                module=module_path(node),
                source=node_source(node),
            )


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
        if node.op != "call_function" or not _is_written_in_place(node):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            root = _detached_from(value)
            if root is not None and root.name not in buffers:
                raise CaptureError(
                    f"{node.target} writes, detached, into a tensor that gradients flow through",
                    module=module_path(node),
                    source=node_source(node),
                )


def _detached_from(node: object) -> torch.fx.Node | None:
    """Return the first tensor with the memory of a node, if detach stands between the two."""
    detached = False
    while isinstance(node, torch.fx.Node):
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return None
        memory = internals.storage_identity(value)
        sources = [n for n in node.all_input_nodes if _has_memory(n, memory)]
        if not sources:
            return node if detached else None
        detached = detached or node.target is torch.ops.aten.detach.default
        node = sources[0]
    return None


def _has_memory(node: torch.fx.Node, memory: int) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and internals.storage_identity(value) == memory


def _detach_outputs(body: torch.fx.GraphModule) -> None:
    graph = body.graph
    output = next(n for n in graph.nodes if n.op == "output")

    def detached(node: torch.fx.Node) -> torch.fx.Node:
        value = node.meta.get("val")
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return node
        with graph.inserting_before(output):
            result = graph.call_function(torch.ops.aten.detach.default, (node,))
        result.meta.update(
            {k: node.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in node.meta}
        )
        return result

    output.args = tuple(torch.fx.map_arg(a, detached) for a in output.args)
    body.recompile()

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients flow in a graph where they flowed in its trace, tensor by tensor.

A trace runs with autograd on: of each call it is known which operands and results wanted a gradient. What shows memory that
was written to under no_grad, or through a detached alias, does not, though the numbers in it come from what does.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import torch_internals as internals
from ortrain.capture.aliases import memories_of, origin_of, written_by
from ortrain.capture.errors import CaptureError, UnseenStateError
from ortrain.capture.functional import body_of, is_region
from ortrain.capture.locations import module_path, node_source
from ortrain.capture.no_grad_regions import detached_before
from ortrain.capture.trace_internals import tracked_by


def follow_gradients(program: torch.export.ExportedProgram) -> frozenset[int]:
    """Detach operands to which gradients would flow in the graph and did not in the trace.

    Args:
      program: As exported, with regions and writes; nodes of detached operands are added.

    Returns:
      Memory that regions under no_grad have made and to which something that wants a gradient is written later.

    Raises:
      CaptureError: What gradients flow through is written to under no_grad, or past a detached alias: PyTorch changes
        numbers, and keeps gradients.
      UnseenStateError: What wants a gradient is written through a detached alias, whose later readers alone get it;
        or a gradient flowed in the trace and would not in the graph.
    """
    flow = _Flow()
    for node in program.graph.find_nodes(op="placeholder"):
        if getattr(node.meta.get("val"), "requires_grad", False):
            flow.carrying.add(node)
            flow.held.update(memories_of(node))
    flow.follow(program.graph_module, without_gradients=False)
    return frozenset(flow.copied)


class _Flow:
    """Where the gradients of a graph flow that is read from its first node to its last.

    Attributes:
      carrying: Nodes from which gradients flow to what wants some.
      written: Memory to which such values were written.
      elsewhere: Nodes whose gradients go to what the forward has made a leaf, or to what lies outside of the module.
      cut: Memory that regions under no_grad have made; their results are detached views of it.
      copied: Of it, what something that wants a gradient is written to later: their results are copies.
      held: Memory of what wants a gradient.
    """

    def __init__(self) -> None:
        self.carrying: set[fx.Node] = set()
        self.written: set[int] = set()
        self.elsewhere: set[fx.Node] = set()
        self.cut: set[int] = set()
        self.copied: set[int] = set()
        self.held: set[int] = set()

    def follow(self, owner: fx.GraphModule, without_gradients: bool) -> bool:
        """Follow the nodes of a graph or of the body of a region; tell whether its results carry gradients."""
        for node in list(owner.graph.nodes):
            if node.op == "call_function" and is_region(node):
                self._region(owner, node, without_gradients)
            elif node.op == "call_function":
                self._call(node, without_gradients)
            elif node.op == "output":
                return any(map(self._carries, node.all_input_nodes))
        return False

    def _region(self, owner: fx.GraphModule, call: fx.Node, without_gradients: bool) -> None:
        body = body_of(owner, call)
        inner = body.graph.find_nodes(op="placeholder")
        given = call.args[len(call.args) - len(inner) :]
        for placeholder, value in zip(inner, given, strict=True):
            if isinstance(value, fx.Node) and self._carries(value):
                self.carrying.add(placeholder)
        if call.target is internals.no_grad_region():
            without_gradients = call.args[0] is False
        carries = self.follow(body, without_gradients)
        if without_gradients:
            taken = {memory for node in call.all_input_nodes for memory in memories_of(node)}
            self.cut.update(memory for memory in memories_of(call) if memory not in taken)
        elif carries:
            self.carrying.add(call)

    def _call(self, node: fx.Node, without_gradients: bool) -> None:
        written = set(written_by(node))
        tracked = tracked_by(node)
        operands = [n for n in pytree.tree_leaves((node.args, node.kwargs)) if _is_tensor(n)]
        if tracked is not None and len(tracked.arguments) != len(operands):
            tracked = None
        flowing = [n for n in node.all_input_nodes if self._carries(n)]
        if tracked is not None:
            wanted = dict(zip(operands, tracked.arguments, strict=True))
            self._refuse_lost(node, wanted, without_gradients)
            self._refuse_past_autograd(node, written, wanted, without_gradients)
            if written and not (tracked.results or without_gradients) and any(tracked.arguments):
                raise _unseen(
                    node, f"{node.target} writes to a list, whose gradients a graph would lose"
                )
        if not flowing or node.target is torch.ops.aten.detach.default:
            return
        if tracked is not None:
            wants = any(tracked.results)
            untracked = [
                n
                for n, is_wanted in wanted.items()
                if n not in written and not (is_wanted and (wants or not written))
            ]
            # What a region computes under no_grad is detached as it leaves it.
            if written or not without_gradients:
                for operand in filter(self._carries, untracked):
                    node.replace_input_with(operand, detached_before(node, operand))
                flowing = [n for n in flowing if n not in untracked]
        if not flowing:
            return
        self.carrying.add(node)
        if not without_gradients and (tracked is None or any(tracked.results)):
            self.held.update(memories_of(node))
        if not without_gradients and written and any(n not in written for n in flowing):
            for target in written:
                if memories := self.cut.intersection(memories_of(target)):
                    self.copied.update(memories)
                elif origin_of(target)[1]:
                    what = f"{node.target} writes what wants a gradient through a detached tensor"
                    raise _unseen(node, what)
                self.held.update(memories_of(target))
                self.written.update(memories_of(target))

    def _refuse_lost(
        self, node: fx.Node, wanted: dict[fx.Node, bool], without_gradients: bool
    ) -> None:
        """Refuse a node through which gradients flowed in the trace alone."""
        if without_gradients:
            return
        for operand, is_wanted in wanted.items():
            if is_wanted and not self._carries(operand):
                if operand not in self.elsewhere and _computed_with_gradients(operand):
                    raise _unseen(node, f"gradients flow through '{operand.name}', not in a graph")
                self.elsewhere.add(node)

    def _refuse_past_autograd(
        self,
        node: fx.Node,
        written: set[fx.Node],
        wanted: dict[fx.Node, bool],
        without_gradients: bool,
    ) -> None:
        """Refuse a write to what gradients flow through that autograd does not see: it changes numbers alone."""
        for target in filter(_may_want_gradients, written):
            seen = wanted.get(target, True) and not without_gradients
            if not seen and not self.held.isdisjoint(memories_of(target)):
                mode = "under no_grad" if without_gradients else "detached"
                raise CaptureError(
                    f"{node.target} writes, {mode}, into a tensor that gradients flow through",
                    module=module_path(node),
                    source=node_source(node),
                )

    def _carries(self, node: fx.Node) -> bool:
        if not _may_want_gradients(node):
            return False
        return node in self.carrying or not self.written.isdisjoint(memories_of(node))


def _unseen(node: fx.Node, what: str) -> UnseenStateError:
    return UnseenStateError(what, module=module_path(node), source=node_source(node))


def _computed_with_gradients(node: fx.Node) -> bool:
    tracked = tracked_by(node)
    return tracked is not None and any(tracked.results) and any(tracked.arguments)


def _may_want_gradients(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(
        isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        for leaf in leaves
    )


def _is_tensor(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators that may return what they were given: dropout that drops nothing, ``type_as`` of one type.

What such an operator says of itself is that its result has memory of its own, and a graph goes by that. Who writes to the
result, or returns it beside the operand, tells the difference.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import torch_internals as internals
from ortrain.capture.aliases import memories_of, written_by
from ortrain.capture.errors import CaptureError
from ortrain.capture.locations import node_source
from ortrain.capture.meta_values import Call
from ortrain.capture.trace_internals import nodes_of

# Of a rate of 0 traces say that it gives back its operand, which it does not.
_DRAWING = torch.ops.aten.native_dropout.default


@dataclasses.dataclass(frozen=True, slots=True)
class _Alias:
    """A result, by its place among them, that has the memory of an operand."""

    result: int
    operand: int
    is_same: bool  # the operand itself


def restore_aliases(program: torch.export.ExportedProgram, module: str) -> None:
    """Put operands in the place of results that are the same tensor, where that is seen.

    Raises:
      CaptureError: A result is another view of an operand, and that is seen.
    """
    for node in nodes_of(program):
        if node.target is _DRAWING:
            _separate(node)
    known: dict[Any, list[_Alias]] = {}
    while _restore_some(program, module, known):  # what it was made of may be seen now
        pass


def _restore_some(
    program: torch.export.ExportedProgram, module: str, known: dict[Any, list[_Alias]]
) -> bool:
    seen, has_changed = _Seen(program), False
    for node in list(nodes_of(program)):
        if not _promises_new_memory(node.target) or not seen.may_tell(node):
            continue
        call = Call(node)
        key = call.key
        if key not in known:
            known[key] = list(_aliases(call))
        for alias in known[key]:
            operand, memory = call.operands[alias.operand], memories_of(node)[alias.result]
            given = memories_of(operand)
            # A result that is its operand lies in memory as that does.
            is_laid_out = alias.is_same and memory in seen.returned and memory not in given
            if not is_laid_out and not seen.tells([memory], given):
                continue
            if not alias.is_same or isinstance(node.meta["val"], (list, tuple)):
                raise CaptureError(
                    f"{node.target} gives a view of its operand, which is written to or returned",
                    module=module,
                    source=node_source(node),
                )
            node.replace_all_uses_with(operand)
            node.graph.erase_node(node)
            _move(nodes_of(program), memory, operand.meta["val"])
            seen, has_changed = _Seen(program), True
            break
    return has_changed


class _Seen:
    """Memory that is written to, or lies behind arguments, parameters and results."""

    def __init__(self, program: torch.export.ExportedProgram) -> None:
        nodes = list(nodes_of(program))
        writing = (n for n in nodes if n.target is not torch.ops.aten.detach_.default)
        self._written = {m for n in writing for w in written_by(n) for m in memories_of(w)}
        self._outside = {m for n in nodes if n.op == "placeholder" for m in memories_of(n)}
        self.returned = {
            m
            for n in nodes
            if n.op == "output"
            for given in n.all_input_nodes
            for m in memories_of(given)
        }

    def may_tell(self, node: fx.Node) -> bool:
        operands = [m for given in node.all_input_nodes for m in memories_of(given)]
        results = memories_of(node)
        return not self.returned.isdisjoint(results) or self.tells(results, operands)

    def tells(self, results: list[int], operands: list[int]) -> bool:
        """Tell whether it can be seen that results have the memory of operands."""
        if not self._written.isdisjoint((*results, *operands)):
            return True
        if set(results) <= set(operands):  # the trace knows it, and so does who returns them
            return False
        others = self.returned | self._outside
        return not (self.returned.isdisjoint(results) or others.isdisjoint(operands))


def _promises_new_memory(target: Any) -> bool:
    """Tell whether an operator's results have memory of their own, as its schema says."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    return target is not _DRAWING and all(
        result.alias_info is None for result in target._schema.returns
    )


def _aliases(call: Call) -> Iterator[_Alias]:
    """Yield what results of an operator share with its operands; of one that cannot be asked nothing is known."""
    given, results = call.run() or ([], [])
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    for place, result in enumerate(tensors):
        for index, operand in enumerate(given):
            if not isinstance(operand, torch.Tensor):
                continue
            if internals.storage_identity(result) == internals.storage_identity(operand):
                is_same = (result.shape, result.stride(), result.storage_offset()) == (
                    *(operand.shape, operand.stride(), operand.storage_offset()),
                )
                yield _Alias(place, index, is_same)


def _separate(node: fx.Node) -> None:
    """Give the result of an operator memory of its own where a trace says that it has its operand's."""
    memory, value = memories_of(node)[0], node.meta["val"][0]
    if memory not in memories_of(node.args[0]):
        return
    behind, pending = {node}, [node]
    while pending:
        users = [user for user in pending.pop().users if memory in memories_of(user)]
        pending += [user for user in users if user not in behind]
        behind.update(users)
    _move(behind, memory, torch.empty_like(value.detach()))


def _move(nodes: Iterable[fx.Node], memory: int, into: torch.Tensor) -> None:
    """Let all values of some nodes in some memory lie in that of another value."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or internals.storage_identity(value) != memory:
            return value
        made = torch.as_strided(into, value.shape, value.stride(), value.storage_offset())
        return made.detach().requires_grad_(value.requires_grad)

    for node in nodes:
        if memory in memories_of(node):
            node.meta["val"] = pytree.tree_map(moved, node.meta["val"])

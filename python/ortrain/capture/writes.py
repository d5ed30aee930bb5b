# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes to tensors, rewritten as new values without tracing the program again.

PyTorch's functionalization traces the whole program once more, which costs as much as the export.
Here the nodes are copied in order; a write becomes the operator's functional form, and what shares
memory with the written tensor is computed anew from it where it is read next.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument

from ortrain.capture import size_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.aliases import memories_of

_aten = torch.ops.aten
# They change what a tensor is, not what it holds, as all do that PyTorch tags inplace_view.
_NOT_VALUES = frozenset({"aten::set_", "aten::resize_", "aten::resize_as_"})
# Their results are like their first arguments. Up to 2.11 PyTorch asks sizes for more when it makes
# them.
_LIKE_FIRST = (
    _aten.copy.default,
    _aten.select_scatter.default,
    _aten.slice_scatter.default,
)
# Of torch.nn.functional.batch_norm.
_RUNNING = (3, 4)
_TRAINING = 5
_BATCH_NORM_ARGUMENTS = 9  # the last one names a backend
_FROM_WRITE = "ortrain_from_write"


class _CannotRewriteError(Exception):
    """A write that only PyTorch's own functionalization understands."""


def replace_writes(program: torch.export.ExportedProgram, known: Callable[[Any], bool]) -> bool:
    """Rewrite a program so that it writes to no tensor.

    Args:
      program: As exported; all its operators are known but for the writes.
      known: Tells whether an operator has a conversion.

    Returns:
      Whether it could be rewritten; the program is left as it is otherwise.
    """
    rewriting = _Rewriting(program, known)
    try:
        rewriting.run()
    except _CannotRewriteError:
        return False
    rewriting.store()
    return True


def is_rewritable_write(node: fx.Node) -> bool:
    """Tell whether a node is a write of a kind that ``replace_writes`` may know how to rewrite."""
    if _is_batch_norm(node):
        return True
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, torch._ops.OpOverload)
        and target._schema.is_mutable
        and functional_form(target) is not None
    )


def is_from_write(node: fx.Node) -> bool:
    """Tell whether a node stands for a part of a write that was rewritten."""
    return _FROM_WRITE in node.meta


def updates_running_statistics(node: fx.Node) -> bool:
    """Tell whether an ``aten.batch_norm`` node writes to its running mean and variance."""
    arguments = node.args
    if len(arguments) != _BATCH_NORM_ARGUMENTS or node.kwargs:
        return True  # so it is left to PyTorch
    return arguments[_TRAINING] is not False and any(arguments[i] is not None for i in _RUNNING)


def _is_batch_norm(node: fx.Node) -> bool:
    return node.target is _aten.batch_norm.default


def functional_form(target: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """Return ``aten.add.Tensor`` of ``aten.add_.Tensor``; None for other kinds of writes."""
    name = target.name().partition(".")[0]
    written = [a for a in target._schema.arguments if a.alias_info and a.alias_info.is_write]
    if (
        target.namespace != "aten"
        or not name.endswith("_")
        or name.endswith("__")
        or name in _NOT_VALUES
        or torch.Tag.inplace_view in target.tags
        or len(written) != 1
        or written[0] is not target._schema.arguments[0]
    ):
        return None
    packet = getattr(_aten, name.removeprefix("aten::")[:-1], None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


@dataclasses.dataclass
class _Memory:
    """The tensors that share one storage."""

    root: fx.Node  # the first of them, of the program
    value: fx.Node  # what it holds now, of the result
    inputs: int = 0  # how many inputs of the program are among them
    version: int = 0  # how often they were written to


@dataclasses.dataclass
class _Alias:
    """A tensor of the program and what it holds in the result."""

    memory: _Memory
    # What it is a view of: None for the root, and where that is not known.
    parent: fx.Node | None
    value: fx.Node
    version: int = 0
    same: bool = False  # it is the parent itself


class _Rewriting:
    def __init__(self, program: torch.export.ExportedProgram, known: Callable[[Any], bool]) -> None:
        self._program = program
        self._known = known
        self._graph = fx.Graph()
        self._nodes: dict[fx.Node, Any] = {}  # of what has no storage of its own
        self._aliases: dict[fx.Node, _Alias] = {}
        self._memories: dict[int, _Memory] = {}
        self._kinds = {s.arg.name: s for s in program.graph_signature.input_specs}
        self._outputs: list[OutputSpec] = []

    def run(self) -> None:
        for node in self._program.graph.nodes:
            if node.op == "output":
                self._finish(node)
            elif node.op != "call_function":
                self._register(node, self._copy(node))
            elif _is_batch_norm(node) and updates_running_statistics(node):
                self._batch_norm(node)
            elif isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
                self._write(node)
            else:
                self._register(node, self._copy(node))

    def store(self) -> None:
        """Put the result into the program."""
        self._program.graph_module.graph = self._graph
        signature = self._program.graph_signature
        signature.output_specs[:] = self._outputs
        # A copied graph may name its nodes otherwise: 'input' becomes 'input_1'.
        inputs = (n for n in self._program.graph.nodes if n.op == "placeholder")
        signature.input_specs[:] = [
            dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=node.name))
            for spec, node in zip(signature.input_specs, inputs, strict=True)
        ]

    # ------------------------------------------------------------------ values of the result

    def _now(self, node: fx.Node) -> fx.Node:
        """Return what a node of the program holds at this point of the result."""
        alias = self._aliases.get(node)
        if alias is None:
            return self._nodes[node]
        memory = alias.memory
        if alias.version != memory.version:
            if node is memory.root:
                alias.value = memory.value
            elif alias.parent is None:
                raise _CannotRewriteError
            elif alias.same:
                alias.value = self._now(alias.parent)
            else:
                alias.value = self._copy(node)
            alias.version = memory.version
        return alias.value

    def _copy(self, node: fx.Node) -> fx.Node:
        return self._graph.node_copy(node, self._now)

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a node whose arguments are of the result; layer and source as of ``like``."""
        if not self._known(target):
            raise _CannotRewriteError
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in like.meta.items() if k != "val"} | {_FROM_WRITE: True}
        given, named = fx.map_arg((args, kwargs), _value)
        if target in _LIKE_FIRST:
            like_first = (given[0], given[0].shape, given[0].stride())
            made = internals.fake_result(_aten.new_empty_strided.default, like_first, {})
        else:
            made = internals.fake_result(target, given, named)
        node.meta["val"] = made
        if node.meta["val"] is None:
            raise _CannotRewriteError
        return node

    def _register(self, node: fx.Node, copy: fx.Node) -> None:
        """Remember what of the program a copied node stands for, and what it shares memory with."""
        storages = memories_of(node)
        shared = [s for s in storages if s in self._memories]
        if node.op == "placeholder" and shared:
            self._memories[shared[0]].inputs += 1
        if not isinstance(_value(node), torch.Tensor) and not shared:
            self._nodes[node] = copy
            return
        if len(set(storages)) != 1:  # parts with memory of their own, looked at one by one
            self._nodes[node] = copy
            return
        memory = self._memories.get(storages[0])
        if memory is None:
            memory = _Memory(node, copy, inputs=int(node.op == "placeholder"))
            self._memories[storages[0]] = memory
            self._aliases[node] = _Alias(memory, None, copy)
            return
        sources = [n for n in node.all_input_nodes if storages[0] in memories_of(n)]
        parent = sources[0] if sources and sources[0] in self._aliases else None
        self._aliases[node] = _Alias(memory, parent, copy, memory.version)

    # ---------------------------------------------------------------------------------- writes

    def _write(self, node: fx.Node) -> None:
        function = functional_form(node.target)
        target = node.args[0] if node.args else None
        if function is None or not isinstance(target, fx.Node) or target not in self._aliases:
            raise _CannotRewriteError
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._now)
        written = self._call(node, function, *args, **kwargs)
        self._assign(target, written)
        alias = self._aliases[target]
        self._aliases[node] = _Alias(alias.memory, target, written, alias.version, same=True)

    def _batch_norm(self, node: fx.Node) -> None:
        if len(node.args) != _BATCH_NORM_ARGUMENTS or node.args[_TRAINING] is not True:
            raise _CannotRewriteError
        if any(not isinstance(node.args[i], fx.Node) for i in _RUNNING):
            raise _CannotRewriteError
        function = _aten._native_batch_norm_legit_functional.default
        call = self._call(node, function, *fx.map_arg(node.args[:-1], self._now))
        parts = []
        for index in (0, *_RUNNING):
            part = self._graph.call_function(operator.getitem, (call, index))
            part.meta = {**call.meta, "val": call.meta["val"][index]}
            parts.append(part)
        self._register(node, parts[0])
        for index, part in zip(_RUNNING, parts[1:], strict=True):
            self._assign(node.args[index], part)

    def _assign(self, target: fx.Node, value: fx.Node) -> None:
        """Let the memory of a tensor of the program hold a value where the tensor is."""
        first = self._aliases.get(target)
        if (
            first is None
            or first.memory.inputs > 1
            or not _same_kind(_value(target), _value(value))
        ):
            raise _CannotRewriteError
        memory = first.memory
        if memory.root.op == "placeholder" and not self._is_buffer(memory.root):
            raise _CannotRewriteError
        node, whole = target, value
        while node is not memory.root:
            alias = self._aliases[node]
            if alias.parent is None:
                raise _CannotRewriteError
            if not alias.same:
                whole = self._inside(node, self._now(alias.parent), whole)
            node = alias.parent
        memory.value = whole
        memory.version += 1
        first.value, first.version = value, memory.version

    def _inside(self, view: fx.Node, base: fx.Node, value: fx.Node) -> fx.Node:
        """Return a base with other values where a view of it is."""
        rest = fx.map_arg(view.args[1:], self._now)
        if view.kwargs or view.args[0] is not self._aliases[view].parent:
            raise _CannotRewriteError
        if view.target is _aten.slice.Tensor:
            return self._call(view, _aten.slice_scatter.default, base, value, *rest)
        if view.target is _aten.select.int:
            return self._call(view, _aten.select_scatter.default, base, value, *rest)
        if view.target is _aten.transpose.int:
            return self._call(view, _aten.transpose.int, value, *rest)
        raise _CannotRewriteError

    def _is_buffer(self, root: fx.Node) -> bool:
        return self._kinds[root.name].kind is InputKind.BUFFER

    # --------------------------------------------------------------------------------- outputs

    def _finish(self, output: fx.Node) -> None:
        updates = []
        for memory in self._memories.values():
            if memory.version == 0 or memory.root.op != "placeholder":
                continue
            updates.append(memory.value)
            self._outputs.append(
                OutputSpec(
                    OutputKind.BUFFER_MUTATION,
                    TensorArgument(name=memory.value.name),
                    self._kinds[memory.root.name].target,
                )
            )
        (values,) = output.args
        specs = self._program.graph_signature.output_specs
        results = []
        for spec, value in zip(specs, values, strict=True):
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise _CannotRewriteError
            if isinstance(value, fx.Node):
                value = self._now(value)
                spec = dataclasses.replace(spec, arg=dataclasses.replace(spec.arg, name=value.name))
            results.append(value)
            self._outputs.append(spec)
        copy = self._graph.output((*updates, *results))
        copy.meta = dict(output.meta)


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _same_kind(old: torch.Tensor, made: torch.Tensor) -> bool:
    """Tell whether a new value has type and sizes of the tensor that it is written to."""
    return (
        isinstance(made, torch.Tensor)
        and made.dtype == old.dtype
        and made.layout == old.layout
        and made.dim() == old.dim()
        and all(
            size_internals.size_expression(a) == size_internals.size_expression(b)
            for a, b in zip(made.shape, old.shape, strict=True)
        )
        and internals.storage_identity(made) != internals.storage_identity(old)
    )

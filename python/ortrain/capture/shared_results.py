# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Finds the results of a forward that share memory, and the views that lead to them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument

from ortrain.capture import size_internals
from ortrain.capture.aliases import memories_of, origin_of, written_by
from ortrain.capture.captured import Placeholder, Role
from ortrain.capture.errors import CaptureError
from ortrain.capture.result_views import Given, ResultView, Size, Step, in_order_of


def take_views_out(
    program: torch.export.ExportedProgram, placeholders: Sequence[Placeholder]
) -> list[ResultView] | None:
    """Let a program give what its results are views of; return how they are made, None where it gives all.

    Results that are not in the program any more stand there as they did, and nobody needs them: those whose source is
    no output.

    Raises:
      CaptureError: Results share memory in a way that cannot be restored.
    """
    return _Taking(program, placeholders).run()


class _Taking:
    def __init__(
        self, program: torch.export.ExportedProgram, placeholders: Sequence[Placeholder]
    ) -> None:
        self._program = program
        self._output = next(n for n in program.graph.nodes if n.op == "output")
        specs = program.graph_signature.output_specs
        self._positions = [i for i, s in enumerate(specs) if s.kind is OutputKind.USER_OUTPUT]
        self._inputs = {
            spec.arg.name: placeholder
            for spec, placeholder in zip(
                program.graph_signature.input_specs, placeholders, strict=True
            )
            if placeholder.role is not Role.CONSTANT
        }

    def run(self) -> list[ResultView] | None:
        results = [self._output.args[0][p] for p in self._positions]
        origins = [origin_of(node)[0] for node in results]
        memories = [memories_of(node) for node in results]
        shared = [m for m in memories if memories.count(m) > 1]
        replaced: dict[fx.Node, int] = {}
        views = []
        count = 0
        for place, (node, origin, memory) in enumerate(
            zip(results, origins, memories, strict=True)
        ):
            steps: tuple[Step, ...] = ()
            if origin.name in self._inputs:
                views.append(ResultView(self._source(origin), self._chain(origin, node)))
                continue
            base = node
            if memory in shared or not _lies_as_a_graph_gives_it(node):
                base = self._base(node, origin)
                steps = self._chain(base, node)
                if not _lies_as_a_graph_gives_it(base):
                    steps = (_restored_order(base), *steps)
            if base not in replaced:
                replaced[base] = count
                count += 1
                if base is not node:
                    self._replace(place, base)
            views.append(ResultView(("output", replaced[base]), steps))
        if all(v == ResultView(("output", i)) for i, v in enumerate(views)):
            return None
        if count == 0:
            raise CaptureError("it computes nothing: its results are views of what it was given")
        return views

    def _source(self, origin: fx.Node) -> tuple[str, Any]:
        placeholder = self._inputs[origin.name]
        if placeholder.role is Role.USER:
            return "user", placeholder.index
        return "outside" if placeholder.role is Role.OUTSIDE else "module", placeholder.name

    def _base(self, node: fx.Node, origin: fx.Node) -> fx.Node:
        """Return the tensor that a result is a view of: what is written to it later is in its value too."""
        if isinstance(origin.meta.get("val"), torch.Tensor):
            return origin
        while node is not origin:
            memory = set(memories_of(node))
            source = next(n for n in node.all_input_nodes if not memory.isdisjoint(memories_of(n)))
            if source is origin:
                return node  # one of several that an operator gives
            node = source
        raise CaptureError(f"results share memory that {origin.target} gives")

    def _replace(self, place: int, base: fx.Node) -> None:
        position = self._positions[place]
        outputs = list(self._output.args[0])
        outputs[position] = base
        self._output.args = (tuple(outputs),)
        specs = self._program.graph_signature.output_specs
        specs[position] = OutputSpec(
            OutputKind.USER_OUTPUT, TensorArgument(name=base.name), specs[position].target
        )

    def _chain(self, base: fx.Node, node: fx.Node) -> tuple[Step, ...]:
        """Return the operators that lead from a tensor to a view of it."""
        steps: list[Step] = []
        while node is not base:
            memory = set(memories_of(node))
            sources = [n for n in node.all_input_nodes if not memory.isdisjoint(memories_of(n))]
            if not sources or node.op != "call_function":
                raise CaptureError("results share memory in a way that is no view")
            if not (written := list(written_by(node))):
                steps.append(self._step(node, sources[0]))
            elif written != sources[:1]:
                raise CaptureError(f"results share memory that {node.target} writes to")
            node = sources[0]
        return tuple(reversed(steps))

    def _step(self, node: fx.Node, source: fx.Node) -> Step:
        target = node.target
        if not isinstance(target, torch._ops.OpOverload) and target is not operator.getitem:
            raise CaptureError(f"results share memory that {target} gives")

        def given(leaf: Any) -> Any:
            if leaf is source:
                return Given()
            value = leaf.meta.get("val") if isinstance(leaf, fx.Node) else leaf
            if isinstance(value, torch.SymInt):
                return Size(size_internals.size_expression(value))
            if isinstance(leaf, fx.Node) and not isinstance(value, int):
                raise CaptureError(f"results share memory, by {target} of several tensors")
            return value

        arguments = fx.node.map_aggregate((node.args, dict(node.kwargs)), given)
        return Step(target, arguments)


def _lies_as_a_graph_gives_it(node: fx.Node) -> bool:
    """Tell whether a tensor is contiguous, and all of its memory, as what a graph gives is."""
    value = node.meta["val"]
    if value.layout is not torch.strided:
        return True
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not _is_equal(size, 1) and not _is_equal(stride, expected):
            return False
        expected = expected * size
    return _is_equal(value.storage_offset(), 0)


def _restored_order(node: fx.Node) -> Step:
    value = node.meta["val"]
    strides = [size_internals.size_hint(s) for s in value.stride()]
    if 0 in strides:
        raise CaptureError(f"results share memory, in elements of {node.target} that are one")
    order = tuple(sorted(range(value.dim()), key=lambda axis: -strides[axis]))
    return Step(in_order_of, ((Given(), order), {}))


def _is_equal(a: Any, b: Any) -> bool:
    difference = sympy.sympify(size_internals.size_expression(a)) - sympy.sympify(
        size_internals.size_expression(b)
    )
    return bool(difference == 0 or sympy.expand(difference) == 0)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A graph builder and executor in plain PyTorch: the truth for conversions and gradients.

A graph built here runs node by node with the meanings of ``reference_ops``; torch.autograd gives
its gradients. Nothing of the engine takes part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortrain.capture.dtypes import TORCH_DTYPE, onnx_code
from ortrain.testing.reference_ops import OPERATORS


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ReferenceValue:
    """A value of a reference graph; its shape is the one at the sample's sizes."""

    name: str
    dtype: int
    rank: int
    shape: tuple[int | str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceNode:
    """One node; an empty name among the inputs is an optional input left out."""

    op: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceInput:
    """One input of a graph."""

    name: str
    dtype: int
    shape: tuple[int | str, ...]
    role: str


@dataclasses.dataclass(frozen=True, slots=True)
class ReferenceOutput:
    """One output of a graph: the value ``value`` under the name ``name``."""

    value: str
    name: str
    role: str
    target: str


class ReferenceError(RuntimeError):
    """A node failed; names it, its inputs' shapes and what PyTorch said."""


def run_node(node: ReferenceNode, inputs: Sequence[torch.Tensor | None]) -> tuple[Any, ...]:
    """Return the outputs of one node.

    Raises:
      NotImplementedError: The operator has no meaning here.
      ReferenceError: PyTorch refused the inputs.
    """
    function = OPERATORS.get((node.domain, node.op))
    if function is None:
        raise NotImplementedError(f"{node.domain}::{node.op} has no reference")
    try:
        result = function(list(inputs), node.attrs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        shown = [None if t is None else f"{t.dtype}{list(t.shape)}" for t in inputs]
        raise ReferenceError(f"[{node.op} '{node.name}'] inputs {shown}: {error}") from error
    return result if isinstance(result, tuple) else (result,)


@dataclasses.dataclass(slots=True)
class ReferenceGraph:
    """A finished graph."""

    name: str
    inputs: list[ReferenceInput]
    outputs: list[ReferenceOutput]
    constants: dict[str, torch.Tensor]
    nodes: list[ReferenceNode]

    def run(
        self,
        inputs: Mapping[str, torch.Tensor],
        observe: Callable[[ReferenceNode, tuple[torch.Tensor, ...]], None] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Run the graph; gradients flow back to the inputs that require them.

        Args:
          inputs: A tensor per input name.
          observe: Called after each node with its outputs, to compare an engine node by node.

        Returns:
          The outputs by name.
        """
        values: dict[str, torch.Tensor | None] = {**self.constants}
        for spec in self.inputs:
            tensor = inputs[spec.name]
            if onnx_code(tensor.dtype) != spec.dtype or tensor.dim() != len(spec.shape):
                raise ReferenceError(f"input {spec.name}: {tensor.dtype} of rank {tensor.dim()}")
            values[spec.name] = tensor
        for node in self.nodes:
            results = run_node(node, [values[n] if n else None for n in node.inputs])
            values.update(zip(node.outputs, results, strict=False))
            if observe is not None:
                observe(node, results)
        return {output.name: values[output.value] for output in self.outputs}  # type: ignore[misc]

    def operators(self) -> dict[str, int]:
        """Return how often each operator stands in the graph."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            key = f"{node.domain}::{node.op}" if node.domain else node.op
            counts[key] = counts.get(key, 0) + 1
        return counts


class ReferenceBuilder:
    """Records nodes, and runs each at once on made-up inputs to learn dtypes and ranks.

    Args:
      name: Name of the graph.
      hints: Size of each symbol in the made-up inputs; 2 where none is given.
      samples: Inputs to use instead of made-up ones, by name.
    """

    def __init__(
        self,
        name: str = "",
        hints: Mapping[str, int] | None = None,
        samples: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._hints = dict(hints or {})
        self._samples = dict(samples or {})
        self._graph = ReferenceGraph(name, [], [], {}, [])
        self._tensors: dict[str, torch.Tensor] = {}
        self._count = 0

    def _value(self, name: str, tensor: torch.Tensor) -> ReferenceValue:
        if name in self._tensors:
            raise ValueError(f"two values are called {name}")
        self._tensors[name] = tensor.detach()
        return ReferenceValue(name, onnx_code(tensor.dtype), tensor.dim(), tuple(tensor.shape))

    def _unique(self, base: str) -> str:
        self._count += 1
        return f"{base}#{self._count}"

    def input(
        self,
        name: str,
        dtype: int,
        shape: Sequence[int | str],
        role: str,
        requires_grad: bool = False,
    ) -> ReferenceValue:
        """Add an input."""
        del requires_grad  # torch.autograd asks the tensors themselves
        sizes = [self._hints.get(s, 2) if isinstance(s, str) else s for s in shape]
        tensor = self._samples.get(name)
        if tensor is None:
            tensor = torch.zeros(sizes, dtype=TORCH_DTYPE[dtype])
        made = self._value(name, tensor)
        self._graph.inputs.append(ReferenceInput(name, dtype, tuple(shape), role))
        return dataclasses.replace(made, shape=tuple(shape))

    def constant(self, array: torch.Tensor, name: str = "") -> ReferenceValue:
        """Add a constant."""
        made = self._value(name or self._unique("constant"), torch.as_tensor(array))
        self._graph.constants[made.name] = self._tensors[made.name]
        return made

    def node(
        self,
        op: str,
        inputs: Sequence[ReferenceValue | None],
        attrs: Mapping[str, Any] | None = None,
        outputs: int = 1,
        name: str = "",
        domain: str = "",
    ) -> Any:
        """Add a node and run it."""
        base = name or op
        results = tuple(self._unique(base) for _ in range(outputs))
        names = tuple("" if v is None else v.name for v in inputs)
        node = ReferenceNode(op, domain, base, names, results, dict(attrs or {}))
        with torch.no_grad():
            tensors = run_node(node, [self._tensors[n] if n else None for n in names])
        self._graph.nodes.append(node)
        made = tuple(self._value(n, t) for n, t in zip(results, tensors, strict=False))
        if len(made) != outputs:
            raise ValueError(f"[{op} '{base}'] has {len(tensors)} outputs, not {outputs}")
        return made[0] if outputs == 1 else made

    def set_checkpoint(self, number: int) -> None:
        """Take no notice: recomputing changes no number."""

    def output(self, value: ReferenceValue, name: str, role: str, target: str = "") -> None:
        """Add an output."""
        self._graph.outputs.append(ReferenceOutput(value.name, name, role, target))

    def finish(self) -> ReferenceGraph:
        """Return the graph."""
        return self._graph

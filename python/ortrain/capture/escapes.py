# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators that run in PyTorch as one node of a graph, with PyTorch's own backward."""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ortrain import _core, logs
from ortrain.errors import ShapeError

_log = logs.get_logger("ortrain")
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True, slots=True)
class Escape:
    """An operator of a captured graph that runs in PyTorch.

    Attributes:
      target: The operator with its overload, or the class of an autograd function.
      layer: Path of the layer; empty for the module itself.
      reason: Why it does not run natively, one sentence.
      source: ``file:line: code`` of the user's line, empty where it is not known.
    """

    target: str
    layer: str
    reason: str
    source: str

    def __str__(self) -> str:
        where = f" in layer '{self.layer}'" if self.layer else ""
        return f"{self.target}{where}: {self.reason}" + (
            f" (at {self.source})" if self.source else ""
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Operand:
    """Stands for a tensor, or a number computed from sizes, among the arguments of an escape."""

    position: int
    is_number: bool = False


def with_operands(leaves: Sequence[Any], tree: Any, given: Callable[[Operand], Any]) -> Any:
    """Return the structure of ``leaves``, with what is given for each operand in its place."""
    filled = [given(leaf) if isinstance(leaf, Operand) else leaf for leaf in leaves]
    return pytree.tree_unflatten(filled, tree)


class EscapedCall:
    """One call of a function of PyTorch, made whenever its node of the graph runs.

    Operands are copied on the way in: a backward may keep them, or hand them to anybody, and the
    memory of a run is used again.

    Args:
      name: What it is called in messages.
      function: Takes the arguments; returns a tensor, or a list or tuple of tensors; None among
        them is left out.
      args: Its arguments, nested, with an ``Operand`` where a tensor or a computed number stands.
      kwargs: Its keyword arguments, likewise.
      stream: A number that no other call of the graph has, where it may draw random numbers: the
        last operand is the graph's seed then.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        stream: int | None,
    ) -> None:
        self._name = name
        self._function = function
        self._leaves, self._tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._stream = stream
        self._told = False
        self.key = f"{name}#{next(_numbers)}"
        call = weakref.proxy(self)  # the engine holds the functions, and this object removes them

        def forward(operands: list[Any], results: list[Any], tracked: list[int]) -> Any:
            return call._forward(operands, results, tracked)

        def backward(kept: Any, *gradients: Any) -> None:
            call._backward(kept, *gradients)

        _core.add_external_function(self.key, forward, backward)
        weakref.finalize(self, _core.remove_external_function, self.key)

    @property
    def draws(self) -> bool:
        """Whether it may draw random numbers."""
        return self._stream is not None

    def _forward(
        self,
        operands: list[torch.Tensor],
        results: list[torch.Tensor | None],
        tracked: list[int],
    ) -> Any:
        """Write the results; return what ``_backward`` needs if operands are ``tracked``."""
        seed = None if self._stream is None else seed_of_stream(int(operands.pop()), self._stream)
        # Of the engine's memory the leaves only have the sizes: gradients end there.
        leaves = [t.requires_grad_(i in tracked) for i, t in enumerate(operands)]
        with torch.set_grad_enabled(bool(tracked)), torch.autocast("cpu", enabled=False):
            made = self._results(self._call([t.clone() for t in leaves], seed))
        if len(made) != len(results):
            raise ShapeError(f"{self._name} gave {len(made)} results, expected {len(results)}")
        with torch.no_grad():
            for index, (out, value) in enumerate(zip(results, made, strict=True)):
                if out is not None:
                    self._store(index, value, out)
        return (leaves, made) if tracked else None

    def _call(self, tensors: list[torch.Tensor], seed: int | None) -> Any:
        def given(operand: Operand) -> Any:
            tensor = tensors[operand.position]
            return tensor.item() if operand.is_number else tensor

        args, kwargs = with_operands(self._leaves, self._tree, given)
        if seed is None:
            return self._function(*args, **kwargs)
        generator = torch.default_generator  # not torch.manual_seed, which seeds all devices
        state = generator.get_state()
        try:
            generator.manual_seed(seed)
            return self._function(*args, **kwargs)
        finally:
            generator.set_state(state)

    @staticmethod
    def _results(made: Any) -> list[torch.Tensor]:
        parts = made if isinstance(made, (list, tuple)) else [made]
        return [part for part in parts if part is not None]

    def _store(self, index: int, value: torch.Tensor, out: torch.Tensor) -> None:
        if value.shape != out.shape or value.dtype != out.dtype:
            raise ShapeError(
                f"{self._name}: result {index} is {value.dtype} {list(value.shape)}, by the "
                f"capture it should be {out.dtype} {list(out.shape)}"
            )
        out.copy_(value)

    def _backward(
        self,
        kept: tuple[list[torch.Tensor], list[torch.Tensor]],
        results: list[int],
        incoming: list[torch.Tensor],
        operands: list[int],
        gradients: list[torch.Tensor],
    ) -> None:
        """Write the gradients of the operands, those that the function does not give as zeros."""
        leaves, made = kept
        outputs, given = [], []
        for index, gradient in zip(results, incoming, strict=True):
            value = made[index]
            if value.requires_grad:
                outputs.append(value)
                given.append(gradient.clone())
        found: Sequence[torch.Tensor | None] = [None] * len(operands)
        if outputs:
            found = torch.autograd.grad(
                outputs,
                [leaves[i] for i in operands],
                given,
                retain_graph=True,
                allow_unused=True,
            )
        with torch.no_grad():
            for index, out, value in zip(operands, gradients, found, strict=True):
                if value is not None:
                    out.copy_(value if value.layout is torch.strided else value.to_dense())
                    continue
                out.zero_()
                if not self._told:
                    self._told = True
                    _log.warning(
                        "%s has no gradient for its argument %d; what it was computed from gets a "
                        "gradient of zeros, where PyTorch leaves it without one",
                        self._name,
                        index,
                    )


def seed_of_stream(seed: int, stream: int) -> int:
    """Return a seed of its own for each stream of a graph's seed (Fibonacci hashing)."""
    return (seed ^ (stream * 0x9E3779B97F4A7C15)) & 0x7FFF_FFFF_FFFF_FFFF

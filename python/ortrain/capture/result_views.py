# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results of a forward that share memory with its arguments, the module's tensors or each other.

A graph computes values. Which results are the same memory, and how they lie in it, PyTorch restores behind the graph:
it applies the views of the forward to what the graph gives, or to the tensors that went into it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import sympy
import torch
from torch.utils import _pytree as pytree

from ortrain.capture import size_internals

if TYPE_CHECKING:
    from ortrain.capture.captured import Dimension

_MOST_SIZES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """Stands among arguments for a number that depends on sizes."""

    expression: sympy.Expr


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """Stands among arguments for the tensor that the step before gave."""


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One operator, applied to what the step before gave."""

    operator: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]

    def sized(self, value_of: Callable[[sympy.Expr], int]) -> Step:
        """Return the step with numbers in the place of sizes."""
        leaves, tree = pytree.tree_flatten(self.arguments)
        known = [value_of(x.expression) if isinstance(x, Size) else x for x in leaves]
        return Step(self.operator, pytree.tree_unflatten(known, tree))

    def __call__(self, tensor: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Given, lambda _: tensor, self.arguments)
        return self.operator(*args, **kwargs)


def in_order_of(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose axes lie in memory in an order, the slowest first: this one, or a copy that is no view."""
    if tensor.permute(order).is_contiguous():
        return tensor
    if tensor.requires_grad:
        places = sorted(range(len(order)), key=order.__getitem__)
        return tensor.permute(order).contiguous().permute(places)
    made = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor)


@dataclasses.dataclass(frozen=True, slots=True)
class ResultView:
    """How one result is made.

    Attributes:
      source: ("output", index among what the graph gives), ("user", index of an argument), ("module", name of a
        parameter or buffer) or ("outside", name of an input of the graph).
      steps: Views of it.
    """

    source: tuple[str, Any]
    steps: tuple[Step, ...] = ()


class ResultViews:
    """Makes the results of a call.

    Args:
      views: One per result.
      dims: What the sizes in them stand for.
    """

    def __init__(self, views: Sequence[ResultView], dims: Sequence[Dimension]) -> None:
        self.views = list(views)
        self._dims = list(dims)
        self._sized: dict[tuple[int, ...], list[tuple[Step, ...]]] = {}

    def __call__(
        self, tensors: Sequence[torch.Tensor], value_of: Callable[[str, Any], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the results.

        Args:
          tensors: The arguments of the call, flat.
          value_of: Returns the tensor of a source.
        """
        results = []
        for view, steps in zip(self.views, self.steps(tensors), strict=True):
            result: Any = value_of(*view.source)
            for step in steps:
                result = step(result)
            results.append(result)
        return results

    def are_known(self) -> bool:
        """Tell whether the sizes of the arguments give all sizes of the views."""
        symbols = {dim.symbol for dim in self._dims}
        leaves = (
            leaf for v in self.views for s in v.steps for leaf in pytree.tree_leaves(s.arguments)
        )
        return all(
            leaf.expression.free_symbols <= symbols for leaf in leaves if isinstance(leaf, Size)
        )

    def orders(self) -> dict[int, tuple[int, ...]]:
        """Return the orders of the axes of those outputs of the graph that are copied to lie so, by their index."""
        found = {}
        for view in self.views:
            kind, index = view.source
            if kind == "output" and view.steps and view.steps[0].operator is in_order_of:
                found[index] = view.steps[0].arguments[0][1]
        return found

    def steps(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Step, ...]]:
        """Return the views of each result, for the sizes of a call's arguments."""
        sizes = tuple(tensors[dim.index].shape[dim.axis] for dim in self._dims)
        known = self._sized.get(sizes)
        if known is None:
            symbols = [dim.symbol for dim in self._dims]
            if len(self._sized) >= _MOST_SIZES:
                self._sized.clear()
            known = self._sized[sizes] = [
                tuple(
                    step.sized(lambda e: size_internals.size_function(e, symbols)(*sizes))
                    for step in view.steps
                )
                for view in self.views
            ]
        return known

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A forward that runs again in PyTorch, where somebody differentiates its gradients."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortrain.capture.captured import AutocastState
from ortrain.capture.dynamo_internals import untraced
from ortrain.capture.signature import FlatCall, attributes_set, flatten_outputs

if TYPE_CHECKING:
    from ortrain.engine import Engine
    from ortrain.entry import Entry
    from ortrain.random_numbers import GeneratorStates

_is_leaf = operator.attrgetter("is_leaf")


class ForwardAgain:
    """One call of a module, kept so that PyTorch can run it again.

    It keeps the tensors that no graph input stands for without their history: an argument may
    later depend on the results.

    Args:
      engine: Runs the module.
      entry: The graph that ran.
      call: The call.
    """

    __slots__ = (
        *("_attributes", "_engine", "_entry", "_keeps_casts", "_others"),
        *("_signature", "_state", "_tree"),
    )

    def __init__(self, engine: Engine, entry: Entry, call: FlatCall) -> None:
        self._engine, self._entry = engine, entry
        self._signature, self._state = engine.signature, engine.state
        self._tree, self._attributes = call.tree, call.attributes
        self._keeps_casts = torch.is_autocast_cache_enabled()
        self._others = {i: call.tensors[i].detach() for i in entry.other_arguments}

    def why_not(self) -> str:
        """Return what stands in the way of another run, empty where nothing does."""
        if self._entry.seed_at is not None:
            return (
                "its dropout is drawn by the engine, and PyTorch cannot draw it again; "
                'ORTModule(module, random="pytorch") draws what PyTorch does'
            )
        if not self._engine.is_in_state(self._state):
            return "the module's flags, layers or attributes have changed since its forward"
        return ""

    def tell_backward(self, error: Exception) -> None:
        """Say that PyTorch has run a backward, and why the engine has not."""
        self._engine.tell_failed_run(error, "the backward")

    def gradients(
        self,
        inputs: Sequence[torch.Tensor],
        originals: Mapping[int, torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
        generators: GeneratorStates | None,
    ) -> dict[int, torch.Tensor]:
        """Return the gradients of the inputs, which can be differentiated where grad mode is on.

        Args:
          inputs: Those of the graph, as they were, without history.
          originals: By position those with a gradient, with their history.
          gradients: Of the outputs of the graph that the caller gets; None where there is none.
          generators: Where draws in PyTorch started from.

        Raises:
          RuntimeError: The results of the module do not tell what the graph has given.
        """
        sources = {p: inputs[p].detach().requires_grad_() for p in originals}
        replayed = generators.replayed() if generators else contextlib.nullcontext()
        # Meanwhile the module holds other tensors, which no other thread may take for its own.
        with self._engine.exclusively(), replayed:
            outputs = self._outputs(inputs, sources)
        further = torch.is_grad_enabled()
        roots, given, incoming = [], [], []
        for output, gradient in zip(outputs, gradients, strict=True):
            if gradient is None:
                continue
            if output is None or output.shape != gradient.shape:
                raise RuntimeError(
                    "a gradient of a gradient through ORTModule is not supported where the "
                    f"results of {type(self._engine.module).__name__} share memory in this way; "
                    "run the module itself, ORTModule.module"
                )
            if not output.requires_grad:
                continue
            roots.append(output)
            incoming.append(gradient)
            given.append(_leaf_of(gradient) if further else gradient)
        if not roots:
            return {}
        wanted = list(sources.values())
        found = torch.autograd.grad(roots, wanted, given, create_graph=further, allow_unused=True)
        if further:
            found = _differentiable(found, [*wanted, *given], [*originals.values(), *incoming])
        return {p: g for p, g in zip(sources, found, strict=True) if g is not None}

    def _outputs(
        self, inputs: Sequence[torch.Tensor], sources: Mapping[int, torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """Run the forward; return what the graph's outputs are in PyTorch, None for what is none."""
        entry, module = self._entry, self._engine.module
        written = {(kind, where) for _, kind, where in entry.updates}
        arguments = dict(self._others)
        held: dict[int, torch.Tensor] = {}
        for position, (kind, where) in enumerate(entry.tensors):
            tensor = sources.get(position, inputs[position])
            if (kind, where) in written:
                tensor = tensor.clone()
            if kind == "user":
                arguments[where] = tensor
            elif kind == "module":
                held[where] = tensor
        for kind, where in written:
            if kind == "user":
                arguments.setdefault(where, self._others[where].clone())
        places = self._engine.places()
        replaced = {name: held[place] for name, place in places.items() if place in held}
        overwritten = [p for kind, p in written if kind == "module" and p not in held]
        in_order = [arguments.get(i) for i in range(1 + max(arguments, default=-1))]
        args, kwargs = self._signature.unflatten(self._tree, in_order)
        with (
            _holding(module, replaced, [n for n, p in places.items() if p in overwritten]),
            torch.enable_grad(),
            AutocastState.current().left(),
            entry.autocast.applied(self._keeps_casts),
            attributes_set(self._attributes, in_order),
        ):
            results, _ = flatten_outputs(module.forward(*args, **kwargs))
        return self._as_the_graph_gives(results)

    def _as_the_graph_gives(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        entry = self._entry
        conditions: list[torch.Tensor | None] = [None] * len(entry.captured.branches)
        if entry.captured.views is None:
            return [*results, *conditions]
        outputs: list[torch.Tensor | None] = [None] * entry.num_user_outputs
        views = entry.captured.views.views[: len(results)]
        for result, view in zip(results, views, strict=True):
            kind, index = view.source
            lies_otherwise = len(view.steps) == 1 and index in entry.orders
            if kind == "output" and (not view.steps or lies_otherwise):
                outputs[index] = result
        for result, view in zip(results, views, strict=True):
            kind, index = view.source
            if kind == "output" and outputs[index] is None:
                outputs[index] = result._base
        return outputs


@contextlib.contextmanager
def _holding(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], overwritten: Sequence[str]
) -> Iterator[None]:
    """Put tensors in the places of parameters and buffers, and copies of those that are written."""
    placed: dict[int, torch.Tensor] = {}
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for name in [*tensors, *overwritten]:
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            table: dict[str, Any] = (
                owner._parameters if last in owner._parameters else owner._buffers
            )
            before = table[last]
            if name in tensors:
                tensor = tensors[name]
            else:
                tensor = placed.setdefault(id(before), before.detach().clone())
            kept.append((table, last, before))
            table[last] = tensor
        yield
    finally:
        for table, last, before in reversed(kept):
            table[last] = before


class _Differentiable(torch.autograd.Function):
    """Stands for values that a graph of PyTorch's own computes from leaves.

    The leaves have no history, the originals that they stand for do.
    """

    @staticmethod
    def forward(
        ctx: Any,
        values: Sequence[torch.Tensor],
        leaves: Sequence[torch.Tensor],
        *originals: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.values, ctx.leaves = values, leaves
        of_gradients = (i for i, original in enumerate(originals) if original.requires_grad)
        ctx.originals = with_own_history(originals, of_gradients)
        ctx.set_materialize_grads(False)
        given = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(
            *(g for g, value in zip(given, values, strict=True) if not value.requires_grad)
        )
        return given

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        further = torch.is_grad_enabled()
        roots, given, incoming = [], [], []
        for value, gradient in zip(ctx.values, gradients, strict=True):
            if gradient is not None and value.requires_grad:
                roots.append(value)
                incoming.append(gradient)
                given.append(_leaf_of(gradient) if further else gradient)
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        found: Sequence[torch.Tensor | None] = torch.autograd.grad(
            roots, wanted, given, retain_graph=True, create_graph=further, allow_unused=True
        )
        if further:
            originals = [ctx.originals.get(i, leaf) for i, leaf in enumerate(ctx.leaves)]
            found = _differentiable(found, [*ctx.leaves, *given], [*originals, *incoming])
        of_leaves = iter(found)
        return (
            None,
            None,
            *(next(of_leaves) if leaf.requires_grad else None for leaf in ctx.leaves),
        )


def _leaf_of(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.detach().requires_grad_(gradient.requires_grad)


def _differentiable(
    values: Sequence[torch.Tensor | None],
    leaves: Sequence[torch.Tensor],
    originals: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """Return values computed from leaves as values computed from the originals of these."""
    present = [value for value in values if value is not None]
    if not present:
        return list(values)
    linked = iter(_Differentiable.apply(present, leaves, *originals))
    return [None if value is None else next(linked) for value in values]


class _OwnHistory(torch.autograd.Function):
    """Gives the tensors that it takes, with the history that they have at this moment."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return gradients


def with_own_history(
    tensors: Sequence[torch.Tensor], positions: Iterable[int]
) -> dict[int, torch.Tensor]:
    """Return some tensors by position, such that keeping them makes no reference cycle.

    What is computed from a tensor may be written to it later; an alias has the history of now.
    """
    kept = {i: tensors[i] for i in positions}
    if not all(map(_is_leaf, kept.values())):
        computed = [i for i, t in kept.items() if not t.is_leaf]
        with torch.enable_grad():
            aliases = _OwnHistory.apply(*(kept[i] for i in computed))
        kept.update(zip(computed, aliases, strict=True))
    return kept

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A call of a module made again in PyTorch, from the state in which it was made first."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ortrain.capture.captured import AutocastState
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.signature import CallSignature, OutputTree, flatten_outputs
from ortrain.capture.tracing import modules_run_themselves, tracing_alone
from ortrain.capture.use_cache import without_cache
from ortrain.random_numbers import DropoutSource
from ortrain.tensor_copies import copies_of, widened
from ortrain.verification.draws import RepeatedDraws, UnrepeatableError


class ReplayError(Exception):
    """PyTorch raises where the engine does not; the cause is what it raised."""


@dataclasses.dataclass(slots=True)
class Answer:
    """What a run gives.

    Attributes:
      tensors: The results, each once.
      structure: The structure around them.
      arguments: The tensors among the arguments, as the run left them; gradients lead to these.
      leaves: What stood in the place of parameters and buffers, by their ids.
      draws: The random numbers, for what a backward runs again.
      called_with: Positional and keyword arguments, as the run left them.
    """

    tensors: list[torch.Tensor]
    structure: OutputTree
    arguments: list[torch.Tensor]
    leaves: dict[int, torch.Tensor]
    draws: RepeatedDraws
    called_with: tuple[Sequence[Any], Mapping[str, Any]]


@dataclasses.dataclass(slots=True)
class Rewound:
    """The state of before a call, while it is put in place of the present one.

    Attributes:
      present: What was there.
      values: What tensors held that have changed since.
    """

    present: ReachableState
    values: dict[int, torch.Tensor]


class Replay:
    """A call that is about to be made.

    Args:
      module: The module.
      args: Positional arguments.
      kwargs: Keyword arguments.
      dropout: Who draws the masks of dropout on the engine's side.

    Attributes:
      called_with: Positional and keyword arguments.
      call: The same, flat.
      grad_enabled: Grad mode of the call.

    Raises:
      UnsupportedInputError: An argument is no tensor, number or container of these.
    """

    def __init__(
        self,
        module: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        dropout: DropoutSource = DropoutSource.ENGINE,
    ) -> None:
        self.module, self.dropout = module, dropout
        self._signature = CallSignature(module.forward)
        self.call = self._signature.flatten(args, kwargs)
        self.called_with = (args, kwargs)
        self.grad_enabled = torch.is_grad_enabled()
        self._autocast = AutocastState.current()
        self._tensors = copies_of(self.call.tensors)
        # Contents are set back below, in a way that autograd does not count.
        self._state = _state_of(module)
        reachable = list(self._state.held())
        generators = [g for g in reachable if isinstance(g, torch.Generator)]
        self._generators = _unique([torch.default_generator, *_of_devices(), *generators])
        self._random = _states(self._generators)
        given = {id(t) for t in self.call.tensors}
        found = [t for t in reachable if _is_plain(t) and id(t) not in given]
        self._values = [(t, t.detach().clone()) for t in _unique(found)]

    @contextlib.contextmanager
    def rewound(self) -> Iterator[Rewound]:
        """Go back to the state of before the call; leave it as it is now afterwards.

        Other threads trace no module meanwhile: a trace takes PyTorch's generator for its own.
        """
        with tracing_alone(), self._rewound() as rewound:
            yield rewound

    @contextlib.contextmanager
    def _rewound(self) -> Iterator[Rewound]:
        present = _state_of(self.module)
        random = _states(self._generators)
        now = {}
        with torch.no_grad():
            for tensor, before in self._values:
                if not _is_equal(tensor, before):
                    now[id(tensor)] = tensor.detach().clone()
        try:
            self._state.restore()
            self._write({id(t): before for t, before in self._values if id(t) in now})
            _set(self._generators, self._random)
            yield Rewound(present, now)
        finally:
            present.restore()
            self._write({id(t): now.get(id(t), before) for t, before in self._values})
            _set(self._generators, random)

    def _write(self, values: Mapping[int, torch.Tensor]) -> None:
        with torch.no_grad():
            for tensor, _ in self._values:
                value = values.get(id(tensor))
                if value is not None and not _is_equal(tensor, value):
                    # Not a write that autograd counts: what a graph has kept of it is the same.
                    tensor.data.copy_(value)

    def changed_tensors(
        self, rewound: Rewound
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return each tensor that the first call or this one wrote to, and what both made of it."""
        found = []
        for tensor, before in self._values:
            first = rewound.values.get(id(tensor), before)
            if first is not before or not _is_equal(tensor, before):
                found.append((tensor, first, tensor.detach().clone()))
        return found

    def forget(self, changed: Sequence[torch.Tensor]) -> None:
        """Keep the values of those alone that a run changes."""
        kept = {id(tensor) for tensor in changed}
        self._values = [(t, before) for t, before in self._values if id(t) in kept]

    @contextlib.contextmanager
    def backward_apart(self) -> Iterator[None]:
        """Leave buffers, attributes and generators alone while a checkpoint runs layers again."""
        with tracing_alone(), self._backward_apart():
            yield

    @contextlib.contextmanager
    def _backward_apart(self) -> Iterator[None]:
        present = _state_of(self.module)
        random = _states(self._generators)
        buffers = [(b, b.detach().clone()) for b in _unique(list(self.module.buffers()))]
        hooks = [p._backward_hooks for p in self.module.parameters() if p._backward_hooks]
        held = [dict(table) for table in hooks]
        for table in hooks:  # they see the gradients of the user's own backward
            table.clear()
        try:
            yield
        finally:
            for table, before in zip(hooks, held, strict=True):
                table.update(before)
            present.restore()
            with torch.no_grad():
                for buffer, value in buffers:
                    if not _is_equal(buffer, value):
                        buffer.data.copy_(value)
            _set(self._generators, random)

    def arguments(self, *, wide: bool = False) -> list[torch.Tensor]:
        """Return the tensors of the call as they were, new leaves of autograd's graph.

        Args:
          wide: Whether in float64.
        """
        made = copies_of(self._tensors)
        if wide:
            made = [widened(tensor) if tensor.is_floating_point() else tensor for tensor in made]
        for tensor, given in zip(made, self.call.tensors, strict=True):
            tensor.requires_grad_(given.requires_grad)
        return made

    def bound(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return positional and keyword arguments with these tensors in them."""
        return self._signature.unflatten(self.call.tree, tensors)

    @contextlib.contextmanager
    def modes(self, *, wide: bool = False) -> Iterator[None]:
        """Enter grad mode and autocast as they were; no autocast in float64."""
        with torch.set_grad_enabled(self.grad_enabled), AutocastState.current().left():
            with AutocastState(()).applied() if wide else self._autocast.applied():
                yield

    def run(self, draws: RepeatedDraws, *, wide: bool = False) -> Answer:
        """Run the forward in PyTorch; only inside of `rewound`.

        Args:
          draws: The random numbers.
          wide: Whether in float64, as far as parameters, buffers and arguments decide that.

        Raises:
          ReplayError: The module raises.
          UnrepeatableError: It draws other random numbers than the graph.
          UnsupportedInputError: A result is no tensor, number or container of these.
        """
        draws.begin()
        tensors = self.arguments(wide=wide)
        args, kwargs = self.bound(tensors)
        make = _in_float64 if wide else _alias
        kernels = sdpa_kernel(SDPBackend.MATH) if draws.wants_parts else contextlib.nullcontext()
        with _replaced(self.module, make) as leaves, modules_run_themselves():
            try:
                with self.modes(wide=wide), without_cache(self.module), kernels, draws.repeating():
                    result = self.module.forward(*args, **kwargs)
                draws.finish()
            except UnrepeatableError:
                raise
            except Exception as error:
                raise ReplayError(f"{type(error).__name__}: {error}") from error
        flat, structure = flatten_outputs(result)
        return Answer(flat, structure, tensors, leaves, draws, (args, kwargs))


def _state_of(module: nn.Module) -> ReachableState:
    return ReachableState(module, (), keeps_contents=False)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter on the same memory, which stays whatever becomes of the first one's."""
    if type(tensor) is not nn.Parameter:
        return tensor
    made = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) not in (torch.Tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor
    return tensor.detach().double().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _replaced(
    module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]
) -> Iterator[dict[int, torch.Tensor]]:
    """Put others in the place of parameters and buffers for a while; return them by id."""
    others: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []

    def other(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in others:
            others[id(tensor)] = make(tensor)
        return others[id(tensor)]

    def replace(table: dict[str, Any], values: dict[str, Any]) -> None:
        replaced.append((table, {name: table[name] for name in values}, values))
        table.update(values)

    try:
        for layer in module.modules():
            for table in (layer._parameters, layer._buffers):
                replace(table, {name: other(tensor) for name, tensor in table.items()})
            if isinstance(layer, nn.RNNBase):
                weights = [other(weight) for weight in layer._flat_weights]
                replace(layer.__dict__, {"_flat_weights": weights})
        yield others
    finally:
        for table, before, values in reversed(replaced):
            # What the forward itself has put there stays.
            table.update({n: t for n, t in before.items() if table.get(n) is values[n]})


def _is_plain(value: Any) -> bool:
    """Tell whether a value is a tensor whose elements can be copied and written."""
    return (
        type(value) in (torch.Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.device.type != "meta"
        and not value.is_inference()
    )


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tell whether two tensors hold the same; NaN is no equal of itself here, which does no harm."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _unique(objects: Sequence[Any]) -> list[Any]:
    return list({id(item): item for item in objects}.values())


def _of_devices() -> list[torch.Generator]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return []
    return list(torch.cuda.default_generators)


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _set(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, state in itertools.zip_longest(generators, states):
        generator.set_state(state)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which operators of a captured graph stand inside torch.utils.checkpoint."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortrain.capture.errors import UnseenStateError
from ortrain.capture.torch_internals import replaced
from ortrain.capture.trace_internals import CheckpointGenerator, checkpoints_by, has_own_contexts

_KEY = "ortrain_checkpoint"
# Of these two that are equal are the same to a function.
_VALUES = (int, float, complex, bool, str, bytes, type(None))


class _Reads(TorchFunctionMode):
    """Takes note of the tensors that what runs under it is given, with their versions then."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[torch.Tensor, int]] = {}
        self._made: dict[int, torch.Tensor] = {}  # kept, so that no address is used again

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        for tensor in _tensors_in((args, kwargs)):
            if id(tensor) not in self._made:
                self._found.setdefault(id(tensor), (tensor, tensor._version))
        result = function(*args, **kwargs)
        for tensor in _tensors_in(result):
            if id(tensor) not in self._found:
                self._made[id(tensor)] = tensor
        return result

    def are_as_they_were(self, written: Sequence[torch.Tensor]) -> bool:
        """Tell whether nobody has written to any of them since; of `written` versions say nothing."""
        if not self._found.keys().isdisjoint(map(id, written)):
            return False
        return all(tensor._version == version for tensor, version in self._found.values())


def _tensors_in(values: Any) -> Iterator[torch.Tensor]:
    return (v for v in pytree.tree_leaves(values) if isinstance(v, torch.Tensor))


class _Inside:
    """What a checkpoint runs, and will run again in the backward."""

    def __init__(self, function: Any, args: Any, kwargs: Any, num_written: int) -> None:
        self.reads = _Reads()
        self._num_written = num_written
        self._called = function, args, kwargs
        self._held = list(_held_by(self._called, set()))

    def refuse_changes(self, written: Sequence[torch.Tensor]) -> None:
        """Raise UnseenStateError where the backward would find something else than the forward has.

        Args:
          written: Statistics that normalizations have written so far.
        """
        if not self.reads.are_as_they_were(written[self._num_written :]):
            raise UnseenStateError(
                "its forward writes to what a checkpoint has read, whose backward reads what is there then"
            )
        now = list(_held_by(self._called, set()))
        if len(now) != len(self._held) or not all(map(_is_the_same, now, self._held)):
            raise UnseenStateError(
                "its forward gives a name that a checkpoint has read another value, which the backward finds"
            )


def _held_by(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield what functions close over, bind or have as defaults, and what containers hold, down to other objects."""
    parts: Any = ()
    if isinstance(value, types.FunctionType):
        cells = (cell for cell in value.__closure__ or ())
        held = [cell.cell_contents for cell in cells if cell != types.CellType()]
        parts = *held, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
    elif isinstance(value, functools.partial):
        parts = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, types.MethodType):
        parts = value.__func__, value.__self__
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = tuple(value)
    elif isinstance(value, Mapping):
        parts = (*value.keys(), *value.values())
    yield value
    if id(value) not in seen:
        seen.add(id(value))
        for part in parts:
            yield from _held_by(part, seen)


def _is_the_same(now: Any, before: Any) -> bool:
    is_value = type(now) is type(before) and isinstance(now, _VALUES)
    return now is before or (is_value and bool(now == before))


@contextlib.contextmanager
def marked_checkpoints(module: nn.Module) -> Iterator[None]:
    """Mark what this thread traces inside checkpoints, and trace it as if there were none.

    Reentrant checkpoints, and those with contexts of their own, stay what they are.

    Args:
      module: What is traced. PyTorch's backward runs a checkpoint again, whose layers write to their buffers again.
    """
    thread, numbers = threading.get_ident(), itertools.count(1)
    insides: list[_Inside] = []
    written: list[torch.Tensor] = []
    is_open = has_ended = False

    def marking(original: CheckpointGenerator) -> CheckpointGenerator:
        def generator(
            function: Any, preserve_rng_state: bool, context_fn: Any, *args: Any, **kwargs: Any
        ) -> Iterator[None]:
            nonlocal is_open
            if threading.get_ident() != thread or has_own_contexts(context_fn):
                yield from original(function, preserve_rng_state, context_fn, *args, **kwargs)
                return
            if is_open:  # a checkpoint inside of another is part of it
                yield
                return
            is_open, before = True, _versions(module)
            around = fx_traceback.current_meta.get("custom")
            fx_traceback.current_meta["custom"] = {**(around or {}), _KEY: next(numbers)}
            try:
                inside = _Inside(function, args, kwargs, len(written))
                if torch.is_grad_enabled():
                    insides.append(inside)
                with inside.reads:
                    yield
                if torch.is_grad_enabled() and _versions(module) != before:
                    raise UnseenStateError(
                        "a checkpoint in its forward writes to a buffer, and does so again in the backward"
                    )
            finally:
                is_open = False
                # Behind an error the generator may live for longer than the trace.
                if not has_ended:
                    fx_traceback.current_meta["custom"] = around
                    if around is None:
                        del fx_traceback.current_meta["custom"]

        return generator

    def noting(normalize: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            # input, weight, bias, running_mean, running_var, whether they are of this batch
            of_batch = args[5] if len(args) > 5 else True
            if threading.get_ident() == thread and of_batch:
                written.extend(_tensors_in([args[3:5], kwargs]))
            return normalize(*args, **kwargs)

        return call

    normalizations = [
        (torch, n, noting(getattr(torch, n))) for n in ("batch_norm", "instance_norm")
    ]
    # The export copies no annotations to its nodes otherwise.
    with checkpoints_by(marking), fx_traceback.preserve_node_meta(), replaced(normalizations):
        try:
            yield
            for inside in insides:
                inside.refuse_changes(written)
        finally:
            has_ended = True
            insides.clear()
            written.clear()


def _versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module.buffers()]


def checkpoint_of(node: torch.fx.Node) -> int:
    """Return the number of the checkpoint that an operator stands in, from 1; 0 for none."""
    return int((node.meta.get("custom") or {}).get(_KEY, 0))

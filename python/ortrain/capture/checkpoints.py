# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which operators of a captured graph stand inside torch.utils.checkpoint."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ortrain.capture.errors import UnseenStateError
from ortrain.capture.kept_changes import cells_of
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.shallow_copies import is_same
from ortrain.capture.torch_internals import replaced
from ortrain.capture.trace_internals import CheckpointGenerator, checkpoints_by, has_own_contexts

_KEY = "ortrain_checkpoint"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
# Of what a checkpoint holds: items of a container, and objects in all, that are compared.
_MOST_ITEMS = 64
_MOST_HELD = 1000


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
        self._held = _held_by(self._called)

    def refuse_changes(self, written: Sequence[torch.Tensor]) -> None:
        """Raise UnseenStateError where the backward would find something else than the forward has.

        Args:
          written: Statistics that normalizations have written so far.
        """
        if not self.reads.are_as_they_were(written[self._num_written :]):
            raise UnseenStateError(
                "its forward writes to what a checkpoint has read, whose backward reads what is there then"
            )
        now = _held_by(self._called)
        if len(now) != len(self._held) or not all(map(_is_the_same, now, self._held)):
            raise UnseenStateError(
                "its forward gives a name that a checkpoint has read another value, which the backward finds"
            )


class MarkedCheckpoints:
    """Marks what this thread traces inside checkpoints, and has it traced as if there were none.

    Reentrant checkpoints, and those with contexts of their own, stay what they are.

    Args:
      module: What is traced. PyTorch's backward runs a checkpoint again, whose layers write to their buffers again.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.begin()

    def begin(self) -> None:
        """Take note that a forward begins."""
        self._insides: list[_Inside] = []
        self._written: list[torch.Tensor] = []
        self._state: ReachableState | None = None
        self._changed: set[str] = set()

    def end(self) -> None:
        """Look at what checkpoints will find in the backward, now that the forward is over.

        Raises:
          UnseenStateError: It is something else than what they have found in the forward.
        """
        for inside in self._insides:
            inside.refuse_changes(self._written)
        self._note_changes()

    def _enter(self, function: Any, args: Any, kwargs: Any) -> TorchFunctionMode:
        """Return what a checkpoint runs under; with gradients, Python's state is what it was at the first one."""
        inside = _Inside(function, args, kwargs, len(self._written))
        if torch.is_grad_enabled():
            self._insides.append(inside)
            if self._state is None:
                self._state = ReachableState(self._module, (), keeps_contents=False, tensors=False)
            self._note_changes()
        return inside.reads

    def refuse_changes(self, made: Iterable[str]) -> None:
        """Raise UnseenStateError where Python's state was another one than at the first checkpoint.

        Args:
          made: Names of what a first forward makes, and a later one finds.
        """
        if changed := sorted(self._changed.difference(made)):
            raise UnseenStateError(
                f"its forward changes '{changed[0]}' between or behind checkpoints, whose backward finds what is there then"
            )

    def _note_changes(self) -> None:
        if self._state is not None:
            self._changed.update(name for name, _, _ in self._state.differing())

    @contextlib.contextmanager
    def marked(self) -> Iterator[None]:
        """Mark what is traced meanwhile."""
        thread, numbers = threading.get_ident(), itertools.count(1)
        is_open = has_ended = False
        module = self._module

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
                    with self._enter(function, args, kwargs):
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
                    self._written.extend(_tensors_in([args[3:5], kwargs]))
                return normalize(*args, **kwargs)

            return call

        names = ("batch_norm", "instance_norm")
        normalizations = [(torch, name, noting(getattr(torch, name))) for name in names]
        # The export copies no annotations to its nodes otherwise.
        with (
            checkpoints_by(marking),
            fx_traceback.preserve_node_meta(),
            replaced(normalizations),
        ):
            try:
                yield
            finally:
                has_ended = True
                self.begin()


def _held_by(called: Any) -> list[Any]:
    """Return what functions close over, bind or have as defaults, and what small containers and objects hold.

    Layers, and what lies behind them, are not looked into.
    """
    left, found, seen = [called], [], set()
    while left and len(found) < _MOST_HELD:
        value = left.pop()
        parts: Any = ()
        if isinstance(value, types.FunctionType):
            held = [cell.cell_contents for cell in cells_of(value)]
            parts = *held, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()
        elif isinstance(value, functools.partial):
            parts = value.func, *value.args, *value.keywords.values()
        elif isinstance(value, types.MethodType):
            parts = (value.__func__,)
        elif type(value) in (list, tuple, set, frozenset) and len(value) <= _MOST_ITEMS:
            parts = tuple(value)
        elif type(value) is dict and len(value) <= _MOST_ITEMS:
            parts = (*value.keys(), *value.values())
        elif hasattr(type(value), "__next__"):
            raise UnseenStateError("a checkpoint in its forward has an iterator, which goes on")
        elif _is_plain_object(value):
            parts = tuple(vars(value).values())
        found.append(value)
        if parts and id(value) not in seen:
            seen.add(id(value))
            left.extend(reversed(parts))
    return found


def _is_plain_object(value: Any) -> bool:
    """Tell whether an object is one of a user's class with attributes of its own."""
    if isinstance(value, (type, types.ModuleType, nn.Module, torch.Tensor)):
        return False
    home = getattr(type(value), "__module__", "")
    return type(getattr(value, "__dict__", None)) is dict and not home.startswith("torch")


def _is_the_same(now: Any, before: Any) -> bool:
    """Tell whether two objects are the same to a function, whose parts are compared by themselves."""
    if is_same(now, before):
        return True
    if isinstance(now, _SYMBOLIC) or isinstance(before, _SYMBOLIC):  # a size may be a number by now
        first, second = (v.node.expr if isinstance(v, _SYMBOLIC) else v for v in (now, before))
        return bool(first == second)
    if type(now) is not type(before):
        return False
    if isinstance(now, types.FunctionType):
        return now.__code__ is before.__code__
    if isinstance(now, torch.Size):
        return len(now) == len(before) and all(map(_is_the_same, now, before))
    is_small = type(now) in (list, tuple, set, frozenset, dict) and len(now) <= _MOST_ITEMS
    return (is_small and len(now) == len(before)) or isinstance(now, functools.partial)


def _versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module.buffers()]


def checkpoint_of(node: torch.fx.Node) -> int:
    """Return the number of the checkpoint that an operator stands in, from 1; 0 for none."""
    return int((node.meta.get("custom") or {}).get(_KEY, 0))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What autocast makes of an operator, asked of PyTorch once for each kind of operands.

Autocast looks at the types of operands, not at their sizes or contents: an operator is called on
tensors of one element without contents, and stopped where autocast hands it on.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture import operator_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.captured import AutocastState

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_NUMBERS = (int, float, complex, torch.SymInt, torch.SymFloat, torch.SymBool)


class UnknownRuleError(Exception):
    """Autocast does more to an operator than to cast operands and name a dtype."""


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What autocast makes of an operator for operands of some types.

    Attributes:
      target: The operator that it calls.
      casts: Which of the flat arguments it casts, and to what, in the order in which it does.
      named: Other arguments that it gives, by name.
    """

    target: torch._ops.OpOverload
    casts: tuple[tuple[int, torch.dtype], ...]
    named: Mapping[str, Any]


class AutocastRules:
    """The rules of autocast for operators of one program."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._is_known: dict[Any, bool] = {}
        self._rules: dict[Any, Rule | None] = {}
        self._whole: dict[Any, bool] = {}

    def of(
        self, target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any]
    ) -> Rule | None:
        """Return what the autocast of the moment makes of a call; None if it leaves the call as it is.

        Args:
          target: The operator.
          args: Its arguments, tensors among them fake.
          kwargs: Its named arguments.

        Raises:
          UnknownRuleError: No rule says so.
        """
        state = AutocastState.current()
        key = target, state
        if key not in self._is_known:
            self._is_known[key] = any(
                operator_internals.knows_autocast(target, d) for d, _ in state.enabled
            )
        if not self._is_known[key]:
            return None
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        kinds = key, spec, tuple(map(_kind, leaves))
        if kinds not in self._rules:
            given = list(map(self._stand_in, leaves))
            self._rules[kinds] = self._ask(target, given, spec)
        return self._rules[kinds]

    def check_whole(
        self, target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any], result: Any
    ) -> None:
        """Check that an operator which stays whole has a result as if autocast knew none of its parts.

        Raises:
          UnknownRuleError: It has not; what reads the result has another dtype as well.
        """
        state = AutocastState.current()
        if not state.enabled:
            return
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        kinds = target, spec, tuple(map(_kind, leaves)), _dtypes(result)
        if kinds not in self._whole:
            given, named = pytree.tree_unflatten(list(map(self._sample, leaves)), spec)
            with state.left():
                made = internals.fake_result(target, given, named)
            self._whole[kinds] = made is not None and _dtypes(made) == _dtypes(result)
        if not self._whole[kinds]:
            raise UnknownRuleError(f"{target} has parts that autocast knows")

    def _stand_in(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return _without_contents(self._mode, (1,) * leaf.dim(), leaf.dtype, leaf.device)
        if isinstance(leaf, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return {torch.SymInt: 1, torch.SymFloat: 1.0, torch.SymBool: True}[type(leaf)]
        return leaf

    def _sample(self, leaf: Any) -> Any:
        """Return an argument with the sizes of the sample: with symbols, calls may bind them."""
        if isinstance(leaf, torch.Tensor):
            sizes = tuple(map(_in_sample, leaf.shape))
            return _without_contents(self._mode, sizes, leaf.dtype, leaf.device)
        return _in_sample(leaf)

    def _ask(self, target: torch._ops.OpOverload, given: list[Any], spec: Any) -> Rule | None:
        args, kwargs = pytree.tree_unflatten(given, spec)
        stop = _StopBelowAutocast(self._mode)
        try:
            with _stopping_at(target), enable_python_dispatcher(), stop:
                target(*args, **kwargs)
        except _ReachedError as reached:
            return _rule(target, given, (args, kwargs), reached, stop.casts)
        raise UnknownRuleError(str(target))


def _kind(leaf: Any) -> Any:
    """Return what a rule may depend on."""
    if isinstance(leaf, torch.Tensor):
        if leaf.layout is not torch.strided:
            raise UnknownRuleError(str(leaf.layout))
        return leaf.dtype, leaf.device, leaf.dim()
    if isinstance(leaf, _NUMBERS) and not isinstance(leaf, bool):
        return type(leaf)
    return type(leaf), leaf


def _in_sample(number: Any) -> Any:
    if not isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return number
    if number.node.hint is None:
        raise UnknownRuleError("a number depends on values")
    return number.node.hint


def _dtypes(value: Any) -> tuple[torch.dtype, ...]:
    return tuple(x.dtype for x in pytree.tree_leaves(value) if isinstance(x, torch.Tensor))


def _without_contents(
    mode: FakeTensorMode, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return FakeTensor(mode, torch.empty(sizes, dtype=dtype, device="meta"), device)


class _ReachedError(Exception):
    def __init__(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().__init__(str(target))
        self.target, self.args_, self.kwargs = target, args, kwargs


class _StopBelowAutocast(TorchDispatchMode):
    """Makes what autocast casts, and raises at what it hands on."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self._mode = mode
        self.casts: list[tuple[torch.Tensor, torch.Tensor, torch.dtype]] = []  # result, operand

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # a question about a tensor
            return func(*args, **kwargs)
        if func is not torch.ops.aten._to_copy.default or set(kwargs) != {"dtype"}:
            raise _ReachedError(func, args, kwargs)
        (x,), dtype = args, kwargs["dtype"]
        self.casts.append((_without_contents(self._mode, x.shape, dtype, x.device), x, dtype))
        return self.casts[-1][0]


@contextlib.contextmanager
def _stopping_at(target: torch._ops.OpOverload) -> Iterator[None]:
    """Let a composite operator be reached as a whole."""
    if not operator_internals.is_composite(target):
        yield
        return

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise _ReachedError(target, args, kwargs)

    held = dict(target.py_kernels)
    target.py_kernels[_COMPOSITE] = stop
    target._dispatch_cache.clear()
    try:
        yield
    finally:
        target.py_kernels.clear()
        target.py_kernels.update(held)
        target._dispatch_cache.clear()


def _rule(
    target: torch._ops.OpOverload,
    given: list[Any],
    call: tuple[Any, dict[str, Any]],
    reached: _ReachedError,
    casts: list[tuple[torch.Tensor, torch.Tensor, torch.dtype]],
) -> Rule | None:
    """Compare what autocast was given with what it hands on."""
    if reached.target.name().partition(".")[0] != target.name().partition(".")[0]:
        raise UnknownRuleError(f"{target} becomes {reached.target}")
    before = _by_name(target, *call)
    after = _by_name(reached.target, reached.args_, reached.kwargs)
    positions = {id(leaf): i for i, leaf in enumerate(given) if isinstance(leaf, torch.Tensor)}
    sources = {id(result): id(operand) for result, operand, _ in casts}
    named, used = {}, set()
    for name in before.keys() - after.keys():
        if not _is_default(reached.target, name, before[name]):
            raise UnknownRuleError(f"{reached.target} has no {name}")
    for name, value in after.items():
        old = pytree.tree_leaves(before[name]) if name in before else []
        new = pytree.tree_leaves(value)
        if not any(isinstance(leaf, torch.Tensor) for leaf in (*old, *new)):
            if name not in before or value != before[name]:
                named[name] = value
            continue
        if len(old) != len(new):
            raise UnknownRuleError(f"{reached.target} is given another {name}")
        for a, b in zip(old, new, strict=True):
            if b is not a and sources.get(id(b)) != id(a):
                raise UnknownRuleError(f"{reached.target} is given another {name}")
            used.add(id(b))
    if any(id(result) not in used or id(operand) not in positions for result, operand, _ in casts):
        raise UnknownRuleError(f"{target} casts more than its operands")
    if reached.target is target and not casts and not named:
        return None
    ordered = tuple((positions[id(operand)], dtype) for _, operand, dtype in casts)
    return Rule(reached.target, ordered, named)


def _by_name(
    target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = [argument.name for argument in target._schema.arguments]
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _is_default(target: torch._ops.OpOverload, name: str, value: Any) -> bool:
    """Tell whether leaving out an argument means a value."""
    for argument in target._schema.arguments:
        if argument.name == name:
            return argument.has_default_value() and argument.default_value == value
    return value is None

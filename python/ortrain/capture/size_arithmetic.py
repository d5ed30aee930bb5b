# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a trace computes of symbolic sizes, seen as it comes, and computed once.

Each tensor of a trace asks for its number of elements and whether its strides are those of a contiguous one: tens of
thousands of sums, products and comparisons, a hundred different ones. PyTorch goes through SymPy for each.

As in `torch_internals`, a release of PyTorch that moves one of these names is met here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.fx.experimental.sym_node import SymNode

from ortrain.capture.number_arithmetic import numbers_as_in_python

# Functions of two formulas and nothing else; that of ``%`` asks for ranges, which conditions narrow.
_PURE = (
    *("_add", "_sub", "_mul", "_int_floordiv", "_sym_max", "_sym_min"),
    *("_eq", "_ne", "_lt", "_le", "_gt", "_ge", "_and_", "_or_"),
)
_PROXY = torch._C._TorchDispatchModeKey.PROXY
# What a size was in the call that is captured; of floats a zero has two signs.
_HINTS = (int, bool, type(None))
_Binary = Callable[[SymNode, SymNode], SymNode]
_Action = Callable[[Any], None]
_FIELDS = frozenset({"_hint", "pytype", "_optimized_summation", "shape_env", "fx_node"})
_IS_KNOWN = set(SymNode.__init__.__code__.co_names) >= _FIELDS
_KEEPS_FORMULAS = "_expr_ver" in SymNode.__init__.__code__.co_names
_ORIGINAL_AS_INT, _ORIGINAL_EXPR = SymNode.maybe_as_int, SymNode.expr


def _computed_once(compute: _Binary, action: _Action, thread: int) -> _Binary:
    # With the formulas, so that no others come to lie where they are.
    # A result's fields as they were at first: PyTorch may tell a node its number later.
    known: dict[tuple[Any, ...], tuple[dict[str, Any], Any, Any]] = {}
    # What arithmetic goes into a graph by, as PyTorch's get_proxy_mode() tells.
    mode, mode_before = torch._C._get_dispatch_mode, torch._ops._get_dispatch_mode_pre_dispatch

    def computed(left: SymNode, right: SymNode) -> SymNode:
        one, other = left.__dict__, right.__dict__
        is_plain = type(one["_hint"]) in _HINTS and type(other["_hint"]) in _HINTS
        if (
            not (is_plain and threading.get_ident() == thread)
            or one["fx_node"]
            or mode(_PROXY) is not None
            or mode_before(_PROXY) is not None
        ):
            return compute(left, right)
        first, second = left.expr, right.expr
        key = (
            *(id(first), one["pytype"], one["_hint"], one["_optimized_summation"]),
            *(id(second), other["pytype"], other["_hint"], other["_optimized_summation"]),
            id(one["shape_env"]),
        )
        found = known.get(key)
        if found is None:
            result = compute(left, right)
            known[key] = dict(result.__dict__), first, second
            return result
        # A copy: of which tensor a size is, a graph tells by the node.
        copied = SymNode.__new__(SymNode)
        copied.__dict__.update(found[0])
        if not getattr(copied._expr, "is_Atom", True):
            action(copied._expr)
        return copied

    return computed


def _as_int() -> Callable[[SymNode], int | None]:
    known: dict[int, tuple[int | None, Any]] = {}

    def maybe_as_int(node: SymNode) -> int | None:
        constant = node.__dict__.get("constant")  # a node asks while it is made
        if type(constant) is int:
            return constant
        expr = node.expr
        if getattr(expr, "is_Symbol", False):
            return None
        found = known.get(id(expr))
        if found is None:
            found = known[id(expr)] = _ORIGINAL_AS_INT(node), expr
        return found[0]

    return maybe_as_int


def _expr(node: SymNode) -> Any:
    """Return the formula by what is known of symbols, which the node keeps until more is known."""
    env = node.shape_env
    if env is not None:
        version = env._replacements_version_counter
        if version == node._expr_ver:
            return node._expr_cache
        if version == 0 or node.__dict__.get("constant") is not None:
            return node._expr
    return _ORIGINAL_EXPR.fget(node)


def _cheaper_methods(action: _Action, thread: int) -> dict[str, Any]:
    """Return what gives the same as PyTorch's methods by these names."""
    methods: dict[str, Any] = {"maybe_as_int": _as_int()}
    if _KEEPS_FORMULAS:
        methods["expr"] = property(_expr)
    for name in _PURE if _IS_KNOWN else ():
        if hasattr(SymNode, name):
            methods[name] = _computed_once(getattr(SymNode, name), action, thread)
    return methods


@contextlib.contextmanager
def sizes_computed_once(action: _Action) -> Iterator[None]:
    """Call ``action`` with the formula of each symbolic size, flag or number that this thread computes.

    Single symbols and numbers, which most are, are left out. Arithmetic that is equal, of the same formulas, is done once.
    """
    thread = threading.get_ident()
    original = SymNode.__init__

    def init(node: SymNode, expr: Any, *args: Any, **kwargs: Any) -> None:
        if not getattr(expr, "is_Atom", True) and threading.get_ident() == thread:
            action(expr)
        original(node, expr, *args, **kwargs)

    with (
        numbers_as_in_python(),
        mock.patch.multiple(SymNode, __init__=init, **_cheaper_methods(action, thread)),
    ):
        yield

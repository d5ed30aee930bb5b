# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``ExportedProgram.run_decompositions`` without what it does again for each program.

PyTorch keeps composite operators whole while it traces a program again: it gives each of some 500 operators about
twenty Python kernels, and takes them back afterwards. That is most of the time for a small program. Here each
operator is changed once; later traces put the same kernels in and take them out.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._export import utils as export_utils
from torch._subclasses import fake_impls
from torch.export import exported_program

from ortrain.capture.captured import AutocastState
from ortrain.capture.torch_internals import fake_result

_override = exported_program._override_composite_implicit_decomp
_materialize = export_utils._materialize_cpp_cia_ops
# A loss per label, of which PyTorch says a single number where it traces symbolic sizes again.
_LOSSES = frozenset(
    {
        torch.ops.aten.cross_entropy_loss.default,
        torch.ops.aten.nll_loss.default,
        torch.ops.aten.nll_loss2d.default,
        torch.ops.aten.nll_loss_nd.default,
    }
)
_lock = threading.RLock()
# For each operator that is kept whole: its kernels before and during a trace, and its rule for fake tensors.
_kept: dict[Any, tuple[dict[Any, Any], dict[Any, Any], Callable[..., Any]]] = {}
# The composite operators that PyTorch's registry had when it was last asked for all of them.
_materialized: list[str] = []


def run_decompositions(
    program: torch.export.ExportedProgram, table: Mapping[Any, Callable[..., Any]]
) -> torch.export.ExportedProgram:
    """Return what ``program.run_decompositions(table)`` returns.

    Args:
      program: Traced again, without writes; composite operators that are not in ``table`` stay whole.
      table: From operators to what takes their place.
    """
    with (
        _lock,
        mock.patch.object(exported_program, "_override_composite_implicit_decomp", _overridden),
        # PyTorch asks once for each library of operators.
        mock.patch.object(export_utils, "_materialize_cpp_cia_ops", lambda: None),
    ):
        _materialize_once()
        made = program.run_decompositions(dict(table))
    _correct_losses(made)
    return made


@contextlib.contextmanager
def composites_whole(table: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Keep composite operators whole in traces of this context, but for those in a table."""
    with _lock, mock.patch.object(export_utils, "_materialize_cpp_cia_ops", lambda: None):
        _materialize_once()
        split = exported_program._split_decomp_table_to_cia_and_python_decomp
        with _overridden(split(dict(table))[0]):
            yield


def _correct_losses(program: torch.export.ExportedProgram) -> None:
    """Give losses per label their shape."""
    for node in program.graph.nodes:
        if node.target in _LOSSES:
            given, named = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            with AutocastState.current().left():  # which the program holds as casts
                result = fake_result(node.target, given, named)
            if result is not None:
                node.meta["val"] = result


def _materialize_once() -> None:
    """Make Python objects of all composite operators, unless that has been done for the same ones."""
    global _materialized
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    if names != _materialized:
        _materialize()
        _materialized = names


@contextlib.contextmanager
def _overridden(callables: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replace kernels of composite operators as PyTorch does, for the time of the context."""
    keep = exported_program._special_op_to_preserve_cia
    whole = [op for op, function in callables.items() if function is keep]
    others = {op: function for op, function in callables.items() if function is not keep}
    for op in whole:
        if op not in _kept or _kept[op][0] != op.py_kernels:
            _kept[op] = _changes(op)
    put, rules = [], fake_impls.op_implementations_dict
    try:
        for op in whole:
            _, during, rule = _kept[op]
            before = dict(op.py_kernels)
            put.append((op, before, op not in rules))
            op.py_kernels.clear()
            op.py_kernels.update(during)
            op._dispatch_cache.clear()
            rules.setdefault(op, rule)
        with _override(others):
            yield
    finally:
        for op, before, has_no_rule in put:
            op.py_kernels.clear()
            op.py_kernels.update(before)
            op._dispatch_cache.clear()
            if has_no_rule:
                rules.pop(op, None)


def _changes(op: Any) -> tuple[dict[Any, Any], dict[Any, Any], Callable[..., Any]]:
    """Return the operator's kernels before and during a trace, and the rule for fake tensors that PyTorch gives it then.

    It gives none to an operator that has one; whether this one has may be otherwise at another time.
    """
    before = dict(op.py_kernels)
    rules = fake_impls.op_implementations_dict
    own_rule = rules.pop(op, None)
    try:
        with _override({op: exported_program._special_op_to_preserve_cia}):
            return before, dict(op.py_kernels), rules[op]
    finally:
        if own_rule is not None:
            rules[op] = own_rule

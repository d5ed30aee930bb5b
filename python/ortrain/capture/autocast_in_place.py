# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The casts of autocast, put where its operators stand, without another trace of the program.

An export records above autocast and computes below it: its values have the dtypes that autocast
gives them, and only the casts of operands are missing. What has to come apart for its casts is
traced by itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import operator_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.autocast_regions import cast_before, parts_under_autocast, recording
from ortrain.capture.autocast_rules import AutocastRules, Rule, UnknownRuleError
from ortrain.capture.captured import AutocastState
from ortrain.capture.composite_operators import composites_whole
from ortrain.capture.expansion import CannotExpandError, results_of, splice, trace_of
from ortrain.capture.functional import body_of, is_harmless, is_region, make_functional
from ortrain.capture.trace_internals import nodes_of
from ortrain.capture.writes import functional_form, is_from_write, is_rewritable_write

_DEVICES = ("cpu", "cuda")
_Parts = dict[fx.Node, fx.GraphModule]


def casts_in_place(program: torch.export.ExportedProgram, known: Callable[[Any], bool]) -> bool:
    """Put in the casts of the autocast of the moment and of regions; tell whether it could be done.

    The program writes to nothing then. Its regions are still there and cast nothing more. Where it
    could not be done, the program means what it meant.

    Args:
      program: As exported.
      known: Tells whether an operator has a conversion.
    """

    # Of such a program only this way keeps the meaning once it is functional.
    has_no_other = _has_write_to_cast(program)
    try:
        if has_no_other:
            _planned(program, known)
        with AutocastState.current().left():  # a write is not cast
            if not make_functional(program, known, regions=True, harmless=_any):
                return False
        plan = _planned(program, known)
    except (UnknownRuleError, CannotExpandError):
        if has_no_other and not _has_write_to_cast(program):
            raise
        return False
    for node, rule in plan.rules.items():
        _apply(node, rule)
    for owner, parts in plan.parts.items():
        splice(owner.graph, parts)
    return True


def _has_write_to_cast(program: torch.export.ExportedProgram) -> bool:
    """Tell whether autocast casts what a write becomes; PyTorch does not cast the write."""
    forms = (functional_form(n.target) for n in nodes_of(program) if is_rewritable_write(n))
    return any(operator_internals.knows_autocast(op, d) for op in forms if op for d in _DEVICES)


def _any(_: Any) -> bool:
    return True


@dataclasses.dataclass
class _Plan:
    """What becomes of the nodes of a program."""

    rules: dict[fx.Node, Rule]
    parts: dict[fx.GraphModule, _Parts]

    def made(self) -> Iterator[fx.Node]:
        """Yield the operators that others come apart into."""
        for parts in self.parts.values():
            for body in parts.values():
                yield from body.graph.nodes


def _planned(program: torch.export.ExportedProgram, known: Callable[[Any], bool]) -> _Plan:
    """Look at each node under the autocast that it has in the module."""
    rules = AutocastRules()
    table = parts_under_autocast(filter(_is_called, nodes_of(program)), known, {})
    while True:
        plan = _Plan({}, {})
        with composites_whole(table) if table else contextlib.nullcontext(), recording():
            _visit(program.graph_module, table, rules, plan, set())
        more = parts_under_autocast(plan.made(), known, table)
        if not more:
            return plan
        table |= more


def _visit(
    owner: fx.GraphModule,
    table: dict[Any, Callable[..., Any]],
    rules: AutocastRules,
    plan: _Plan,
    seen: set[fx.GraphModule],
) -> None:
    if owner in seen:
        raise UnknownRuleError("a region is called twice")
    seen.add(owner)
    for node in owner.graph.nodes:
        if is_region(node):
            if any(user.target is not operator.getitem for user in node.users):
                raise UnknownRuleError("a region is used as a whole")
            with _autocast_of(node):
                _visit(body_of(owner, node), table, rules, plan, seen)
        elif not _is_called(node):
            continue
        elif node.target in table:
            parts = plan.parts.setdefault(owner, {})
            parts[node] = _parts(node, table[node.target])
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
            rule = rules.of(node.target, args, kwargs)
            if rule is not None:
                plan.rules[node] = rule
            elif operator_internals.is_composite(node.target):
                rules.check_whole(node.target, args, kwargs, node.meta.get("val"))


def _is_called(node: fx.Node) -> bool:
    """Tell whether autocast may act on a node: no write is cast."""
    target = node.target
    return (
        isinstance(target, torch._ops.OpOverload)
        and not target._schema.is_mutable
        and not is_from_write(node)
    )


@contextlib.contextmanager
def _autocast_of(region: fx.Node) -> Iterator[None]:
    if region.target is not internals.autocast_region():
        yield
        return
    device, dtype, enabled = region.args[:3]
    if device not in _DEVICES:
        raise UnknownRuleError(f"autocast of {device}")
    # Casts are not kept, as in a trace.
    with torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False), recording():
        yield


def _parts(node: fx.Node, function: Callable[..., Any]) -> fx.GraphModule:
    traced = trace_of(node, function)
    for part in traced.graph.nodes:
        if part.op == "get_attr" or not is_harmless(traced, part, _any):
            raise CannotExpandError
    results_of(traced, node)
    return traced


def _apply(node: fx.Node, rule: Rule) -> None:
    """Let a node be what autocast makes of it."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    for index, dtype in rule.casts:
        leaves[index] = cast_before(node, leaves[index], dtype)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    args, kwargs = list(args), dict(kwargs)
    for position, argument in enumerate(rule.target._schema.arguments):
        if argument.name not in rule.named:
            continue
        value = rule.named[argument.name]
        if argument.kwarg_only or position > len(args):
            kwargs[argument.name] = value
        else:
            args[position : position + 1] = [value]
    node.target, node.args, node.kwargs = rule.target, tuple(args), kwargs

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What tracing a module must neither take into the graph nor leave behind in the module."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ortrain.capture.aliases import writes_through_overlap
from ortrain.capture.announcements import Announcements
from ortrain.capture.call_path import CallPath
from ortrain.capture.captured import COLLECTOR_MODULE, collects_layer_outputs
from ortrain.capture.errors import (
    CaptureError,
    ChangingAttributeError,
    CollectiveError,
    FirstCallError,
    SymbolicAttributeError,
    TensorClassError,
    UnseenStateError,
)
from ortrain.capture.locations import node_source
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.shallow_copies import Changes, MadePlain
from ortrain.capture.signature import flatten_outputs
from ortrain.capture.size_internals import number_expression
from ortrain.capture.torch_internals import is_fake
from ortrain.capture.trace_internals import nodes_of

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_READS_OF_VALUES = ("aten.item.default", "aten._local_scalar_dense.default")
_CONTAINERS = (list, tuple, dict, set, collections.deque)
_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextlib.contextmanager
def without_root_hooks(module: nn.Module) -> Iterator[None]:
    """Keep the module's own hooks out of the graph; its wrapper runs them."""
    saved = {table: getattr(module, table) for table in _HOOK_TABLES}
    try:
        for table in _HOOK_TABLES:
            module.__dict__[table] = collections.OrderedDict()
        yield
    finally:
        module.__dict__.update(saved)


def _tensor_tables(part: nn.Module) -> tuple[Any, Any]:
    return part._parameters, part._buffers


@contextlib.contextmanager
def nothing_added(module: nn.Module) -> Iterator[None]:
    """Take out of the layers what tracing put into them, tensors without contents; refuse it then.

    A forward that makes layers or tensors at its first call does so in PyTorch; later calls find
    them there.
    """
    # By keys(): the tables of a scripted layer are no dictionaries.
    before = [
        (part.__dict__, set(part.__dict__), [(t, set(t.keys())) for t in _tensor_tables(part)])
        for part in module.modules()
    ]
    layers = [(part._modules, set(part._modules.keys())) for part in module.modules()]
    added: list[str] = []
    try:
        yield
    finally:
        for attributes, names, tables in before:
            for table, known in [*tables, (attributes, names)]:
                fake = {name for name in set(table.keys()) - known if is_fake(table[name])}
                for name in sorted(fake):
                    del table[name]
                    added.append(name)
        for table, known in layers:
            for name in sorted(set(table.keys()) - known):
                del table[name]
                added.append(name)
    if added:
        raise first_call_error(added, type(module).__name__)


@contextlib.contextmanager
def containers_kept(module: nn.Module) -> Iterator[None]:
    """Leave the layers' containers where they are: an export puts copies in the place of those that it compares."""
    held = [
        (part.__dict__, {n: v for n, v in part.__dict__.items() if isinstance(v, _CONTAINERS)})
        for part in module.modules()
    ]
    try:
        yield
    finally:
        for attributes, before in held:
            for name, container in before.items():
                if attributes.get(name) is not container:
                    attributes[name] = container


def has_hooks(part: nn.Module, *, observers: bool = True) -> bool:
    """Tell whether a layer has hooks that run with its forward or backward.

    Those by which transformers and peft let gradients flow into an embedding count for nothing: a
    graph has the gradients that are asked for. Nor do those that stay behind once transformers was
    asked for what layers give, while nobody collects it; a trace of a call that asks runs them.

    Args:
      part: The layer.
      observers: Whether those count that say of themselves ``only_observes``.
    """
    return any(
        not (_lets_gradients_flow(hook) or _records_for_nobody(hook))
        and (observers or not getattr(hook, "only_observes", False))
        for table in _HOOK_TABLES
        for hook in (getattr(part, table, None) or {}).values()
    )


def _records_for_nobody(hook: Any) -> bool:
    name = getattr(hook, "__name__", "")
    if name != "output_capturing_hook" or hook.__module__ != COLLECTOR_MODULE:
        return False
    return not collects_layer_outputs()


def _lets_gradients_flow(hook: Any) -> bool:
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad") and getattr(
        hook, "__module__", ""
    ).startswith(("transformers.", "peft."))


def refuse_changes(changes: Changes, module: str, closing: Sequence[str] = ()) -> None:
    """Raise CaptureError where a forward does what a graph would do only once.

    Args:
      changes: What it has changed.
      module: The name of the module.
      closing: Classes whose methods use variables of a function around them: Dynamo forgets what
        they do with these.
    """
    if changes.changed and closing:
        raise UnseenStateError(
            f"its forward changes {_quoted(changes.changed)}, which methods of {_quoted(closing)} "
            "may reach",
            module=module,
        )
    if changes.unfollowed:
        raise UnseenStateError(
            f"its forward draws from, or changes, {_quoted(changes.unfollowed)}, which a graph would "
            "do only once",
            module=module,
        )
    if changes.changed:
        kind = SymbolicAttributeError if changes.symbols else ChangingAttributeError
        raise kind(
            f"its forward changes {_quoted(changes.changed)}, which a graph would do only once",
            module=module,
        )
    if changes.drawn:
        raise CaptureError(
            f"its forward draws {' and '.join(changes.drawn)}, which a graph would do only once",
            module=module,
        )
    if changes.made:  # PyTorch's first call makes it; later ones find it there
        raise first_call_error(changes.made, module)


def refuse_announcements(said: Announcements, module: str) -> None:
    """Raise CaptureError where a forward has printed or logged something."""
    if text := str(said):
        raise CaptureError(f"its forward {text}, which a graph would not", module=module)


def refuse_other_ways(
    run: Callable[[], Any],
    before: ReachableState,
    made: Sequence[MadePlain],
    module: str,
    first: CallPath | None,
) -> None:
    """Raise FirstCallError where a forward that finds what its first call made computes something else.

    Args:
      run: Runs the forward on tensors without contents.
      before: What was there before its first call, and is there again.
      made: What its first call made.
      module: The name of the module.
      first: Its first call, where that was recorded.
    """
    if first is None:
        first = CallPath()
        with first:
            flat, tree = flatten_outputs(run())
        first.end(flat, tree)
        before.restore()
    for each in made:
        each.make()
    between = before.again()
    later = CallPath(first)
    with later:
        flat, tree = flatten_outputs(run())
    later.end(flat, tree)
    same = later.steps == first.steps and between.restore() == Changes()
    before.restore()
    if not same:
        raise first_call_error([each.name for each in made], module)


def first_call_error(names: Iterable[str], module: str) -> FirstCallError:
    """Return the error that says which attributes a first call made."""
    return FirstCallError(
        f"its forward makes {_quoted(list(names))} at its first call", module=module
    )


def refuse_living_results(result: Any, before: ReachableState, module: str) -> None:
    """Raise UnseenStateError where a result is, or holds, an object that goes on living.

    A generator runs when the caller asks it, and a container that was there before the call is the
    caller's own, or the module's: a graph gives another one.

    Args:
      result: What the forward returns.
      before: What was there before it.
      module: The name of the module.
    """
    pending, seen = [result], set()
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Iterator) and not isinstance(part, torch.Tensor):
            raise UnseenStateError(
                f"its result holds a {type(part).__name__}, which runs later", module=module
            )
        if isinstance(part, _CONTAINERS) and not isinstance(part, tuple) and before.holds(part):
            raise UnseenStateError(
                f"its result holds a {type(part).__name__} that was there before the call",
                module=module,
            )
        if isinstance(part, dict):
            pending += part.values()
        elif isinstance(part, _CONTAINERS):
            pending += part
        elif dataclasses.is_dataclass(part) and not isinstance(part, type):
            pending += vars(part).values() if hasattr(part, "__dict__") else ()


def refuse_iterators(names: list[str], module: str) -> None:
    """Raise CaptureError where a trace could use up an iterator, which cannot be set back."""
    if names:
        raise UnseenStateError(
            f"it holds {_quoted(names)}, of whose items a trace could take some", module=module
        )


def refuse_opaque_objects(names: list[str], module: str) -> None:
    """Raise UnseenStateError where a forward can reach objects of a state that nobody can compare."""
    if names:
        raise UnseenStateError(
            f"its code may use {_quoted(names)}, whose state nobody can compare or set back",
            module=module,
        )


def refuse_acting_tensors(names: list[str], module: str) -> None:
    """Raise TensorClassError where a forward can reach tensors that decide themselves what operators do."""
    if names:
        raise TensorClassError(
            f"it holds {_quoted(names)}, tensors of a class of their own", module=module
        )


def refuse_caches(names: list[str], module: str) -> None:
    """Raise UnseenStateError where a forward gets tensors from caches, which others empty and write to."""
    if names:
        raise UnseenStateError(
            f"its forward gets tensors from the cache of {_quoted(names)}", module=module
        )


def refuse_collectives(program: torch.export.ExportedProgram, module: str) -> None:
    """Raise CollectiveError where a forward calls torch.distributed.

    The engine runs operators by their operands, and a collective is waited for by none of them.
    """
    for node in nodes_of(program):
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target.namespace in _COLLECTIVES:
            raise CollectiveError(
                f"its forward calls a collective, {target}",
                module=module,
                source=node_source(node),
            )


def refuse_conditions_on_values(program: torch.export.ExportedProgram, module: str) -> None:
    """Raise CaptureError where a forward checks the values of tensors, which a graph would not do.

    Conditions on sizes are guards. Those that an export adds of itself say that a number which is
    used as a size is none below zero.
    """
    nodes = list(nodes_of(program))
    read: set[Any] = set()
    sizes: set[Any] = set()
    for node in nodes:
        value = node.meta.get("val")
        if str(node.target) in _READS_OF_VALUES:
            read |= _symbols((value,))
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                sizes |= _symbols(tensor.shape)
    for node in nodes:
        name = str(node.target).rpartition(".")[0]
        conditions = [n.meta["val"] for n in node.all_input_nodes if "val" in n.meta]
        if name == "aten._assert_async" or (
            name == "aten._assert_scalar"
            and _symbols(conditions) & read
            and not all(_is_of_a_size(c, sizes) for c in conditions)
        ):
            raise CaptureError(
                "its forward checks values of a tensor, which a graph would not do",
                module=module,
                source=node_source(node),
            )


def refuse_writes_through_windows(program: torch.export.ExportedProgram, module: str) -> None:
    """Raise CaptureError where a forward writes through windows that may overlap or leave gaps, or what is expanded.

    What functionalizing makes of such a write forgets what no window shows, and adds up what several show.
    """
    node = writes_through_overlap(program)
    if node is not None:
        raise CaptureError(
            f"{node.target} writes through a view that shows memory more than once, or in part",
            module=module,
            source=node_source(node),
        )


def _symbols(numbers: Iterable[Any]) -> set[Any]:
    """Return the symbols in numbers of a trace."""
    found: set[Any] = set()
    for number in numbers:
        if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found |= getattr(number_expression(number), "free_symbols", set())
    return found


def _is_of_a_size(condition: Any, sizes: set[Any]) -> bool:
    """Tell whether a condition says no more than that one of ``sizes`` is in the range of sizes."""
    expression = number_expression(condition)
    sides = getattr(expression, "args", ())
    return (
        len(sides) == 2
        and sides[0] in sizes
        and (
            (expression.rel_op == ">=" and sides[1] == 0)
            or (expression.rel_op == "<=" and sides[1] >= sys.maxsize)
        )
    )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))

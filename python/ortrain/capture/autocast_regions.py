# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Autocast while an export is traced again: casts of composite operators, regions of the module."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx, nn

from ortrain.capture import operator_internals, recurrent_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.captured import AutocastState
from ortrain.capture.composite_operators import run_decompositions
from ortrain.capture.trace_internals import nodes_of

_OFF = AutocastState(())


class _Recorded(threading.local):
    """The autocast state of the code that is traced: where an operator comes apart it reads as off."""

    state = _OFF


_recorded = _Recorded()


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let operators that come apart do so under the autocast of the moment."""
    held, _recorded.state = _recorded.state, AutocastState.current()
    try:
        yield
    finally:
        _recorded.state = held


def in_region(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return the body of a region under autocast, which tells its composite operators of it."""

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        with recording():
            return body(*args, **kwargs)

    return run


def switches_gradients_in_region(module: nn.Module) -> bool:
    """Tell whether a graph of Dynamo's turns gradients on or off between ends of an autocast region.

    It calls no context manager for that; an export of it forgets the switch.
    """
    for graph in (m.graph for m in module.modules() if isinstance(m, fx.GraphModule)):
        depth = 0
        for node in graph.nodes:
            if node.target is torch.amp.autocast_mode._enter_autocast:
                depth += 1
            elif node.target is torch.amp.autocast_mode._exit_autocast:
                depth -= 1
            elif node.target is torch._C._set_grad_enabled and depth > 0:
                return True
    return False


def has_autocast_region(program: torch.export.ExportedProgram) -> bool:
    """Tell whether the module turns autocast on or off inside of its forward."""
    return any(node.target is internals.autocast_region() for node in nodes_of(program))


def composites_in_float(program: torch.export.ExportedProgram, autocast: AutocastState) -> None:
    """Put casts before operators whose parts CUDA's autocast runs in float32.

    They are known as a whole, and stay so.
    """
    _in_float(program.graph_module, any(device == "cuda" for device, _ in autocast.enabled))


def _in_float(body: fx.GraphModule, is_on: bool) -> None:
    for node in list(body.graph.nodes):
        if node.target is internals.autocast_region():
            device, _, enabled = node.args[:3]
            inside = bool(enabled) if device == "cuda" else is_on
        else:
            inside = is_on
        for operand in node.all_input_nodes:
            if operand.op == "get_attr":
                inner = getattr(body, str(operand.target), None)
                if isinstance(inner, fx.GraphModule):
                    _in_float(inner, inside)
        if not is_on or not operator_internals.hides_float(node.target, _device_of(node)):
            continue
        for operand in node.all_input_nodes:
            value = operand.meta.get("val")
            # Autocast leaves float64 alone. What is float32 here may be 16 bits in the next trace.
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            if value.dtype != torch.float64:
                node.replace_input_with(operand, cast_before(node, operand, torch.float32))


def _device_of(node: fx.Node) -> str:
    """Return the type of the devices of a node's operands; "cpu" where it has none."""
    for operand in node.all_input_nodes:
        value = operand.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.device.type
    return "cpu"


def recurrent_layers_in_one_dtype(program: torch.export.ExportedProgram) -> None:
    """Put casts around recurrent layers of several dtypes, which compute in the widest of them.

    Autocast acts on the products inside of their steps, which the graph does not hold.
    """
    for node in list(nodes_of(program)):
        if recurrent_internals.is_recurrent(node.target):
            _in_one_dtype(node)


def _in_one_dtype(layers: fx.Node) -> None:
    dtypes = {
        n: value.dtype
        for n in layers.all_input_nodes
        if isinstance(value := n.meta.get("val"), torch.Tensor)
    }
    dtype = functools.reduce(torch.promote_types, dtypes.values())
    for operand, given in dtypes.items():
        if given != dtype:
            layers.replace_input_with(operand, cast_before(layers, operand, dtype))
    layers.meta["val"] = tuple(each.to(dtype) for each in layers.meta["val"])
    for result in list(layers.users):
        wanted = result.meta["val"].dtype
        result.meta["val"] = layers.meta["val"][result.args[1]]
        if wanted != dtype:
            users = list(result.users)
            cast = cast_before(layers, result, wanted, result.next)
            for user in users:
                user.replace_input_with(result, cast)


def cast_before(
    node: fx.Node, value: fx.Node, dtype: torch.dtype, place: fx.Node | None = None
) -> fx.Node:
    """Add a cast before a node, or another place, that counts as a part of the node."""
    place = place or node
    with place.graph.inserting_before(place):
        cast = place.graph.call_function(
            torch.ops.aten._to_copy.default, (value,), {"dtype": dtype}
        )
    cast.meta = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}
    cast.meta["val"] = value.meta["val"].to(dtype)  # which other layers may read
    return cast


def decompose_under_autocast(
    program: torch.export.ExportedProgram, known: Callable[[Any], bool]
) -> torch.export.ExportedProgram:
    """Trace again with the autocast of the moment and of regions, which leaves their casts.

    Autocast looks at the parts of composite operators that are none of its own. Those that have no
    conversion, or hide parts that it casts, come apart in the same trace: later it is gone.
    """
    table: dict[Any, Callable[..., Any]] = {}
    traced, seen = None, program
    while True:
        parts = parts_under_autocast(nodes_of(seen), known, table)
        if traced is not None and not parts:
            return traced
        table |= parts
        with recording():
            traced = seen = run_decompositions(program, table)


def parts_under_autocast(
    nodes: Iterable[fx.Node], known: Callable[[Any], bool], table: Collection[Any]
) -> dict[Any, Callable[..., Any]]:
    """Return what takes the place of operators that come apart for their casts, but for those in a table."""
    return {
        node.target: _apart(function)
        for node in nodes
        if node.target not in table
        and operator_internals.loses_autocast(node.target, known, _device_of(node))
        and (function := operator_internals.decomposition(node.target)) is not None
    }


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    def apply(*args: Any, **kwargs: Any) -> Any:
        with _recorded.state.applied():
            return function(*args, **kwargs)

    return apply

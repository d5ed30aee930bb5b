# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A captured graph of one ATen operator, made without an export."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree

from ortrain.capture.convert import convert
from ortrain.capture.export import (
    AutocastState,
    CapturedModule,
    Output,
    OutputRole,
    Placeholder,
    Role,
)
from ortrain.capture.guards import Guards
from ortrain.capture.signature import OutputTree, Slot
from ortrain.testing.reference import ReferenceBuilder


def overload(target: str) -> torch._ops.OpOverload:
    """Return the operator called ``namespace.name.overload``."""
    namespace, name, kind = target.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), kind)


def capture_operator(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[int] | None
) -> tuple[CapturedModule, list[torch.Tensor]]:
    """Build a graph with one operator whose tensors are the user inputs.

    Args:
      target: The operator.
      args: Its positional arguments.
      kwargs: Its keyword arguments.
      results: Which results of an operator with several become outputs; None for all.

    Returns:
      The graph, and the input tensors in order.
    """
    op = overload(target)
    graph = fx.Graph()
    tensors: list[torch.Tensor] = []
    placeholders: list[Placeholder] = []
    leaves, spec = _pytree.tree_flatten((list(args), dict(kwargs)))
    nodes: list[Any] = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            nodes.append(leaf)
            continue
        name = f"x{len(tensors)}"
        node = graph.placeholder(name)
        node.meta["val"] = leaf
        placeholders.append(
            Placeholder(node.name, Role.USER, name, leaf.requires_grad, len(tensors))
        )
        tensors.append(leaf)
        nodes.append(node)
    node_args, node_kwargs = _pytree.tree_unflatten(nodes, spec)
    with torch.no_grad():
        value = op(*args, **kwargs)
    call = graph.call_function(op, tuple(node_args), node_kwargs)
    call.meta["val"] = value
    outputs = [call]
    if isinstance(value, (list, tuple)):
        outputs = []
        for index in range(len(value)) if results is None else results:
            part = graph.call_function(operator.getitem, (call, index))
            part.meta["val"] = value[index]
            outputs.append(part)
    graph.output(tuple(outputs))
    captured = CapturedModule(
        module_name=target,
        graph_module=fx.GraphModule(torch.nn.Module(), graph),
        placeholders=placeholders,
        outputs=[Output(n.name, OutputRole.USER, f"y{i}") for i, n in enumerate(outputs)],
        constants={},
        input_names=[p.name for p in placeholders],
        output_tree=OutputTree(Slot(0), ("y0",)),
        guards=Guards((), ()),
        dims=[],
        training={},
        autocast=AutocastState(()),
        grad_enabled=True,
        dynamic=False,
        seconds={},
    )
    return captured, tensors


def _run_both(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[int] | None
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    captured, tensors = capture_operator(target, args, kwargs, results)
    samples = {f"x{i}": t for i, t in enumerate(tensors)}
    converted = convert(captured, ReferenceBuilder(target, samples=samples))
    got = converted.graph.run({name: tensors[i] for name, i in converted.user_inputs})
    value = overload(target)(*args, **kwargs)
    expected = list(value) if isinstance(value, (list, tuple)) else [value]
    if results is not None:
        expected = [expected[i] for i in results]
    return [got[name] for name in converted.user_outputs], expected, tensors


def _gradients(
    outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    wanted = [t for t in tensors if t.requires_grad]
    sources = [o for o in outputs if o.requires_grad]
    if not wanted or not sources:
        return [None] * len(wanted)
    weights = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype).reshape(o.shape) for o in sources]
    return list(torch.autograd.grad(sources, wanted, weights, allow_unused=True))


def check_operator(
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[int] | None = None,
    gradient: bool = True,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare a converted operator with eager PyTorch: values, dtypes and gradients.

    Raises:
      AssertionError: They differ.
    """
    got, expected, tensors = _run_both(target, args, kwargs, results)
    torch.testing.assert_close(got, expected, equal_nan=True, rtol=rtol, atol=atol)
    if not gradient:
        return
    ours, theirs = _gradients(got, tensors), _gradients(expected, tensors)
    if len(ours) != len(theirs):
        raise AssertionError(f"{len(ours)} gradients, PyTorch has {len(theirs)}")
    for a, b in zip(ours, theirs, strict=True):
        if a is None and b is None:
            continue
        # A gradient of zeros may be left out.
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, equal_nan=True, rtol=rtol, atol=atol)

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

from ortrain.capture.captured import (
    AutocastState,
    CapturedModule,
    Output,
    OutputRole,
    Placeholder,
    Role,
)
from ortrain.capture.convert import convert
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


def _eager(
    target: str, args: Sequence[Any], kwargs: Mapping[str, Any], results: Sequence[int] | None
) -> list[torch.Tensor]:
    value = overload(target)(*args, **kwargs)
    made = list(value) if isinstance(value, (list, tuple)) else [value]
    return made if results is None else [made[i] for i in results]


def _weights(output: torch.Tensor) -> torch.Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)


def _gradients(
    outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    wanted = [t for t in tensors if t.requires_grad]
    sources = [o for o in outputs if o.requires_grad]
    if not wanted or not sources:
        return [None] * len(wanted)
    weights = [_weights(o) for o in sources]
    return list(torch.autograd.grad(sources, wanted, weights, allow_unused=True))


def _compare(
    got: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], **tolerance: Any
) -> None:
    if len(got) != len(expected):
        raise AssertionError(f"{len(got)} tensors, PyTorch has {len(expected)}")
    for a, b in zip(got, expected, strict=True):
        if a is None and b is None:
            continue
        # A gradient of zeros may be left out.
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        b = torch.zeros_like(a) if b is None else b
        torch.testing.assert_close(a, b, equal_nan=True, **tolerance)


def check_operator(
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[int] | None = None,
    gradient: bool = True,
    tolerance: float | None = None,
) -> None:
    """Compare a converted operator with eager PyTorch: values, dtypes and gradients.

    Raises:
      AssertionError: They differ.
    """
    captured, tensors = capture_operator(target, args, kwargs, results)
    samples = {f"x{i}": t for i, t in enumerate(tensors)}
    converted = convert(captured, ReferenceBuilder(target, samples=samples))
    made = converted.graph.run({name: tensors[i] for name, i in converted.user_inputs})
    got = [made[name] for name in converted.user_outputs]
    expected = _eager(target, args, kwargs, results)
    _compare(got, expected, rtol=tolerance, atol=tolerance)
    if gradient:
        ours, theirs = _gradients(got, tensors), _gradients(expected, tensors)
        _compare(ours, theirs, rtol=tolerance, atol=tolerance)


def check_operator_on_engine(
    target: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    results: Sequence[int] | None = None,
    gradient: bool = True,
    tolerance: float | None = None,
) -> None:
    """Compare an operator, run by the engine with all its passes, with eager PyTorch.

    Raises:
      AssertionError: They differ.
      UnsupportedError: The engine lacks an operator or its gradient.
    """
    from ortrain import _core

    captured, tensors = capture_operator(target, args, kwargs, results)
    converted = convert(captured, _core.GraphBuilder(target))
    graph = converted.graph
    graph.run_passes("simplify")
    expected = _eager(target, args, kwargs, results)
    differentiable = graph.differentiable_outputs()
    roots = [
        i for i, e in enumerate(expected) if gradient and e.requires_grad and differentiable[i]
    ]
    if roots:
        graph.build_backward(roots)
    graph.run_passes("fuse")
    index = dict(converted.user_inputs)
    order = [i["name"] for i in graph.inputs if i["role"] == "user"]
    run = _core.Run(_core.Session(graph))
    got = run.forward([tensors[index[name]].detach() for name in order])
    plain = [e.detach() for e in expected]
    _compare(list(got), plain, rtol=tolerance, atol=tolerance)
    if not gradient:
        return
    made: dict[str, torch.Tensor] = {}
    targets = [o["target"] for o in graph.outputs if o["role"] == "gradient"]
    if targets:
        names = [o["name"] for o in graph.outputs if o["role"] == "user"]
        incoming = [names.index(i["target"]) for i in graph.inputs if i["role"] == "gradient"]
        made = dict(zip(targets, run.backward([_weights(plain[i]) for i in incoming]), strict=True))
    ours = [made.get(f"x{i}") for i, t in enumerate(tensors) if t.requires_grad]
    _compare(ours, _gradients(expected, tensors), rtol=tolerance, atol=tolerance)

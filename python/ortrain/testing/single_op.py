# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A captured graph of one ATen operator, made without an export."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
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


def compare(
    got: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor | None],
    exact: Callable[[], Sequence[torch.Tensor | None]],
    **tolerance: Any,
) -> None:
    """Compare tensors with PyTorch's; what `exact` computes in f64 says how far PyTorch's are off.

    Processors sum in different orders, and where terms cancel two right sums lie further apart than
    any fixed tolerance.

    Raises:
      AssertionError: They differ by more than both the tolerance and four times what PyTorch's are
        off, at their worst element.
    """
    if len(got) != len(expected):
        raise AssertionError(f"{len(got)} tensors, PyTorch has {len(expected)}")
    for place, (a, b) in enumerate(zip(got, expected, strict=True)):
        if a is None and b is None:
            continue
        # A gradient of zeros may be left out.
        a = torch.zeros_like(b) if a is None else a  # type: ignore[arg-type]
        b = torch.zeros_like(a) if b is None else b
        try:
            torch.testing.assert_close(a, b, equal_nan=True, **tolerance)
        except AssertionError:
            if a.dtype != torch.float32 or b.dtype != a.dtype or a.shape != b.shape:
                raise
            true = exact()[place]
            if true is None or not _is_as_near(a, b, true):
                raise


def _is_as_near(got: torch.Tensor, expected: torch.Tensor, true: torch.Tensor) -> bool:
    """Whether f32 results lie about as near to those of f64 as PyTorch's do."""
    theirs = (expected.detach().double() - true).abs().max()
    # An element of a sum may be off by the rounding of its largest terms, whatever its own size.
    return bool((got.detach().double() - true).abs().max() <= 4 * theirs)


class _Exact:
    """What PyTorch computes of f32 arguments in f64."""

    def __init__(
        self,
        target: str,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        results: Sequence[int] | None,
    ) -> None:
        self._call = target, args, kwargs, results

    def values(self) -> list[torch.Tensor]:
        """Return the results."""
        return self._run()[0]

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradients of the results, weighted as elsewhere here."""
        return _gradients(*self._run())

    def _run(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        target, args, kwargs, results = self._call
        args, kwargs = _pytree.tree_map(_in_double, (list(args), dict(kwargs)))
        leaves = _pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        return _eager(target, args, kwargs, results), tensors


def _in_double(value: Any) -> Any:
    """Return an f32 tensor as one of f64, anything else as it is."""
    if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
        return value
    return value.detach().double().requires_grad_(value.requires_grad)


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
    exact = _Exact(target, args, kwargs, results)
    compare(got, expected, exact.values, rtol=tolerance, atol=tolerance)
    if gradient:
        ours, theirs = _gradients(got, tensors), _gradients(expected, tensors)
        compare(ours, theirs, exact.gradients, rtol=tolerance, atol=tolerance)


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
    exact = _Exact(target, args, kwargs, results)
    compare(list(got), plain, exact.values, rtol=tolerance, atol=tolerance)
    if not gradient:
        return
    made: dict[str, torch.Tensor] = {}
    targets = [o["target"] for o in graph.outputs if o["role"] == "gradient"]
    if targets:
        names = [o["name"] for o in graph.outputs if o["role"] == "user"]
        incoming = [names.index(i["target"]) for i in graph.inputs if i["role"] == "gradient"]
        made = dict(zip(targets, run.backward([_weights(plain[i]) for i in incoming]), strict=True))
    ours = [made.get(f"x{i}") for i, t in enumerate(tensors) if t.requires_grad]
    theirs = _gradients(expected, tensors)
    compare(ours, theirs, exact.gradients, rtol=tolerance, atol=tolerance)

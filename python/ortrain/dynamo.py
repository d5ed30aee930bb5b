# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``torch.compile(model, backend="ortrain")``: what Dynamo cuts a program into runs on the engine.

Dynamo looks after arguments, flags and control flow; each piece of it that is tensors in, tensors out
becomes a graph of the engine, with a backward, as a whole module does under ``ORTModule``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ortrain import logs
from ortrain.capture import size_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.dynamo_internals import skipped_frame
from ortrain.engine import Engine

_log = logs.get_logger("ortrain")

_Run = Callable[[Sequence[Any], Mapping[str, Any]], Any]


def backend(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, options: Any = None
) -> Callable[..., Any]:
    """Return a function that runs a piece of a program on the engine.

    Args:
      graph_module: The piece, as Dynamo hands it over.
      example_inputs: Its inputs of the first call; only their kinds matter.
      options: None are known.

    Raises:
      TypeError: An option was given.
    """
    if options:
        raise TypeError(f"the backend 'ortrain' takes no options, got {', '.join(sorted(options))}")
    restore_meaning(graph_module)
    varies = has_sizes_that_vary(graph_module)
    return runner_of(graph_module, lambda piece: Engine(piece, any_sizes=varies).run)


def runner_of(
    graph_module: fx.GraphModule, run_on_engine: Callable[[nn.Module], _Run]
) -> Callable[..., Any]:
    """Return a function that runs a piece on an engine, or else in PyTorch.

    Args:
      graph_module: The piece, as Dynamo hands it over.
      run_on_engine: Returns what runs a module, given its arguments and keyword arguments.
    """
    if _gives_views(graph_module):
        _log.info("a piece runs in PyTorch: its results share memory")
        return graph_module.forward
    piece, kept, numbers = _tensors_only(graph_module)
    if None not in numbers:
        return graph_module.forward  # it computes numbers alone, or only writes to its inputs
    run_piece = run_on_engine(piece)

    def run(*args: Any) -> Any:
        results = iter(run_piece([args[i] for i in kept], {}))
        return tuple(next(results) if f is None else f(args) for f in numbers)

    return internals.outside_compiled_code(run)


def restore_meaning(graph_module: fx.GraphModule) -> None:
    """Let a piece compute what the code that it was made of says.

    Raises:
      SkipFrame: (for Dynamo) Python has to run that code.
    """
    for part in graph_module.modules():
        if isinstance(part, fx.GraphModule):
            _restore_checkpoints(part)
            _restore_powers(part)


def _restore_checkpoints(part: fx.GraphModule) -> None:
    """Let checkpoints of a piece be PyTorch's own again, which draw the same numbers when they run again.

    Those that Dynamo leaves in their place count on a compiler for that.
    """
    nodes = part.graph.find_nodes(op="call_function", target=tag_activation_checkpoint)
    for node in nodes:
        if _may_give_no_gradient(node):
            raise skipped_frame("a reentrant checkpoint whose arguments may want no gradient")
        node.target = _checkpoint
    if nodes:
        part.recompile()


def _restore_powers(part: fx.GraphModule) -> None:
    """Let powers of negative numbers be that: as the code of a piece, ``-1 ** k`` is something else."""
    powers = [node for node in part.graph.nodes if node.target in (operator.pow, operator.ipow)]
    of_numbers = [node for node in powers if not isinstance(node.args[0], fx.Node)]
    for node in of_numbers:
        node.target = _power
    if of_numbers:
        part.recompile()


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent


def _may_give_no_gradient(node: fx.Node) -> bool:
    """Tell whether none of a reentrant checkpoint's arguments may want a gradient: its layers get none then.

    What its function reaches by itself stands behind the arguments; parameters may be that.
    """
    if not node.kwargs.get("use_reentrant") or not torch.is_grad_enabled():
        return False
    values = [each.meta.get("example_value") for each in node.all_input_nodes]
    return not any(
        isinstance(v, torch.Tensor) and v.requires_grad and not isinstance(v, nn.Parameter)
        for v in values
    )


def _checkpoint(body: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    options, given = tag_activation_checkpoint.divide_kwargs(kwargs)
    options["use_reentrant"] = False
    if (contexts := body.meta.get("_checkpoint_context_fn")) is not None:
        options["context_fn"] = contexts
    return checkpoint(body, *args, **options, **given)


def has_sizes_that_vary(piece: fx.GraphModule) -> bool:
    """Tell whether a piece is for more than the sizes that it was cut for: Dynamo compares the others."""
    values = [node.meta.get("example_value") for node in piece.graph.find_nodes(op="placeholder")]
    sizes = [size for v in values if isinstance(v, torch.Tensor) for size in v.shape]
    return any(isinstance(each, torch.SymInt) for each in (*values, *sizes))


def _gives_views(piece: fx.GraphModule) -> bool:
    """Tell whether results share memory with each other or with inputs, which code behind may see."""
    (output,) = (node for node in piece.graph.nodes if node.op == "output")
    inputs = [node for node in piece.graph.nodes if node.op == "placeholder"]
    seen = {
        internals.storage_identity(value)
        for value in (node.meta.get("example_value") for node in inputs)
        if isinstance(value, torch.Tensor)
    }
    for node in pytree.tree_leaves(output.args):
        value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
        if isinstance(value, torch.Tensor):
            memory = internals.storage_identity(value)
            if memory in seen:
                return True
            seen.add(memory)
    return False


# Computes a number from the inputs of a piece.
_Number = Callable[[Sequence[Any]], int]


def _tensors_only(
    piece: fx.GraphModule,
) -> tuple[fx.GraphModule, list[int], list[_Number | None]]:
    """Return the piece without the numbers that Dynamo passes in and out of it.

    Sizes that vary, and numbers that layers count in, are inputs of their own. A number among the
    arguments belongs to one captured graph, the size of a tensor may vary.

    Returns:
      The piece, reading sizes off its tensors; which of its inputs that one takes; for each result
      the function that computes it, None where it is the next of those that the piece returns.
    """
    inputs = [node for node in piece.graph.nodes if node.op == "placeholder"]
    axes: dict[Any, tuple[fx.Node, int]] = {}
    symbols: dict[Any, _Number] = {}
    for position, node in enumerate(inputs):
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                expression = size_internals.size_expression(size)
                axes.setdefault(expression, (node, axis))
                symbols.setdefault(expression, lambda a, p=position, x=axis: a[p].shape[x])
        elif isinstance(value, torch.SymInt):
            symbols[size_internals.size_expression(value)] = lambda a, p=position: a[p]

    graph = fx.Graph()
    copies = {node: graph.node_copy(node) for node in inputs}
    results: list[fx.Node] = []
    numbers: list[_Number | None] = []
    for node in piece.graph.nodes:
        if node.op == "output":
            for result in node.args[0]:
                computed = _computed(result, symbols)
                numbers.append(computed)
                if computed is None:
                    results.append(copies.get(result, result))
        elif node.op == "placeholder":
            source = axes.get(_expression(node))
            if source is not None and source[0] is not node and _expression(node) is not None:
                copies[node] = graph.call_method("size", (copies[source[0]], source[1]))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(results))
    graph.eliminate_dead_code(is_impure_node=lambda node: not _is_arithmetic(node))
    unused = {i for i, node in enumerate(graph.find_nodes(op="placeholder")) if not node.users}
    for i, node in enumerate(graph.find_nodes(op="placeholder")):
        if i in unused:
            graph.erase_node(node)
    kept = [i for i in range(len(inputs)) if i not in unused]
    return fx.GraphModule(piece, graph), kept, numbers


def _expression(node: fx.Node) -> Any:
    """Return the expression of a node that is a number which varies; None for others."""
    value = node.meta.get("example_value")
    return size_internals.size_expression(value) if isinstance(value, torch.SymInt) else None


def _is_arithmetic(node: fx.Node) -> bool:
    """Tell whether a node makes a number and nothing else, and can be left out."""
    return node.op in ("call_function", "call_method") and _expression(node) is not None


def _computed(result: Any, symbols: Mapping[Any, _Number]) -> _Number | None:
    """Return how to compute a result from the sizes and numbers among the inputs, if it can be."""
    if not isinstance(result, fx.Node):
        return (lambda _: result) if isinstance(result, (int, float, bool, type(None))) else None
    expression = _expression(result)
    if expression is None:
        return None
    needed = sorted(getattr(expression, "free_symbols", ()), key=str)
    if any(symbol not in symbols for symbol in needed):
        return None
    function = size_internals.size_function(expression, needed)
    sources = [symbols[symbol] for symbol in needed]
    return lambda args: function(*(source(args) for source in sources))

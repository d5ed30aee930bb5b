# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which parameters and arguments PyTorch's autograd leads to from each result of a forward.

A trace runs with autograd on, over tensors without values: what it records says which leaves may get a gradient from a
result, zeros or not, whatever becomes of the operators in a graph. That a function gives None for an operand it does not say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ortrain.capture.captured import CapturedModule, OutputRole
from ortrain.capture.errors import OutsideGradientError, UnseenStateError
from ortrain.capture.torch_internals import is_fake


def leaves_reached(
    results: Sequence[torch.Tensor],
    leaves: Mapping[str, torch.Tensor],
) -> list[frozenset[str] | None]:
    """Return for each result the names of the leaves that a backward from it reaches, None where it wants no gradient.

    Args:
      results: As the forward returns them.
      leaves: Tensors that may require a gradient, by name; each counts as a leaf under its own identity alone.

    Raises:
      UnseenStateError: A backward reaches a leaf that has contents, so that the trace has not made it, and has no name.
    """
    names = list(leaves)
    bits = {id(leaf): 1 << index for index, leaf in enumerate(leaves.values())}
    known: dict[Any, int] = {}
    reached: list[frozenset[str] | None] = []
    for result in results:
        if not result.requires_grad:
            reached.append(None)
            continue
        leaf = result.grad_fn is None
        if leaf:
            _refuse_unknown(result, bits)
        mask = bits.get(id(result), 0) if leaf else _reached(result.grad_fn, bits, known)
        reached.append(frozenset(n for i, n in enumerate(names) if mask >> i & 1))
    return reached


def refuse_writes_with_history(tensors: Mapping[str, torch.Tensor], had: Collection[str]) -> None:
    """Raise UnseenStateError where a tensor has got a history that it had not: its next use leads back to this call.

    Args:
      tensors: Arguments, parameters and buffers, as the forward leaves them.
      had: Names of those with one before.
    """
    for name, tensor in tensors.items():
        if tensor.requires_grad and name not in had:
            raise UnseenStateError(
                f"it writes what depends on a parameter to '{name}', which has a gradient from then on"
            )


def _reached(root: Any, bits: dict[int, int], known: dict[Any, int]) -> int:
    """Return the leaves below a node of autograd's graph, one bit each; ``known`` has those of nodes seen before."""
    pending = [(root, False)]
    while pending:
        node, done = pending.pop()
        if node in known:
            continue
        below = [each for each, _ in node.next_functions if each is not None]
        if done:
            mask = 0
            for each in below:
                mask |= known[each]
            known[node] = mask
            continue
        is_leaf = node.name().endswith("AccumulateGrad")
        variable = node.variable if is_leaf else None
        if variable is not None:
            _refuse_unknown(variable, bits)
            known[node] = bits.get(id(variable), 0)
            continue
        pending.append((node, True))
        pending.extend((each, False) for each in below if each not in known)
    return known[root]


def _refuse_unknown(leaf: torch.Tensor, bits: Mapping[int, int]) -> None:
    if id(leaf) not in bits and not is_fake(leaf):
        raise OutsideGradientError(
            "it uses a tensor that lies outside of the module and wants a gradient, which a graph would not give"
        )


def add_zero_gradients(captured: CapturedModule, missing: Mapping[str, Collection[str]]) -> None:
    """Let results lead to inputs from which only zeros come back: what was overwritten, what counts zero times.

    PyTorch gives such an input a gradient of zeros, for which optimizers decay weights and move averages; an input
    without a gradient they leave alone. The sum of no elements is subtracted, which changes no bit.

    Args:
      captured: Its graph is changed.
      missing: Names of inputs by the name of a result.
    """
    graph = captured.graph_module.graph
    output = next(node for node in graph.nodes if node.op == "output")
    names = {p.node: p.name for p in captured.placeholders}
    inputs = {names[n.name]: n for n in graph.nodes if n.op == "placeholder" and n.name in names}
    values = list(output.args[0])
    with graph.inserting_before(output):
        for place, described in enumerate(captured.outputs):
            if described.role is OutputRole.USER:
                for name in sorted(missing.get(described.name, ())):
                    values[place] = _without_nothing_of(graph, values[place], inputs[name])
    output.args = (tuple(values), *output.args[1:])


def _without_nothing_of(graph: fx.Graph, value: fx.Node, source: fx.Node) -> fx.Node:
    aten = torch.ops.aten

    def call(operator: Any, *arguments: Any, **settings: Any) -> fx.Node:
        node = graph.call_function(operator, arguments, settings)
        metas = [a.meta["val"] if isinstance(a, fx.Node) else a for a in arguments]
        node.meta["val"] = operator(*metas, **settings)
        return node

    if source.meta["val"].dim() == 0:
        source = call(aten.unsqueeze.default, source, 0)
    nothing = call(aten.sum.default, call(aten.slice.Tensor, source, 0, 0, 0))
    if nothing.meta["val"].dtype != value.meta["val"].dtype:
        nothing = call(aten._to_copy.default, nothing, dtype=value.meta["val"].dtype)
    return call(aten.sub.Tensor, value, nothing)

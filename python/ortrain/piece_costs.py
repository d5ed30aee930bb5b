# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the engine saves in a piece of a module, and what it costs to hand the piece over.

The figures are of one core of an AMD EPYC (Zen 5); `python -m benchmarks.pieces` measures them. They are
constants, and no clock is read: the same program runs the same way, with the same bits, each time.
"""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Iterator

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture import size_internals

_VARIABLE = "ORTRAIN_PIECES"

# Microseconds. A call of a module that Dynamo has cut, and each piece of it, wherever that runs.
_MODULE, _PIECE = 40.0, 15.0
# A call of an engine: forward and backward, and for each tensor that it takes.
_CALL, _DIFFERENTIABLE, _CONSTANT = 70.0, 4.3, 1.2
_CALL_WITHOUT_GRADIENTS, _INPUT_WITHOUT_GRADIENTS = 27.0, 3.4
# What must be saved for each microsecond spent: the figures are those of another machine.
_MARGIN = 1.25


@dataclasses.dataclass(frozen=True, slots=True)
class _Saved:
    """What an operator saves where the engine runs it in place of PyTorch.

    Attributes:
      forward: Microseconds per call.
      backward: The same of its gradient.
      of_elements: Nanoseconds per element of its result, forward alone.
      of_gradients: Forward and backward.
    """

    forward: float = 1.5
    backward: float = 2.8
    of_elements: float = 0.0
    of_gradients: float = 0.0


_OTHERS = _Saved()
_SAVED = {
    name: saved
    for names, saved in (
        ("linear", _Saved(3.6, 8.8)),
        ("matmul bmm mm addmm baddbmm einsum conv1d conv2d conv3d conv", _Saved(3.0, 6.0)),
        (
            "view reshape transpose permute t expand expand_as unsqueeze squeeze flatten split chunk "
            "unbind contiguous to float detach",
            _Saved(1.0, 1.5),
        ),
        ("scaled_dot_product_attention cross_entropy embedding", _Saved(4.0, 4.0)),
        ("dropout", _Saved(4.0, 4.0, 0.0, 3.5)),
        ("tanh", _Saved(1.5, 2.8, 1.5, 1.8)),
        ("exp log sin cos pow sqrt rsqrt erf", _Saved(1.5, 2.8, 0.3, 0.5)),
        ("where masked_fill masked_fill_", _Saved(2.0, 4.0, 2.0, 5.0)),
        ("softmax log_softmax", _Saved(2.0, 2.8, 0.0, 0.2)),
        ("layer_norm", _Saved(3.0, 3.0, 0.2, 0.3)),
        ("rms_norm", _Saved(6.0, 12.0, 0.1, 1.5)),
        ("add sub mul truediv neg iadd imul isub add_ mul_", _Saved(1.5, 2.8, 0.0, 0.1)),
    )
    for name in names.split()
}


class Choice(enum.Enum):
    """Which pieces of a module run on the engine."""

    WORTHWHILE = "worthwhile"  # those that are expected to gain by it
    ALL = "all"

    @staticmethod
    def current() -> Choice:
        """Return what ORTRAIN_PIECES says.

        Raises:
          ValueError: It says neither.
        """
        text = os.environ.get(_VARIABLE, "").strip().lower() or Choice.WORTHWHILE.value
        try:
            return Choice(text)
        except ValueError:
            known = " or ".join(c.value for c in Choice)
            raise ValueError(f"{_VARIABLE}={text}, expected {known}") from None


def gain(piece: fx.GraphModule) -> float:
    """Return how many microseconds a call of a piece is expected to save on the engine.

    Args:
      piece: As Dynamo hands it over, with the results of its nodes as "example_value".

    Returns:
      Less than 0 where it is expected to lose; nodes that only PyTorch runs are not known here.
    """
    inputs = [v for n in piece.graph.find_nodes(op="placeholder") for v in _tensors(n)]
    if torch.is_grad_enabled() and any(v.requires_grad for v in inputs):
        differentiable = sum(v.requires_grad for v in inputs)
        price = (
            _CALL + _DIFFERENTIABLE * differentiable + _CONSTANT * (len(inputs) - differentiable)
        )
    else:
        price = _CALL_WITHOUT_GRADIENTS + _INPUT_WITHOUT_GRADIENTS * len(inputs)
    return sum(map(_saved_by, piece.graph.nodes)) - _MARGIN * price


def price_of_cutting(calls_of_pieces: int) -> float:
    """Return the microseconds that a call of a module takes more because it is cut."""
    return _MARGIN * (_MODULE + _PIECE * calls_of_pieces)


def _saved_by(node: fx.Node) -> float:
    results = list(_tensors(node)) if node.op.startswith("call_") else []
    if not results or _does_nothing(node):
        return 0.0
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    saved = _SAVED.get(name, _OTHERS)
    elements = sum(map(_count, results))
    if any(result.requires_grad for result in results):
        return saved.forward + saved.backward + 1e-3 * saved.of_gradients * elements
    return saved.forward + 1e-3 * saved.of_elements * elements


def _does_nothing(node: fx.Node) -> bool:
    """Tell whether a node is a dropout that drops nothing, or a part of a result of several."""
    if getattr(node.target, "__name__", "") == "dropout":
        given = dict(zip(("input", "p", "training"), node.args, strict=False)) | dict(node.kwargs)
        return given.get("training") is False or given.get("p") == 0
    source = node.args[0] if node.args else None
    is_part = getattr(node.target, "__name__", "") == "getitem" and isinstance(source, fx.Node)
    return is_part and not isinstance(source.meta.get("example_value"), torch.Tensor)


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    leaves = pytree.tree_leaves(node.meta.get("example_value"))
    return (value for value in leaves if isinstance(value, torch.Tensor))


def _count(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size_internals.size_hint(size)
    return count

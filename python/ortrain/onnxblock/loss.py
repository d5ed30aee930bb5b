# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Losses as blocks. Targets that the model does not have become inputs of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx

from ortrain.onnxblock import blocks
from ortrain.onnxblock.blocks import Block

_REDUCTIONS = {"mean": blocks.ReduceMean, "sum": blocks.ReduceSum, "none": blocks.PassThrough}


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction is '{reduction}', expected mean, sum or none")


class _Loss(Block):
    """Of a result and a target of its shape.

    Args:
      reduction: "mean", "sum" or "none".

    Raises:
      ValueError: It is none of these.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        _check_reduction(reduction)
        self._reduce = _REDUCTIONS[reduction]()

    def _target(self, like: str, name: str) -> str:
        return name if name in self._accessor.names() else blocks.InputLike(like).build(name)


class MSELoss(_Loss):
    """The squared differences, as torch.nn.MSELoss."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss; return its name."""
        target = self._target(loss_input_name, target_name)
        difference = blocks.Sub().build(loss_input_name, target)
        return self._reduce.build(blocks.Mul().build(difference, difference))


class L1Loss(_Loss):
    """The absolute differences, as torch.nn.L1Loss."""

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss; return its name."""
        target = self._target(loss_input_name, target_name)
        return self._reduce.build(blocks.Abs().build(blocks.Sub().build(loss_input_name, target)))


class BCEWithLogitsLoss(_Loss):
    """Binary cross entropy of logits, as torch.nn.BCEWithLogitsLoss.

    Computed from softplus, which does not overflow: (1 - t) x + (1 + (p - 1) t) softplus(-x).

    Args:
      weight: Array that scales each element; None for none.
      reduction: "mean", "sum" or "none".
      pos_weight: Array that scales where the target is 1; None for none.
    """

    def __init__(self, weight: Any = None, reduction: str = "mean", pos_weight: Any = None) -> None:
        super().__init__(reduction)
        self._weight, self._pos_weight = weight, pos_weight

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss; return its name."""
        accessor = self._accessor
        target = self._target(loss_input_name, target_name)
        one = blocks.Constant(1.0).build()
        linear = blocks.Mul().build(blocks.Sub().build(one, target), loss_input_name)
        decay = accessor.add_node("Softplus", [blocks.Neg().build(loss_input_name)])
        if self._pos_weight is not None:
            extra = np.asarray(self._pos_weight, np.float32) - 1
            scaled = blocks.Mul().build(accessor.add_initializer("pos_weight", extra), target)
            decay = blocks.Mul().build(blocks.Add().build(one, scaled), decay)
        loss = blocks.Add().build(linear, decay)
        if self._weight is not None:
            weight = accessor.add_initializer("weight", np.asarray(self._weight, np.float32))
            loss = blocks.Mul().build(weight, loss)
        return self._reduce.build(loss)


class CrossEntropyLoss(Block):
    """Cross entropy of scores [N, C, ...] and labels [N, ...], as torch.nn.CrossEntropyLoss.

    Args:
      weight: Array [C] that scales each class; None for none.
      reduction: "mean", "sum" or "none".
      ignore_index: Labels that do not count; None for none.
    """

    def __init__(
        self, weight: Any = None, reduction: str = "mean", ignore_index: int | None = None
    ) -> None:
        super().__init__()
        _check_reduction(reduction)
        self._weight, self._reduction, self._ignored = weight, reduction, ignore_index

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Add the loss; return its name. Labels that the model does not have are int64."""
        accessor = self._accessor
        if labels_name not in accessor.names():
            labels = accessor.described(scores_input_name)
            labels.name = labels_name
            labels.type.tensor_type.elem_type = onnx.TensorProto.INT64
            del labels.type.tensor_type.shape.dim[1]
            accessor.graph.input.append(labels)
        inputs = [scores_input_name, labels_name]
        if self._weight is not None:
            weight = np.asarray(self._weight, np.float32)
            inputs.append(accessor.add_initializer("class_weight", weight))
        ignored = {} if self._ignored is None else {"ignore_index": self._ignored}
        return accessor.add_node(
            "SoftmaxCrossEntropyLoss", inputs, reduction=self._reduction, **ignored
        )

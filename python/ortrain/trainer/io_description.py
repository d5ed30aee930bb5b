# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs as the first form of ORTTrainer describes them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortrain.trainer.model_description import (
    ModelDescription as _Description,
)
from ortrain.trainer.model_description import (
    OutputDescription,
    TypedInputDescription,
)


class IODescription:
    """One input or output.

    Args:
      name: Its name.
      shape: Its extents: numbers, and names of those that change.
      dtype: Its element type; None for any.
      num_classes: Of labels: how many classes there are; kept, not used.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int | str],
        dtype: torch.dtype | None = None,
        num_classes: int | None = None,
    ) -> None:
        self.name_ = name
        self.shape_ = list(shape)
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """Inputs and outputs; the first output is the loss.

    Args:
      inputs: In the order of the model's arguments, what the loss takes last.
      outputs: The loss, then the model's results.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = list(inputs)
        self.outputs_ = list(outputs)


def generate_sample(desc: IODescription, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a random tensor as a description says, extents that are names being 1.

    Args:
      desc: With ``num_classes_`` it is of labels, whole numbers below that.
      device: Where to make it.
    """
    size = [extent if isinstance(extent, int) else 1 for extent in desc.shape_]
    if desc.num_classes_:
        return torch.randint(0, desc.num_classes_, size, dtype=desc.dtype_, device=device)
    return torch.randn(size, dtype=desc.dtype_, device=device)


def described(given: ModelDescription) -> _Description:
    """Return the description that ``ortrain.ORTTrainer`` takes."""
    inputs = [TypedInputDescription(d.name_, list(d.shape_), d.dtype_) for d in given.inputs_]
    outputs = [
        OutputDescription(d.name_, list(d.shape_), position == 0)
        for position, d in enumerate(given.outputs_)
    ]
    return _Description.of(inputs, outputs)

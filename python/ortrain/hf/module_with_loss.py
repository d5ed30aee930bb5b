# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A model with a loss behind it, so that one graph holds both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class _AttributesOf:
    """Has the attributes of a callable object, of which guards do not look at the inside."""

    def __init__(self, function: Any) -> None:
        self.__dict__ = vars(function)


class LossLayer(nn.Module):
    """Calls a loss function; its attributes, parameters among them, are seen as a layer's are.

    Args:
      function: Called as ``function(outputs, labels, num_items_in_batch=items, **options)``.
      options: More keyword arguments for it.
    """

    def __init__(self, function: Callable[..., Any], options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.function = function
        self.options = dict(options or {})
        if not isinstance(function, nn.Module) and hasattr(function, "__dict__"):
            self.attributes = _AttributesOf(function)

    def train(self, mode: bool = True) -> LossLayer:
        """Leave the function in its mode: a Trainer does not change that either."""
        self.training = mode
        return self

    def forward(self, outputs: Any, labels: Any, items: Any) -> Any:
        """Return the loss, a scalar."""
        return self.function(outputs, labels, num_items_in_batch=items, **self.options)


class ModuleWithLoss(nn.Module):
    """Computes a model and a loss that a Trainer would compute behind it.

    Args:
      model: The model; the layer ``model`` of this one.
      loss: Given the model's results, the labels and the number of labelled items, the loss.
    """

    def __init__(self, model: nn.Module, loss: LossLayer) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(
        self, *args: Any, loss_labels: Any = None, loss_items: Any = None, **kwargs: Any
    ) -> Any:
        """Run the model, and the loss where there are labels.

        Args:
          *args: The model's.
          loss_labels: Labels for the loss; None leaves it out.
          loss_items: Number of labelled items in the whole batch, a scalar tensor, or None.
          **kwargs: The model's.

        Returns:
          The loss and the model's results, or these alone.
        """
        outputs = self.model(*args, **kwargs)
        if loss_labels is None:
            return outputs
        return self.loss(outputs, loss_labels, loss_items), outputs

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Let go of the model's gradients; a Trainer does not touch those of a loss function."""
        self.model.zero_grad(set_to_none)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A model with a loss behind it, so that one graph holds both."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# (outputs, labels, number of labelled items in the whole batch) to the loss, a scalar.
LossFunction = Callable[[Any, Any, Any], torch.Tensor]


class ModuleWithLoss(nn.Module):
    """Computes a model and a loss that the Trainer would compute behind it.

    Tensors have the names that they have in the model.

    Args:
      model: The model.
      loss_fn: Given the model's results, the labels and the number of labelled items, the loss.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFunction) -> None:
        super().__init__()
        state = self.__dict__
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[name] = model.__dict__[name]
        state["training"] = model.training
        state["_original_model"] = model
        state["loss_fn"] = loss_fn
        accepted = inspect.signature(model.forward).parameters
        collects = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
        own = ("loss_labels", "loss_items")

        def forward(*, loss_labels: Any = None, loss_items: Any = None, **inputs: Any) -> Any:
            outputs = model(**inputs)
            if loss_labels is None:
                return outputs
            return loss_fn(outputs, loss_labels, loss_items), outputs

        keyword = inspect.Parameter.KEYWORD_ONLY
        names = [n for n, p in accepted.items() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        parameters = [inspect.Parameter(n, keyword, default=None) for n in own]
        parameters += [inspect.Parameter(n, keyword, default=accepted[n].default) for n in names]
        if collects:
            parameters.append(inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD))
        forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        self.forward = forward

    @property
    def original_model(self) -> nn.Module:
        """The model."""
        return self._original_model  # not by __dict__: an ORTModule around this looks it up here

    def train(self, mode: bool = True) -> ModuleWithLoss:
        """Put the model into training or evaluation mode."""
        self.training = mode
        self.original_model.train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_original_model" not in self.__dict__:
                raise
            return getattr(self.__dict__["_original_model"], name)

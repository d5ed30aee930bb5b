# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A module and its loss function as one module."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortrain.capture.signature import flatten_outputs
from ortrain.errors import InvalidModelError
from ortrain.trainer.model_description import ModelDescription

Tensors = dict[str, torch.Tensor]
LossFunction = Callable[..., torch.Tensor]

# The attribute that holds the loss function.
LOSS = "_loss_function"


class JoinedModule(nn.Module):
    """A module and its loss function behind the inputs and outputs that are described.

    Tensors have the names that they have in the module; those of the loss function stand below
    ``loss_fn``. Without the last input, which the loss function takes, there is no loss.
    """

    def __new__(cls, module: nn.Module, *_: object) -> JoinedModule:
        """Return an instance of a class with the name of the module's, which errors give."""
        kind = type(type(module).__name__, (cls,), {"__module__": cls.__module__})
        return object.__new__(kind)

    def __init__(
        self, module: nn.Module, loss_fn: LossFunction | None, description: ModelDescription
    ) -> None:
        super().__init__()
        state = self.__dict__
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[name] = module.__dict__[name]
        state["_target"] = module
        state["_loss_layer"] = loss_fn if isinstance(loss_fn, nn.Module) else None
        state[LOSS] = loss_fn  # what it leads to is looked at as what layers hold
        state["_layers"] = None
        self.follow_layers()
        state["training"] = module.training
        names = [entry.name for entry in description.inputs]
        label = names[-1] if loss_fn is not None else None
        passed = [name for name in names if name != label]
        accepted = inspect.signature(module.forward).parameters
        takes_names = all(name in accepted for name in passed)
        by_position = _passed_by_position(module, passed) if takes_names else len(passed)
        outputs = description.output_names

        def forward(*args: torch.Tensor, **kwargs: torch.Tensor) -> Tensors:
            inputs = {**dict(zip(names, args, strict=False)), **kwargs}
            # Hooks get what is passed by position, as people do it.
            count = by_position if _hooks_take_positions(module) or not takes_names else 0
            by_name = {name: inputs[name] for name in passed[count:]}
            result = module(*[inputs[name] for name in passed[:count]], **by_name)
            given = outputs if loss_fn is None else outputs[1:]  # of the module
            flat = _described(result, given)
            if len(flat) < len(given):
                more = len(outputs) - len(given)
                raise InvalidModelError(
                    f"model_desc describes {len(outputs)} outputs, the model has {len(flat) + more}"
                )
            found = dict(zip(given, flat, strict=False))
            if loss_fn is None or inputs.get(label) is None:
                return found
            predictions = result if isinstance(result, tuple) else (result,)
            loss = loss_fn(*predictions, inputs[label])
            return {outputs[0]: flatten_outputs((loss,))[0][0], **found}

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        empty = inspect.Parameter.empty
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(name, kind, default=None if name == label else empty)
                for name in names
            ]
        )
        self.forward = forward

    def follow_layers(self) -> None:
        """See the layers that the module has now, beside the loss function."""
        state = self.__dict__
        if state["_loss_layer"] is None:
            return
        layers = list(state["_target"]._modules.items())
        if layers == state["_layers"]:
            return
        name = "loss_fn"
        while hasattr(state["_target"], name):
            name += "_"
        state["_layers"] = layers
        state["_modules"] = {**dict(layers), name: state["_loss_layer"]}


def _passed_by_position(module: nn.Module, names: Sequence[str]) -> int:
    """Return how many inputs a forward takes by position, of those that it takes by their names."""
    parameters = inspect.signature(module.forward).parameters
    # What a decorator puts around it may take names alone.
    outermost = inspect.signature(module.forward, follow_wrapped=False).parameters.values()
    if not any(each.kind == inspect.Parameter.VAR_POSITIONAL for each in outermost):
        parameters = {each.name: each for each in outermost}
    positional = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    in_order = [name for name, each in parameters.items() if each.kind in positional]
    pairs = zip(names, in_order, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _hooks_take_positions(module: nn.Module) -> bool:
    """Tell whether a hook on a module's call is told of what is passed by position alone."""
    named = len(module._forward_pre_hooks_with_kwargs) + len(module._forward_hooks_with_kwargs)
    forward = len(module._forward_pre_hooks) + len(module._forward_hooks)
    return forward > named or bool(module._backward_hooks or module._backward_pre_hooks)


def _described(result: Any, outputs: Sequence[str]) -> Sequence[torch.Tensor]:
    """Return the tensors of a result; of a mapping that has all outputs, these."""
    if isinstance(result, Mapping) and all(name in result for name in outputs):
        result = tuple(result[name] for name in outputs)
    return flatten_outputs(result)[0]

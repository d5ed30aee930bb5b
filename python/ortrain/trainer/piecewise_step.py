# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps of a module that no graph holds whole: pieces of its forward and backward, the optimizer in one graph."""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain import _core, devices
from ortrain.capture.dtypes import onnx_code
from ortrain.capture.object_places import OF_LAYERS
from ortrain.engine import Engine
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.overlap import OccupiedMemory
from ortrain.pieces import Pieces
from ortrain.report import CaptureRecord
from ortrain.tensor_copies import named_copies
from ortrain.trainer.flat_layout import state_dtype

Tensors = dict[str, torch.Tensor]

_CONTAINERS = (list, tuple, dict)

# Batches may reach ever other parameters: experts, layers that are skipped.
_MOST_OPTIMIZERS = 16
# What a state calls the gradient that it keeps of a parameter, behind its name.
_GRADIENT = ":grad"


class PiecewiseStep:
    """Runs forward and backward of a module as an ORTModule would, and the optimizer on the engine.

    Gradients are what autograd leaves; the parameters' own ``grad`` stays as it is.

    Args:
      module: Returns its outputs by name.
      mode: Returns what a forward runs in: modes of layers, of gradients, autocast.
      options: As for StepEngine.
      beside: Modules that its forward calls and that are none of its layers.
    """

    def __init__(
        self,
        module: nn.Module,
        mode: Callable[[bool], AbstractContextManager[Any]],
        options: Mapping[str, Any],
        beside: Sequence[nn.Module] = (),
    ) -> None:
        self._module = module
        self._beside = tuple(beside)
        self._mode = mode
        self._options = dict(options)
        self._engine = Engine(module, cut=Pieces, tells=False)
        # By what they train, and all types and shapes.
        self._optimizers: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()

    def evaluate(self, inputs: Tensors) -> Tensors:
        """Return the outputs of the forward alone, as in eval mode."""
        return _apart(self._forward(inputs, training=False))

    def add_gradients(
        self, state: Any, inputs: Tensors, trains: Callable[[], Mapping[str, bool]]
    ) -> Tensors:
        """Run a batch; add its gradients to those that the state keeps.

        Args:
          state: A TrainingState.
          inputs: As for `gradients`.
          trains: As for `gradients`.

        Returns:
          The outputs.

        Raises:
          InvalidModelError: As `gradients`.
          UnsupportedError: A parameter has got another shape since earlier batches of the same optimizer step.
        """
        outputs, gradients = self.gradients(state, inputs, trains)
        self._keep(state, gradients)
        return outputs

    @torch.inference_mode(False)
    @torch.enable_grad()
    def gradients(
        self, state: Any, inputs: Tensors, trains: Callable[[], Mapping[str, bool]]
    ) -> tuple[Tensors, Tensors]:
        """Run a batch forward and backward.

        Args:
          state: A TrainingState, of which the loss scale counts.
          inputs: By name; the forward gets copies, but of those in memory of the module's.
          trains: Called behind the forward, which may make parameters: returns whether each is to be
            trained, by name.

        Returns:
          The outputs, and the gradients of the parameters that the loss depends on, by name; dense.

        Raises:
          InvalidModelError: The loss is no single float, or depends on nothing that is trained.
        """
        outputs = self._forward(inputs, training=True)
        trained = trains()
        loss = self._checked_loss(outputs)
        # Scaled in float32, which holds factors that 16 bits do not.
        wide = loss.to(state_dtype(loss)).sum()
        factor = state.loss_scale / self._options["accumulation"]
        with self._gradients_apart() as parameters:
            (wide * factor).backward()
            gradients = {
                name: p.grad.to_dense() if p.grad.layout != torch.strided else p.grad
                for name, p in parameters.items()
                if p.grad is not None and trained.get(name, False)
            }
        if not gradients:
            raise InvalidModelError(
                f"the loss '{self._options['loss']}' depends on no parameter that is trained"
            )
        return _apart(outputs), gradients

    def optimizer_step(self, state: Any) -> tuple[bool, bool, float | torch.Tensor | None]:
        """Update the parameters by the gradients that are kept, and forget these.

        Returns:
          Whether anything was updated, whether gradients were finite, and their norm where it is known.
        """
        trained = tuple(state.kept_parameters)
        try:
            _, updated, finite, norm = self.optimizer_of(trained).optimizer_step(state)
        finally:  # also where it fails: the next step begins anew
            state.kept_batches = 0
            for name in trained:
                state.drop_state(_gradient_of(name))
        return updated, finite, norm

    @property
    def captures(self) -> list[CaptureRecord]:
        """What became of each kind of call."""
        return self._engine.records

    @property
    def pieces(self) -> list[CaptureRecord]:
        """What was captured of the pieces."""
        return self._engine.piece_records

    def _forward(self, inputs: Tensors, *, training: bool) -> Tensors:
        # In memory of the module's a forward is to see what it writes there.
        own = OccupiedMemory(_tensors_held_by(self._module, *self._beside))
        outside = {name: t for name, t in inputs.items() if not own.touched_by(t)}
        with self._mode(training):  # in inference mode copies would be what no backward may need
            copies = named_copies(outside)
            given = {n: copies[n] if n in copies else t.detach() for n, t in inputs.items()}
            result: Tensors = self._engine.run((), given)
        return result

    def _checked_loss(self, outputs: Tensors) -> torch.Tensor:
        name = self._options["loss"]
        loss = outputs[name]
        if not loss.is_floating_point() or loss.numel() != 1:
            dtype = str(loss.dtype).removeprefix("torch.")
            raise InvalidModelError(
                f"the loss '{name}' is {dtype}{list(loss.shape)}, expected a single float"
            )
        if not loss.requires_grad:
            raise InvalidModelError(f"the loss '{name}' depends on no parameter that is trained")
        return loss

    @contextmanager
    def _gradients_apart(self) -> Iterator[dict[str, nn.Parameter]]:
        """Give the parameters without gradients; what they had comes back afterwards."""
        parameters = dict(self._module.named_parameters())
        held = {name: p.grad for name, p in parameters.items()}
        try:
            for parameter in parameters.values():
                parameter.grad = None
            yield parameters
        finally:
            for name, parameter in parameters.items():
                parameter.grad = held[name]

    def _keep(self, state: Any, gradients: Mapping[str, torch.Tensor]) -> None:
        """Add gradients to those of the batches before, which may be of other parameters."""
        before = self._kept(state)
        kept = state.optimizer if before else {}
        for name in before & gradients.keys():
            if kept[_gradient_of(name)].shape != gradients[name].shape:
                raise UnsupportedError(
                    f"'{name}' has another shape than for the batches before of the same step"
                )
        for name, gradient in gradients.items():
            if name in before:
                kept[_gradient_of(name)].add_(gradient)
            else:
                wide = gradient.to(state_dtype(gradient))
                state.share_state(_gradient_of(name), wide.resolve_neg().contiguous())
        names = [name for name, _ in self._module.named_parameters()]
        state.kept_parameters = [name for name in names if name in before or name in gradients]
        state.kept_batches += 1

    @staticmethod
    def _kept(state: Any) -> set[str]:
        """Return the parameters of which the batches so far of a step have left gradients."""
        if state.kept_batches == 0:
            return set()  # what stands there is of steps that are over
        # A checkpoint does not list them.
        return set(state.kept_parameters) or {
            target.removesuffix(_GRADIENT)
            for target in state.optimizer
            if target.endswith(_GRADIENT)
        }

    def take_options(self, options: Mapping[str, Any]) -> None:
        """Go on with other options of a step."""
        self._options = dict(options)
        self._optimizers.clear()

    def optimizer_of(self, trained: tuple[str, ...]) -> Any:
        """Return a program of the optimizer alone: its model is a loss that depends on what is trained."""
        parameters = list(self._module.named_parameters())
        key = trained, tuple((name, p.dtype, p.shape) for name, p in parameters)
        if key in self._optimizers:
            self._optimizers.move_to_end(key)
            return self._optimizers[key]
        builder = _core.GraphBuilder("optimizer")
        sums, wanted = [], set(trained)
        for name, parameter in parameters:  # groups may name any
            code, shape = onnx_code(parameter.dtype), list(parameter.shape)
            value = builder.input(name, code, shape, "parameter", name in wanted)
            if name in wanted:
                total = builder.node("ReduceSum", [value], {"keepdims": 0})
                sums.append(builder.node("Cast", [total], {"to": onnx_code(torch.float32)}))
        loss = builder.node("Sum", sums, {})
        builder.output(loss, self._options["loss"], "user", "")
        provider = devices.provider_of(parameters[0][1].device)
        program = _core.TrainingProgram(builder.finish(), self._options, provider)
        self._optimizers[key] = program
        if len(self._optimizers) > _MOST_OPTIMIZERS:
            self._optimizers.popitem(last=False)
        return program


def _gradient_of(name: str) -> str:
    return name + _GRADIENT


def _apart(outputs: Tensors) -> Tensors:
    """Return outputs as a graph gives them: none is a tensor, or a view of one, that was there before or elsewhere."""
    return {
        name: output.detach()
        if output.grad_fn is not None and not output._is_view()
        else output.detach().clone()
        for name, output in outputs.items()
    }


def _tensors_held_by(module: nn.Module, *beside: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and tensors among other attributes of layers, in containers too."""
    yield from module.parameters()
    yield from module.buffers()
    for layer in (*module.modules(), *beside):
        for name, value in vars(layer).items():
            if isinstance(value, torch.Tensor):
                yield value
            elif value and name not in OF_LAYERS and isinstance(value, _CONTAINERS):
                for leaf in pytree.tree_leaves(value):
                    if isinstance(leaf, torch.Tensor):
                        yield leaf

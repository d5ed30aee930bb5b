# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Training from the files that ``ortrain.artifacts.generate_artifacts`` writes, without the model.

state = CheckpointState.load_checkpoint("checkpoint")
module = Module("training_model.onnx", state, "eval_model.onnx")
optimizer = Optimizer("optimizer_model.onnx", module)
for x, y in batches:
    module.train()
    loss = module(x, y)
    optimizer.step()
    module.lazy_reset_grad()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ortrain import _core
from ortrain.checkpoint_folder import read_checkpoint
from ortrain.errors import DeviceError, InvalidModelError

Property = int | float | str


class Parameter:
    """One parameter of a checkpoint.

    Attributes:
      name: Its name.
    """

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        self.name = name
        self._tensor = tensor

    @property
    def data(self) -> np.ndarray[Any, Any]:
        """Its contents, in the memory that training writes to."""
        return self._tensor.numpy()

    @data.setter
    def data(self, value: np.ndarray[Any, Any]) -> None:
        given = torch.as_tensor(value)
        if given.shape != self._tensor.shape:
            raise ValueError(
                f"parameter '{self.name}' has shape {list(self._tensor.shape)}, the value "
                f"{list(given.shape)}"
            )
        self._tensor.copy_(given)

    def __repr__(self) -> str:
        return f"Parameter({self.name!r}, shape={list(self._tensor.shape)})"


class Parameters(Mapping[str, Parameter]):
    """Parameters and buffers of a checkpoint by name."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        tensors = self._state.tensors
        if name not in tensors:
            raise KeyError(name)
        return Parameter(name, tensors[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.tensors)

    def __len__(self) -> int:
        return len(self._state.tensors)


class Properties(MutableMapping[str, Property]):
    """What a program keeps with a checkpoint: numbers and strings by name."""

    def __init__(self, items: Mapping[str, Property]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Property:
        return self._items[name]

    def __setitem__(self, name: str, value: Property) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise TypeError(f"property '{name}' is {value!r}, expected an int, a float or a str")
        self._items[name] = value

    def __delitem__(self, name: str) -> None:
        del self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class CheckpointState:
    """Everything that training changes; made by ``load_checkpoint``.

    Attributes:
      parameters: Parameters and buffers by name.
      properties: What the program keeps with them.
    """

    def __init__(self, state: Any, properties: Mapping[str, Property]) -> None:
        self._state = state
        self.parameters = Parameters(state)
        self.properties = Properties(properties)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | Path) -> CheckpointState:
        """Read the newest complete checkpoint of a folder.

        Raises:
          FileError: There is none.
        """
        checkpoint = read_checkpoint(Path(checkpoint_uri), stacklevel=2)
        state = _core.TrainingState()
        _core.restore_checkpoint(state, checkpoint)
        return cls(state, checkpoint.properties)

    @classmethod
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | Path,
        include_optimizer_state: bool = False,
    ) -> None:
        """Add a checkpoint to a folder, whole or not at all.

        Raises:
          FileError: It cannot be written; the checkpoints that were there stay.
        """
        _core.save_checkpoint(
            Path(checkpoint_uri), state._state, dict(state.properties), include_optimizer_state
        )


class Module:
    """Runs training and evaluation models of files.

    Args:
      train_model_uri: The training model.
      state: Its parameters.
      eval_model_uri: The evaluation model; without it ``eval`` is refused.
      device: ``"cpu"``.
      session_options: Not used.
    """

    def __init__(
        self,
        train_model_uri: str | Path,
        state: CheckpointState,
        eval_model_uri: str | Path | None = None,
        device: str = "cpu",
        session_options: None = None,
    ) -> None:
        if device != "cpu":
            raise DeviceError(f"device is '{device}': there is a CPU provider only")
        if session_options is not None:
            raise TypeError("session_options of ONNX Runtime are not used; leave them None")
        self.training = True
        self._state = state
        self._training_graph = _core.load_onnx(Path(train_model_uri))
        self._evaluation_graph = (
            _core.load_onnx(Path(eval_model_uri)) if eval_model_uri is not None else None
        )
        self._attach(_core.GraphBuilder("optimizer").finish())

    def _attach(self, optimizer_graph: Any) -> None:
        evaluation = self._evaluation_graph or self._training_graph
        self._program = _core.TrainingProgram.from_graphs(
            self._training_graph, optimizer_graph, evaluation
        )

    def __call__(self, *user_inputs: Any) -> Any:
        """Run a batch: forward and backward in train mode, the forward alone in eval mode.

        Args:
          *user_inputs: numpy arrays or torch tensors, one per input of the model.

        Returns:
          The outputs as numpy arrays; one alone by itself.
        """
        inputs = [torch.as_tensor(value) for value in user_inputs]
        state = self._state._state
        if self.training:
            outputs = self._program.add_gradients(state, inputs)[0]
        else:
            outputs = self._program.evaluate(state, inputs)
        arrays = tuple(output.numpy() for output in outputs)
        return arrays[0] if len(arrays) == 1 else arrays

    def train(self, mode: bool = True) -> Module:
        """Run the training model from now on."""
        if not mode and self._evaluation_graph is None:
            raise InvalidModelError("there is no evaluation model: give eval_model_uri")
        self.training = mode
        return self

    def eval(self) -> Module:
        """Run the evaluation model from now on."""
        return self.train(False)

    def lazy_reset_grad(self) -> None:
        """Let the next training batch start from zero gradients."""
        _core.TrainingProgram.reset_gradients(self._state._state)

    def _parameters(self, trainable_only: bool) -> list[torch.Tensor]:
        graph = self._training_graph
        names = sorted(i["target"] for i in graph.inputs if i["role"] == "parameter")
        if trainable_only:
            trained = {
                o["target"].removesuffix(":grad")
                for o in graph.outputs
                if o["role"] == "state_update" and o["target"].endswith(":grad")
            }
            names = [name for name in names if name in trained]
        tensors = self._state._state.tensors
        return [tensors[name] for name in names]

    def get_parameters_size(self, trainable_only: bool = True) -> int:
        """Return how many numbers the parameters hold."""
        return sum(tensor.numel() for tensor in self._parameters(trainable_only))

    def get_contiguous_parameters(self, trainable_only: bool = False) -> np.ndarray[Any, Any]:
        """Return the parameters in the order of their names as one row of float32 numbers."""
        rows = [t.float().reshape(-1) for t in self._parameters(trainable_only)]
        return torch.cat(rows).numpy() if rows else np.zeros(0, np.float32)

    def copy_buffer_to_parameters(
        self, buffer: np.ndarray[Any, Any], trainable_only: bool = True
    ) -> None:
        """Set the parameters from such a row.

        Raises:
          ValueError: It has another length.
        """
        row, at = torch.as_tensor(buffer).reshape(-1), 0
        tensors = self._parameters(trainable_only)
        expected = sum(tensor.numel() for tensor in tensors)
        if row.numel() != expected:
            raise ValueError(f"the buffer has {row.numel()} numbers, the parameters {expected}")
        for tensor in tensors:
            tensor.copy_(row[at : at + tensor.numel()].view(tensor.shape))
            at += tensor.numel()

    def export_model_for_inferencing(
        self, inference_model_uri: str | Path, graph_output_names: Sequence[str]
    ) -> None:
        """Write the evaluation model with these outputs and the present weights.

        Raises:
          InvalidModelError: There is no evaluation model, or no such output.
        """
        if self._evaluation_graph is None:
            raise InvalidModelError("there is no evaluation model: give eval_model_uri")
        _core.export_for_inference(
            self._evaluation_graph,
            self._state._state,
            list(graph_output_names),
            Path(inference_model_uri),
        )

    def _graph(self) -> Any:
        return self._training_graph if self.training else self._evaluation_graph

    def input_names(self) -> list[str]:
        """Names of the inputs in the present mode."""
        return [i["name"] for i in self._graph().inputs if i["role"] == "user"]

    def output_names(self) -> list[str]:
        """Names of the outputs in the present mode."""
        return [o["name"] for o in self._graph().outputs if o["role"] == "user"]


class Optimizer:
    """Updates the parameters of a module.

    Args:
      optimizer_uri: The optimizer model.
      module: The module.
    """

    def __init__(self, optimizer_uri: str | Path, module: Module) -> None:
        self._module = module
        module._attach(_core.load_onnx(Path(optimizer_uri)))

    def step(self) -> None:
        """Update the parameters with the gradients that are there.

        Raises:
          InvalidModelError: There are none.
        """
        self._module._program.optimizer_step(self._module._state._state)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of the next step."""
        if not learning_rate >= 0:
            raise ValueError(f"learning_rate is {learning_rate}, expected 0 or more")
        self._module._state._state.learning_rate = float(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the rate of the next step."""
        return float(self._module._state._state.learning_rate)


class LinearLRScheduler:
    """Grows the rate from 0 over the warm-up, then lets it fall to 0 at the last step.

    Args:
      optimizer: The optimizer.
      initial_learning_rate: The rate at the end of the warm-up.
      warmup_step_count: Steps of the warm-up.
      total_step_count: All steps.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        initial_learning_rate: float,
        warmup_step_count: int,
        total_step_count: int,
    ) -> None:
        if not 0 <= warmup_step_count <= total_step_count or total_step_count < 1:
            raise ValueError(
                f"warmup_step_count is {warmup_step_count}, total_step_count {total_step_count}"
            )
        self._optimizer = optimizer
        self._rate = initial_learning_rate
        self._warmup, self._total = warmup_step_count, total_step_count
        self.step()

    def step(self) -> None:
        """Set the rate of the next optimizer step, by the number of those so far.

        Steps before a checkpoint count.
        """
        steps = self._optimizer._module._state._state.steps
        if steps < self._warmup:
            factor = steps / self._warmup
        else:
            factor = max(0.0, (self._total - steps) / max(1, self._total - self._warmup))
        self._optimizer.set_learning_rate(self._rate * factor)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Blocks whose result is a whole model: of a forward, or of training."""

from __future__ import annotations

import abc
import copy
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from ortrain import artifacts
from ortrain.api import CheckpointState
from ortrain.errors import InvalidModelError
from ortrain.onnxblock.base_model import ModelAccessor, present
from ortrain.onnxblock.blocks import Block

Parameters = tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]]


class _ModelBlock(Block):
    def _built(self, args: Any, kwargs: Any) -> tuple[Any, ModelAccessor]:
        """Build; the results, one or several, become the outputs of the model."""
        accessor = present()
        self.base = accessor.model
        result = self.build(*args, **kwargs)
        names = [result] if isinstance(result, str) else list(result)
        described = [accessor.described(name) for name in names]
        del accessor.graph.output[:]
        accessor.graph.output.extend(described)
        try:
            onnx.checker.check_model(accessor.model, full_check=True)
        except Exception as error:
            raise InvalidModelError(f"{type(self).__name__}: {error}") from error
        return result, accessor


class ForwardBlock(_ModelBlock):
    """Makes a model of what ``build`` adds; what that returns are its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self._model: onnx.ModelProto | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the model; return what ``build`` does."""
        result, accessor = self._built(args, kwargs)
        self._model = copy.deepcopy(accessor.model)
        return result

    def to_model_proto(self) -> onnx.ModelProto:
        """Return the model.

        Raises:
          RuntimeError: It was not built.
        """
        if self._model is None:
            raise RuntimeError("the block was not called yet")
        return self._model


class TrainingBlock(_ModelBlock, abc.ABC):
    """Makes training and evaluation models of what ``build`` adds; its first result is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self._requires_grad: dict[str, bool] = {}
        self._models: tuple[onnx.ModelProto, onnx.ModelProto] | None = None
        self._parameters: Parameters | None = None

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Say whether an initializer is trained; those that nobody names are constants.

        Args:
          argument_name: Its name.
          value: False for a parameter that stays as it is.
        """
        self._requires_grad[argument_name] = bool(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Build the models; return what ``build`` does.

        Raises:
          InvalidModelError: Nothing is trained, a name is no initializer, or the loss has no gradient.
        """
        result, accessor = self._built(args, kwargs)
        by_name = {each.name: each for each in accessor.graph.initializer}
        for name in self._requires_grad:
            if name not in by_name:
                raise InvalidModelError(f"'{name}' in requires_grad is no initializer of the model")
        trained, frozen = (
            [name for name, yes in self._requires_grad.items() if yes is wanted]
            for wanted in (True, False)
        )
        with tempfile.TemporaryDirectory() as folder:
            artifacts.generate_artifacts(accessor.model, trained, frozen, artifact_directory=folder)
            read = (onnx.load(f"{folder}/{kind}_model.onnx") for kind in ("training", "eval"))
            self._models = tuple(read)  # type: ignore[assignment]
        self._parameters = [by_name[n] for n in trained], [by_name[n] for n in frozen]
        return result

    def parameters(self) -> Parameters:
        """Return the initializers that are trained, and those that are parameters and stay.

        Raises:
          RuntimeError: The models were not built.
        """
        if self._parameters is None:
            raise RuntimeError("the block was not called yet")
        return self._parameters

    def to_model_proto(self) -> tuple[onnx.ModelProto, onnx.ModelProto]:
        """Return the models of training and of evaluation.

        Raises:
          RuntimeError: They were not built.
        """
        if self._models is None:
            raise RuntimeError("the block was not called yet")
        return self._models


def write_for_parameters(
    parameters: Parameters,
    folder: Path,
    optimizer: Any = artifacts.OptimType.AdamW,
    **settings: Any,
) -> None:
    """Write the files of a model that has these parameters alone: its optimizer's model and checkpoint count."""
    trained, frozen = parameters
    sums = [
        onnx.helper.make_node("ReduceSum", [p.name], [f"{p.name}/sum"], keepdims=0)
        for p in (*trained, *frozen)
    ]
    total = onnx.helper.make_node("Sum", [node.output[0] for node in sums], ["loss"])
    loss = onnx.helper.make_tensor_value_info("loss", trained[0].data_type, [])
    graph = onnx.helper.make_graph([*sums, total], "parameters", [], [loss], [*trained, *frozen])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    names = ([p.name for p in each] for each in (trained, frozen))
    artifacts.generate_artifacts(
        model, *names, optimizer=optimizer, artifact_directory=folder, **settings
    )


def save_checkpoint(parameters: Parameters, path_to_checkpoint: str | Path) -> None:
    """Write a checkpoint of parameters, as ``TrainingBlock.parameters`` gives them, for ``ortrain.api``.

    Raises:
      FileError: It cannot be written.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_for_parameters(parameters, Path(folder))
        shutil.copytree(Path(folder) / "checkpoint", path_to_checkpoint, dirs_exist_ok=True)


def load_checkpoint_to_model(path_to_checkpoint: str | Path, model: onnx.ModelProto) -> None:
    """Put the parameters of a checkpoint into the initializers of a model that have their names.

    Raises:
      FileError: There is no checkpoint.
    """
    held = CheckpointState.load_checkpoint(path_to_checkpoint).parameters
    for each in model.graph.initializer:
        if each.name in held:
            each.CopyFrom(onnx.numpy_helper.from_array(held[each.name].data, each.name))

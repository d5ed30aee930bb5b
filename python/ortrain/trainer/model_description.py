# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The inputs and outputs of a model as the user of ORTTrainer describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ortrain import logs
from ortrain.errors import ArgumentTypeError, DTypeError, ShapeError

_log = logs.get_logger("ortrain")

# A number is a fixed extent, a name an extent that may change and is the same wherever it stands.
Extents = list[int | str]


class InputDescription(NamedTuple):
    """One input of the model.

    Attributes:
      name: The parameter of forward that it is, or of the loss function.
      shape: Its extents; empty for a scalar.
    """

    name: str
    shape: Extents


class TypedInputDescription(NamedTuple):
    """One input of the model, and its element type; None for any."""

    name: str
    shape: Extents
    dtype: torch.dtype | None


class SeenInputDescription(NamedTuple):
    """One input of the model, and the element type that it had in the first step; others may follow."""

    name: str
    shape: Extents
    dtype: torch.dtype


class OutputDescription(NamedTuple):
    """One output of the model; ``is_loss`` marks what training makes small."""

    name: str
    shape: Extents
    is_loss: bool = False


class SeenOutputDescription(NamedTuple):
    """One output of the model, and the element type that it had in the first step."""

    name: str
    shape: Extents
    is_loss: bool
    dtype: torch.dtype


class ModelDescription:
    """Inputs and outputs of a model.

    Args:
      description: ``{"inputs": [(name, shape)], "outputs": [(name, shape[, is_loss])]}``; a shape
        is a list of numbers and names, empty for a scalar.

    Raises:
      ArgumentTypeError: Something in it has another type.
      ValueError: A key or a name is missing, unknown or there twice, or there are several losses.
    """

    def __init__(self, description: Mapping[str, Any]) -> None:
        if not isinstance(description, Mapping):
            raise ArgumentTypeError(f"model_desc must be a dict, got {type(description).__name__}")
        unknown = sorted(set(description) - {"inputs", "outputs"})
        if unknown:
            raise ValueError(f"model_desc has unknown keys: {', '.join(map(repr, unknown))}")
        for key in ("inputs", "outputs"):
            if key not in description:
                raise ValueError(f"model_desc has no '{key}'")
            if not isinstance(description[key], Sequence) or isinstance(description[key], str):
                raise ArgumentTypeError(f"model_desc['{key}'] must be a list of tuples")
        self.inputs: list[InputDescription | TypedInputDescription | SeenInputDescription] = [
            InputDescription(*_name_and_shape(_described(entry), f"model_desc['inputs'][{i}]", 2))
            for i, entry in enumerate(description["inputs"])
        ]
        self.outputs: list[OutputDescription | SeenOutputDescription] = []
        for i, entry in enumerate(description["outputs"]):
            place = f"model_desc['outputs'][{i}]"
            entry = _described(entry)
            name, shape = _name_and_shape(entry, place, 3)
            is_loss = entry[2] if len(entry) > 2 else False
            if not isinstance(is_loss, bool):
                raise ArgumentTypeError(f"{place}: the third entry, is_loss, must be a bool")
            self.outputs.append(OutputDescription(name, shape, is_loss))
        # What a run has shown to be so, or not; and what the latest call's inputs show.
        self._seen: set[tuple[str, str]] = set()
        self._followed: list[Any] = []
        self._check_names()

    # The rate is no input of the engine's graph; its description is what it was when it was one.
    learning_rate = TypedInputDescription("__learning_rate", [1], torch.float32)

    @staticmethod
    def of(
        inputs: Sequence[InputDescription | TypedInputDescription], outputs: list[OutputDescription]
    ) -> ModelDescription:
        """Return a description made of its parts."""
        made = ModelDescription({"inputs": [], "outputs": []})
        made.inputs, made.outputs = list(inputs), outputs
        made._check_names()
        return made

    def _check_names(self) -> None:
        for kind in (self.inputs, self.outputs):
            names = [entry.name for entry in kind]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"model_desc has two entries named '{twice[0]}'")
        if sum(output.is_loss for output in self.outputs) > 1:
            raise ValueError("model_desc marks more than one output as the loss")

    @property
    def loss(self) -> OutputDescription | SeenOutputDescription | None:
        """The output that is the loss."""
        return next((output for output in self.outputs if output.is_loss), None)

    @property
    def output_names(self) -> list[str]:
        """Names of the outputs, in order."""
        return [output.name for output in self.outputs]

    def ordered(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], without: str = ""
    ) -> dict[str, torch.Tensor]:
        """Return the tensors of a call by name.

        Args:
          args: Those that are given by position; or one list or mapping of all.
          kwargs: Those that are given by name.
          without: An input that may be missing.

        Raises:
          TypeError: Inputs are missing, unknown, there twice, or no tensors.
        """
        names = [entry.name for entry in self.inputs]
        if len(args) == 1 and isinstance(args[0], Mapping) and not kwargs:
            args, kwargs = (), args[0]
        elif len(args) == 1 and isinstance(args[0], (list, tuple)) and not kwargs:
            args = args[0]
        if len(args) > len(names):
            raise TypeError(f"there are {len(args)} inputs, model_desc describes {len(names)}")
        given: dict[str, Any] = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names:
                raise TypeError(f"'{name}' is no input of model_desc: {', '.join(names)}")
            if name in given:
                raise TypeError(f"input '{name}' is given twice")
            given[name] = value
        names = [name for name in names if name in given or name != without]
        missing = [name for name in names if name not in given]
        if missing:
            raise TypeError(f"input '{missing[0]}' is missing")
        for name, value in given.items():
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"input '{name}' is a {type(value).__name__}, expected a tensor")
        return {name: given[name] for name in names}

    def check_inputs(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the extents behind the names, as these tensors have them.

        Raises:
          ShapeError: A tensor does not have the shape that is described.
          DTypeError: A tensor has another element type.
        """
        self._followed = self._following("input", self.inputs, tensors, {})
        extents: dict[str, int] = {}
        for entry in self._followed:
            if entry.name not in tensors:
                continue
            _match(f"input '{entry.name}'", entry.shape, tensors[entry.name].shape, extents)
            dtype = tensors[entry.name].dtype
            expected = entry.dtype if isinstance(entry, TypedInputDescription) else None
            if expected is not None and dtype != expected:
                raise DTypeError(f"input '{entry.name}' is {dtype}, model_desc says {expected}")
        return extents

    def note_types(
        self, inputs: Mapping[str, torch.Tensor], outputs: Mapping[str, torch.Tensor]
    ) -> None:
        """Put the element types of a step into the entries, where none stand yet."""
        self.inputs = [
            SeenInputDescription(*entry, inputs[entry.name].dtype)
            if isinstance(entry, InputDescription)
            else entry
            for entry in self.inputs
        ]
        self.outputs = [
            SeenOutputDescription(*entry, outputs[entry.name].dtype)
            if isinstance(entry, OutputDescription)
            else entry
            for entry in self.outputs
        ]

    def check_outputs(
        self,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
        extents: dict[str, int],
    ) -> None:
        """Raise ShapeError where an output does not have the shape that is described.

        Args:
          inputs: As ``check_inputs`` has had them, of a run that has succeeded: what they showed counts from then on.
          outputs: What it gave.
          extents: What ``check_inputs`` has returned.
        """
        self.inputs = self._followed
        self._seen.update(("input", name) for name in inputs)
        self.outputs = self._following("output", self.outputs, outputs, extents)
        self._seen.update(("output", name) for name in outputs)
        for entry in self.outputs:
            tensor = outputs.get(entry.name)
            if tensor is not None and not _is_plain_loss(entry, tensor):
                _match(f"output '{entry.name}'", entry.shape, tensor.shape, extents)

    def _following(
        self,
        what: str,
        entries: list[Any],
        tensors: Mapping[str, torch.Tensor],
        extents: Mapping[str, int],
    ) -> list[Any]:
        """Return entries, with a warning those that do not say what the first tensor is as that one has it.

        Programs of 2020 describe what they do not have; the ancestor looked at the first batch alone.
        """
        if all((what, name) in self._seen for name in tensors):
            return entries
        known = dict(extents)
        for entry in entries:  # what is held to first
            if (what, entry.name) in self._seen and entry.name in tensors:
                _fits(entry, tensors[entry.name], known)
        result = []
        for entry in entries:
            tensor = tensors.get(entry.name)
            if tensor is None or (what, entry.name) in self._seen:
                result.append(entry)
                continue
            dtype = entry.dtype if isinstance(entry, TypedInputDescription) else None
            fits = _fits(entry, tensor, known)
            if not fits or dtype not in (None, tensor.dtype):
                _log.warning(
                    "the description says that %s '%s' is %s%s; it is %s%s, which counts",
                    *(what, entry.name, _name_of(dtype), entry.shape),
                    *(_name_of(tensor.dtype), list(tensor.shape)),
                )
            if not fits:
                axes = [f"{what} {entry.name}, axis {axis}" for axis in range(tensor.dim())]
                entry = entry._replace(shape=axes)
            if dtype is not None:
                entry = entry._replace(dtype=tensor.dtype)
            result.append(entry)
        return result


def _fits(entry: Any, tensor: torch.Tensor, extents: dict[str, int]) -> bool:
    """Tell whether a tensor has the shape of an entry; takes the extents behind names, where it has."""
    tried = dict(extents)
    try:
        if not _is_plain_loss(entry, tensor):
            _match("", entry.shape, tensor.shape, tried)
    except ShapeError:
        return False
    extents.update(tried)
    return True


def _is_plain_loss(entry: Any, tensor: torch.Tensor) -> bool:
    """Tell whether an entry may be described as a scalar or as a vector: a loss of one element."""
    is_loss = isinstance(entry, (OutputDescription, SeenOutputDescription)) and entry.is_loss
    return is_loss and tensor.numel() == 1 and entry.shape in ([], [1])


def _name_of(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def _described(entry: Any) -> Any:
    """Return an entry without the type that a step has put into it."""
    is_seen = isinstance(entry, (SeenInputDescription, SeenOutputDescription))
    return entry[:-1] if is_seen else entry


def _name_and_shape(entry: Any, place: str, most: int) -> tuple[str, Extents]:
    if not isinstance(entry, (tuple, list)) or not 2 <= len(entry) <= most:
        raise ArgumentTypeError(
            f"{place} must be a tuple of a name, a shape" + ", is_loss" * (most > 2)
        )
    name, shape = entry[0], entry[1]
    if not isinstance(name, str) or not name:
        raise ArgumentTypeError(f"{place}: the name must be a string that is not empty")
    if not isinstance(shape, (list, tuple)):
        raise ArgumentTypeError(f"{place}: the shape of '{name}' must be a list")
    for extent in shape:
        if isinstance(extent, bool) or not isinstance(extent, (int, str)):
            raise ArgumentTypeError(
                f"{place}: the shape of '{name}' holds {extent!r}, no number or name"
            )
        if isinstance(extent, int) and extent < 0:
            raise ValueError(f"{place}: the shape of '{name}' holds {extent}")
    return name, list(shape)


def _match(what: str, described: Extents, shape: torch.Size, extents: dict[str, int]) -> None:
    wrong = len(described) != len(shape)
    for expected, size in zip(described, shape, strict=False):
        if isinstance(expected, str):
            known = extents.setdefault(expected, size)
            if known != size and not wrong:
                raise ShapeError(
                    f"{what} has shape {list(shape)}, model_desc says {described}, and "
                    f"'{expected}' is {known} elsewhere"
                )
        wrong = wrong or (isinstance(expected, int) and expected != size)
    if wrong:
        raise ShapeError(f"{what} has shape {list(shape)}, model_desc says {described}")

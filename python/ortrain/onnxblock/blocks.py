# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Blocks that add one operator each, and the base of blocks of one's own.

A block is called inside of ``with onnxblock.base(model)`` with names of values, and returns the name of its result.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import onnx

from ortrain.errors import InvalidModelError
from ortrain.onnxblock.base_model import ModelAccessor, present


class Block(abc.ABC):
    """Adds to the model; subclasses say how in ``build``.

    Attributes:
      base: The onnx.ModelProto, while ``build`` runs.
    """

    def __init__(self) -> None:
        self.base: onnx.ModelProto | None = None

    @abc.abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add what the block stands for; return the name of its result, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and check the model.

        Raises:
          RuntimeError: There is no model to add to.
          InvalidModelError: What came out is no ONNX model.
        """
        self.base = present().model
        result = self.build(*args, **kwargs)
        try:
            onnx.checker.check_model(self.base, full_check=True)
        except Exception as error:
            raise InvalidModelError(f"{type(self).__name__}: {error}") from error
        return result

    @property
    def _accessor(self) -> ModelAccessor:
        return present()


class _Operator(Block):
    """One operator of any number of inputs."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self._operator = operator

    def build(self, *input_names: str) -> str:
        """Add the operator."""
        return self._accessor.add_node(self._operator, list(input_names))


def _operator(name: str) -> type[_Operator]:
    def make(self: _Operator) -> None:
        _Operator.__init__(self, name)

    space = {"__init__": make, "__doc__": f"ONNX's {name}.", "__module__": __name__}
    return type(name, (_Operator,), space)


Abs, Add, Div, Log = map(_operator, ("Abs", "Add", "Div", "Log"))
Mul, Neg, Sigmoid, Sub = map(_operator, ("Mul", "Neg", "Sigmoid", "Sub"))
SequenceConstruct = _operator("SequenceConstruct")


class _Reduction(Block):
    """Over all axes, which are gone afterwards."""

    _operator = ""

    def build(self, input_name: str) -> str:
        """Add the operator."""
        return self._accessor.add_node(self._operator, [input_name], keepdims=0)


class ReduceMean(_Reduction):
    """The mean of all elements, a scalar."""

    _operator = "ReduceMean"


class ReduceSum(_Reduction):
    """The sum of all elements, a scalar."""

    _operator = "ReduceSum"


class Pow(Block):
    """The elements to a power.

    Args:
      exponent: The power.
    """

    def __init__(self, exponent: float) -> None:
        super().__init__()
        self._exponent = exponent

    def build(self, input_name: str) -> str:
        """Add the operator."""
        exponent = Constant(self._exponent).build()
        return self._accessor.add_node("Pow", [input_name, exponent])


class Constant(Block):
    """A constant of one element, float32.

    Args:
      value_float: The number.
    """

    def __init__(self, value_float: float) -> None:
        super().__init__()
        self._value = value_float

    def build(self) -> str:
        """Add the constant."""
        return self._accessor.add_initializer("constant", np.array([self._value], np.float32))


class Clip(Block):
    """The elements bounded.

    Args:
      clip_min: Lower bound; None for none.
      clip_max: Upper bound; None for none.
    """

    def __init__(self, clip_min: float | None = None, clip_max: float | None = None) -> None:
        super().__init__()
        self._bounds = (("clip_min", clip_min), ("clip_max", clip_max))

    def build(self, input_name: str) -> str:
        """Add the operator."""
        accessor = self._accessor
        bounds = [
            "" if bound is None else accessor.add_initializer(stem, np.float32(bound))
            for stem, bound in self._bounds
        ]
        return accessor.add_node("Clip", [input_name, *bounds])


class Cast(Block):
    """The elements in another type.

    Args:
      to: A type of onnx.TensorProto.
    """

    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def build(self, input_name: str) -> str:
        """Add the operator."""
        return self._accessor.add_node("Cast", [input_name], to=int(self._to))


class PassThrough(Block):
    """What it is given: one name, or several."""

    def build(self, *input_names: str) -> Any:
        """Return the names."""
        return input_names[0] if len(input_names) == 1 else input_names


class InputLike(Block):
    """A further input of the model, described as one of its inputs or outputs.

    Args:
      like: The name of that.
    """

    def __init__(self, like: str) -> None:
        super().__init__()
        self._like = like

    def build(self, input_name: str | None = None) -> str:
        """Add the input under a name, by default one of its own.

        Raises:
          LookupError: The model describes no such value.
        """
        accessor = self._accessor
        described = accessor.described(self._like)
        described.name = input_name or accessor.new_name("user_input")
        accessor.graph.input.append(described)
        return described.name

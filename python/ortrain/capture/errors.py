# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Errors of the capture: what could not be captured, in which layer, at which line of the user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ortrain._core import OrtrainError


class CaptureError(OrtrainError, NotImplementedError):
    """A module, or one of its operators, cannot be turned into a graph.

    Attributes:
      module: Class name of the module, or path of the layer inside it.
      reason: What stands in the way, one sentence.
      source: ``file:line: code`` of the user's line, empty where it is not known.
      may_be_cut: Whether the module may run in pieces, rather than in PyTorch whole.
    """

    may_be_cut = True

    def __init__(self, reason: str, *, module: str = "", source: str = "") -> None:
        self.module = module
        self.reason = reason
        self.source = source
        text = f"[{module}] {reason}" if module else reason
        super().__init__(f"{text}\n  at {source}" if source else text)


class SizeConditionError(CaptureError):
    """The graph holds for sizes that meet a condition which cannot be told beforehand."""


class UnsupportedInputError(CaptureError, TypeError):
    """An argument or a result of the module is of a kind that has no place in a graph."""


class TensorClassError(UnsupportedInputError):
    """An argument is a tensor of a class of its own, which does as it likes with every operator."""

    may_be_cut = False  # nor do pieces know of such classes


class ReplacedFunctionError(CaptureError):
    """A function of PyTorch was replaced by one that calls it."""

    may_be_cut = False


class UnsupportedOperatorError(CaptureError):
    """An ATen operator, or a form of it, has no conversion.

    Attributes:
      target: The operator with its overload, such as ``aten.add.Tensor``.
    """

    def __init__(self, target: str, reason: str, *, module: str = "", source: str = "") -> None:
        self.target = target
        super().__init__(f"{target}: {reason}", module=module, source=source)


class AutogradFunctionError(CaptureError):
    """The module calls a torch.autograd.Function, whose own backward a capture would lose."""


class ChangingAttributeError(CaptureError):
    """The forward assigns to attributes of its layers, which no graph does; every call differs."""


class SymbolicAttributeError(ChangingAttributeError):
    """What the forward assigns is a size; a number may be what was there before."""


class EverNewCallError(CaptureError):
    """The calls differ, one after the other, in what a graph holds fixed."""


class FirstCallError(CaptureError):
    """The forward makes attributes at its first call, which later calls find there."""

    may_be_cut = False  # the next call may be captured whole


class UnseenStateError(CaptureError):
    """The forward uses an object whose state neither a trace nor Dynamo follows."""

    may_be_cut = False


class HandledErrorError(CaptureError):
    """The forward handles an error that a trace has raised, and goes on in another way."""

    may_be_cut = False  # Dynamo's errors are others than PyTorch's too


class FailedRunError(CaptureError):
    """A graph that holds for a call by its guards does not run it."""

    may_be_cut = False


class CacheWantedError(CaptureError):
    """The call asks for a key-value cache, whose sizes differ in each call that extends it."""

    may_be_cut = False


class OutsideGradientError(UnseenStateError):
    """The forward uses a tensor outside of the module that wants a gradient."""


class CallError(CaptureError):
    """What stands in the way is how this call was made; others of its kind may have a graph.

    Attributes:
      holds: Tells of another call whether it is made in the same way; None where nobody knows.
    """

    holds: Callable[[Any], bool] | None = None


class ForeignModeError(CallError):
    """The call is made under a mode of PyTorch that sees, or changes, what operators do."""

    may_be_cut = False


class CollectiveError(CaptureError):
    """The forward talks to other processes, in an order that all of them keep."""

    may_be_cut = False


class ConversionError(OrtrainError):
    """A conversion gave another dtype or shape than PyTorch: a defect of Ortrain."""


class SymbolicBudgetError(Exception):
    """Following sizes by symbols takes more operations than a trace may spend on it."""

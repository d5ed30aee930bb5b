# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Every error type that Ortrain raises, with the built-in types they also are."""

from ortrain._core import (
    DeviceError,
    DTypeError,
    FileError,
    InternalError,
    InvalidModelError,
    NanError,
    OrtrainError,
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
)
from ortrain.capture.errors import CaptureError, ConversionError, UnsupportedOperatorError


class ArgumentTypeError(OrtrainError, TypeError, ValueError, AssertionError):
    """An argument of another type than the training API of 2020 takes, where that raised ValueError or asserted."""


class ArgumentValueError(OrtrainError, ValueError, AssertionError):
    """An argument that is out of range, where the training API of 2020 asserted."""


class VerificationError(OrtrainError):
    """A verified step is another in PyTorch (``ORTModule(model, verify=...)``).

    Attributes:
      layer: Path of the first layer that differs; empty for the module itself.
      what: What differs: "output #0", "gradient of parameter 'fc.weight'", "buffer 'norm.running_mean'".
      difference: The largest difference of two numbers; infinity where they are no numbers.
      step: Number of the call, from 1.
    """

    def __init__(self, text: str, *, layer: str, what: str, difference: float, step: int) -> None:
        super().__init__(text)
        self.layer = layer
        self.what = what
        self.difference = difference
        self.step = step


__all__ = [
    "ArgumentTypeError",
    "ArgumentValueError",
    "CaptureError",
    "ConversionError",
    "DTypeError",
    "DeviceError",
    "FileError",
    "InternalError",
    "InvalidModelError",
    "NanError",
    "OrtrainError",
    "OutOfMemoryError",
    "ShapeError",
    "UnsupportedError",
    "UnsupportedOperatorError",
    "VerificationError",
]

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

__all__ = [
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
]

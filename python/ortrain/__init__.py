# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A training engine for PyTorch models: ``model = ORTModule(model)``."""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortrain.debug_options import DebugOptions, LogLevel
    from ortrain.errors import (
        CaptureError,
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
        VerificationError,
    )
    from ortrain.module import ORTModule
    from ortrain.trainer import ORTTrainer, ORTTrainerOptions, TrainStepInfo

__version__ = "0.1.0"

_HOMES = {
    "DebugOptions": "ortrain.debug_options",
    "LogLevel": "ortrain.debug_options",
    "ORTModule": "ortrain.module",
    "ORTTrainer": "ortrain.trainer",
    "ORTTrainerOptions": "ortrain.trainer",
    "TrainStepInfo": "ortrain.trainer",
    "CaptureError": "ortrain.errors",
    "DTypeError": "ortrain.errors",
    "DeviceError": "ortrain.errors",
    "FileError": "ortrain.errors",
    "InternalError": "ortrain.errors",
    "InvalidModelError": "ortrain.errors",
    "NanError": "ortrain.errors",
    "OrtrainError": "ortrain.errors",
    "OutOfMemoryError": "ortrain.errors",
    "ShapeError": "ortrain.errors",
    "UnsupportedError": "ortrain.errors",
    "VerificationError": "ortrain.errors",
}

if os.environ.get("ORTRAIN_LOG"):
    importlib.import_module("ortrain.logs").configure()

_PACKAGES = (
    "amp",
    "api",
    "artifacts",
    "callbacks",
    "checkpoint",
    "distributed",
    "extension",
    "hf",
    "metrics",
    "onnxblock",
    "optim",
    "profile",
    "trainer",
)

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    # On first use: `python -m ortrain.env` must work where the extension or torch is broken.
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"ortrain.{name}")
    raise AttributeError(f"module 'ortrain' has no attribute {name!r}")

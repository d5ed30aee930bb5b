# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule under the name of the module that it had in ``onnxruntime.training``."""

from ortrain.debug_options import DebugOptions, LogLevel
from ortrain.module import ORTModule

__all__ = ["DebugOptions", "LogLevel", "ORTModule"]

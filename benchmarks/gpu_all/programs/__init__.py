# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Programs of users on a device: each takes what wraps a module and where, and returns what it saw."""

from benchmarks.gpu_all.programs import large, libraries, training
from benchmarks.gpu_all.programs.registry import PROGRAMS, Wrap, alone

__all__ = ["PROGRAMS", "Wrap", "alone", "large", "libraries", "training"]

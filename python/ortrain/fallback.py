# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Calls that run in PyTorch, and saying so."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain import _core
from ortrain.capture.errors import CaptureError
from ortrain.capture.escapes import Escape
from ortrain.capture.guards import sizes_of
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.signature import FlatCall
from ortrain.random_numbers import GeneratorStates
from ortrain.report import CaptureRecord

Sizes = tuple[torch.Size, ...]
# Memory, devices, what is watched on purpose: PyTorch is not asked whether it sees them too.
OUT_OF_MEMORY = (_core.OutOfMemoryError, torch.OutOfMemoryError, MemoryError)
_OF_THE_MACHINE = (*OUT_OF_MEMORY, _core.DeviceError, _core.NanError, _core.FileError)
# Between the caller and the warning: not what the user wants to be pointed at.
_INSIDE = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (__file__, torch.__file__)
)


@dataclasses.dataclass(slots=True)
class Refused:
    """A kind of call that runs in PyTorch.

    Attributes:
      error: What stands in the way of a graph.
      reason: Why a capture was tried.
      shown: Whether PyTorch has shown that it takes the call, and the user knows.
      sizes: Those of the calls that it holds for; None for all.
    """

    error: Exception
    reason: str
    shown: bool = False
    sizes: set[Sizes] | None = None

    def fits(self, call: FlatCall) -> bool:
        """Tell whether the refusal holds for the sizes of a call of its kind."""
        return self.sizes is None or tuple(sizes_of(call.tensors)) in self.sizes


class StateBefore:
    """Tells whether a run that has failed may run again: what it could write to is as it was.

    Args:
      module: What runs.
      args: Positional arguments.
      kwargs: Keyword arguments.
    """

    def __init__(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._reached = ReachableState(module, (args, kwargs), keeps_contents=False, tensors=False)
        given = pytree.tree_leaves((args, kwargs))
        tensors = [t for t in given if isinstance(t, torch.Tensor) and not t.is_inference()]
        self._tensors = [*tensors, *module.parameters(), *module.buffers()]
        self._versions = [t._version for t in self._tensors]
        devices = {t.device for t in self._tensors if t.device.type != "meta"}
        self._generators = [GeneratorStates(device) for device in devices]

    def is_unchanged(self) -> bool:
        """Tell whether no tensor has been written to, and nothing else that the run could reach has changed."""
        if self._versions != [t._version for t in self._tensors]:
            return False
        return next(self._reached.differing(), None) is None

    def restore_generators(self) -> None:
        """Put the generators back."""
        for states in self._generators:
            states.restore()


def is_refusal(error: Exception) -> bool:
    """Tell whether an error of the engine may be no error of PyTorch's; else it is about the machine."""
    return not isinstance(error, _OF_THE_MACHINE)


def is_strict() -> bool:
    """Tell whether the user wants an error rather than PyTorch (ORTRAIN_STRICT)."""
    return is_switched_on("ORTRAIN_STRICT")


def is_switched_on(flag: str) -> bool:
    """Tell whether an environment variable is on, as the engine reads its own."""
    return os.environ.get(flag, "0").lower() in ("1", "true", "on", "yes")


def without_numbers(text: str) -> str:
    """Return what texts that differ in numbers alone have in common."""
    return re.sub(r"[0-9]+", "#", text)


def tell_fallback(name: str, record: CaptureRecord) -> None:
    """Warn that a module runs in PyTorch, or in pieces with PyTorch between them.

    Args:
      name: The module's class.
      record: Of a kind of call that is no graph.
    """
    how = "in pieces, not whole" if record.pieces else "in PyTorch, not in Ortrain"
    warnings.warn(
        f"{name} runs {how}: {record.fallback}", RuntimeWarning, stacklevel=_depth_of_caller()
    )


def tell_escapes(name: str, escapes: Sequence[Escape], told: set[str]) -> None:
    """Warn that operators of a module run in PyTorch, each as one node of the graph.

    Args:
      name: The module's class.
      escapes: The operators.
      told: What has been said of the module, numbers left out.

    Raises:
      CaptureError: The user wants an error rather than PyTorch.
    """
    if not escapes:
        return
    first = escapes[0]
    if is_strict():
        raise CaptureError(
            f"{first.target}: {first.reason}", module=first.layer, source=first.source
        )
    shown = list(dict.fromkeys(map(str, escapes)))
    if (known := without_numbers("; ".join(shown))) in told:
        return
    told.add(known)
    warnings.warn(
        f"{name}: {len(escapes)} of its operators run in PyTorch: {'; '.join(shown)}",
        RuntimeWarning,
        stacklevel=_depth_of_caller(),
    )


def _depth_of_caller() -> int:
    """Return the stack level, seen from our caller, of the user's line that called the module."""
    frame, depth = sys._getframe(1), 1
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, depth = frame.f_back, depth + 1
    return depth

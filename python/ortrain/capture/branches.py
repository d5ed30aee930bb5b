# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Branches on the values of tensors: how they went in PyTorch, and what a graph gives so that one sees how they go.

``if not torch.isfinite(x).all()`` asks a tensor that has no contents while it is traced. A trace is told how PyTorch's own
forward went there, and gives the tensor as one more result: a run of which one is otherwise counts for nothing, and
PyTorch runs that call. So what is assumed here decides about speed alone.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ortrain.capture.errors import CaptureError, FirstCallError
from ortrain.capture.size_internals import DataDependentError
from ortrain.capture.torch_internals import is_fake, is_transforming, replaced

# More are a loop that goes on until values say so.
_MOST = 256
_ask = torch._C.TensorBase.__bool__


class Branch(NamedTuple):
    """How a branch on a tensor went.

    Attributes:
      file: Of the code that asked.
      line: In it.
      value: What the tensor was.
    """

    file: str
    line: int
    value: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class BranchError(FirstCallError):
    """The forward branches on values; PyTorch runs one call to see which way."""


class OtherBranchError(Exception):
    """A branch of the forward goes another way than in the graph that was run."""


def asks_for_values(error: BaseException) -> bool:
    """Tell whether a capture has failed since the forward asks for the value of a tensor."""
    return isinstance(error, CaptureError) and isinstance(error.__cause__, DataDependentError)


@contextlib.contextmanager
def branches_recorded() -> Iterator[list[Branch]]:
    """Record how branches of this thread go, which runs in PyTorch; no other one may trace or record meanwhile."""
    recorded: list[Branch] = []

    def answer(tensor: torch.Tensor, frame: types.FrameType) -> bool:
        value = _ask(tensor)
        if len(recorded) < _MOST:
            recorded.append(Branch(*_place_of(frame), value))
        return value

    with _answered_by(answer):
        yield recorded


class Answers:
    """Answers a trace's branches on tensors without contents, by how they went in PyTorch.

    Args:
      branches: As PyTorch met them; a trace may meet fewer.

    Attributes:
      given: Those that it has met.
      conditions: The tensors that it asked, as they were then.
    """

    def __init__(self, branches: Sequence[Branch]) -> None:
        self.given: list[Branch] = []
        self.conditions: list[torch.Tensor] = []
        self._left = list(branches)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Answer this thread."""
        with _answered_by(self._answer) if self._left else contextlib.nullcontext():
            yield

    def _answer(self, tensor: torch.Tensor, frame: types.FrameType) -> bool:
        is_known = not is_fake(tensor) or tensor.constant is not None
        if is_known or tensor.dim() > 0 or is_transforming():
            return _ask(tensor)
        place = _place_of(frame)
        for i, branch in enumerate(self._left):
            if (branch.file, branch.line) == place:
                del self._left[: i + 1]
                self.given.append(branch)
                self.conditions.append(tensor.detach().clone())
                return branch.value
        return _ask(tensor)


@contextlib.contextmanager
def _answered_by(answer: Any) -> Iterator[None]:
    thread = threading.get_ident()

    def asked(tensor: torch.Tensor) -> bool:
        if threading.get_ident() != thread:
            return _ask(tensor)
        return answer(tensor, sys._getframe(1))

    with replaced([(torch.Tensor, "__bool__", asked)]):
        yield


def _place_of(frame: types.FrameType) -> tuple[str, int]:
    return frame.f_code.co_filename, frame.f_lineno


def refuse_other_branches(branches: Sequence[Branch], conditions: Sequence[torch.Tensor]) -> None:
    """Raise OtherBranchError where the conditions that a run has given are not those of its trace.

    Args:
      branches: As they were answered.
      conditions: Of one element each.
    """
    for branch, condition in zip(branches, conditions, strict=True):
        if bool(condition) != branch.value:
            raise OtherBranchError(f"the branch at {branch} goes another way now")

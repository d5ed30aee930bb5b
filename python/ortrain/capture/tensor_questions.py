# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What code asks tensors for, heard where they answer: a name that is made up stands in no code."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from ortrain.capture.torch_internals import replaced

Asks = Callable[[types.CodeType, dict[str, Any]], bool]


class TensorQuestions:
    """Hears which attributes of tensors code asks for while `heard`.

    Args:
      names: Of the attributes, which tensors have.
      counts: Tells whether what code asks is noted, by the code and its globals.
      passes_on: Tells whether code asks for its caller, as the standard library's does.

    Attributes:
      asked: By names, the code that has asked first.
    """

    def __init__(self, names: Iterable[str], counts: Asks, passes_on: Asks) -> None:
        self._names = list(names)
        self._counts, self._passes_on = counts, passes_on
        # By ids, as code hashes all that it holds. None: it passes on.
        self._known: dict[int, tuple[types.CodeType, bool | None]] = {}
        self.asked: dict[str, types.CodeType] = {}

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hear what this thread asks for."""
        self.asked.clear()
        thread = threading.get_ident()
        listening = [
            (
                torch.Tensor,
                name,
                _heard(name, inspect.getattr_static(torch.Tensor, name), self, thread),
            )
            for name in self._names
        ]
        with replaced(listening):
            yield

    def hear(self, name: str, frame: types.FrameType | None) -> None:
        """Note that the code of a frame asks for an attribute."""
        if name in self.asked:
            return
        while frame is not None:
            code = frame.f_code
            known = self._known.get(id(code))
            if known is None:
                passes_on = self._passes_on(code, frame.f_globals)
                counts = None if passes_on else self._counts(code, frame.f_globals)
                known = self._known[id(code)] = code, counts
            counts = known[1]
            if counts is not None:
                if counts:
                    self.asked[name] = code
                return
            frame = frame.f_back


def _heard(name: str, behind: Any, questions: TensorQuestions, thread: int) -> _Heard:
    # One that can be set hides what stands in an object's own dictionary.
    kind = _HeardAndSet if hasattr(behind, "__set__") else _Heard
    return kind(name, behind, questions, thread)


class _Heard:
    """Stands in a class for a descriptor of an attribute."""

    def __init__(self, name: str, behind: Any, questions: TensorQuestions, thread: int) -> None:
        self._name, self._behind = name, behind
        self._questions, self._thread = questions, thread

    def __get__(self, tensor: Any, cls: type | None = None) -> Any:
        if tensor is not None and threading.get_ident() == self._thread:
            self._questions.hear(self._name, sys._getframe(1))
        return self._behind.__get__(tensor, cls)


class _HeardAndSet(_Heard):
    """Stands for one that can be set."""

    def __set__(self, tensor: Any, value: Any) -> None:
        self._behind.__set__(tensor, value)

    def __delete__(self, tensor: Any) -> None:
        self._behind.__delete__(tensor)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward may ask that a trace would answer otherwise, or once."""

from __future__ import annotations

import functools
import operator
import pprint
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule


class Asks(nn.Module):
    """Doubles its result where a question is answered with yes."""

    def __init__(self, question: Callable[[Asks, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
        self.register_buffer("mark", torch.ones(2))
        self._question = question

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Ask it."""
        return self.layer(x) * (2.0 if self._question(self, x) else 3.0)


def _class_far_behind(model: Asks, x: torch.Tensor) -> bool:
    return type(model.layer(x).relu().sigmoid().tanh().exp().sin().cos()) is torch.Tensor


ANSWERS: dict[str, Callable[[Asks, torch.Tensor], Any]] = {
    "class of a result": _class_far_behind,
    "class by attribute": lambda m, x: (x * 2).__class__ is torch.Tensor,
    "class in a table": lambda m, x: {torch.Tensor: True}.get(type(x), False),
    "name of a class": lambda m, x: type(x).__name__ == "Tensor",
    "name by attribute": lambda m, x: x.__class__.__name__ in ("Tensor", "Parameter"),
    "compiling": lambda m, x: torch.compiler.is_compiling(),
    "exporting": lambda m, x: torch.compiler.is_exporting(),
    "inference": lambda m, x: torch.is_inference_mode_enabled(),
    "inference of a tensor": lambda m, x: (x * 1).is_inference(),
    "versions": lambda m, x: x._version % 2 == 0,
    "gradient by text": lambda m, x: getattr(m.layer.weight, "grad") is None,  # noqa: B009
    "gradient by name": lambda m, x: operator.attrgetter("grad")(m.layer.weight) is None,
    "attribute of a tensor": lambda m, x: getattr(m.mark, "is_marked", False),
    "none of these": lambda m, x: isinstance(x, torch.Tensor) and type(m) is Asks,
}


@pytest.mark.parametrize("question", ANSWERS)
def test_questions_are_answered_as_by_pytorch(question: str) -> None:
    """Also at the second call, behind a backward, a write and in inference mode."""
    model, expected = Asks(ANSWERS[question]), Asks(ANSWERS[question])
    wrapped = ORTModule(model)
    x = torch.randn(4, 3)

    def same() -> None:
        torch.testing.assert_close(wrapped(x), expected(x))

    same()
    for each in (wrapped, expected):
        each(x).sum().backward()
    same()
    x.add_(1)
    same()
    model.mark.is_marked = expected.mark.is_marked = True
    same()
    with torch.no_grad():
        same()
    with torch.inference_mode():
        same()


_WAYS: dict[str, Callable[[str], Any]] = {
    "print": lambda text: print(text),
    "a name of its own": functools.partial(print, flush=True),
    "pprint": lambda text: pprint.pprint(text, width=99),
}


@pytest.mark.parametrize("way", _WAYS)
def test_what_a_forward_prints_is_printed_at_each_call(
    way: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And shows what PyTorch's would."""

    def says(model: Asks, x: torch.Tensor) -> bool:
        _WAYS[way](f"rows {x.shape[0]}")
        return True

    wrapped = ORTModule(Asks(says))
    for rows in (4, 5, 5):
        wrapped(torch.randn(rows, 3)).sum().backward()
    printed = capsys.readouterr().out.replace("'", "")
    assert printed == "rows 4\nrows 5\nrows 5\n"


_HARMLESS: dict[str, Callable[[Asks, torch.Tensor], Any]] = {
    "a class in a message": lambda m, x: isinstance(x, torch.Tensor) or f"got {type(x)}",
    "its name": lambda m, x: isinstance(x, torch.Tensor) or type(x).__name__,
}


@pytest.mark.parametrize("question", _HARMLESS)
def test_questions_for_readers_leave_the_graph_whole(question: str) -> None:
    """Checks of arguments name what they were given."""
    wrapped = ORTModule(Asks(_HARMLESS[question]))
    wrapped(torch.randn(4, 3))
    assert wrapped.report().native_share == 1

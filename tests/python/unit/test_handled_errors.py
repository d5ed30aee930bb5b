# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Handlers in a forward for what a trace raises and PyTorch does not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from tests.python.unit.side_by_side import Linear, assert_same_calls

_OUTSIDE = torch.tensor([3.0])


def _reads(x: torch.Tensor) -> float:
    try:
        return float(x.sum())
    except Exception:
        return 100.0


def _reads_a_constant(x: torch.Tensor) -> float:
    try:
        return _OUTSIDE.item()
    except Exception:
        return 100.0


def _suppresses(x: torch.Tensor) -> float:
    result = 100.0
    with contextlib.suppress(Exception):
        result = int(x.sum()) + 0.5
    return result


def _raised_otherwise(x: torch.Tensor) -> float:
    def read() -> float:
        try:
            return int(x.sum())
        except RuntimeError as error:
            raise ValueError("no number") from error

    try:
        return read()
    except ValueError:
        return 100.0


def _finally(x: torch.Tensor) -> float:
    result = 100.0
    while True:
        try:
            result = float(x.sum())
        finally:
            break  # noqa: B012
    return result


def _views(x: torch.Tensor) -> float:
    try:
        return x.view(7, -1).shape[1]
    except RuntimeError:
        return 100.0


def _nothing_raised(x: torch.Tensor) -> float:
    try:
        return 2.0
    except RuntimeError:
        return 100.0
    finally:
        x = x + 1


def _own_error(x: torch.Tensor) -> float:
    try:
        raise ValueError("mine")
    except ValueError:
        return 2.0


def _searches(x: torch.Tensor) -> float:
    layers = nn.ModuleDict({"a": nn.Identity()})
    found = 1.0 if hasattr(x, "nowhere") or hasattr(layers, "nowhere") else 2.0
    try:
        layers["b"]
    except KeyError:
        found += 1
    try:
        layers.nowhere  # noqa: B018
    except AttributeError:
        found += 1
    return found + len([*layers]) + len(list(nn.ModuleList([nn.Identity()])))


class Handles(Linear):
    def __init__(self, ask: Callable[[torch.Tensor], float]) -> None:
        super().__init__()
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.ask(x)


@pytest.mark.parametrize(
    "ask", [_reads, _reads_a_constant, _suppresses, _raised_otherwise, _finally, _views]
)
def test_what_is_handled_is_not_captured(ask: Callable[[torch.Tensor], float]) -> None:
    # A seventh row makes the view possible.
    model = assert_same_calls(lambda: Handles(ask), rows=(3, 7, 3, 5, 14))
    assert "after an error" in str(model.report().captures[0].fallback)


@pytest.mark.parametrize("ask", [_nothing_raised, _own_error, _searches])
def test_other_handlers_are(ask: Callable[[torch.Tensor], float]) -> None:
    model = assert_same_calls(lambda: Handles(ask))
    (record,) = model.report().captures
    assert record.native_nodes > 0 and not record.fallback


def test_an_error_that_is_not_handled() -> None:
    class Raises(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.linear(x.view(5, -1))
            finally:
                self.linear(x)

    with pytest.raises(RuntimeError):
        ORTModule(Raises())(torch.ones(3, 4))

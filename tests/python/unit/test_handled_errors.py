# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Handlers in a forward for what a trace raises and PyTorch does not."""

from __future__ import annotations

import contextlib
import json
import random
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule
from ortrain.capture.error_handlers import handles_errors
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


def _raised_in_c(x: torch.Tensor) -> float:
    try:
        x.data_ptr()
        return 2.0
    except Exception:
        return 100.0


def _raised_by_the_standard_library(x: torch.Tensor) -> float:
    try:
        return float(len(json.dumps({"n": x.shape[0]})))
    except Exception:
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
    "ask",
    [
        *(_reads, _reads_a_constant, _suppresses, _raised_otherwise, _finally, _views),
        *(_raised_in_c, _raised_by_the_standard_library),
    ],
)
def test_what_is_handled_is_not_captured(ask: Callable[[torch.Tensor], float]) -> None:
    # A seventh row makes the view possible.
    model = assert_same_calls(lambda: Handles(ask), rows=(3, 7, 3, 5, 14))
    assert "after an error" in str(model.report().captures[0].fallback)


_NEEDS_MONITORING = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="which errors a function handles is not told"
)


@pytest.mark.parametrize(
    "ask",
    [
        _searches,
        pytest.param(_nothing_raised, marks=_NEEDS_MONITORING),
        pytest.param(_own_error, marks=_NEEDS_MONITORING),
    ],
)
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


class Draws(Handles):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


@pytest.mark.parametrize("ask", [_reads, _suppresses, _finally, _views])
def test_a_module_with_handlers_does_not_run_in_pieces(
    ask: Callable[[torch.Tensor], float],
) -> None:
    def between(net: nn.Module, step: int) -> None:
        random.seed(step)

    model = assert_same_calls(lambda: Draws(ask), between, rows=(3, 7, 3, 5, 14))
    assert all(r.pieces == 0 for r in model.report().captures) or ask is _finally


def test_handlers_that_dynamo_runs_otherwise() -> None:
    def handled(*kinds: type[BaseException]) -> Callable[[], None]:
        def handle() -> None:
            try:
                torch.ones(2).view(3)
            except kinds:
                pass

        return handle

    def bare() -> None:
        try:
            torch.ones(2).view(3)
        except:  # noqa: E722
            pass

    def searching() -> None:
        try:
            {}["a"]
        except (KeyError, AttributeError):
            pass

    def closing() -> None:
        with torch.no_grad():
            torch.ones(2)
        try:
            torch.ones(2)
        finally:
            torch.ones(3)

    assert handles_errors(handled(RuntimeError).__code__) and handles_errors(bare.__code__)
    assert not handles_errors(searching.__code__) and not handles_errors(closing.__code__)
    assert handles_errors(_suppresses.__code__) and handles_errors(_reads.__code__)


def test_a_checkpoint_of_a_parameter_that_is_written_to() -> None:
    class Decays(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = checkpoint(
                lambda t: self.linear(t).sigmoid(), x * random.random(), use_reentrant=False
            )
            with torch.no_grad():
                self.linear.bias.mul_(0.9)
            return y

    assert_same_calls(Decays, lambda net, step: random.seed(step))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The conformance suite finds what is wrong, and lets rounding pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from conformance import opinfo
from conformance.opinfo import Outcome
from ortrain.engine import Engine


def entry(name: str) -> Any:
    return next(op for op in opinfo.entries() if op.name == name)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("cumsum", Outcome.native),
        ("nn.functional.softplus", Outcome.native),
        ("normal", Outcome.random),
        ("lgamma", Outcome.escaped),
        ("fft.rfft", Outcome.refused),
    ],
)
def test_outcomes(name: str, outcome: Outcome) -> None:
    result = opinfo.run_entry(entry(name), 2)
    assert result.outcome is outcome, result
    assert result.samples == 2


def test_a_wrong_result_and_an_error_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda *args: run(*args) + 1e-3)
    assert opinfo.run_entry(entry("exp"), 1).outcome is Outcome.wrong
    monkeypatch.setattr(Engine, "run", lambda *args: run(*args).detach() * 1)
    assert opinfo.run_entry(entry("exp"), 1).outcome is Outcome.wrong

    def fail(*args: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(Engine, "run", fail)
    result = opinfo.run_entry(entry("exp"), 1)
    assert result.outcome is Outcome.failed and "a defect" in result.detail


def test_rounding_is_held_against_float64() -> None:
    exact = torch.randn(50, dtype=torch.float64)
    theirs = exact.float() * (1 + 1e-4)
    assert opinfo._as_close(exact.float() * (1 - 2e-4), theirs, exact)
    assert not opinfo._as_close(exact.float() * (1 - 1e-3), theirs, exact)
    for values in (torch.full((50,), torch.nan), torch.full((50,), torch.inf)):
        assert not opinfo._as_close(values, theirs, exact)
        assert not opinfo._as_close(values, -values.nan_to_num(posinf=torch.inf), exact)


def test_the_database_has_not_shrunk() -> None:
    assert len(opinfo.entries()) > 500

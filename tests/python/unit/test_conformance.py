# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The conformance suite finds what is wrong, and lets rounding pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from conformance import architectures, bad_inputs, onnx_nodes, opinfo, random_programs
from conformance.onnx_nodes import NodeOutcome
from conformance.opinfo import Outcome
from conformance.random_programs import Instruction
from ortrain import UnsupportedError, _core
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


def onnx_case(name: str) -> Any:
    return next(case for case in onnx_nodes.cases() if case.name == name)


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("test_add", NodeOutcome.passed),
        ("test_reduce_sum_keepdims_random", NodeOutcome.passed),  # its axes are an input
        ("test_reshape_negative_dim", NodeOutcome.passed),
        ("test_training_dropout", NodeOutcome.random),
        ("test_string_concat", NodeOutcome.refused),
        ("test_scan_sum", NodeOutcome.refused),
    ],
)
def test_onnx_cases(name: str, outcome: NodeOutcome) -> None:
    result = onnx_nodes.run_case(onnx_case(name))
    assert result.outcome is outcome, result


def test_a_wrong_onnx_result_is_found() -> None:
    case = copy.deepcopy(onnx_case("test_add"))  # ONNX keeps its cases
    case.data_sets[0][1][0] = case.data_sets[0][1][0] + 1
    assert onnx_nodes.run_case(case).outcome is NodeOutcome.wrong


@pytest.mark.long
@pytest.mark.slow
def test_onnx_cases_have_not_become_fewer() -> None:
    results = [onnx_nodes.run_case(case) for case in onnx_nodes.cases()]
    assert not [r for r in results if r.outcome is NodeOutcome.wrong]
    assert sum(r.outcome is NodeOutcome.passed for r in results) >= onnx_nodes.CASES_BAR


def test_an_architecture_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    (result,) = architectures.run(architectures.chosen(["DistilBert"]))
    assert result.ok and result.native_share == 1.0, result
    run = Engine.run

    def off(*args: Any) -> Any:
        outputs = run(*args)
        outputs["logits"] = outputs["logits"] * 1.01
        return outputs

    monkeypatch.setattr(Engine, "run", off)
    (result,) = architectures.run(architectures.chosen(["DistilBert"]))
    assert "eager PyTorch has" in result.difference


def test_random_programs_find_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert random_programs.check(5) > 0
    instructions = [Instruction("linear", 0, 0), Instruction("2:mul", 0, 1)]
    assert random_programs.difference(instructions, 3, 0) == ("", True)
    run = Engine.run
    monkeypatch.setattr(Engine, "run", lambda *args: run(*args) * 1.001)
    assert "off by" in random_programs.difference(instructions, 3, 0)[0]


@pytest.mark.parametrize("length", [1 << 24, 1 << 40])
def test_an_empty_result_may_have_a_long_axis_but_none_to_go_along_for_hours(length: int) -> None:
    graph = _core.Graph.parse(
        "graph g (float32[1, 2, 5] x [user grad]) => (y) {\n"
        f"  y = Resize (x, _, _, int64[3] {{2, {length}, 0}})\n}}\n"
    )
    graph.build_backward([0])
    run = _core.Run(_core.Session(graph))
    if length == 1 << 40:
        with pytest.raises(
            UnsupportedError, match=r"\[Resize\].* has no elements, but axes too long"
        ):
            run.forward([torch.ones(1, 2, 5)])
        return
    (y,) = run.forward([torch.ones(1, 2, 5)])
    assert y.shape == (2, length, 0)
    (dx,) = run.backward([torch.ones(2, length, 0)])
    assert torch.equal(dx, torch.zeros(1, 2, 5))


def test_bad_inputs_end_in_typed_errors() -> None:
    ends = bad_inputs.run(4000)
    assert ends["accepted"] > 500 and ends["IndexError"] > 500 and ends["ShapeError"] > 100

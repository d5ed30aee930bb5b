# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The programs on capture: what counts as a difference, and what a crash or a hang does to a run."""

from __future__ import annotations

import collections
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conformance.silent import program as programs_module
from conformance.silent import ways
from conformance.silent.observed import (
    NOT_RAISED,
    Comparison,
    Raised,
    Run,
    difference,
    first_difference,
    observe,
)
from conformance.silent.program import OWN, TOPICS, Program, Session, programs, run
from conformance.silent.ways import Verdict

EXACT = Comparison()


def differs(a: Any, b: Any, how: Comparison = EXACT) -> str:
    return difference(observe(a), observe(b), how)


def test_tensors_that_are_equal_enough() -> None:
    x = torch.linspace(-1, 1, 6).reshape(2, 3)
    assert differs(x, x * (1 + 1e-5)) == ""
    assert differs(x * torch.nan, x * torch.nan) == ""
    assert differs(x.t(), x.t().contiguous()) == ""
    # Absolute to the largest value of the tensor.
    assert differs(torch.tensor([0.0, 1e4]), torch.tensor([0.05, 1e4])) == ""
    assert differs(torch.ones(3), torch.full((3,), 1.005), Comparison(coarse=torch.bfloat16)) == ""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (torch.ones(3) * 1.001, "3 of 3 values, 1.001 for 1 at (0,)"),
        (torch.ones(2), "float32 (2,) for float32 (3,)"),
        (torch.ones(3, dtype=torch.float64), "float64 (3,) for float32 (3,)"),
        (torch.ones(3, requires_grad=True), "requires_grad True for False"),
        (torch.tensor([1.0, torch.nan, 1.0]), "1 of 3 values, nan for 1 at (1,)"),
        (None, "None for a tensor (3,)"),
    ],
)
def test_tensors_that_differ(found: Any, said: str) -> None:
    assert differs(torch.ones(3), found) == said


def test_integers_and_strides_are_exact() -> None:
    assert differs(torch.tensor([1000000]), torch.tensor([1000001])) != ""
    x = torch.ones(2, 3)
    said = differs(x, x.t().contiguous().t(), Comparison(layout=True))
    assert said == "strides (1, 2) for (3, 1)"


def test_a_record_is_of_the_moment() -> None:
    x, held = torch.ones(2), [1, {"a": 2}]
    before = observe(x), observe(held)
    x.add_(1)
    held[1]["b"] = 3  # type: ignore[index]
    assert difference(before[0], observe(x), EXACT) == "2 of 2 values, 2 for 1 at (0,)"
    assert difference(before[1], observe(held), EXACT) == "[1]: 2 parts for 1"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),  # their order
        (collections.OrderedDict(a=1), {"a": 1}),
        ([1, 2], (1, 2)),
        (1, True),
        (1, 1.0),
        ({1, 2}, {1, 3}),
        (collections.deque([1], maxlen=2), collections.deque([1])),
        (np.ones(2), np.ones(2, dtype=np.float32)),
        (0.5, 0.6),
    ],
)
def test_python_values_that_differ(a: Any, b: Any) -> None:
    assert differs(a, a) == ""
    assert differs(a, b) != ""


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(TypeError, match="which cannot be compared"):
        observe(object())


def test_exceptions_are_told_from_differences() -> None:
    value, bad = ("0 y", observe(1)), ("0 y", observe(2))
    raised, other = ("0 step", Raised("ValueError: a")), ("0 step", Raised("TypeError: b"))
    passed = ("0 step", NOT_RAISED)
    assert first_difference([value], [value], EXACT).text == ""
    assert first_difference([raised], [other], EXACT).text == ""
    assert first_difference([value], [bad], EXACT).text == "0 y: 2 for 1"
    assert first_difference([passed], [raised], EXACT).refused
    assert not first_difference([raised], [passed], EXACT).refused
    assert "went on where PyTorch raises" in first_difference([raised], [value], EXACT).text


def test_verdicts() -> None:
    case = Program("a", "topic", OWN, 0, "what", lambda s: None, EXACT)
    one, two = ("0 y", observe(1)), ("1 z", observe(2))
    raised = ("1 step", Raised("ValueError: a"))

    def verdict(eager: list[Any], found: list[Any], error: str = "", how: str = "") -> Verdict:
        return ways._judge(case, Run(eager), Run(found, error, how)).verdict

    assert verdict([one, two], [one, two]) is Verdict.right
    assert verdict([one, two], [one, ("1 z", observe(3))]) is Verdict.wrong
    assert verdict([one, two], [one], "KeyError: a") is Verdict.error
    assert verdict([one, two], [one]) is Verdict.wrong  # shows less, and raises nothing
    assert verdict([one, raised], [one, raised]) is Verdict.raised
    assert verdict([one, raised], [one, two]) is Verdict.wrong
    assert verdict([one, two], [], "status -11", "crashed") is Verdict.error


def test_a_session_sees_gradients_buffers_and_raises() -> None:
    def body(s: Session) -> None:
        model = s.wrap(nn.BatchNorm1d(2))
        s.train(model, s.leaf(3, 2))
        with s.may_raise("width"):
            s.call(model, s.values(3, 3))

    session, error = run(Program("a", "t", OWN, 0, "", body, EXACT), lambda module: module)
    labels = [label.partition(" ")[2] for label, _ in session.seen]
    assert error is None
    assert labels == [
        "output",
        *(f"buffer {name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "gradient of weight",
        "gradient of bias",
        "gradient of argument 0",
        *(f"buffer {name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        "width",
    ]
    assert isinstance(session.seen[-1][1], Raised) and session.seen[-1][1].said


def test_the_programs() -> None:
    found = programs()
    assert {p.topic for p in found} == set(TOPICS)
    recent = {p.origin for p in found if p.year >= 2025}
    assert len(recent) >= 60
    assert all((p.origin == OWN) == (p.year == 0) for p in found)
    assert {p.topic for p in programs(["hooks"])} == {"hooks"}
    assert {p.name for p in programs(["moving_means"])} == {"code_book_by_moving_means"}


PROBES = """
    import os, time, torch
    from torch import nn
    from conformance.silent.program import program

    def _elsewhere(s):
        return type(s.wrap(nn.Linear(2, 2))) is not nn.Linear

    @program()
    def same(s):
        "Equal."
        s.train(s.wrap(nn.Linear(2, 2)), s.leaf(3, 2))

    @program()
    def other(s):
        "Differs."
        s.see("elsewhere", _elsewhere(s))

    @program()
    def dies(s):
        "Ends the process."
        if _elsewhere(s):
            os._exit(3)

    @program()
    def hangs(s):
        "Does not end."
        if _elsewhere(s):
            time.sleep(600)

    @program()
    def last(s):
        "Equal."
        s.see("value", 1)
"""


@pytest.fixture
def probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Program]:
    (tmp_path / "silent_probes.py").write_text(textwrap.dedent(PROBES))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "silent_probes", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(ways.__file__).parents[2] / 'python'}")
    monkeypatch.setattr(programs_module, "_programs", {})
    return {p.name: p for p in programs(modules=["silent_probes"])}


@pytest.mark.long
def test_a_crash_costs_one_program(probes: dict[str, Program]) -> None:
    chosen = [probes[name] for name in ("same", "other", "dies", "last")]
    told: list[tuple[str, str]] = []
    outcomes = ways.run(chosen, ["ortrain"], lambda *what: told.append(what))
    found = {o.program.name: o.judged["ortrain"] for o in outcomes}
    assert {name: judged.verdict for name, judged in found.items()} == {
        "same": Verdict.right,
        "other": Verdict.wrong,
        "dies": Verdict.error,
        "last": Verdict.right,
    }
    assert found["same"].how == "native"
    assert found["dies"].detail.startswith("crashed: status 3")
    assert sorted(told) == sorted((way, p.name) for way in ("eager", "ortrain") for p in chosen)


@pytest.mark.long
def test_a_hang_ends_at_the_limit(probes: dict[str, Program], tmp_path: Path) -> None:
    chosen = [probes[name] for name in ("hangs", "last")]
    runs = ways._run_way("ortrain", chosen, tmp_path, lambda way, name: None, 3, "cpu")
    assert runs["hangs"] == Run([], "3 s", "took too long")
    assert runs["last"].seen == [("0 value", 1)]


def test_a_program_that_fails_in_pytorch_is_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Program("a", "topic", OWN, 0, "what", lambda s: None, EXACT)
    monkeypatch.setattr(ways, "_run_way", lambda *args: {"a": Run([], "ValueError: a defect")})
    with pytest.raises(RuntimeError, match="a in PyTorch alone:  ValueError: a defect"):
        ways.run([case], ["ortrain"])

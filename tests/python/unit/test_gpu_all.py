# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What is run on a GPU, without one: the list, results, the search for batches, rehearsals."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_all import kernels, memory, record, speed, training
from benchmarks.gpu_all.__main__ import GROUPS, LINES, main, reason_not_to_run
from benchmarks.gpu_all.line import Aim, Line, Run, is_fault, not_run, outcome
from benchmarks.memory import is_out_of_memory, try_batch
from benchmarks.peers import PEERS
from benchmarks.table import make_console
from benchmarks.worker import TIME_LIMIT, WorkerError
from benchmarks.workloads import Workload
from ortrain import _core
from ortrain.testing.models import CASES
from tests.python.unit.gpu_all_runs import rehearsed, run

MACHINE = {"gpu": {"name": "NVIDIA H200"}, "environment": {"versions": {"torch": "2.13.0"}}}


def line(measure: Callable[[Run], dict[str, Any]], *aims: Aim, check: bool = False) -> Line:
    return Line("key", "ops", "Title", aims, 10.0, measure, check)


# --- the list


def test_lines_have_what_is_aimed_at() -> None:
    by_key = {each.key: each for each in LINES}
    assert len(by_key) == len(LINES)
    words = "smoke ops sanitizer parity soak suites doors speed memory kernels"
    assert words.split() == list(GROUPS)
    aims = {key: {a.figure: a.bound for a in each.aims} for key, each in by_key.items()}
    for key, eager, compiled in (
        ("gpt2", 2.0, 1.1),
        ("gpt2-medium", 1.6, 1.1),
        ("bert-large-mlm", 1.6, 1.1),
        ("bert-base-cls", 3.0, 1.2),
        ("bert-large-padded", 2.2, 1.5),
        ("llama-1b", 1.3, 1.05),
        ("t5-base", 1.3, 1.05),
        ("vit-large", 1.3, 1.05),
        ("resnet-50", 1.3, 1.05),
    ):
        assert aims[key] == {
            "× eager": eager,
            "× compile": compiled,
            "first step of compile's": 0.2,
        }
    assert aims["largest-batch"]["batch × eager's"] == 3
    assert aims["largest-batch"]["batch × compile's"] == 1.5
    assert all(each.seconds < 600 for each in LINES)
    assert all(each.check == (each.group not in ("speed", "memory", "kernels")) for each in LINES)


@pytest.mark.slow
def test_models_have_the_published_sizes() -> None:
    sizes = {
        each.key: sum(p.numel() for p in each.measure.args[0].build_meta().parameters()) / 1e6
        for each in speed.LINES
    }
    for key, millions in (
        ("gpt2", 124),
        ("gpt2-medium", 355),
        ("bert-large-mlm", 335),
        ("bert-base-cls", 109),
        ("bert-large-padded", 335),
        ("t5-base", 223),
        ("vit-large", 303),
        ("resnet-50", 23.5),
    ):
        assert sizes[key] == pytest.approx(millions, rel=0.01), key
    assert 1000 < sizes["llama-1b"] < 1600


def test_list_prints_every_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert all(each.key in out for each in LINES)
    assert "× eager ≥ 2" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_every_line_is_not_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([]) == 0
    out = capsys.readouterr().out
    assert out.count("not run") == len(LINES)
    assert "sees no GPU" in out
    assert main(["--output", str(tmp_path), "--group", "ops,soak"]) == 0
    document = json.loads((tmp_path / "no-gpu.json").read_text())
    assert document["gpu"] is None and document["rehearsal"] is False
    assert set(document["lines"]) == {"op-cases", "op-gradients", "soak", "ddp"}
    for result in document["lines"].values():
        assert result["status"] == "not run" and "sees no GPU" in result["error"]
        assert result["date"] and result["versions"]["torch"]
        assert "--group ops,soak" in result["command"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "gpt5"],
        ["--group", "gpus"],
        ["--peers", "eager"],
        ["--peers", "jax,ortrain"],
        ["--rounds", "0"],
    ],
)
def test_command_refuses(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2


def test_reasons_not_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason_not_to_run("cpu") == "'cpu' is no GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "PyTorch sees 1 GPUs" in reason_not_to_run("cuda:1")
    monkeypatch.setattr(_core, "gpu_platform", lambda: "none")
    assert "no GPU provider" in reason_not_to_run("cuda:0")
    monkeypatch.setattr(_core, "gpu_platform", lambda: "cuda")
    assert reason_not_to_run("cuda:0") == ""


# --- results


def test_outcome_judges_aims() -> None:
    measured = run(rehearsal=False)
    aims = (Aim("× eager", 2.0), Aim("growth", 0, most=True))
    good = outcome(line(lambda _: {"× eager": 2.0, "growth": 0}, *aims), measured)
    assert good["status"] == "reached" and [a["reached"] for a in good["aims"]] == [True, True]
    slow = outcome(line(lambda _: {"× eager": 1.9, "growth": 0}, *aims), measured)
    assert slow["status"] == "missed" and not is_fault(slow)
    wrong = outcome(line(lambda _: {"× eager": 2, "growth": 1}, *aims, check=True), measured)
    assert wrong["status"] == "missed" and is_fault(wrong)
    unknown = outcome(line(lambda _: {"growth": 0}, *aims), measured)
    assert unknown["status"] == "incomplete" and unknown["aims"][0]["reached"] is None
    assert not is_fault(unknown)
    assert is_fault(outcome(line(lambda _: {}, *aims, check=True), measured))


def test_rehearsal_judges_nothing() -> None:
    made = outcome(line(lambda _: {"× eager": 99.0}, Aim("× eager", 2.0), check=True), run())
    assert made["status"] == "rehearsed" and made["aims"][0]["reached"] is None
    assert not is_fault(made)


def test_failing_line_is_recorded() -> None:
    def fail(_: Run) -> dict[str, Any]:
        raise WorkerError("illegal memory access")

    made = outcome(line(fail, Aim("× eager", 2.0)), run(rehearsal=False))
    assert made["status"] == "failed" and is_fault(made)
    assert made["error"] == "WorkerError: illegal memory access"
    half = outcome(line(lambda _: {"× eager": 2.1, "error": "compile: x"}), run(rehearsal=False))
    assert half["status"] == "failed" and half["figures"] == {"× eager": 2.1}


def test_line_that_was_cut_off_is_incomplete() -> None:
    figures = {"× eager": 2.1, "unfinished": "compile: the time limit was reached"}
    for rehearsal in (False, True):
        made = outcome(line(lambda _: figures, Aim("× eager", 2.0)), run(rehearsal=rehearsal))
        assert made["status"] == "incomplete" and not is_fault(made)
        assert made["error"] == figures["unfinished"] and made["figures"] == {"× eager": 2.1}
    assert made["aims"][0]["value"] == 2.1


def test_figures_of_a_comparison_that_was_cut_off() -> None:
    times = {"wall": {"median": 0.2}, "first_step": {"wall": 2.0}}
    stages = {"wall": 1.0, "stages": {"capture": 0.6}}
    profile = {"total us": 1500.0, "kernels": [{"kernel": "a", "us": 1500.0, "count": 2}]}
    ours = {"wall": {"median": 0.1}, "first_step": stages, "eta": 0.3, "profile": profile}
    cut = {"error": TIME_LIMIT}
    figures = speed.figures_of({"sides": {"eager": times, "ortrain": ours, "compile": cut}})
    assert figures["unfinished"] == "compile: the time limit was reached"
    assert (figures["× eager"], figures["× compile"]) == (2.0, None)
    assert (figures["η"], figures["stages"]) == (0.3, {"capture": 0.6})
    assert figures["kernels, ms"] == 1.5 and figures["kernels"][0]["kernel"] == "a"
    told = {"wall": {"median": 0.1}, "profile_error": "no counters"}
    figures = speed.figures_of({"sides": {"eager": times, "ortrain": told}})
    assert figures["no kernels"] == "no counters" and not {"error", "unfinished"} & set(figures)
    figures = speed.figures_of({"sides": {"eager": times, "ortrain": cut}})
    assert figures["unfinished"] and figures["× eager"] is None
    # A fault, and nothing at all, are failures.
    for sides in (
        {"eager": times, "compile": {"error": "out of memory"}, "ortrain": cut},
        {"eager": cut, "ortrain": cut},
    ):
        assert "error" in speed.figures_of({"sides": sides})


def test_results_are_merged(tmp_path: Path) -> None:
    path = tmp_path / record.file_name(MACHINE, rehearsal=False)
    assert path.name == "nvidia-h200.json"
    measured = {"status": "missed", "figures": {"× eager": 1.2}}
    record.save(path, MACHINE, {"gpt2": measured, "soak": measured}, rehearsal=False)
    left_out = not_run(line(lambda _: {}), "no time")
    again = {"status": "reached", "figures": {"× eager": 2.2}}
    kept = record.load(path, rehearsal=False)
    merged = record.merge(kept, {"gpt2": left_out, "soak": again, "ddp": left_out})
    assert merged == {"gpt2": measured, "soak": again, "ddp": left_out}


def test_results_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    aims = (Aim("× eager", 2.0), Aim("growth", 0, most=True))
    figures = {"× eager": 2.51, "growth": 3, "η": 0.41, "comparison": {"sides": {}}}
    made = outcome(line(lambda _: dict(figures), *aims), run(rehearsal=False))
    left_out = not_run(line(lambda _: {}, *aims), "no [time]")
    record.print_results({"a": made, "b": left_out}, make_console(), rehearsal=False)
    out = capsys.readouterr().out
    assert "2.51 (× eager ≥ 2)" in out and "3 (growth = 0)" in out and "η 0.41" in out
    assert "missed" in out and "not run" in out and "no [time]" in out and "sides" not in out


def test_rehearsals_and_measurements_do_not_mix(tmp_path: Path) -> None:
    assert record.file_name(MACHINE, rehearsal=True) == "rehearsal.json"
    path = tmp_path / "results.json"
    record.save(path, MACHINE, {}, rehearsal=True)
    with pytest.raises(record.RecordError, match="holds a rehearsal, expected measurements"):
        record.load(path, rehearsal=False)
    record.save(path, MACHINE, {}, rehearsal=False)
    with pytest.raises(record.RecordError, match="holds measurements, expected a rehearsal"):
        record.load(path, rehearsal=True)
    path.write_text("[]")
    with pytest.raises(record.RecordError, match="holds no results"):
        record.load(path, rehearsal=False)
    assert record.load(tmp_path / "none.json", rehearsal=False) == {}


def test_command_fills_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what stands for a GPU: lines left for want of time, then run, then none remaining."""
    module = sys.modules[main.__module__]
    monkeypatch.setattr(module, "reason_not_to_run", lambda device: "")
    monkeypatch.setattr(module, "describe_machine", lambda device: MACHINE)
    runs: list[str] = []

    def measure(name: str, value: float, made: Run) -> dict[str, Any]:
        assert (made.device, made.provider, made.rehearsal) == ("cuda:0", "cuda:0", False)
        assert made.peers == ("eager", "compile", "ortrain") and made.rounds == 5
        runs.append(name)
        return {"× eager": value}

    aim = (Aim("× eager", 2.0),)
    lines = (
        Line("a", "speed", "A", aim, 30.0, functools.partial(measure, "a", 2.5)),
        Line("b", "speed", "B", aim, 300.0, functools.partial(measure, "b", 1.5)),
    )
    monkeypatch.setattr(module, "LINES", lines)
    output = ["--output", str(tmp_path)]
    assert main(["--minutes", "1", *output]) == 0
    document = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert document["lines"]["a"]["status"] == "reached"
    assert "may take 300 s" in document["lines"]["b"]["error"]
    assert main(["--remaining", *output]) == 0
    assert main(["--remaining", *output]) == 0
    document = json.loads((tmp_path / "nvidia-h200.json").read_text())
    assert document["lines"]["b"]["status"] == "missed"
    assert runs == ["a", "b"]


def test_line_that_goes_on_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[main.__module__]
    monkeypatch.setattr(module, "reason_not_to_run", lambda device: "")
    monkeypatch.setattr(module, "describe_machine", lambda device: MACHINE)

    def written() -> dict[str, Any]:
        return json.loads((tmp_path / "nvidia-h200.json").read_text())["lines"]["a"]

    def measure(made: Run) -> dict[str, Any]:
        assert made.profile
        made.partial({"× eager": 2.5})
        assert written()["status"] == "incomplete" and written()["figures"] == {"× eager": 2.5}
        assert written()["error"] == "the line did not end"
        return {"× eager": 2.6}

    monkeypatch.setattr(
        module, "LINES", (Line("a", "speed", "A", (Aim("× eager", 2.0),), 30.0, measure),)
    )
    assert main(["--profile", "--output", str(tmp_path)]) == 0
    assert written()["status"] == "reached" and written()["figures"] == {"× eager": 2.6}


# --- largest batch


@pytest.mark.parametrize("first", [1, 8, 64])
@pytest.mark.parametrize(("fixed", "row", "capacity"), [(20, 3, 1000), (5, 11, 300), (50, 1, 777)])
def test_largest_batch_is_found(first: int, fixed: int, row: int, capacity: int) -> None:
    tried = []

    def attempt(batch: int) -> dict[str, Any]:
        tried.append(batch)
        peak = fixed + row * batch + batch % 3  # not quite a line
        fits = peak <= capacity
        return {"fits": fits, "peak_bytes": peak, "seconds": 1.0} if fits else {"fits": False}

    fitting = memory.largest_batch(attempt, first, capacity)
    true = max(b for b in range(1, 2000) if fixed + row * b + b % 3 <= capacity)
    found = max(fitting)
    assert true - max(1, true // 32) <= found <= true
    assert len(tried) == len(set(tried)) <= 14


def test_largest_batch_where_nothing_fits() -> None:
    assert memory.largest_batch(lambda batch: {"fits": False}, 4, 100) == {}


def test_out_of_memory_is_told_from_other_errors() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_out_of_memory(_core.OutOfMemoryError("no 5 bytes on cuda:0"))
    assert is_out_of_memory(RuntimeError("BackendCompilerFailed: CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("illegal memory access"))


def test_batch_is_tried() -> None:
    workload = Workload("mlp", 8, 1)
    side = PEERS["eager"].make(workload.build())
    made = try_batch(side, workload, "bf16", "cpu", workload.batch)
    assert made["fits"] and made["seconds"] > 0 and made["peak_bytes"] > 0
    assert try_batch(side, workload, "bf16", "cpu", workload.batch - 1) == {"fits": False}


def test_largest_batch_without_growth_of_memory() -> None:
    def attempt(batch: int) -> dict[str, Any]:
        return {"fits": batch <= 11, "peak_bytes": 5, "seconds": 1.0}

    assert max(memory.largest_batch(attempt, 2, 0)) == 11


def test_kernels_of_a_profile_are_added_up() -> None:
    head = '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    rows = [
        ("0", "a", "gpu__time_duration.sum", "ns", "1,000"),
        ("0", "a", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "80"),
        ("1", "a", "gpu__time_duration.sum", "us", "3"),
        ("1", "a", "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "40"),
        ("2", "b", "gpu__time_duration.sum", "ns", "9000"),
    ]
    lines = [head, *(",".join(f'"{cell}"' for cell in row) for row in rows)]
    first, second = kernels.summarize(lines)
    assert first == {"kernel": "b", "us": 9.0, "launches": 1}
    assert second == {"kernel": "a", "us": 4.0, "launches": 2, "memory %": 50.0}


def test_parity_sees_a_wrong_gradient() -> None:
    def net() -> torch.nn.Module:
        torch.manual_seed(0)
        made = torch.nn.Linear(4, 3)
        made(torch.ones(2, 4)).square().sum().backward()
        return made

    ours, plain = net(), net()
    assert training._gradient_difference(ours, plain, None) == 0
    ours.weight.grad[1, 2] += 0.1
    assert training._gradient_difference(ours, plain, None) > 1
    assert training._gradient_difference(ours, plain, net()) > 1
    ours.weight.grad = None
    assert training._gradient_difference(ours, plain, None) > 1
    assert training._relative(float("nan"), 1.0) > 1


def test_model_is_followed_step_for_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "1")
    made = training.follow("mlp", "cpu", "f32", 3)
    assert made["right"] and made["native"] == 1.0 and made["gradient"] < 1, made
    missing = dataclasses.replace(CASES["gpt2"], needs="no_such_package")
    monkeypatch.setitem(CASES, "gpt2", missing)
    assert training.follow("gpt2", "cpu", "f32", 3) == {"skipped": "no_such_package"}


def test_model_is_followed_where_flags_of_pytorch_are_frozen() -> None:
    script = (
        "import torch\n"
        "torch.backends.disable_global_flags()\n"  # importing PyTorch's own tests does it
        "from benchmarks.gpu_all import training\n"
        "assert training.follow('mlp', 'cpu', 'f32', 1)['right']\n"
        "assert torch.backends.cudnn.allow_tf32\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "ORTRAIN_GPU_SIMULATOR": "1"},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


# --- whole lines


@pytest.mark.long
def test_rehearsal_of_checks_without_the_program(tmp_path: Path) -> None:
    lines = rehearsed(tmp_path, "--only", "fault")
    assert lines["fault"]["figures"]["wrong"] == 0
    assert "1000000" in lines["fault"]["figures"]["error raised"]


@pytest.mark.slow
@pytest.mark.long
def test_rehearsal_of_checks(tmp_path: Path) -> None:
    lines = rehearsed(tmp_path, "--only", ",".join(e.key for e in LINES if e.check))
    for key in ("op-cases", "op-gradients", "op-memcheck", "op-racecheck", "op-synccheck"):
        assert lines[key]["figures"]["failed"] == 0 and lines[key]["figures"]["passed"] > 0
    for key in ("parity-f32", "parity-bf16"):
        assert lines[key]["figures"]["wrong"] == 0 and lines[key]["figures"]["compared"] == 2
    for key in ("layers-f32", "layers-bf16", "steps", "fault", "profile"):
        assert lines[key]["figures"]["wrong"] == 0, lines[key]
    assert lines["soak"]["figures"]["steps"] == 20
    assert lines["ddp"]["figures"]["loss difference"] < 1e-4
    assert lines["ddp"]["figures"]["ranks differ"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("each", speed.LINES, ids=lambda each: each.key)
def test_every_kind_of_work_has_a_tiny_form(each: Line) -> None:
    workload = speed.tiny(each.measure.args[0])
    model = workload.build()
    assert sum(p.numel() for p in model.parameters()) < 100_000
    assert workload.density == each.measure.args[0].density
    loss = model(**workload.make_batch()).loss
    loss.backward()
    assert loss.isfinite()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("key", ["bert-large-padded", "resnet-50"])
def test_rehearsal_of_speed(tmp_path: Path, key: str) -> None:
    figures = rehearsed(tmp_path, "--only", key, "--profile")[key]["figures"]
    assert figures["× eager"] > 0 and figures["first step of eager's"] > 0
    assert figures["stages"]["capture"] > 0 and figures["first step, s"] > 0
    assert 0 < len(figures["kernels"]) <= 60 and figures["kernels, ms"] > 0
    comparison = figures["comparison"]
    assert comparison["settings"]["dtype"] == "bf16" and comparison["settings"]["cold_compile"]
    assert comparison["sides"]["ortrain"]["native_share"] == 1.0
    assert comparison["sides"]["ortrain"]["block"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_rehearsal_of_memory(tmp_path: Path) -> None:
    figures = rehearsed(tmp_path, "--group", "memory")["largest-batch"]["figures"]
    assert figures["batch"] == 11 and figures["batch × eager's"] == 11 / 5
    assert figures["time of a sample, of that at 16"] > 0

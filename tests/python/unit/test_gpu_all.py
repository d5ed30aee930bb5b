# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What is run on a GPU, without one: the list, the search for batches, results, rehearsals."""

import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compare, step_clock
from benchmarks.compare import Settings
from benchmarks.gpu_all import kernels, memory, op_cases, parts, record, speed, training
from benchmarks.gpu_all.__main__ import GROUPS, LINES, main, reason_not_to_run
from benchmarks.gpu_all.line import Aim, Line, Run, find_tool, is_fault, not_run, outcome
from benchmarks.kernel_times import kernel_times
from benchmarks.memory import is_out_of_memory, try_batch
from benchmarks.peers import PEERS
from benchmarks.table import make_console
from benchmarks.worker import TIME_LIMIT, Worker, WorkerEndedError, WorkerError
from benchmarks.workloads import MODELS, Workload
from ortrain import _core
from ortrain.testing.models import CASES

PROVIDER = "simulator" if _core.gpu_platform() == "simulator" else "cpu"
MACHINE = {"gpu": {"name": "NVIDIA H200"}, "environment": {"versions": {"torch": "2.13.0"}}}


def run(**changes: Any) -> Run:
    made = Run("cpu", PROVIDER, True, ("eager", "ortrain"), 1, time.monotonic() + 120)
    return dataclasses.replace(made, **changes)


def line(measure: Callable[[Run], dict[str, Any]], *aims: Aim, check: bool = False) -> Line:
    return Line("key", "ops", "Title", aims, 10.0, measure, check)


# --- the list


def test_lines_have_what_is_aimed_at() -> None:
    by_key = {each.key: each for each in LINES}
    assert len(by_key) == len(LINES)
    words = "smoke ops sanitizer parity soak speed memory kernels"
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


# --- the clock


def test_steps_on_a_device_are_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count()
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: str) -> None:
            assert stream == "stream"
            self.at = next(ticks)
            log.append("event")

        def elapsed_time(self, other: Any) -> float:
            return 1e3 * (other.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append("wait"))

    def step() -> torch.Tensor:
        log.append("step")
        next(ticks)
        return torch.tensor(0.5)

    made = step_clock.time_steps(step, 3, "cuda:0")
    assert made["wall"] == [2.0, 2.0, 2.0] and made["loss"] == 0.5
    assert len(made["cpu"]) == len(made["faults"]) == 3 and made["block"] > 0
    # Nothing waits between the steps.
    assert log == ["step", "wait", *["event", "step", "event"] * 3, "wait"]


def test_steps_on_the_cpu_are_timed_by_the_clock() -> None:
    def step() -> torch.Tensor:
        time.sleep(0.002)
        return torch.tensor(1.0)

    made = step_clock.time_steps(step, 4, "cpu")
    assert len(made["wall"]) == 4 and min(made["wall"]) >= 0.002
    assert made["block"] >= 0.002


def test_kernels_of_a_step_are_told() -> None:
    left = torch.randn(64, 64)
    made = kernel_times(lambda: [left @ left for _ in range(3)], "cpu")
    (product,) = (row for row in made["kernels"] if row["kernel"] == "aten::mm")
    assert product["count"] == 3 and 0 < product["us"] <= made["total us"]
    assert len(kernel_times(lambda: (left @ left).sum().cos(), "cpu", 2)["kernels"]) == 2


def test_settings_want_products_of_the_device() -> None:
    with pytest.raises(ValueError, match="products on 'cuda:0' need a product_edge"):
        Settings(device="cuda:0")
    with pytest.raises(ValueError, match="sides on 'cuda:0' are to be alone"):
        Settings(device="cuda:0", product_edge=64)


# --- pieces that need a process


def test_worker_ends_at_its_deadline() -> None:
    with Worker({}, 1, time.monotonic() + 0.2) as worker:
        with pytest.raises(WorkerEndedError, match="the time limit was reached"):
            worker.ask("flops", workload=dataclasses.asdict(Workload("gpt2", 1, 1024)))


def test_worker_does_what_was_begun() -> None:
    plain = dataclasses.asdict(Workload("mlp", 8, 1))
    with Worker({}, 1) as worker:
        worker.begin("prepare", workload=plain, peer="ortrain")
        worker.begin("call", function="resources:resident_bytes")
        assert worker.ask("flops", workload=plain) > 0
        worker.begin("prepare", workload={**plain, "overrides": {"depth": 3}}, peer="eager")
        with pytest.raises(WorkerError, match="TypeError"):
            worker.settle()
        worker.begin("flops", workload=plain)
        worker.close(at_once=True)


HASH = """
import hashlib, sys
from benchmarks.workloads import Workload
model = Workload("bert-cls", 1, 8, overrides=dict(hidden_size=16, num_hidden_layers=1,
    num_attention_heads=2, intermediate_size=32, vocab_size=97)).build(sys.argv[1])
digest = hashlib.sha256()
for name, tensor in model.state_dict().items():
    digest.update(name.encode() + tensor.cpu().numpy().tobytes())
print(digest.hexdigest(), {tensor.device.type for tensor in model.state_dict().values()})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda:0",
            marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
        ),
    ],
)
def test_processes_draw_equal_weights(device: str) -> None:
    made = {
        subprocess.run(
            [sys.executable, "-c", HASH, device],
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for _ in range(2)
    }
    assert len(made) == 1 and repr(torch.device(device).type) in made.pop()


def test_weights_of_the_cpu_are_those_of_its_seed() -> None:
    torch.manual_seed(0)
    plain = MODELS["mlp"].build({})
    made = Workload("mlp", 1, 1).build().state_dict()
    assert all(torch.equal(made[name], weight) for name, weight in plain.state_dict().items())


@pytest.mark.parametrize("cores", [1, 1000])
def test_sides_that_are_done_stay_where_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    """The time is over in the second round of the second of three sides."""
    started: list[Worker] = []
    turns = []

    class Ended(Worker):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            started.append(self)
            if len(turns) == 4:
                self._end_late()

        def ask(self, request: str, **arguments: Any) -> Any:
            if request == "steps":
                turns.append(self)
                if len(turns) == 4:
                    for worker in started:
                        worker._end_late()
            return super().ask(request, **arguments)

    monkeypatch.setattr(compare, "Worker", Ended)
    monkeypatch.setattr(compare, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(compare, "START_TOGETHER", cores)
    settings = Settings(
        peers=("eager", "ortrain", "tuned"),
        threads=1,
        rounds=2,
        cold_compile=True,
        product_edge=64,
        alone=True,
        profiled=("eager",),
    )
    so_far = []
    made = compare.compare(
        Workload("mlp", 8, 1),
        settings,
        deadline=time.monotonic() + 100,
        done=lambda result: so_far.append(list(result["sides"])),
    )
    eager, ours, tuned = made["sides"].values()
    assert "error" not in eager and eager["eta"] > 0 and eager["peak_bytes"] > 0
    assert eager["profile"]["kernels"] and eager["phases"]["first step"] > 0
    assert ours["error"] == TIME_LIMIT and ours["eta"] > 0 and "peak_bytes" not in ours
    assert ours["first_step"]["stages"]["capture"] > 0
    assert tuned["error"] == TIME_LIMIT and "wall" not in tuned
    assert made["reference_error"] == TIME_LIMIT and made["flops"] > 0
    assert len(so_far) == 3
    figures = speed.figures_of(made)
    assert figures["× eager"] > 0 and "ortrain: the time limit" in figures["unfinished"]
    json.dumps(made)


def test_comparison_without_time_has_errors() -> None:
    settings = Settings(("eager",), threads=1, rounds=1, product_edge=64, alone=True)
    made = compare.compare(Workload("mlp", 8, 1), settings, deadline=time.monotonic())
    assert made["sides"]["eager"]["error"] == TIME_LIMIT and made["flops"] is None
    assert made["gemm"] == {} and "error" in speed.figures_of(made)


# Stands for ortrain_check_kernels: ten cases, one of which ends the process, one is the last that
# its device takes, one never ends.
PROGRAM = """#!{python}
import json, sys, time
arguments = sys.argv[2:]
part, parts = map(int, arguments[arguments.index("--part") + 1].split("/"))
after = int(arguments[arguments.index("--after") + 1]) if "--after" in arguments else -1
checked = failed = 0
for case in range(10):
    if case % parts != part or case <= after:
        continue
    print(json.dumps({{"at": case, "case": "Op/" + str(case)}}), flush=True)
    checked += 1
    if case == 3:
        sys.exit("killed by case 3")
    if case == 5:
        print(json.dumps({{"failed": 5, "case": "Op/5", "kernel": "own", "type": "float32",
                          "message": "illegal address"}}), flush=True)
        sys.exit(3)
    if case == 7:
        time.sleep(60)
print(json.dumps({{"cases": checked, "passed": checked, "failed": failed, "refused": 0,
                  "largest": 0.25, "left_out": 0}}))
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "program"
    path.write_text(PROGRAM.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("ORTRAIN_CHECK_KERNELS", str(path))
    monkeypatch.setattr(op_cases, "SILENCE", 1.0)
    return path


@pytest.mark.parametrize("processes", [1, 3])
def test_cases_go_on_after_one_that_ends_its_process(program: Path, processes: int) -> None:
    figures = op_cases.check_all(["values"], processes, time.monotonic() + 60).figures()
    assert figures["cases"] == 10 and figures["failed"] == 3 and figures["left out"] == 0
    text = "\n".join(figures["messages"])
    assert "Op/3: the process ended with status 1: killed by case 3" in text
    assert "Op/5 own float32: illegal address" in text
    assert "Op/5: the device takes no more work after it" in text
    assert "Op/7: no answer in 1 s" in text


def test_cases_that_were_left_out_are_told(program: Path) -> None:
    figures = op_cases.check_all(["values"], 1, time.monotonic() - 1).figures()
    assert figures["left out"] > 0


needs_program = pytest.mark.skipif(
    PROVIDER != "simulator", reason="this build has no simulator of the GPU provider"
)


@needs_program
def test_program_checks_cases_of_own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTRAIN_CHECK_KERNELS", raising=False)

    def named(*arguments: str) -> tuple[set[str], dict[str, Any]]:
        done = subprocess.run(
            [op_cases.find_program(), *arguments], capture_output=True, text=True, check=True
        )
        *lines, last = map(json.loads, done.stdout.splitlines())
        return {line["case"] for line in lines if "at" in line}, last

    cases, found = named("values", "--only", "Softmax/rows")
    assert found["cases"] == len(cases) > 0 and found["failed"] == found["left_out"] == 0
    halves = [named("values", "--only", "Softmax/rows", "--part", f"{i}/2")[0] for i in (0, 1)]
    assert halves[0] | halves[1] == cases and not halves[0] & halves[1]
    kernels = _core.device_kernels(PROVIDER)
    others = {"host", "view", "ref"}  # the last of them makes nothing on a device
    own = [case for case in _core.op_cases() if not others.issuperset(kernels[case["op"]])]
    _, found = named("values", "--own", "--seconds", "0")
    assert found["cases"] == 0 and found["left_out"] == len(own) < len(_core.op_cases())
    gradients, found = named("gradients", "--only", "Softmax/rows")
    assert gradients < cases and found["failed"] == 0


@needs_program
@pytest.mark.parametrize(
    "arguments", [[], ["sums"], ["values", "--part", "2/2"], ["values", "--seconds", "x"]]
)
def test_program_refuses(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTRAIN_CHECK_KERNELS", raising=False)
    command = [op_cases.find_program(), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "usage:" in done.stderr and done.stdout == ""


@needs_program
def test_rehearsal_of_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORTRAIN_CHECK_KERNELS", raising=False)
    figures = rehearsed(tmp_path, "--only", "op-cases")["op-cases"]["figures"]
    assert figures["failed"] == 0 and figures["passed"] > 0
    assert figures["cases"] > 30 and figures["left out"] == 0


def test_program_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_CHECK_KERNELS", "/nowhere/program")
    with pytest.raises(FileNotFoundError, match="/nowhere/program is missing: cmake --build"):
        op_cases.check_all(["values"], 1, time.monotonic() + 5)


def test_sanitizer_is_called_and_read(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(
        "#!/bin/sh\n"
        'test "$1 $2 $3 $4" = "--tool memcheck --print-limit 20" || exit 3\n'
        'echo "========= Invalid __global__ write of size 4 bytes"\n'
        'echo \'{"cases": 1, "passed": 3, "failed": 0, "refused": 0, "left_out": 2}\'\n'
        'echo "========= ERROR SUMMARY: 2 errors"\n'
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + os.environ["PATH"])
    monkeypatch.setattr(op_cases, "_processes", lambda _: 6)
    assert find_tool("compute-sanitizer") == str(tool)
    measured = run(rehearsal=False)
    figures = op_cases.measure_sanitized(measured, tool="memcheck")
    assert figures["errors"] == 4 and figures["passed"] == 6 and figures["left out"] == 4
    assert "Invalid __global__ write" in figures["reports"][0]
    tool.write_text("#!/bin/sh\necho device not supported; exit 1\n")
    figures = op_cases.measure_sanitized(measured, tool="memcheck")
    assert "no summary" in figures["error"]
    assert figures["processes that did not end well"] == 2
    monkeypatch.setattr(op_cases, "find_tool", lambda name: None)
    with pytest.raises(FileNotFoundError, match="compute-sanitizer was not found"):
        op_cases.measure_sanitized(measured, tool="memcheck")


def test_hazards_of_a_race_are_counted() -> None:
    text = "========= RACECHECK SUMMARY: 3 hazards displayed (3 errors, 0 warnings)"
    assert op_cases.sanitized_figures([(text, None)], rehearsal=False)["errors"] == 3


# --- parts


def test_parts_name_lines_that_there_are() -> None:
    keys = {each.key for each in LINES}
    for name, part in parts.PARTS.items():
        named = [key for lane in part.lanes for key in lane]
        assert set(named) <= keys and len(named) == len(set(named)), name
        assert part.seconds <= 570, "a command has ten minutes"
    assert {key for part in parts.PARTS.values() for lane in part.lanes for key in lane} == keys


def test_lanes_go_on_after_a_line_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CHECK_KERNELS", "/nowhere/program")
    output = tmp_path / "out"
    lanes = ["--lane", "op-cases,found", "--rehearse", "--seconds", "100"]
    assert parts.main([*lanes, "--output", str(output)]) == 0
    made = json.loads((output / "lines.json").read_text())
    assert set(made) == {"op-cases", "found"}
    assert all(each["status"] == "failed" for each in made.values())
    assert "/nowhere/program is missing" in made["op-cases"]["error"]
    assert "=== found" in (output / "log.txt").read_text()


def test_line_that_overruns_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "KILLED_AFTER", -3.0)
    results = parts.Results(tmp_path)
    parts.run_line("found", ["--rehearse"], 3.1, results)
    made = json.loads((tmp_path / "lines.json").read_text())
    assert made["found"] == {
        "status": "failed",
        "error": "no result, status None",
        "whole seconds": made["found"]["whole seconds"],
    }


def test_options_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(parts, "run_lanes", lambda *arguments: given.extend(arguments[:3]))
    monkeypatch.setattr(parts.Results, "__init__", lambda self, folder: None)
    (tmp_path / "lines.json").write_text("{}")
    output = ["--output", str(tmp_path)]
    more = ["--rounds", "3", "--peers", "eager,ortrain", "--device", "cuda:1", "--profile"]
    assert parts.main(["--lane", "gpt2", "--seconds", "200", *more, *output]) == 0
    assert given[:2] == [[["gpt2"]], 200.0]
    assert given[2] == [
        *("--peers", "eager,ortrain", "--rounds", "3", "--device", "cuda:1", "--profile")
    ]
    given.clear()
    assert parts.main(["E", "--peers", "ortrain", *output]) == 0
    assert given[2] == ["--peers", "eager,ortrain", "--peers", "ortrain"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lane", "gpt2", "--turns", "3"],
        ["--lane", "gpt2,gpt5"],
        ["--lane", "gpt2", "--peers", "jax,ortrain"],
        ["--lane", "gpt2", "--rounds", "0"],
        ["C", "--lane", "gpt2"],
        ["F"],
        [],
    ],
)
def test_parts_refuse_before_anything_runs(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    with pytest.raises(SystemExit) as refused:
        parts.main([*arguments, "--output", str(output)])
    assert refused.value.code == 2 and not output.exists()
    assert "--turns" not in arguments or "unknown option: --turns" in capsys.readouterr().err


def test_line_that_is_ended_keeps_what_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "POLL", 0.05)
    written = tmp_path / "gpu.json"
    script = (
        "import pathlib, time\n"
        f'pathlib.Path({str(written)!r}).write_text(\'{{"lines": {{"a": {{"x": 1}}}}}}\')\n'
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    results = parts.Results(tmp_path / "out")
    status = parts._followed(process, time.monotonic() + 2, tmp_path, "a", results)
    assert status is None and process.poll() is not None
    assert json.loads((tmp_path / "out" / "lines.json").read_text()) == {"a": {"x": 1}}


def test_no_line_is_begun_without_time(tmp_path: Path) -> None:
    parts.run_lanes([["found"]], 1.0, [], parts.Results(tmp_path))
    made = json.loads((tmp_path / "lines.json").read_text())
    assert made["found"]["status"] == "not run"


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


def rehearsed(tmp_path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    assert main(["--rehearse", "--output", str(tmp_path), *arguments]) == 0
    document = json.loads((tmp_path / "rehearsal.json").read_text())
    assert document["rehearsal"] is True and document["gpu"] is None
    for result in document["lines"].values():
        assert result["status"] == "rehearsed", result.get("error")
        assert all(aim["reached"] is None for aim in result["aims"])
    return document["lines"]


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

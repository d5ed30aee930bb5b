# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Sides of a comparison: their clock, their processes, what stands where the time is over."""

import dataclasses
import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import compare, step_clock
from benchmarks.compare import Settings
from benchmarks.gpu_all import speed
from benchmarks.kernel_times import kernel_times
from benchmarks.worker import TIME_LIMIT, Worker, WorkerEndedError, WorkerError
from benchmarks.workloads import MODELS, Workload

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


@pytest.mark.long
@pytest.mark.sampled(1)
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


@pytest.mark.long
@pytest.mark.sampled(1)
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

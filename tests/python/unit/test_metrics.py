# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
import logging
import socket
import sys

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.metrics import StepMetrics, modules_in, peak_memory_bytes

NAMES = {
    "ortrain/step_time",
    "ortrain/tokens_per_second",
    "ortrain/peak_memory_mib",
    "ortrain/planned_memory_mib",
    "ortrain/captures",
    "ortrain/escapes",
    "ortrain/fallbacks",
}


class Branching(nn.Module):
    """Cannot be captured whole."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x * 2


class Escaping(nn.Module):
    """One of its operators runs in PyTorch."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return torch.cumprod(self.linear(x), 1)


def train(model, rows=2):
    model(torch.ones(rows, 4)).sum().backward()


def scalars_in(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {name: events.Scalars(name) for name in events.Tags()["scalars"]}


def test_figures_of_steps():
    model = ORTModule(nn.Linear(4, 4))
    metrics = StepMetrics(model)
    train(model)
    first = metrics.step(tokens=10)
    train(model)
    second = metrics.step()
    assert (first.step, second.step) == (1, 2)
    assert first.tokens_per_second == pytest.approx(10 / first.step_time)
    assert second.tokens_per_second is None
    assert "ortrain/tokens_per_second" not in second.scalars()
    assert set(first.scalars()) == NAMES
    assert (second.captures, second.escapes, second.fallbacks) == (1, 0, 0)
    assert second.planned_memory_mib * 2**20 == model.memory_plan().total_bytes
    assert 50 < first.peak_memory_mib <= second.peak_memory_mib
    assert first.peak_memory_mib * 2**20 <= peak_memory_bytes()


def test_begin_leaves_out_what_passed(monkeypatch):
    now = iter([0.0, 100.0, 103.0, 103.0, 104.5, 104.5])
    metrics = StepMetrics(ORTModule(nn.Linear(4, 4)))
    monkeypatch.setattr("ortrain.metrics.time.perf_counter", lambda: next(now))
    metrics._logged = float("inf")
    metrics.begin()  # at 0
    metrics.begin()  # at 100
    monkeypatch.setattr(metrics, "_tell", lambda figures: None)
    assert metrics.step(tokens=6).step_time == 3.0
    assert metrics.step(tokens=6).tokens_per_second == 4.0


@pytest.mark.since_torch(2, 12)
def test_captures_and_what_runs_in_pytorch_are_counted():
    model = ORTModule(nn.Linear(4, 4))
    train(model)
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
    assert StepMetrics(model).step().captures == 2
    escaping = ORTModule(Escaping())
    with pytest.warns(RuntimeWarning, match="cumprod"):
        train(escaping)
    figures = StepMetrics(escaping).step()
    assert (figures.captures, figures.escapes, figures.fallbacks) == (1, 1, 0)
    cut = ORTModule(Branching())
    with pytest.warns(RuntimeWarning, match="runs in pieces"):
        train(cut)
    figures = StepMetrics(cut).step()
    assert figures.fallbacks == 1 and figures.escapes >= 1 and figures.captures >= 1


def test_modules_are_found_inside_of_others():
    inner = ORTModule(nn.Linear(4, 4))
    assert modules_in(nn.Sequential(inner, nn.Sequential(inner))) == [inner]

    class Wrapper:
        module = nn.Sequential(inner)

    assert modules_in(Wrapper()) == [inner]
    for nothing in (nn.Linear(4, 4), object(), None):
        with pytest.raises(TypeError, match="no ORTModule in this"):
            StepMetrics(nothing)


def test_distributed_data_parallel_is_looked_into():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    try:
        model = nn.parallel.DistributedDataParallel(ORTModule(nn.Linear(4, 4)))
        metrics = StepMetrics(model)
        train(model)
        assert metrics.step().captures == 1
    finally:
        torch.distributed.destroy_process_group()


def test_tensorboard_gets_the_scalars(tmp_path):
    model = ORTModule(nn.Linear(4, 4))
    with StepMetrics(model, log_dir=tmp_path) as metrics:
        figures = []
        for _ in range(3):
            train(model)
            figures.append(metrics.step(tokens=8))
    written = scalars_in(tmp_path)
    assert set(written) == NAMES
    times = written["ortrain/step_time"]
    assert [event.step for event in times] == [1, 2, 3]
    assert [event.value for event in times] == pytest.approx([f.step_time for f in figures])


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    model = ORTModule(nn.Linear(4, 4))
    with StepMetrics(model, log_dir=tmp_path / "runs") as metrics:
        metrics.step()
    assert not (tmp_path / "runs").exists()


def test_log_gets_a_line_now_and_then(caplog):
    model = ORTModule(nn.Linear(4, 4))
    with caplog.at_level(logging.INFO, logger="ortrain.metrics"):
        metrics = StepMetrics(model)
        for _ in range(5):
            metrics.step(tokens=3)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("step 1: ") and "tokens/s" in caplog.messages[0]


def test_missing_tensorboard_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ModuleNotFoundError, match="pip install tensorboard"):
        StepMetrics(ORTModule(nn.Linear(4, 4)), log_dir=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"total_steps": 0}, ValueError, "total_steps must be at least 1, got 0"),
        ({"total_steps": 2.5}, TypeError, "total_steps must be an int, got float"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        StepMetrics(ORTModule(nn.Linear(4, 4)), **arguments)


def test_bad_tokens():
    metrics = StepMetrics(ORTModule(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="tokens must not be negative, got -1"):
        metrics.step(tokens=-1)
    with pytest.raises(TypeError, match="tokens must be an int, got Tensor"):
        metrics.step(tokens=torch.tensor(3))

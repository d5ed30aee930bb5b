# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Profiles: what is counted, by operator and by layer, the trace, the page, the command."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, _core
from ortrain.profile import NodeTime, Profile, profile
from ortrain.profile.__main__ import main

ROWS, WIDTH = 6, 16


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    _core.clear_profiles()
    yield
    _core.clear_profiles()
    assert not _core.profiling()


def blocks(count: int = 3) -> nn.Module:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
    return nn.Sequential(*layers)


def train(model: nn.Module, rows: int = ROWS) -> None:
    model(torch.randn(rows, WIDTH)).square().mean().backward()


@pytest.fixture
def measured() -> Profile:
    model = ORTModule(blocks())
    train(model)
    with profile(model) as result:
        assert _core.profiling()
        for _ in range(4):
            train(model)
    return result


def products(nodes: list[NodeTime]) -> list[NodeTime]:
    return [node for node in nodes if node.flops > 0]


def test_nodes_carry_what_they_cost(measured: Profile) -> None:
    assert {node.phase for node in measured.nodes} == {"forward", "backward"}
    assert all(node.runs == 4 and node.seconds > 0 for node in measured.nodes)
    forward = [node for node in products(measured.nodes) if node.phase == "forward"]
    assert len(forward) == 3
    for node in forward:
        assert node.flops == 4 * 2 * ROWS * WIDTH * WIDTH
        assert node.bytes == 4 * 4 * (2 * ROWS * WIDTH + WIDTH * WIDTH + WIDTH)
    # Three gradients of weights, and of the input of all but the first layer.
    backward = [node for node in products(measured.nodes) if node.phase == "backward"]
    assert sum(node.flops for node in backward) == 5 * forward[0].flops
    assert measured.nodes == sorted(measured.nodes, key=lambda node: -node.seconds)


def test_groups_share_the_time(measured: Profile) -> None:
    for groups in (measured.by_op(), measured.by_layer(), measured.by_layer(merge_repeated=False)):
        assert sum(group.share for group in groups) == pytest.approx(1)
        assert sum(group.seconds for group in groups) == pytest.approx(measured.seconds)
        assert sum(group.flops for group in groups) == sum(n.flops for n in measured.nodes)
    assert any(group.gflops > 0 for group in measured.by_op())
    assert all(group.gbytes > 0 for group in measured.by_op())


def test_repeated_layers_are_one() -> None:
    def row(layer: str) -> dict[str, Any]:
        sizes = {"bytes": 8.0, "flops": 0.0, "runs": 2, "seconds": 0.5}
        return {"op": "Tanh", "layer": layer, "kernel": "simd", "phase": "forward", **sizes}

    layers = ["encoder.layer.0.act/Tanh", "encoder.layer.11.act/Tanh", "head2/Tanh", ""]
    made = Profile([{"graph": "g", "steps": [row(layer) for layer in layers], "events": []}])
    names = {group.name: group for group in made.by_layer()}
    assert set(names) == {"encoder.layer.*.act, forward", "head2, forward", "(no layer), forward"}
    assert names["encoder.layer.*.act, forward"].runs == 4
    assert names["encoder.layer.*.act, forward"].bytes == 32
    assert len(made.by_layer(merge_repeated=False)) == 4


def test_trace_is_one_of_chrome(measured: Profile, tmp_path: Path) -> None:
    measured.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    runs = [event for event in events if event["ph"] == "X"]
    assert len(runs) == sum(node.runs for node in measured.nodes)
    assert [event["ts"] for event in runs] == sorted(event["ts"] for event in runs)
    assert runs[0]["ts"] == 0
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert {event["pid"] for event in runs} == set(processes)
    assert set(processes.values()) == {"Sequential"}
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {event["tid"] for event in runs} == set(lanes)
    assert {name.partition(",")[0] for name in lanes.values()} == {"forward", "backward"}
    rated = [event for event in runs if "GFLOP/s" in event["args"]]
    assert rated and all(event["args"]["flops"] > 0 for event in rated)
    total = sum(event["dur"] for event in runs)
    assert total * 1e-6 == pytest.approx(measured.seconds, rel=1e-3)


def test_latest_step_is_one_forward_and_backward(measured: Profile) -> None:
    step = measured.last_step()
    assert len(step) == len(measured.nodes)
    assert [event.node.phase for event in step] == sorted(
        (event.node.phase for event in step), reverse=True
    )
    assert step[-1] == measured.events[-1]


def test_page_fetches_nothing(measured: Profile, tmp_path: Path) -> None:
    measured.save_html(tmp_path / "page.html", "<tags> & more")
    text = (tmp_path / "page.html").read_text()
    assert "&lt;tags&gt; &amp; more" in text and "<tags>" not in text
    assert "http" not in text and "<script" not in text
    assert text.count("<rect") == len(measured.last_step())


def test_text_counts_what_it_leaves_out(measured: Profile) -> None:
    text = measured.tables(top=1)
    assert "matrix products" in text.splitlines()[0]
    assert text.count(" more, ") == 2
    assert str(Profile()) == "no node has run"
    assert "no node has run" in page_of(Profile())


def page_of(made: Profile) -> str:
    from ortrain.profile.page import page

    return page(made, "nothing")


def test_only_the_model_that_was_named() -> None:
    one, other = ORTModule(blocks(1)), ORTModule(blocks(2))
    with profile(nn.ModuleList([one])) as measured:
        train(one)
        train(other)
    assert len(products(measured.nodes)) == 2  # no gradient of the input
    with profile() as everything:
        train(one)
        train(other)
    assert len(products(everything.nodes)) == 2 + 5


def test_method_gives_the_rows() -> None:
    model = ORTModule(blocks(1))
    train(model)
    assert model.profile() == []
    with profile(model) as measured:
        train(model, ROWS)
        train(model, ROWS + 1)
    assert model.profile() == measured.nodes
    # Two plans of one graph: each node is one row.
    assert all(node.runs == 2 for node in measured.nodes)
    assert measured.nodes[0].bytes > 0


def test_nothing_is_recorded_when_off() -> None:
    model = ORTModule(blocks(1))
    with profile(model):
        train(model)
    rows = model.profile()
    train(model)
    assert model.profile() == rows


def test_state_is_restored_after_an_error() -> None:
    model = ORTModule(blocks(1))
    with pytest.raises(ValueError, match="mine"):
        with profile(model) as measured:
            train(model)
            raise ValueError("mine")
    assert measured.nodes
    assert not _core.profiling()


def test_flag_switches_it_on_from_the_start() -> None:
    code = "from ortrain import _core; print(_core.profiling())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ORTRAIN_PROFILE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "True\n"


def test_plain_module_is_refused() -> None:
    with pytest.raises(TypeError, match="no ORTModule in this Linear"):
        with profile(nn.Linear(2, 2)):
            pass


SCRIPT = """
import sys
import torch
from ortrain import ORTModule

def train():
    model = ORTModule(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()

train()  # the model is gone when the script ends
print(sys.argv[1:], __name__)
sys.exit(3)
"""


def test_command_runs_a_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    trace, page = tmp_path / "t.json", tmp_path / "p.html"
    outputs = ["--trace", str(trace), "--html", str(page)]
    assert main([str(script), "--own", "1", *outputs, "--", "--html", "x"]) == 3
    out = capsys.readouterr().out
    assert "['--own', '1', '--html', 'x'] __main__" in out
    assert "GFLOP/s" in out and "Linear" in out
    assert json.loads(trace.read_text())["traceEvents"]
    assert "script.py" in page.read_text()


def test_command_names_a_missing_script(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere.py"])
    assert "there is no script nowhere.py" in capsys.readouterr().err

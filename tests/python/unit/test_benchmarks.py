# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: what is counted, sides that fail, the files that are written."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import chart, first_step, memory, overhead, suite, train_step
from benchmarks.compare import Settings, compare, ratio
from benchmarks.peers import MAX_NORM, PEERS, make_step
from benchmarks.table import make_console
from benchmarks.worker import Worker, WorkerError
from benchmarks.workloads import MODELS, WITHOUT_DROPOUT, Workload

TINY = {
    "vocab_size": 97,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


def test_lengths_have_the_mean_that_was_asked_for() -> None:
    for density in (0.25, 0.5, 0.9, 1.0):
        for batch in (1, 2, 16):
            lengths = Workload("bert-cls", batch, 128, density).lengths()
            assert len(lengths) == batch
            assert sum(lengths) / batch / 128 == pytest.approx(density, abs=0.02)
            assert max(lengths) <= 128 and min(lengths) >= 1


def test_batch_is_the_same_each_time_and_masked() -> None:
    workload = Workload("bert-mlm", 4, 64, 0.5, 0.2, {"vocab_size": 97})
    batch, again = workload.make_batch(), workload.make_batch()
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    assert batch["attention_mask"].sum(1).tolist() == workload.lengths()
    assert ((batch["input_ids"] == 0) == (batch["attention_mask"] == 0)).all()
    labelled = batch["labels"] != -100
    assert not (labelled & (batch["attention_mask"] == 0)).any()
    assert (labelled.sum(1) > 0).all()
    assert labelled.sum() / batch["attention_mask"].sum() == pytest.approx(0.2, abs=0.1)
    assert batch["input_ids"].max() < 97


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rnn", 1, 1), "unknown model 'rnn'"),
        (("gpt2", 0, 1), "must be positive"),
        (("vit-base", 1, 32, 0.5), "density 0.5 does not apply"),
        (("gpt2", 1, 8, 1.0, 0.5), "label rate 0.5 does not apply"),
    ],
)
def test_workload_refuses(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload(*arguments)


def test_flops_are_those_of_the_formula() -> None:
    # Eight layers, forward and two gradients, but no gradient of the batch.
    assert Workload("mlp", 8, 1).flops() == (8 * 3 - 1) * 2 * 8 * 32 * 32
    small = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 97}
    batch, seq, width, layers = 3, 20, 16, 2
    tokens = batch * seq
    weights = layers * 12 * width * width + 97 * width
    causal_attention = 6 * layers * width * seq * tokens
    expected = 6 * weights * tokens + causal_attention
    assert Workload("gpt2", batch, seq, overrides=small).flops() == expected


def test_flops_leave_out_padding_and_unlabelled_rows() -> None:
    dense = Workload("bert-mlm", 4, 32, overrides=TINY)
    padded = dataclasses.replace(dense, density=0.5)
    # By rows of their own lengths, one at a time.
    by_row = sum(
        Workload("bert-mlm", 1, length, overrides=TINY).flops() for length in padded.lengths()
    )
    assert padded.flops() == pytest.approx(by_row)
    rare = dataclasses.replace(dense, label_rate=0.2)
    labelled = int((rare.make_batch()["labels"] != -100).sum())
    head = 97 * 8 + 8 * 8
    assert dense.flops() - rare.flops() == 6 * head * (4 * 32 - labelled)


def test_every_model_has_dropout_where_its_architecture_does() -> None:
    for name, model in MODELS.items():
        workload = Workload(name, 1, 8)
        rates = {part.p for part in workload.build_meta().modules() if _is_dropout(part)}
        assert rates <= {0.1, 0.0}, name
        assert (0.1 in rates) == (name not in WITHOUT_DROPOUT), name
        assert model.kind in {"causal", "mlm", "classes", "image", "vector", "seq2seq"}


def _is_dropout(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Dropout)


def test_sides_do_the_same_step() -> None:
    workload = Workload("mlp", 8, 1)
    batch = workload.make_batch()
    losses = {}
    for peer in ("eager", "tuned", "ortrain"):
        side = PEERS[peer].make(workload.build())
        step = make_step(side, batch, "f32")
        losses[peer] = [float(step()) for _ in range(5)]
        assert all(p.grad is None for p in side.model.parameters())
        group = side.optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (1e-4, 0.01)
        assert MAX_NORM == 1.0
    assert losses["eager"][0] > losses["eager"][-1]
    for peer in ("tuned", "ortrain"):
        assert losses[peer] == pytest.approx(losses["eager"], rel=1e-5)


def test_settings_refuse() -> None:
    for wrong in ({"peers": ("jax",)}, {"peers": ()}, {"dtype": "f16"}, {"rounds": 0}):
        with pytest.raises(ValueError):
            Settings(**wrong)
    with pytest.raises(SystemExit):
        train_step.main(["--model", "mlp", "--peers", "jax"])
    with pytest.raises(SystemExit):
        suite.main(["--only", "unknown"])


def test_fit_is_a_line() -> None:
    assert overhead.fit([(1, 5.0), (2, 7.0), (4, 11.0)]) == pytest.approx((3.0, 2.0))


def test_suite_covers_what_is_aimed_at() -> None:
    keys = [entry.key for entry in suite.SUITE]
    assert len(set(keys)) == len(keys)
    assert set(suite.ETA_TARGETS) <= set(keys)
    assert {entry.workload.model for entry in suite.SUITE} == set(MODELS)
    assert sum(bool(entry.targets) for entry in suite.SUITE) == 10
    for entry in suite.SUITE:
        assert set(entry.targets) in (set(), {"eager", "tuned", "compile"})


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One comparison with a side whose process cannot start."""
    with pytest.MonkeyPatch.context() as patch:
        broken = dataclasses.replace(PEERS["compile"], environment={"PYTHONHOME": "/nowhere"})
        patch.setitem(PEERS, "compile", broken)
        settings = Settings(("eager", "compile", "ortrain"), threads=1, rounds=1)
        return compare(Workload("mlp", 8, 1), settings)


@pytest.mark.long
@pytest.mark.slow
def test_comparison_has_figures_of_every_side(result: dict[str, Any]) -> None:
    assert json.loads(json.dumps(result))["workload"]["name"] == "mlp 8"
    assert set(result["gemm"]) == {"torch.mm", "ortrain"}
    for library, rate in result["gemm"].items():
        assert 1e8 < rate <= result["gemm_best"][library]
    assert result["flops"] == Workload("mlp", 8, 1).flops()
    for name in ("eager", "ortrain"):
        side = result["sides"][name]
        assert side["threads"] == 1
        assert side["parameter_tensors"] == 16
        for clock in ("wall", "cpu"):
            times = side[clock]
            assert 0 < times["min"] <= times["median"] <= times["q3"]
            assert times["q1"] <= times["median"]
        assert side["wall"]["steps"] == side["cpu"]["steps"] > 10
        assert 0 < side["eta"] < 1 and 0 < side["eta_best"] < 1
        assert side["first_step"]["wall"] > side["wall"]["min"]
        assert side["peak_bytes"] > 50e6
        assert side["faults_per_step"] >= 0
    assert result["sides"]["ortrain"]["native_share"] == 1.0
    assert result["sides"]["ortrain"]["fallback"] == ""


@pytest.mark.long
@pytest.mark.slow
def test_side_that_fails_is_named_and_the_others_go_on(
    result: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "ended with status" in result["sides"]["compile"]["error"]
    assert ratio(result, "compile", "ortrain") is None
    assert ratio(result, "eager", "ortrain") > 0
    suite.print_sides(result, make_console())
    whole = result | {"targets": {"eager": 1e9}, "eta_target": None}
    suite.print_summary([whole], make_console())
    out = capsys.readouterr().out
    assert "compile failed: the process ended" in out
    assert "(1e+09)" in out
    document = {"environment": suite.env.collect(), "workloads": [whole]}
    page = chart.page(document)
    assert "the process ended" in page and page.count("<rect") >= 4 and "http" not in page


@pytest.mark.slow
@pytest.mark.long
def test_command_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "r.json"
    overrides = json.dumps(TINY)
    arguments = ["--model", "minilm", "--batch", "2", "--seq", "8", "--density", "0.5"]
    arguments += ["--set", overrides, "--peers", "ortrain", "--rounds", "1", "--threads", "1"]
    assert train_step.main([*arguments, "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["environment"]["machine"]["cpu"]
    assert document["sides"]["ortrain"]["native_share"] == 1.0
    assert "ortrain" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.slow
def test_first_step_and_new_shape() -> None:
    workload = Workload("mlp", 8, 1)
    others = [Workload("mlp", 10, 1), Workload("mlp", 9, 1)]
    row = first_step.measure(workload, others, "ortrain", {}, 1)
    assert row["first"]["cpu"] > 0 and row["first"]["wall"] > row["steady"] > 0
    assert max(row["larger_shape_cost"], row["shape_cost"]) < row["first"]["wall"]
    names = [name for name, _, _ in first_step.rows(["eager", "ortrain"], "/tmp/x")]
    assert names == ["eager", "ortrain, nothing cached", "ortrain, second process"]


@pytest.mark.long
@pytest.mark.slow
def test_memory_is_as_planned() -> None:
    overrides = {"vocab_size": 97, "num_hidden_layers": 1}
    side = memory.measure(Workload("minilm", 8, 128, overrides=overrides), "ortrain", 1)
    assert "error" not in side, side
    plan = side["plan"]
    assert plan["arena_bytes"] <= 1.05 * plan["arena_lower_bound"]
    assert side["forward_backward"] == pytest.approx(plan["total_bytes"], rel=0.15)
    assert side["peak"] > side["resident_before"] > 0


@pytest.mark.slow
def test_worker_reports_errors_and_lives() -> None:
    plain = dataclasses.asdict(Workload("mlp", 8, 1))
    with Worker({}, 1) as worker:
        with pytest.raises(WorkerError, match="TypeError"):
            worker.ask("flops", workload={**plain, "overrides": {"depth": 3}})
        assert worker.ask("flops", workload=plain) > 0

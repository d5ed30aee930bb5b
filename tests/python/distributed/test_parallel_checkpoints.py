# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints and state dicts of several processes: one for all, for any number to go on from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from training_runs import make, train, weights_of

from ortrain.checkpoint import aggregate_checkpoints
from ortrain.errors import FileError, UnsupportedError

Group = Callable[[int], Ranks]
Weights = dict[str, torch.Tensor]


def stage(number: int, **more: Any) -> dict[str, Any]:
    return {"deepspeed_zero_optimization": {"stage": number}, **more}


def assert_equal(given: Weights, expected: Weights) -> None:
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(given[name], tensor), name


def run_on(folder: Path, given: dict[str, Any], before: int, after: int) -> tuple[str, Weights]:
    """Train, save, train; then load in a trainer that was made otherwise, and train again."""
    rank, size = dist.get_rank(), dist.get_world_size()
    trainer = make(size, "adam", model={"normed": True, "dropout": 0.3}, **given)
    train(trainer, rank, size, before)
    path = trainer.save_checkpoint(folder, {"epoch": 3})
    expected_losses = train(trainer, rank, size, after)
    other = make(size, "adam", seed=7, model={"normed": True, "dropout": 0.3}, **given)
    train(other, rank, size, 1)
    assert other.load_checkpoint(folder) == {"epoch": 3}
    assert train(other, rank, size, after) == expected_losses
    assert_equal(weights_of(other), weights_of(trainer))
    return path.name, weights_of(trainer)


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize(("batches", "before"), [(1, 4), (2, 4), (2, 5)])
def test_training_goes_on_bit_by_bit(
    group: Group, tmp_path: Path, number: int, batches: int, before: int
) -> None:
    given = {"batches": batches, "distributed": stage(number)}
    (first, weights), (second, others) = group(2).run(run_on, tmp_path, given, before, 6)
    assert first == second == "checkpoint-00000001"
    assert_equal(others, weights)
    assert [path.name for path in tmp_path.iterdir()] == [first]


def run_save(folder: Path, given: dict[str, Any], steps: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    trainer = make(size, "adam", **given)
    train(trainer, rank, size, steps)
    trainer.save_checkpoint(folder)


def run_load(folder: Path, given: dict[str, Any], steps: int) -> Weights:
    rank, size = dist.get_rank(), dist.get_world_size()
    trainer = make(size, "adam", seed=5, **given)
    trainer.load_checkpoint(folder)
    train(trainer, rank, size, steps)
    return weights_of(trainer)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("saved", "loaded"), [((2, 1), (4, 0)), ((4, 1), (2, 1)), ((2, 0), (3, 1))]
)
@pytest.mark.parametrize("once", [False, True])
def test_other_numbers_and_stages_go_on(
    group: Group, tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int], once: bool
) -> None:
    # In the middle of an optimizer step of three batches, which all but one trainer go on with.
    def given(number: int) -> dict[str, Any]:
        return {"batches": 3, "distributed": stage(number, allreduce_post_accumulation=once)}

    group(saved[0]).run(run_save, tmp_path, given(saved[1]), 7)
    results = group(loaded[0]).run(run_load, tmp_path, given(loaded[1]), 5)
    alone = make(1, "adam", batches=3)
    train(alone, 0, 1, 12)
    restored = make(1, "adam", seed=3, batches=3)
    restored.load_checkpoint(tmp_path)
    train(restored, 0, 1, 5)
    for weights in (*results, weights_of(restored)):
        for name, expected in weights_of(alone).items():
            torch.testing.assert_close(weights[name], expected, rtol=1e-5, atol=1e-5)
    for weights in results:
        assert_equal(weights, results[0])


def run_state_dict() -> tuple[dict[str, Any], Weights]:
    rank = dist.get_rank()
    trainer = make(2, "adam", distributed=stage(1))
    train(trainer, rank, 2, 3)
    state = trainer.state_dict()
    other = make(2, "adam", seed=9, distributed=stage(1))
    other.load_state_dict(state)
    assert train(other, rank, 2, 3) == train(trainer, rank, 2, 3)
    assert_equal(weights_of(other), weights_of(trainer))
    # Parameters alone leave the optimizer's states as they are.
    weights, before = trainer.state_dict(pytorch_format=True), trainer.state_dict()["optimizer"]
    trainer.load_state_dict(weights)
    after = trainer.state_dict()["optimizer"]
    for name, kinds in before.items():
        if name != "shared_optimizer_state":
            assert_equal(after[name], kinds)
    return state, weights


def test_state_dicts_are_whole(group: Group) -> None:
    results = group(2).run(run_state_dict)
    alone = make(1, "adam")
    train(alone, 0, 1, 3)
    expected = alone.state_dict()
    for rank, (state, _) in enumerate(results):
        assert state["trainer_options"]["world_rank"] == rank
        assert state["trainer_options"]["world_size"] == 2
        assert state["trainer_options"]["zero_stage"] == 1
        assert state["optimizer"].keys() == expected["optimizer"].keys()
        for name, kinds in expected["optimizer"].items():
            for kind, tensor in kinds.items():
                torch.testing.assert_close(state["optimizer"][name][kind], tensor)


def test_joined_as_one_folder(group: Group, tmp_path: Path) -> None:
    group(2).run(run_save, tmp_path, {"distributed": stage(1)}, 2)
    whole = aggregate_checkpoints([tmp_path, tmp_path], pytorch_format=False)
    assert whole["optimizer"]["0.weight"]["Moment_1"].shape == (64, 6)
    other = tmp_path.with_name("other")  # what another process had named, if nobody wrote there
    assert (
        aggregate_checkpoints([tmp_path, other]).keys() == whole["model"]["full_precision"].keys()
    )
    other.mkdir()
    with pytest.raises(UnsupportedError, match="2 folders of checkpoints"):
        aggregate_checkpoints([tmp_path, other])


def run_failures(folder: Path) -> list[str]:
    rank = dist.get_rank()
    trainer = make(2, "adam", distributed=stage(1))
    train(trainer, rank, 2, 1)
    texts = []
    for action in (
        lambda: trainer.save_checkpoint(folder / "a file"),
        lambda: trainer.load_checkpoint(folder / "nowhere"),
    ):
        try:
            action()
        except FileError as error:
            texts.append(str(error))
    train(trainer, rank, 2, 1)  # nobody waits for anybody
    return texts


def test_what_fails_in_one_process_fails_in_all(group: Group, tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("")
    first, second = group(2).run(run_failures, tmp_path)
    assert "cannot create the folder" in first[0]
    assert "there is no folder" in first[1]
    assert second == [f"process 0: {text}" for text in first]


def run_bad_user_dict(folder: Path) -> str:
    rank = dist.get_rank()
    trainer = make(2, "adam", distributed=stage(1))
    train(trainer, rank, 2, 1)
    text = ""
    try:
        trainer.save_checkpoint(folder, {"kept": torch.zeros(1)} if rank == 1 else None)
    except TypeError as error:
        text = str(error)
    train(trainer, rank, 2, 1)  # nobody waits for anybody
    return text


def test_a_bad_user_dict_in_one_process(group: Group, tmp_path: Path) -> None:
    first, second = group(2).run(run_bad_user_dict, tmp_path)
    assert second.startswith("user_dict['kept'] is a Tensor")
    assert first == f"process 1: {second}"
    assert list(tmp_path.iterdir()) == []


def run_refused(folder: Path) -> list[str]:
    rank = dist.get_rank()
    distributed = {"enable_adasum": True, "allreduce_post_accumulation": True}
    trainer = make(2, "adam", batches=2, distributed=distributed)
    train(trainer, rank, 2, 1)
    texts = []
    try:
        trainer.save_checkpoint(folder)
    except UnsupportedError as error:
        texts.append(str(error))
    sharded = make(2, "adam", distributed=stage(1))
    train(sharded, rank, 2, 1)
    try:
        sharded.save_as_onnx(folder / f"{rank}.onnx", training=True)
    except UnsupportedError as error:
        texts.append(str(error))
    return texts


def test_what_cannot_be_saved_is_told(group: Group, tmp_path: Path) -> None:
    for texts in group(2).run(run_refused, tmp_path):
        assert "save between two optimizer steps" in texts[0]
        assert "stage' must be 0" in texts[1]

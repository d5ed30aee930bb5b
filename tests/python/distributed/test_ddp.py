# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule below DistributedDataParallel, DeepSpeed and accelerate, in two processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ddp_runs
import pytest
import torch
from ranks import Ranks, ranks

Group = Callable[[int], Ranks]


def same_weights(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], *, atol: float = 1e-6
) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=atol, msg=name)


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"static_graph": True}])
def test_two_ranks_train_as_one_process(group: Group, options: dict[str, Any]) -> None:
    losses, weights = ddp_runs.one_process()
    results = group(2).run(ddp_runs.data_parallel, True, 1, options)
    for found, state in results:
        assert found == pytest.approx(losses, abs=1e-5, rel=0)
        same_weights(state, weights)
    for name in weights:
        assert torch.equal(results[0][1][name], results[1][1][name]), name


def test_no_sync_accumulates(group: Group) -> None:
    ours = group(2).run(ddp_runs.data_parallel, True, 3)
    theirs = group(2).run(ddp_runs.data_parallel, False, 3)
    for (found, state), (expected, weights) in zip(ours, theirs, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)
        same_weights(state, weights)


def test_unused_parameters(group: Group) -> None:
    ours = group(2).run(ddp_runs.unused_parameters, True)
    theirs = group(2).run(ddp_runs.unused_parameters, False)
    for state, weights in zip(ours, theirs, strict=True):
        same_weights(state, weights)


def test_gradients_are_handed_over_as_they_are_final(group: Group) -> None:
    for events in group(2).run(ddp_runs.order_of_buckets, True):
        assert events.count("gradient") == 8
        assert events.count("reduce") >= 8
        # an all-reduce starts after each layer, not all of them behind the last gradient
        last = len(events) - 1 - events[::-1].index("gradient")
        assert events[:last].count("reduce") >= 6, events


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_zero_trains_as_data_parallel(group: Group, stage: int) -> None:
    whole = group(2).run(ddp_runs.adamw_data_parallel)
    parts = group(2).run(ddp_runs.deepspeed_zero, stage, True)
    for (losses, weights, held), (found, state, share) in zip(whole, parts, strict=True):
        assert found == pytest.approx(losses, abs=1e-5)
        same_weights(state, weights, atol=1e-5)
        assert share <= 0.55 * held


@pytest.mark.slow
def test_accelerate_launches_and_wraps(group: Group) -> None:
    first, second = group(2).run(ddp_runs.accelerated)
    assert first == second
    assert first[-1] < first[0]


def test_fsdp_runs_in_pytorch_or_is_refused(group: Group) -> None:
    for original, second in group(2).run(ddp_runs.fully_sharded):
        assert original == ""  # with a warning that the module runs in PyTorch
        assert second.startswith("UnsupportedError") and "fully_shard" in second, second


@pytest.mark.slow
def test_trainer_that_evaluates_first_trains_in_parallel() -> None:
    with ranks(2) as processes:  # of their own: accelerate keeps its state
        (first, a), (second, b) = processes.run(ddp_runs.evaluates_before_training)
    assert first and second
    assert a == b

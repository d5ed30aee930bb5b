# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Samplers of balanced batches: what holds for any data, numbers of processes and settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from ortrain.distributed import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)

SETTINGS = {
    "costs": st.lists(st.integers(0, 100), min_size=1, max_size=60),
    "size": st.integers(1, 5),
    "shuffle": st.booleans(),
    "group_size": st.one_of(st.none(), st.integers(1, 20)),
    "random_level": st.sampled_from([0.0, 0.1, 1.0]),
    "epoch": st.integers(0, 3),
}


def samplers(costs: list[int], size: int, epoch: int = 0, **options: Any) -> list[Any]:
    made = [
        LoadBalancingDistributedSampler(costs, float, world_size=size, rank=rank, **options)
        for rank in range(size)
    ]
    for sampler in made:
        sampler.set_epoch(epoch)
    return made


@settings(max_examples=60, deadline=None)
@given(**SETTINGS)
def test_every_sample_is_drawn(costs: list[int], size: int, epoch: int, **options: Any) -> None:
    drawn = [list(sampler) for sampler in samplers(costs, size, epoch, **options)]
    rounds = -(-len(costs) // size)
    assert [len(indices) for indices in drawn] == [rounds] * size
    together = [index for indices in drawn for index in indices]
    assert set(together) == set(range(len(costs)))
    if len(costs) >= size:
        assert len(together) - len(set(together)) == rounds * size - len(costs)


@settings(max_examples=60, deadline=None)
@given(**SETTINGS)
def test_nothing_is_drawn_twice_with_drop_last(
    costs: list[int], size: int, epoch: int, **options: Any
) -> None:
    if len(costs) < size:
        with pytest.raises(ValueError, match=f"{len(costs)} samples"):
            samplers(costs, size, drop_last=True, **options)
        return
    drawn = [list(s) for s in samplers(costs, size, epoch, drop_last=True, **options)]
    assert [len(indices) for indices in drawn] == [len(costs) // size] * size
    together = [index for indices in drawn for index in indices]
    assert len(set(together)) == len(together)


@settings(max_examples=30, deadline=None)
@given(
    costs=st.lists(st.integers(0, 1000), min_size=8, max_size=60),
    size=st.integers(2, 4),
    shuffle=st.booleans(),
)
def test_what_is_drawn_together_costs_alike(costs: list[int], size: int, shuffle: bool) -> None:
    drawn = [list(sampler) for sampler in samplers(costs, size, shuffle=shuffle)]
    rounds = [sorted(costs[i] for i in indices) for indices in zip(*drawn, strict=True)]
    rounds.sort()
    # Rounds are neighbours of the sorted costs: none reaches into another one.
    for before, after in zip(rounds, rounds[1:], strict=False):
        assert before[-1] <= after[0]


def test_epochs_differ_and_come_again() -> None:
    costs = [i % 7 for i in range(40)]
    (first, *_), (other, *_) = samplers(costs, 2, 0), samplers(costs, 2, 1)
    assert list(first) != list(other)
    first.set_epoch(1)
    assert list(first) == list(other)
    (plain, *_) = samplers(costs, 2, 0, shuffle=False)
    before = list(plain)
    plain.set_epoch(1)
    assert list(plain) == before
    assert [costs[i] for i in before] == sorted(costs[i] for i in before)


def test_neighbours_make_groups_which_are_drawn_in_random_order() -> None:
    costs = torch.randperm(41, generator=torch.Generator().manual_seed(0)).tolist()
    groups = [sorted(range(a, min(a + 8, 41)), key=costs.__getitem__) for a in range(0, 41, 8)]
    for shuffle in (False, True):
        (alone,) = samplers(costs, 1, group_size=8, shuffle=shuffle, seed=5)
        drawn = list(alone)
        number_of = [next(g for g, members in enumerate(groups) if i in members) for i in drawn]
        order = list(dict.fromkeys(number_of))
        assert [i for g in order for i in groups[g]] == drawn
        assert (order == list(range(6))) != shuffle
    first, second = samplers(costs, 2, group_size=8, shuffle=False)
    together = [i for pair in zip(first, second, strict=True) for i in pair]
    assert together[:41] == [i for group in groups for i in group]


def test_settings_by_position() -> None:
    sampler = LoadBalancingDistributedSampler([1, 2, 3], float, 2, 1, False, 2, 7, True, 0.5)
    assert (sampler.world_size, sampler.rank, sampler.shuffle) == (2, 1, False)
    assert (sampler.group_size, sampler.seed, sampler.drop_last) == (2, 7, True)
    assert sampler.random_level == 0.5


@pytest.mark.parametrize("options", [{"random_level": 0.3}])
def test_other_samples_meet_in_other_epochs(options: dict[str, Any]) -> None:
    costs = list(range(40))

    def pairs(epoch: int) -> set[frozenset[int]]:
        drawn = [list(sampler) for sampler in samplers(costs, 2, epoch, **options)]
        return {frozenset(pair) for pair in zip(*drawn, strict=True)}

    assert pairs(0) != pairs(1)


def cut(indices: list[int]) -> list[list[int]]:
    """Return batches of one to three indices, by their numbers."""
    batches: list[list[int]] = []
    position = 0
    while position < len(indices):
        size = 1 + indices[position] % 3
        batches.append(indices[position : position + size])
        position += size
    return batches


@settings(max_examples=40, deadline=None)
@given(drop_last=st.booleans(), **SETTINGS)
def test_all_get_as_many_batches(
    costs: list[int], size: int, epoch: int, drop_last: bool, **options: Any
) -> None:
    made = [
        LoadBalancingDistributedBatchSampler(sampler, cut, drop_last=drop_last)
        for sampler in samplers(costs, size, **options)
    ]
    for sampler in made:
        sampler.set_epoch(epoch)
    drawn = [list(sampler) for sampler in made]
    assert len({len(batches) for batches in drawn}) == 1
    assert [len(sampler) for sampler in made] == [len(batches) for batches in drawn]
    counts = [len(cut(list(sampler.sampler))) for sampler in made]
    assert len(drawn[0]) == (min(counts) if drop_last else max(counts))
    for sampler, batches in zip(made, drawn, strict=True):
        own = cut(list(sampler.sampler))
        assert batches[: len(own)] == own[: len(batches)]
        assert all(batch in own for batch in batches)


def test_in_a_data_loader() -> None:
    data = [torch.full((n % 5 + 1,), float(n)) for n in range(20)]
    sampler = LoadBalancingDistributedSampler(data, len, world_size=2, rank=0)
    batches = LoadBalancingDistributedBatchSampler(
        sampler, lambda indices: [indices[i : i + 4] for i in range(0, len(indices), 4)]
    )
    loader = DataLoader(data, batch_sampler=batches, collate_fn=list)  # type: ignore[arg-type]
    assert len(loader) == 3
    assert sum(len(batch) for batch in loader) == 10


def test_one_process_by_default() -> None:
    assert sorted(LoadBalancingDistributedSampler([3, 1, 2], float)) == [0, 1, 2]


@pytest.mark.parametrize(
    ("data", "options", "error", "text"),
    [
        (iter([1]), {}, TypeError, "dataset must have a length"),
        ([], {}, ValueError, "dataset has 0 samples"),
        ([1], {"world_size": 0}, ValueError, "world_size is 0"),
        ([1], {"world_size": 2, "rank": 2}, ValueError, "rank is 2, expected 0 to 1"),
        ([1], {"group_size": 0}, ValueError, "group_size is 0"),
        ([1], {"random_level": 1.5}, ValueError, "random_level is 1.5"),
    ],
)
def test_refusals(data: Any, options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LoadBalancingDistributedSampler(data, float, **options)


def test_refusals_of_batches() -> None:
    with pytest.raises(TypeError, match="must be a LoadBalancingDistributedSampler, got list"):
        LoadBalancingDistributedBatchSampler([1], cut)  # type: ignore[arg-type]
    sampler = LoadBalancingDistributedSampler([1, 2], float)
    with pytest.raises(TypeError, match="batch_fn must be callable"):
        LoadBalancingDistributedBatchSampler(sampler, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gave no batch"):
        list(LoadBalancingDistributedBatchSampler(sampler, lambda indices: []))

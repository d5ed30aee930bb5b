# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Samplers that give all processes samples of like cost at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from ortrain.distributed import environment

# Gives the batches of a list of indices.
BatchFunction = Callable[[list[int]], list[list[int]]]


class LoadBalancingDistributedSampler(Sampler[int]):
    """Gives the processes disjoint samples such that those drawn at the same time cost alike.

    Samples are sorted by their cost and dealt out in rounds of ``world_size`` neighbours, one to each
    process; an epoch draws the rounds in random order. With ``group_size`` the dataset is cut into groups of
    neighbours, each is sorted, and an epoch draws the groups in random order, what is inside of one by rising cost.
    Costs are asked for once per sample.

    Args:
      dataset: A map-style dataset.
      complexity_fn: Returns the cost of a sample, a number, such as its length.
      world_size: How many processes there are; by default as ``ortrain.distributed.world_size``.
      rank: The number of this one; by default as ``ortrain.distributed.world_rank``.
      shuffle: Draw the rounds, or the groups, in another order in each epoch; otherwise as they come.
      group_size: How many neighbours of the dataset make a group; without, all of it is sorted.
      seed: Of the order; the same in all processes.
      drop_last: Leave out samples that would not give each process one; otherwise samples of
        the last round are drawn twice.
      random_level: From 0 to 1: a cost is raised at random, by a whole number up to this share of the range of all
        costs, before sorting, so that neighbours change between epochs.

    Raises:
      TypeError: ``dataset`` has no length.
      ValueError: A number is out of range, or the dataset is empty.
    """

    def __init__(
        self,
        dataset: Any,
        complexity_fn: Callable[[Any], float],
        world_size: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        group_size: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise TypeError(f"dataset must have a length, got {type(dataset).__name__}")
        self.dataset = dataset
        self.world_size = environment.world_size() if world_size is None else world_size
        self.rank = environment.world_rank() if rank is None else rank
        if self.world_size < 1:
            raise ValueError(f"world_size is {self.world_size}, expected 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank is {self.rank}, expected 0 to {self.world_size - 1}")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size is {group_size}, expected 1 or more")
        if not 0.0 <= random_level <= 1.0:
            raise ValueError(f"random_level is {random_level}, expected 0 to 1")
        count = len(dataset)
        self.shuffle = shuffle
        self.group_size = group_size
        self.drop_last = drop_last
        self.seed = seed
        self.random_level = random_level
        self.epoch = 0
        rounds = count // self.world_size if drop_last else -(-count // self.world_size)
        if rounds == 0:
            raise ValueError(
                f"dataset has {count} samples, which gives none of {self.world_size} processes one"
            )
        self._rounds = rounds
        self._costs = torch.tensor(
            [float(complexity_fn(dataset[i])) for i in range(count)], dtype=torch.float64
        )

    def __len__(self) -> int:
        return self._rounds

    def __iter__(self) -> Iterator[int]:
        return iter(self.shares()[self.rank])

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass: another one for each epoch, the same in all processes.

        Args:
          epoch: The number of the pass, from 0.
        """
        self.epoch = epoch

    def shares(self) -> list[list[int]]:
        """Return the indices of this epoch for each process, in the order of the processes."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = self._sorted(generator)
        size, wanted = self.world_size, self._rounds * self.world_size
        if len(order) < wanted:
            last = order[wanted - size :]
            order += [last[i % len(last)] for i in range(wanted - len(order))]
        elif len(order) > wanted:
            # With `shuffle` others are left out in each epoch.
            left_out = len(order) - wanted
            start = (
                int(torch.randint(wanted + 1, (), generator=generator)) if self.shuffle else wanted
            )
            order = order[:start] + order[start + left_out :]
        rounds = [order[i * size : (i + 1) * size] for i in range(self._rounds)]
        if self.shuffle and self.group_size is None:
            drawn = torch.randperm(self._rounds, generator=generator).tolist()
            rounds = [rounds[i] for i in drawn]
        return [[members[rank] for members in rounds] for rank in range(size)]

    def _sorted(self, generator: torch.Generator) -> list[int]:
        """Return all indices by rising cost, within groups where there are some."""
        costs = self._costs
        noise = int(float(costs.max() - costs.min()) * self.random_level) + 1
        if noise > 1:
            costs = costs + torch.randint(noise, (len(costs),), generator=generator)
        if self.group_size is None:
            return torch.argsort(costs, stable=True).tolist()
        groups = torch.arange(len(costs)).split(self.group_size)
        numbers = (
            torch.randperm(len(groups), generator=generator).tolist()
            if self.shuffle
            else range(len(groups))
        )
        order: list[int] = []
        for group in (groups[i] for i in numbers):
            order += group[torch.argsort(costs[group], stable=True)].tolist()
        return order


class LoadBalancingDistributedBatchSampler(Sampler[list[int]]):
    """Cuts the samples of each process into batches of varying size, equally many for all.

    Args:
      sampler: Gives the samples.
      batch_fn: Takes a list of indices, returns a list of batches of them. It is called for the
        indices of each process in every process, and must give the same each time.
      drop_last: Give all processes as many batches as the one with the fewest has; otherwise as many
        as the one with the most, others repeating some of theirs.

    Raises:
      TypeError: ``sampler`` is another one.
    """

    def __init__(
        self,
        sampler: LoadBalancingDistributedSampler,
        batch_fn: BatchFunction,
        drop_last: bool = False,
    ) -> None:
        if not isinstance(sampler, LoadBalancingDistributedSampler):
            raise TypeError(
                f"sampler must be a LoadBalancingDistributedSampler, got {type(sampler).__name__}"
            )
        if not callable(batch_fn):
            raise TypeError("batch_fn must be callable")
        self.sampler = sampler
        self.batch_fn = batch_fn
        self.drop_last = drop_last
        self._made: tuple[int, list[list[int]]] | None = None

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._batches())

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next pass; see LoadBalancingDistributedSampler."""
        self.sampler.set_epoch(epoch)

    def _batches(self) -> list[list[int]]:
        if self._made is None or self._made[0] != self.sampler.epoch:
            of_all = [self.batch_fn(share) for share in self.sampler.shares()]
            counts = [len(batches) for batches in of_all]
            if min(counts) == 0:
                raise ValueError("batch_fn gave no batch for the samples of a process")
            wanted = min(counts) if self.drop_last else max(counts)
            own = of_all[self.sampler.rank]
            batches = [own[i % len(own)] for i in range(wanted)]
            self._made = (self.sampler.epoch, batches)
        return self._made[1]

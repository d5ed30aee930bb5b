# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients averaged over the processes in buckets, while the backward of earlier layers goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ortrain.distributed import Processes
from ortrain.trainer.flat_layout import FlatLayout

# Bytes of gradients that go together, at least.
_BUCKET = 4 << 20


@dataclasses.dataclass(slots=True)
class _Bucket:
    """A stretch of a vector of gradients."""

    gradients: torch.Tensor
    awaited: set[str]


class GradientBuckets:
    """The average of one batch's gradients over the processes.

    All processes have the same buckets and start them in the same order, the last parameters' first,
    whatever the order is in which their backwards give them.

    Args:
      layout: Where the gradients lie.
      flats: The vectors, by element type.
      processes: Those that average.
      trained: Names of the parameters whose gradients are yet to come.
    """

    def __init__(
        self,
        layout: FlatLayout,
        flats: Mapping[torch.dtype, torch.Tensor],
        processes: Processes,
        trained: Collection[str],
    ) -> None:
        self._processes = processes
        self._buckets = [
            _Bucket(flats[dtype][begin:end], names & set(trained))
            for dtype, begin, end, names in _stretches(layout)
        ]
        self._bucket_of = {
            name: number for number, bucket in enumerate(self._buckets) for name in bucket.awaited
        }
        self._started = 0
        self._works: list[Any] = []
        self._start_those_that_are_whole()

    def finished(self, parameters: Iterable[str]) -> None:
        """Take note that the gradients of these parameters will not change any more."""
        for name in parameters:
            self._buckets[self._bucket_of[name]].awaited.discard(name)
        self._start_those_that_are_whole()

    def wait(self) -> None:
        """Return when all are averaged; the backward is over.

        Raises:
          RuntimeError: Another process has ended.
        """
        for bucket in self._buckets[self._started :]:
            bucket.awaited.clear()
        self._start_those_that_are_whole()
        for work in self._works:
            work.wait()

    def _start_those_that_are_whole(self) -> None:
        while self._started < len(self._buckets) and not self._buckets[self._started].awaited:
            gradients = self._buckets[self._started].gradients
            self._started += 1
            if gradients.numel() == 0:
                continue
            # As DistributedDataParallel does: gradients that are large overflow alike.
            gradients.mul_(1.0 / self._processes.size)
            self._works.append(self._processes.begin_all_reduce(gradients))


def _stretches(layout: FlatLayout) -> list[tuple[torch.dtype, int, int, set[str]]]:
    """Return type, begin, end and parameters of each bucket, the last parameters first."""
    result: list[tuple[torch.dtype, int, int, set[str]]] = []
    for dtype, size in layout.sizes.items():
        # One without elements lies where the next one begins, and before it.
        places = [(b, e, n) for n, (kind, b, e) in layout.places.items() if kind == dtype]
        end, names = size, set()
        for begin, _, name in sorted(places, key=lambda place: place[:2], reverse=True):
            names.add(name)
            if (end - begin) * dtype.itemsize >= _BUCKET or begin == 0:
                result.append((dtype, begin, end, names))
                end, names = begin, set()
    return result

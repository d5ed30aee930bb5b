# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The gradients of one process's batches, and what several processes make of theirs together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ortrain.distributed import Processes, adasum
from ortrain.errors import UnsupportedError
from ortrain.trainer.flat_layout import FlatLayout
from ortrain.trainer.gradient_buckets import GradientBuckets

Flats = dict[torch.dtype, torch.Tensor]


class JoinedGradients:
    """Gradients in one vector per element type, which is reduced where it lies.

    Args:
      processes: Those that train together.
      separate: Each batch is reduced by itself, and its means added to those of the batches before; otherwise
        batches add up here, and the last one's sum is reduced.
      by_adasum: Gradients are put together by Adasum, not averaged.

    Attributes:
      layout: Where the gradients of each parameter lie.
      flats: Of the batch, or of the batches so far.
    """

    def __init__(self, processes: Processes, *, separate: bool, by_adasum: bool) -> None:
        self._processes = processes
        self.separate = separate
        self.by_adasum = by_adasum
        self.layout = FlatLayout({})
        self.flats = self.layout.zeros()
        self._sums = self.layout.zeros()  # of the batches so far, where each is reduced by itself
        self._written: list[str] | None = None  # by the latest graph; what others have is zeros

    def views(self) -> dict[str, torch.Tensor]:
        """Return the gradient of each parameter."""
        return self.layout.views(self.flats)

    def move(self, layout: FlatLayout) -> None:
        """Lie otherwise; what has kept its shape keeps its values."""
        self.flats = self._moved(self.flats, layout)
        if self.separate:
            self._sums = self._moved(self._sums, layout)
        self.layout = layout
        self._written = None

    def clear_without(self, trained: list[str]) -> None:
        """Put zeros where gradients lie that no graph of this step writes."""
        if self._written == trained:
            return
        for name, view in self.views().items():
            if name not in trained:
                view.zero_()
        self._written = list(trained)

    def put(self, gradients: Mapping[str, torch.Tensor], *, first: bool) -> None:
        """Take the gradients of a batch of which any parameters may have some; others have zeros.

        Args:
          gradients: By parameter.
          first: It is the first batch of an optimizer step.
        """
        if first or self.separate:
            for flat in self.flats.values():
                flat.zero_()
        views = self.views()
        for name, gradient in gradients.items():
            views[name].add_(gradient)
        self._written = None

    def buckets(self, trained: Collection[str]) -> GradientBuckets:
        """Return what averages the gradients of a batch while they come."""
        return GradientBuckets(self.layout, self.flats, self._processes, trained)

    def reduce(self) -> None:
        """Put the gradients of all processes together; all of them are there."""
        if not self.by_adasum:
            self.buckets(()).wait()
            return
        for dtype, flat in self.flats.items():
            adasum.all_reduce(flat, self.layout.parts(dtype), self._processes)

    def add_up(self, *, first: bool, last: bool) -> None:
        """Add a batch that is reduced to those before; with the last one the sum lies in ``flats``."""
        for dtype, batch in self.flats.items():
            if first:
                self._sums[dtype].copy_(batch)
            elif last:
                batch.add_(self._sums[dtype])
            else:
                self._sums[dtype].add_(batch)

    def means(self) -> dict[str, torch.Tensor]:
        """Return the means over the processes of what the batches so far have added up to."""
        if self.separate:
            return self.layout.views(self._sums)
        if self.by_adasum:
            raise UnsupportedError(
                "gradients that Adasum has not put together yet have no sum: save between two "
                "optimizer steps"
            )
        sums = {dtype: flat.clone() for dtype, flat in self.flats.items()}
        for flat in sums.values():
            flat.mul_(1.0 / self._processes.size)
            self._processes.all_reduce(flat)
        return self.layout.views(sums)

    def take(self, means: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `means` gave, in whatever processes; parameters without have zeros."""
        for name, view in self.layout.views(self._sums if self.separate else self.flats).items():
            if name in means:
                view.copy_(means[name])
            else:
                view.zero_()
        self._written = None

    def _moved(self, flats: Flats, layout: FlatLayout) -> Any:
        made, before = layout.zeros(), self.layout.views(flats)
        for name, view in layout.views(made).items():
            if name in before and before[name].shape == view.shape:
                view.copy_(before[name])
        return made

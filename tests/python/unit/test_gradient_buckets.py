# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients in buckets: each once, in one order in all processes, none before it is final."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ortrain.trainer import gradient_buckets
from ortrain.trainer.flat_layout import FlatLayout
from ortrain.trainer.gradient_buckets import GradientBuckets


class Recorder:
    """Two processes with the same gradients: the sum is twice each."""

    size = 2

    def __init__(self) -> None:
        self.begun: list[tuple[int, int]] = []  # address and elements
        self.unfinished = 0

    def begin_all_reduce(self, tensor: torch.Tensor) -> Any:
        assert tensor.is_contiguous()
        assert tensor.numel() > 0
        self.begun.append((tensor.data_ptr(), tensor.numel()))
        self.unfinished += 1
        recorder = self

        class Work:
            def wait(self) -> None:
                tensor.mul_(2)
                recorder.unfinished -= 1

        return Work()


def layout_of(draw: random.Random) -> FlatLayout:
    parameters = {}
    for number in draw.sample(range(100), draw.randrange(1, 12)):
        dtype = draw.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        shape = [draw.randrange(0, 9) for _ in range(draw.randrange(0, 3))]
        parameters[f"p{number}"] = torch.zeros(shape, dtype=dtype)
    return FlatLayout(parameters)


@pytest.mark.parametrize("seed", range(40))
def test_random_layouts_and_orders(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(gradient_buckets, "_BUCKET", draw.choice([1, 64, 200, 1 << 20]))
    layout = layout_of(draw)
    names = list(layout.places)
    trained = draw.sample(names, draw.randrange(0, len(names) + 1))
    orders = []
    for _ in range(2):
        flats = layout.zeros()
        views = layout.views(flats)
        recorder = Recorder()
        buckets = GradientBuckets(layout, flats, recorder, trained)
        first = {dtype: flat.data_ptr() for dtype, flat in flats.items()}
        left = draw.sample(trained, len(trained))
        while left and draw.random() < 0.9:  # the rest ends with the backward
            some = [left.pop() for _ in range(min(len(left), draw.randrange(1, 4)))]
            for name in some:
                view = views[name]
                inside = [
                    a <= view.data_ptr() < a + n * view.element_size() for a, n in recorder.begun
                ]
                assert view.numel() == 0 or not any(inside), f"{name} went before it was final"
                view.fill_(int(name[1:]) + 1)
            buckets.finished(some)
        for name in left:
            views[name].fill_(int(name[1:]) + 1)
        buckets.wait()
        assert recorder.unfinished == 0
        for name, view in views.items():
            expected = int(name[1:]) + 1 if name in trained else 0
            assert (view == expected).all(), f"{name} is not the average"
        total = sum(n for _, n in recorder.begun)
        assert total == sum(layout.sizes.values()), "each element goes once"
        starts = []
        for address, count in recorder.begun:
            dtype = next(
                d
                for d, flat in flats.items()
                if 0 <= address - flat.data_ptr() < flat.numel() * flat.element_size()
            )
            starts.append((dtype, (address - first[dtype]) // dtype.itemsize, count))
        orders.append(starts)
    assert orders[0] == orders[1], "the processes begin in the same order"

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What other threads do during a capture is none of the forward's."""

import itertools
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ortrain import ORTModule

SHARED = {"ticks": 0}


class Monitor(threading.Thread):
    """Reads, counts and handles errors, as the threads of progress bars and loaders do."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self.numbers = itertools.count()

    def run(self) -> None:
        while not self.ended.is_set():
            self.tick()

    def tick(self) -> None:
        SHARED["ticks"] = next(self.numbers)
        _ = sys.stdin, os.environ.get("HOME"), time.time(), torch.rand(2)
        try:
            raise KeyError
        except KeyError:
            time.sleep(0.0002)


@pytest.fixture
def monitor() -> Iterator[Monitor]:
    thread = Monitor()
    thread.start()
    yield thread
    thread.ended.set()
    thread.join()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.steps = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x)) * self.steps


def test_a_capture_is_not_refused_for_what_another_thread_does(monitor: Monitor) -> None:
    for _ in range(3):
        model = ORTModule(Net())
        model(torch.randn(3, 4)).sum().backward()
        report = model.report()
        assert [record.fallback for record in report.captures] == [""]
        assert report.native_share == 1.0
    assert SHARED["ticks"] > 0

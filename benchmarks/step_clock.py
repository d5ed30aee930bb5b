# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Time of steps, on the CPU and on a device that works while the host goes on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.resources import page_faults


class StepClock:
    """Marks between pieces of work: moments on the CPU, CUDA events on a device.

    Args:
      device: PyTorch's name of it.
    """

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._on_host = self._device.type == "cpu"

    def mark(self) -> Any:
        """Return a mark behind all work that was given to the device so far."""
        if self._on_host:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def synchronize(self) -> None:
        """Wait until the device has done its work."""
        if not self._on_host:
            torch.cuda.synchronize(self._device)

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the time between two marks; the device must have passed the later one."""
        return end - begin if self._on_host else begin.elapsed_time(end) / 1e3


def time_steps(step: Callable[[], torch.Tensor], count: int, device: str) -> dict[str, Any]:
    """Do some steps after one that does not count; return the figures of each and the loss.

    The first one finds what the system took from a sleeping process: caches, and pages of
    libraries, whose faults are not the step's. Nothing waits for a device between the steps: the
    loss is read at the end, as in a training that logs now and then.

    Returns:
      Seconds "wall" between the marks around each step, "cpu" of the host in it, page "faults";
      "block": seconds of a step on the host's clock, the whole block between two synchronizations;
      "loss" after the last one.
    """
    clock = StepClock(device)
    loss = step()
    clock.synchronize()
    spans, cpu, faults = [], [], []
    start = time.perf_counter()
    for _ in range(count):
        faults_before = page_faults()
        begin, cpu_begin = clock.mark(), time.process_time()
        loss = step()
        end = clock.mark()
        cpu.append(time.process_time() - cpu_begin)
        faults.append(page_faults() - faults_before)
        spans.append((begin, end))
    clock.synchronize()
    block = (time.perf_counter() - start) / count
    wall = [clock.seconds(*span) for span in spans]
    return {"wall": wall, "cpu": cpu, "faults": faults, "block": block, "loss": float(loss)}

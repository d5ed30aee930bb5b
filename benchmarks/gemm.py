# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The rate of a large matrix product: what a step is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.step_clock import StepClock

# Of the size of a transformer's products, large enough that the rate is the library's best.
ROWS, DEPTH, COLUMNS = 1024, 1024, 3072
DEVICE_EDGE = 8192  # of the square product on a device


class Products:
    """The same float32 product by PyTorch's library and by the engine's, ready to be timed."""

    def __init__(self) -> None:
        from ortrain import ORTModule

        generator = torch.Generator().manual_seed(0)
        left = torch.randn(ROWS, DEPTH, generator=generator)
        linear = torch.nn.Linear(DEPTH, COLUMNS, bias=False)
        weight = linear.weight.detach()
        out = torch.empty(ROWS, COLUMNS)
        engine = ORTModule(linear)
        self._run: dict[str, Callable[[], object]] = {
            "torch.mm": lambda: torch.mm(left, weight.t(), out=out),
            "ortrain": lambda: engine(left),
        }

    def rates(self, repeat: int) -> dict[str, list[float]]:
        """Return the FLOP/s of some products in turn, by library."""
        rates: dict[str, list[float]] = {name: [] for name in self._run}
        with torch.no_grad():
            for _ in range(repeat):
                for name, run in self._run.items():
                    start = time.perf_counter()
                    run()
                    seconds = time.perf_counter() - start
                    rates[name].append(2 * ROWS * DEPTH * COLUMNS / seconds)
        return rates


class DeviceProducts:
    """A bfloat16 product by PyTorch's library on a device, ready to be timed.

    Args:
      device: PyTorch's name of it.
      edge: Rows, depth and columns.
    """

    def __init__(self, device: str, edge: int = DEVICE_EDGE) -> None:
        self._clock = StepClock(device)
        self._edge = edge
        generator = torch.Generator(device).manual_seed(0)
        # Zeros would run at another rate than what a training multiplies.
        self._left, self._right = (
            torch.randn(edge, edge, generator=generator, device=device, dtype=torch.bfloat16)
            for _ in range(2)
        )

    def rates(self, repeat: int) -> dict[str, list[float]]:
        """Return the FLOP/s of some products by library, after as many that raise the clock."""
        for _ in range(repeat):
            torch.mm(self._left, self._right)
        spans = []
        for _ in range(repeat):
            begin = self._clock.mark()
            torch.mm(self._left, self._right)
            spans.append((begin, self._clock.mark()))
        self._clock.synchronize()
        return {"torch.mm": [2 * self._edge**3 / self._clock.seconds(*span) for span in spans]}

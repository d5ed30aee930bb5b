# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The rate of a large float32 matrix product: what a step is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

# Of the size of a transformer's products, large enough that the rate is the library's best.
ROWS, DEPTH, COLUMNS = 1024, 1024, 3072


class Products:
    """The same product by PyTorch's library and by the engine's, ready to be timed."""

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

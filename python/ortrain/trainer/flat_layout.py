# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Where parameters, their gradients and states lie in one vector per element type."""

from __future__ import annotations

from collections.abc import Mapping

import torch

# Elements to which parameters, and shares of processes, are aligned: 64 bytes of float32.
_ALIGNMENT = 16

# A parameter, and begin and end of a slice of its elements in row-major order.
Slice = tuple[str, int, int]


def state_dtype(parameter: torch.Tensor) -> torch.dtype:
    """Return the type in which an optimizer keeps its states of a parameter."""
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


class FlatLayout:
    """Where the elements of each parameter lie in one vector per type of optimizer states.

    Args:
      parameters: By name; the order is that of the vectors.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self.shapes = {name: tuple(p.shape) for name, p in parameters.items()}
        self.places: dict[str, tuple[torch.dtype, int, int]] = {}
        self.sizes: dict[torch.dtype, int] = {}
        for name, parameter in parameters.items():
            dtype = state_dtype(parameter)
            begin = self.sizes.get(dtype, 0)
            self.places[name] = (dtype, begin, begin + parameter.numel())
            self.sizes[dtype] = _aligned(begin + parameter.numel())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FlatLayout) and (
            (self.shapes, self.places) == (other.shapes, other.places)
        )

    __hash__ = None  # type: ignore[assignment]

    def zeros(self) -> dict[torch.dtype, torch.Tensor]:
        """Return the vectors of all parameters."""
        return {dtype: torch.zeros(size, dtype=dtype) for dtype, size in self.sizes.items()}

    def views(self, flats: Mapping[torch.dtype, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the part of each parameter in such vectors, in its shape."""
        return {
            name: flats[dtype][begin:end].view(self.shapes[name])
            for name, (dtype, begin, end) in self.places.items()
        }

    def parts(self, dtype: torch.dtype) -> list[tuple[int, int]]:
        """Return begin and end of each parameter of a type in its vector."""
        return [(begin, end) for kind, begin, end in self.places.values() if kind == dtype]

    def share(self, dtype: torch.dtype, rank: int, size: int) -> tuple[int, int]:
        """Return begin and end of a process's equal share of a vector."""
        blocks = self.sizes[dtype] // _ALIGNMENT
        return blocks * rank // size * _ALIGNMENT, blocks * (rank + 1) // size * _ALIGNMENT

    def slices(self, rank: int, size: int) -> list[Slice]:
        """Return what of each parameter lies in a process's share; nothing of some."""
        result = []
        for name, (dtype, begin, end) in self.places.items():
            first, last = self.share(dtype, rank, size)
            first, last = max(first, begin), min(last, end)
            if first < last:
                result.append((name, first - begin, last - begin))
        return result


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

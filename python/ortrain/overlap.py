# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Tells whether tensors lie in the same bytes, by their addresses."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

import torch


class OccupiedMemory:
    """The bytes of tensors, those in their gaps too, by their addresses.

    Args:
      tensors: Those.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        taken = sorted(bounds for bounds in map(bounds_of, tensors) if bounds is not None)
        self._begins = [begin for begin, _ in taken]
        # Of all up to each: one may reach beyond those that begin behind it.
        self._ends = list(itertools.accumulate((end for _, end in taken), max))
        self.overlaps = any(
            end > begin for end, begin in zip(self._ends, self._begins[1:], strict=False)
        )

    def touched_by(self, tensor: torch.Tensor) -> bool:
        """Tell whether another tensor lies in one of the bytes."""
        bounds = bounds_of(tensor)
        if bounds is None:
            return False
        before = bisect.bisect_left(self._begins, bounds[1])
        return before > 0 and self._ends[before - 1] > bounds[0]


def any_overlap(written: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> bool:
    """Tell whether a tensor that is written lies in bytes of another one, which is read or written.

    Tensors count as all bytes from their first element to their last one: those that lie in each
    other's gaps overlap too.

    Args:
      written: Each at most once.
      read: None of ``written``.
    """
    taken = OccupiedMemory(written)
    return taken.overlaps or any(map(taken.touched_by, read))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Tell whether two elements of a tensor may lie in one place, as those of an expanded one do."""
    if tensor.layout is not torch.strided or tensor.is_contiguous() or tensor.numel() == 0:
        return False
    reach = 0  # of the axes with shorter strides
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def views_of_one(written: Iterable[torch.Tensor], read: Iterable[torch.Tensor]) -> bool:
    """Tell whether a tensor that is written and one that is read are views of one: a write makes both newer."""
    bases = {id(_base(tensor)) for tensor in written}
    return any(id(_base(tensor)) in bases for tensor in read)


def _base(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor._base is None else tensor._base


def bounds_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Return the addresses of a tensor's first byte and of the one behind its last; None where it has none."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    begin = tensor.data_ptr()
    if begin == 0:  # its storage is freed
        return None
    if tensor.is_contiguous():
        return (begin, begin + tensor.nbytes)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (begin, begin + (last + 1) * tensor.element_size())

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Adasum: gradients of several processes put together by how far they agree.

S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", arXiv:2006.02924: of two
gradients a and b of a parameter

    (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b,

which is their sum where they are orthogonal and their mean where they are equal; of 2^k processes by
pairs of neighbours, then of pairs, and so on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortrain.distributed.processes import Processes
from ortrain.errors import UnsupportedError

# Elements that are widened to double at a time.
_CHUNK = 1 << 18


def require_power_of_two(size: int) -> None:
    """Raise UnsupportedError for numbers of processes that do not pair up."""
    if size & (size - 1):
        raise UnsupportedError(
            f"option 'distributed.enable_adasum' pairs processes up: world_size is {size}, expected a "
            "power of two"
        )


def combine(a: torch.Tensor, b: torch.Tensor) -> None:
    """Put the combination of two gradients, vectors of one size, into ``a``.

    Sums are taken in double. A gradient of zeros gives the other one.
    """
    product = a_square = b_square = 0.0
    for x, y in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        x, y = x.double(), y.double()
        product += torch.dot(x, y).item()
        a_square += torch.dot(x, x).item()
        b_square += torch.dot(y, y).item()
    a.mul_(_weight(product, a_square)).add_(b, alpha=_weight(product, b_square))


def all_reduce(flat: torch.Tensor, parts: Sequence[tuple[int, int]], processes: Processes) -> None:
    """Put the combination over all processes into a vector; equal bits in all of them.

    Args:
      flat: The gradients of this process; takes as much memory again.
      parts: Begin and end of each parameter's gradient in it.
      processes: A power of two of them.
    """
    require_power_of_two(processes.size)
    other = torch.empty_like(flat)
    distance = 1
    while distance < processes.size:
        peer = processes.rank ^ distance
        processes.exchange(flat, other, peer)
        for begin, end in parts:
            # The same order in both, so that both round alike.
            mine, theirs = flat[begin:end], other[begin:end]
            if processes.rank < peer:
                combine(mine, theirs)
            else:
                combine(theirs, mine)
                mine.copy_(theirs)
        distance *= 2


def _weight(product: float, square: float) -> float:
    return 1.0 - product / (2.0 * square) if square != 0.0 else 1.0

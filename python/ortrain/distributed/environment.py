# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which of how many processes this one is, by torch.distributed or by what the launcher has set."""

from __future__ import annotations

import torch.distributed as dist

from ortrain.launchers import discover


def world_rank() -> int:
    """Return the number of this process: of torch.distributed, else by the launcher, else 0."""
    return dist.get_rank() if _initialized() else discover().world_rank


def world_size() -> int:
    """Return how many processes there are: of torch.distributed, else by the launcher, else 1."""
    return dist.get_world_size() if _initialized() else discover().world_size


def local_rank() -> int:
    """Return the number of this process on its machine, 0 where no launcher says."""
    return discover().local_rank or 0


def _initialized() -> bool:
    return dist.is_available() and dist.is_initialized()

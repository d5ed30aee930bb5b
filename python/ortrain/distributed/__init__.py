# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Training in several processes: their places, collectives, samplers of balanced batches."""

from ortrain.distributed.environment import local_rank, world_rank, world_size
from ortrain.distributed.processes import Processes
from ortrain.distributed.sampler import (
    LoadBalancingDistributedBatchSampler,
    LoadBalancingDistributedSampler,
)
from ortrain.distributed.stop_request import StopRequest
from ortrain.launchers import Place, discover

__all__ = [
    "LoadBalancingDistributedBatchSampler",
    "LoadBalancingDistributedSampler",
    "Place",
    "Processes",
    "StopRequest",
    "discover",
    "local_rank",
    "world_rank",
    "world_size",
]

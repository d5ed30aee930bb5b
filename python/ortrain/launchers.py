# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which of how many processes this one is, by the variables that its launcher has set."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

# Of each launcher the variables of rank, number of processes and rank on the machine; a launcher
# that starts inside of another one stands before it.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ),
    "MVAPICH2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One process among others.

    Attributes:
      world_rank: Its number, from 0.
      world_size: How many there are.
      local_rank: Its number among those on its machine; None where nobody says.
      launcher: Who says so: "torchrun", "Open MPI", "MVAPICH2", "PMI" (MPICH, Intel MPI), "Slurm"; None
        for a process that was started by itself.
    """

    world_rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    launcher: str | None = None


def discover(environ: Mapping[str, str] | None = None) -> Place:
    """Read this process's place from the variables that launchers set.

    ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK`` come first (torchrun; also any script that sets them),
    then those of Open MPI (``OMPI_COMM_WORLD_*``), MVAPICH2 (``MV2_COMM_WORLD_*``), the process
    manager of MPICH and Intel MPI (``PMI_*``, ``MPI_LOCALRANKID``) and Slurm (``SLURM_PROCID``,
    ``SLURM_NTASKS``, ``SLURM_LOCALID``).

    Args:
      environ: The variables; those of the process by default.

    Raises:
      ValueError: A launcher's variables are no numbers, do not fit together, or one is missing.
    """
    variables = os.environ if environ is None else environ
    for launcher, (rank, size, local) in _LAUNCHERS.items():
        if rank not in variables:
            continue
        if size not in variables:
            raise ValueError(f"{rank} is set, {size} is not: {launcher} sets both")
        place = Place(
            _number(variables, rank),
            _number(variables, size),
            _number(variables, local) if local in variables else None,
            launcher,
        )
        if place.world_rank >= place.world_size:
            raise ValueError(
                f"{rank} is {place.world_rank}, expected less than {size}, {place.world_size}"
            )
        return place
    return Place()


def _number(variables: Mapping[str, str], name: str) -> int:
    text = variables[name]
    if not text.isdecimal():
        raise ValueError(f"{name} is '{text}', expected a number of 0 or more")
    return int(text)

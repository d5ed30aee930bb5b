# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What launchers say about a process, and requests to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
import torch.distributed as dist
from ranks import Ranks

from ortrain import distributed
from ortrain.distributed import Place, Processes, StopRequest, discover

Group = Callable[[int], Ranks]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Place(0, 1, None, None)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, Place(1, 2, 0, "torchrun")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Place(1, 2, None, "torchrun")),
        (
            {
                "OMPI_COMM_WORLD_RANK": "3",
                "OMPI_COMM_WORLD_SIZE": "4",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "SLURM_PROCID": "0",
                "SLURM_NTASKS": "1",
            },
            Place(3, 4, 1, "Open MPI"),
        ),
        (
            {
                "MV2_COMM_WORLD_RANK": "0",
                "MV2_COMM_WORLD_SIZE": "2",
                "MV2_COMM_WORLD_LOCAL_RANK": "0",
            },
            Place(0, 2, 0, "MVAPICH2"),
        ),
        ({"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1"}, Place(5, 6, 1, "PMI")),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "2"}, Place(2, 3, 2, "Slurm")),
        ({"SLURM_NTASKS": "3"}, Place(0, 1, None, None)),  # an allocation, not a task of it
    ],
)
def test_launchers(variables: dict[str, str], expected: Place) -> None:
    assert discover(variables) == expected


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANK": "1"}, "RANK is set, WORLD_SIZE is not"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one', expected a number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1', expected a number"),
        ({"PMI_RANK": "2", "PMI_SIZE": "2"}, "PMI_RANK is 2, expected less than PMI_SIZE, 2"),
    ],
)
def test_what_makes_no_sense_is_named(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        discover(variables)


def run_places() -> tuple[int, int, int]:
    for name in ("RANK", "WORLD_SIZE"):
        del os.environ[name]  # the group is asked first
    return distributed.world_rank(), distributed.world_size(), distributed.local_rank()


def test_the_group_is_asked_first() -> None:
    processes = Ranks(2)
    try:
        assert processes.run(run_places) == [(0, 2, 0), (1, 2, 0)]
    finally:
        processes.end()
    assert (distributed.world_rank(), distributed.world_size()) == (0, 1)


def run_stop() -> list[bool]:
    answers = []
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest(Processes()) as stop:
        answers.append(stop.asked())
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        answers.append(stop.asked())
    assert signal.getsignal(signal.SIGTERM) is before
    return answers


def test_all_stop_where_one_is_asked(group: Group) -> None:
    assert group(2).run(run_stop) == [[False, True], [False, True]]


def test_one_process_alone_stops() -> None:
    with StopRequest() as stop:
        assert not stop.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.asked()


def test_an_error_is_that_of_all(group: Group) -> None:
    assert group(2).run(run_errors) == [
        ["ValueError: mine", "RuntimeError: process 1: of one", "UnicodeDecodeError", "7"],
        ["ValueError: process 0: mine", "RuntimeError: of one", "RuntimeError", "7"],
    ]


def run_errors() -> list[str]:
    processes, texts = Processes(), []

    def fail_in_first() -> int:
        raise ValueError("mine")

    def fail_in_second() -> int:
        if processes.rank == 1:
            raise RuntimeError("of one")
        return 3

    for call in (
        lambda: processes.on_first(fail_in_first),
        lambda: processes.everywhere(fail_in_second),
    ):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    try:
        processes.on_first(lambda: b"\xff".decode())
    except (UnicodeDecodeError, RuntimeError) as error:
        texts.append(type(error).__name__)
    texts.append(str(processes.on_first(lambda: 7)))
    return texts

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Processes joined by Gloo on this machine, that make what a test asks for."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

# Seconds after which processes that still work are killed.
_TIMEOUT = 120.0


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launcher_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun sets in a process."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


class Ranks:
    """Runs functions in all of some processes, which stay between calls.

    Args:
      size: How many.
      joined: With torch.distributed initialized; otherwise only with the variables of a launcher.
    """

    def __init__(self, size: int, *, joined: bool = True) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        self._processes = []
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            variables = launcher_variables(rank, size, port)
            process = context.Process(target=_serve, args=(theirs, variables, joined), daemon=True)
            before = os.environ.get("OMP_NUM_THREADS")
            os.environ["OMP_NUM_THREADS"] = "1"  # read when the child loads its libraries
            try:
                process.start()
            finally:
                if before is None:
                    del os.environ["OMP_NUM_THREADS"]
                else:
                    os.environ["OMP_NUM_THREADS"] = before
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return what a function of a test's module returns in each process.

        Raises:
          AssertionError: It raised somewhere, or took too long; all processes are ended then.
        """
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + _TIMEOUT
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                self.end()
                raise AssertionError(f"process {rank} does not answer")
            try:
                result, error = pipe.recv()
            except EOFError:
                self.end()
                raise AssertionError(f"process {rank} has ended") from None
            if error is not None:
                self.end()
                raise AssertionError(f"in process {rank}: {error}")
            results.append(result)
        return results

    @property
    def alive(self) -> bool:
        """Whether calls can be made."""
        return all(process.is_alive() for process in self._processes)

    def end(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@contextlib.contextmanager
def ranks(size: int, *, joined: bool = True) -> Iterator[Ranks]:
    """Give processes that end with the context."""
    made = Ranks(size, joined=joined)
    try:
        yield made
    finally:
        made.end()


def _serve(pipe: Connection, variables: dict[str, str], joined: bool) -> None:
    os.environ.update(variables)
    import torch
    import torch.distributed

    torch.set_num_threads(1)
    if joined:
        torch.distributed.init_process_group("gloo")
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((function(*args), None))
        except Exception:
            pipe.send((None, traceback.format_exc()))

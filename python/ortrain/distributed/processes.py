# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Collectives of torch.distributed on host memory."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ortrain.errors import UnsupportedError
from ortrain.launchers import Place, discover
from ortrain.logs import get_logger

_log = get_logger("ortrain.distributed")

_SECONDS_TO_LET_GO = 0.1

Result = TypeVar("Result")


class Processes:
    """The processes of the default group of torch.distributed, which train together.

    All of them must make the same calls in the same order. Where the group's backend cannot move host
    memory (NCCL alone), a group with Gloo is made beside it.

    Raises:
      UnsupportedError: torch.distributed is not initialized, or was built without Gloo.

    Attributes:
      rank: The number of this one.
      size: How many there are.
    """

    def __init__(self) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise UnsupportedError("torch.distributed is not initialized")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = None
        if dist.get_backend() == "nccl":
            self._group = dist.new_group(backend="gloo")

    @classmethod
    def start(cls, world_rank: int | None, world_size: int, local_rank: int | None) -> Processes:
        """Return the processes, with torch.distributed initialized if it is not.

        Args:
          world_rank: What the number of this process must be; None for any.
          world_size: How many there must be.
          local_rank: What its number on its machine must be; None for any.

        Raises:
          ValueError: The process group, or what the launcher has set, says otherwise; or there is
            neither.
        """
        joined = dist.is_available() and dist.is_initialized()
        place = Place() if joined and local_rank is None else discover()
        if local_rank is not None and place.local_rank not in (None, local_rank):
            _contradicts("local_rank", local_rank, place.launcher, place.local_rank)
        if joined:
            says = "the process group of torch.distributed"
            rank, size = dist.get_rank(), dist.get_world_size()
        elif place.launcher is not None:
            says, rank, size = place.launcher, place.world_rank, place.world_size
        elif world_rank is not None and "MASTER_ADDR" in os.environ:
            says, rank, size = "", world_rank, world_size
        else:
            raise ValueError(
                f"option 'distributed.world_size' is {world_size}, but torch.distributed is not "
                "initialized and no launcher has set this process's place (RANK and WORLD_SIZE of "
                "torchrun, or those of MPI or Slurm)"
            )
        if size != world_size:
            _contradicts("world_size", world_size, says, size)
        if world_rank is not None and rank != world_rank:
            _contradicts("world_rank", world_rank, says, rank)
        if not joined:
            _initialize(rank, size)
        return cls()

    def all_reduce(self, tensor: torch.Tensor, operation: str = "SUM") -> None:
        """Put the sum over the processes, or what another ReduceOp makes, into a contiguous tensor.

        All of them get equal bits.
        """
        if tensor.numel() > 0:
            dist.all_reduce(tensor, op=getattr(dist.ReduceOp, operation), group=self._group)

    def begin_all_reduce(self, tensor: torch.Tensor) -> Any:
        """Begin to put the sum over the processes into a contiguous tensor that is not empty.

        Returns:
          What has a ``wait()``; until then the tensor belongs to the collective. All processes begin theirs in the
          same order.
        """
        return dist.all_reduce(tensor, group=self._group, async_op=True)

    def broadcast(self, tensors: Sequence[torch.Tensor], source: int = 0) -> None:
        """Put the contents of a process's contiguous tensors, of any types, into those of all."""
        parts = [_bytes_of(t) for t in tensors if t.numel() > 0]
        if not parts:
            return
        together = parts[0] if len(parts) == 1 else torch.cat(parts)
        dist.broadcast(together, source, group=self._group)
        if len(parts) > 1 and self.rank != source:
            for part, given in zip(parts, together.split([len(p) for p in parts]), strict=True):
                part.copy_(given)

    def exchange(self, tensor: torch.Tensor, received: torch.Tensor, peer: int) -> None:
        """Send a tensor to another process, and receive its one of the same size."""
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, tensor, peer, self._group),
                dist.P2POp(dist.irecv, received, peer, self._group),
            ]
        )
        for request in requests:
            request.wait()

    def send_to(self, root: int, tensor: torch.Tensor, source: int) -> None:
        """Put a contiguous tensor of process ``source`` into that of ``root``; others do nothing."""
        if root == source or tensor.numel() == 0:
            return
        if self.rank == source:
            dist.send(tensor, root, group=self._group)
        elif self.rank == root:
            dist.recv(tensor, source, group=self._group)

    def from_first(self, value: Any) -> Any:
        """Return what process 0 gives; picklable."""
        held = [value]
        dist.broadcast_object_list(held, 0, group=self._group)
        return held[0]

    def from_all(self, value: Any) -> list[Any]:
        """Return what each process gives, in their order; picklable."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def on_first(self, action: Callable[[], Result]) -> Result:
        """Return the picklable result of an action that process 0 makes.

        Raises:
          Exception: What the action raised, in all of them.
        """
        outcome: tuple[Any, Exception | None] = (None, None)
        if self.rank == 0:
            try:
                outcome = (action(), None)
            except Exception as error:
                outcome = (None, error)
        error = self._agree(outcome[1])
        if error is not None:
            raise error
        result: Result = self.from_first(outcome[0])
        return result

    def everywhere(self, action: Callable[[], Result]) -> Result:
        """Return the result of an action that each process makes; where one fails, all do.

        Raises:
          Exception: What the action raised here, or in the first process where it failed.
        """
        failed: Exception | None = None
        result: Any = None
        try:
            result = action()
        except Exception as error:
            failed = error
        error = self._agree(failed)
        if error is not None:
            raise error
        made: Result = result
        return made

    def _agree(self, failed: Exception | None) -> Exception | None:
        """Return this process's error, or the first one of another; None where all went well."""
        return first_error(self.from_all(told(failed)), failed)


# What other processes are told of an error: the module and the name of its class, and its text.
Told = tuple[str, str, str]


def told(error: Exception | None) -> Told | None:
    """Return what other processes are told of an error, whatever its class is."""
    if error is None:
        return None
    kind = type(error)
    try:
        text = str(error)
    except Exception as failed:
        text = f"(its text cannot be made: {type(failed).__name__})"
    return kind.__module__, kind.__qualname__, text


def first_error(every: Sequence[Told | None], own: Exception | None) -> Exception | None:
    """Return this process's error, or the first one of another; None where there is none.

    Args:
      every: What the processes were ``told``.
      own: This one's.
    """
    if own is not None:
        return own
    for rank, other in enumerate(every):
        if other is None:
            continue
        module, name, text = other
        text = f"process {rank}: {text}"
        try:
            made = functools.reduce(getattr, name.split("."), sys.modules[module])(text)
        except Exception:  # it takes something else than a message, or has no name here
            made = None
        name = name.rpartition(".")[2]
        return made if isinstance(made, Exception) else RuntimeError(f"{text} ({name})")
    return None


def _contradicts(option: str, given: int, says: str | None, expected: int | None) -> None:
    raise ValueError(f"option 'distributed.{option}' is {given}, {says} says {expected}")


def _initialize(rank: int, size: int) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise ValueError(
                f"{name} is not set: the address and a free port of the machine of process 0, by "
                "which the processes find each other"
            )
    store, _, _ = next(dist.rendezvous("env://", rank, size))
    # torchrun keeps its store when it starts processes again, with the addresses of those before.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {attempt}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    atexit.register(_leave)
    _log.info("process %d of %d, joined by Gloo", rank, size)


def _leave() -> None:
    """Leave the group before the interpreter goes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    # Where torch.export was used, PyTorch keeps the group, and Gloo's threads may still hold tensors
    # of the last collective: they need the interpreter's lock now, later they would abort the process.
    time.sleep(_SECONDS_TO_LET_GO)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor."""
    return tensor.detach().reshape(-1).view(torch.uint8)

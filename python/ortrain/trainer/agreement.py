# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""That several processes are about to do the same: told apart before anything has changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ortrain import logs
from ortrain.distributed import Processes
from ortrain.distributed.processes import first_error, told
from ortrain.errors import InvalidModelError

_log = logs.get_logger("ortrain")

_STEP = "the step"
_FAILED = "what it has failed with"
_NO_STEP: dict[str, Any] = {"the step": "not begun"}


def require_alike(processes: Processes, own: Mapping[str, Any]) -> None:
    """Compare what each process has, by what it is; all processes call it, and all or none raise.

    Args:
      processes: Those that must agree.
      own: What this one has; picklable.

    Raises:
      InvalidModelError: Some have other values; names the first difference, with both values.
    """
    refuse_differences(processes.from_all(dict(own)), processes.rank)


def refuse_differences(every: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise InvalidModelError for the first difference between what a process has and what others have.

    Args:
      every: What each process has, by what it is.
      rank: Of this one.
    """
    own = every[rank]
    for number, other in enumerate(every):
        for what in sorted({**own, **other}, key=lambda what: not what.startswith("'")):  # tensors
            if own.get(what) != other.get(what):
                raise InvalidModelError(
                    f"{what} is {own.get(what)} in process {rank}, {other.get(what)} in process {number}"
                )


def agree(
    processes: Processes,
    own: Mapping[str, Any],
    details: Callable[[], Mapping[str, Any]],
    failed: Exception | None = None,
) -> None:
    """Do as ``require_alike`` by a collective of 16 bytes, for what is compared in every step.

    Args:
      processes: Those that must agree.
      own: What this one has; its repr is compared.
      details: Gives what is looked at first for the error's text, where processes differ.
      failed: What this one has failed with; all fail then.

    Raises:
      InvalidModelError: Some have other values.
    """
    every = _every_unless_alike(processes, own, details, failed)
    if every is not None:
        refuse_differences(every, processes.rank)


def have_graphs(
    processes: Processes,
    numbers: Mapping[str, Any],
    step: Mapping[str, Any] | None,
    failed: Exception | None,
    details: Callable[[], Mapping[str, Any]],
    may_do_without: Callable[[], bool],
) -> bool:
    """Tell whether all processes have a graph for a step, all the same, by a collective of 16 bytes where they do.

    Where graphs differ a warning says so.

    Args:
      processes: Those that call it.
      numbers: What must be alike, with a graph or without.
      step: What this one's graph does, by its parts; None where it has none.
      failed: What this one has failed with; all fail then.
      details: As for ``agree``.
      may_do_without: Whether such a step can be run without a graph; in all alike.

    Raises:
      InvalidModelError: Some have other numbers, or graphs of other steps, where there has to be one.
    """
    every = _every_unless_alike(processes, {**numbers, _STEP: step}, details, failed)
    if every is None:
        return step is not None
    steps = [other.pop(_STEP, _NO_STEP) for other in every]
    whole = [{**other, **(step or {})} for other, step in zip(every, steps, strict=True)]
    if _NO_STEP in steps:  # it is elsewhere
        refuse_differences(whole, processes.rank)
    refuse_differences(every, processes.rank)
    if None not in steps:
        try:
            refuse_differences(whole, processes.rank)
        except InvalidModelError as difference:
            if not may_do_without():
                raise
            _log.warning("no graph runs this step: %s", difference)
    return False


def _every_unless_alike(
    processes: Processes,
    own: Mapping[str, Any],
    details: Callable[[], Mapping[str, Any]],
    failed: Exception | None,
) -> list[dict[str, Any]] | None:
    """Return what each process has, details too; None where all have the same. Raises where one has failed."""
    own = {**own, _FAILED: told(failed)}
    every = None
    if not are_alike(processes, own):
        every = processes.from_all({**details(), **own})
    told_by_all = [other.pop(_FAILED, None) for other in every or ()]
    error = first_error(told_by_all, failed)
    if error is not None:
        raise error
    return every


def are_alike(processes: Processes, own: Mapping[str, Any]) -> bool:
    """Tell whether all processes have the same, by a collective of 16 bytes; all get one answer.

    Args:
      processes: Those that call it.
      own: What this one has; its repr is compared.
    """
    text = repr(sorted(own.items()))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little", signed=True)
    # The inverse of the largest ~x is the smallest x.
    extremes = torch.tensor([number, ~number], dtype=torch.int64)
    processes.all_reduce(extremes, "MAX")
    largest, inverse_of_smallest = extremes.tolist()
    return bool(largest == ~inverse_of_smallest)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Time the same training step on several sides, one at a time, in rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.worker import Worker, WorkerError
from benchmarks.workloads import Workload

TURN_SECONDS = 0.3  # a side does at least this much work before the next one has its turn
GEMM_REPEAT = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How to compare.

    Attributes:
      peers: Names in ``PEERS``.
      threads: Threads of each side; None leaves the choice to PyTorch.
      dtype: "f32", or "bf16" for autocast.
      rounds: Turns of each side.
      cold_compile: Give torch.compile and Ortrain empty caches instead of those kept between runs.
      device: PyTorch's name of where the sides train: "cpu", "cuda:0".
      product_edge: Measure bfloat16 products of this many rows, depth and columns, on the device,
        in place of the float32 ones on the CPU.
    """

    peers: Sequence[str] = tuple(PEERS)
    threads: int | None = None
    dtype: str = "f32"
    rounds: int = 7
    cold_compile: bool = False
    device: str = "cpu"
    product_edge: int | None = None

    def __post_init__(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise ValueError(f"unknown peer {peer!r}; there are {', '.join(PEERS)}")
        if not self.peers or len(set(self.peers)) != len(self.peers):
            raise ValueError("name each peer once, at least one")
        if self.dtype not in ("f32", "bf16"):
            raise ValueError(f"dtype is f32 or bf16, not {self.dtype!r}")
        if self.rounds < 1:
            raise ValueError("rounds must be positive")
        if self.threads is not None and self.threads < 1:
            raise ValueError("threads must be positive")
        if self.device != "cpu" and self.product_edge is None:
            raise ValueError(f"products on {self.device!r} need a product_edge")


def compare(
    workload: Workload,
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Return the figures of every side.

    Each side lives in a process of its own and does a few steps per turn while the others sleep; on
    a device, whose memory they would share, one side is done before the next begins.
    A side that fails is reported with the reason, and the others go on.

    Args:
      workload: What to train.
      settings: How to compare.
      say: Called with what is being done.
      deadline: When the processes are ended, by ``time.monotonic()``; sides that were not done by
        then have an error.

    Returns:
      A dict for JSON with "workload", "settings", "flops", "gemm" and "gemm_best" (median and most
      FLOP/s by library) and "sides". A side has "error", or: seconds "wall" and "cpu" (median, min,
      quartiles, steps) and "block" (a step's, of whole turns), "first_step", page faults per step,
      memory (on a device, of PyTorch's allocator there), and "eta": the time that the
      better library would take for the step's products over that of the step, medians of both,
      since the clock of a machine varies; "eta_best" likewise of the best times.
    """
    plain = dataclasses.asdict(workload)
    sides: dict[str, dict[str, Any]] = {}
    with contextlib.ExitStack() as stack:
        reference = stack.enter_context(Worker({}, settings.threads, deadline))
        flops = reference.ask("flops", workload=plain)
        products = _Products(reference, settings)
        # On a device the sides would share its memory: each has it to itself, one after the other.
        alone = settings.device != "cpu"
        groups = [(name,) for name in settings.peers] if alone else [tuple(settings.peers)]
        for group in groups:
            _compare_group(group, workload, settings, say, deadline, products, sides)
        gemm = {library: statistics.median(each) for library, each in products.rates.items()}
        gemm_best = {library: max(each) for library, each in products.rates.items()}
        for side in sides.values():
            if "wall" in side:
                side["eta"] = flops / max(gemm.values()) / side["wall"]["median"]
                side["eta_best"] = flops / max(gemm_best.values()) / side["wall"]["min"]
    return {
        "workload": {"name": workload.name, **plain},
        "settings": dataclasses.asdict(settings),
        "load": os.getloadavg()[0],
        "flops": flops,
        "gemm": gemm,
        "gemm_best": gemm_best,
        "sides": sides,
    }


class _Products:
    """The rates of large products, by library, measured between the sides' turns."""

    def __init__(self, worker: Worker, settings: Settings) -> None:
        self._worker = worker
        self._arguments = {
            "repeat": GEMM_REPEAT,
            "device": settings.device,
            "edge": settings.product_edge,
        }
        self.rates: dict[str, list[float]] = worker.ask("gemm", **self._arguments)

    def measure(self) -> None:
        """Measure once more."""
        for library, more in self._worker.ask("gemm", **self._arguments).items():
            self.rates[library] += more


def _compare_group(
    names: Sequence[str],
    workload: Workload,
    settings: Settings,
    say: Callable[[str], None],
    deadline: float | None,
    products: _Products,
    sides: dict[str, dict[str, Any]],
) -> None:
    """Time sides that take turns, and add what is found to ``sides``."""
    workers: dict[str, Worker] = {}
    samples: dict[str, dict[str, list[float]]] = {}
    turn: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for name in names:
            say(f"{workload.name}: {name}, first step")
            environment = dict(PEERS[name].environment)
            environment |= peer_caches(stack, cold=settings.cold_compile)
            worker = stack.enter_context(Worker(environment, settings.threads, deadline))
            where = {"dtype": settings.dtype, "device": settings.device}
            try:
                sides[name] = worker.ask(
                    "build", workload=dataclasses.asdict(workload), peer=name, **where
                )
                sides[name]["first_step"] = worker.ask("first_step")
                step = worker.ask("warm_up")
            except WorkerError as error:
                _drop(name, error, sides, workers, worker)
                continue
            workers[name] = worker
            turn[name] = max(1, min(1000, math.ceil(TURN_SECONDS / step)))
            samples[name] = {"wall": [], "cpu": [], "faults": [], "block": [], "loss": []}
        longest = 0.0
        for number in range(settings.rounds):
            # A round that would be cut off is left out; what there is stands.
            if number and deadline is not None and time.monotonic() + 1.5 * longest > deadline:
                break
            start = time.monotonic()
            say(f"{workload.name}: round {number + 1} of {settings.rounds}")
            products.measure()
            for name in list(workers) if number % 2 == 0 else list(reversed(workers)):
                try:
                    done = workers[name].ask("steps", count=turn[name])
                except WorkerError as error:
                    _drop(name, error, sides, workers, workers[name])
                    continue
                samples[name]["wall"] += done["wall"]
                samples[name]["cpu"] += done["cpu"]
                samples[name]["faults"] += done["faults"]
                samples[name]["block"].append(done["block"])
                samples[name]["loss"].append(done["loss"])
            longest = max(longest, time.monotonic() - start)
        for name in list(workers):
            try:
                facts = workers[name].ask("finish")
            except WorkerError as error:
                _drop(name, error, sides, workers, workers[name])
                continue
            sides[name] |= facts | _figures(samples[name])


def ratio(result: dict[str, Any], of: str, to: str, clock: str = "wall") -> float | None:
    """Return how many times as long a step of ``of`` takes as one of ``to``; None if one failed."""
    slow, quick = (result["sides"].get(name, {}).get(clock) for name in (of, to))
    if slow is None or quick is None:
        return None
    return slow["median"] / quick["median"]


def _figures(samples: dict[str, list[float]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for clock in ("wall", "cpu"):
        steps = samples[clock]
        # A single step is its own quartiles.
        low, median, high = statistics.quantiles(
            steps if len(steps) > 1 else steps * 2, n=4, method="inclusive"
        )
        result[clock] = {
            "median": median,
            "min": min(steps),
            "q1": low,
            "q3": high,
            "steps": len(steps),
        }
    result["faults_per_step"] = statistics.median(samples["faults"])
    result["block"] = statistics.median(samples["block"])
    result["loss"] = samples["loss"][-1]
    return result


def _drop(
    name: str,
    error: WorkerError,
    sides: dict[str, dict[str, Any]],
    workers: dict[str, Worker],
    worker: Worker,
) -> None:
    sides[name] = {**sides.get(name, {}), "error": str(error)}
    workers.pop(name, None)
    worker.close()


def peer_caches(stack: contextlib.ExitStack, *, cold: bool) -> dict[str, str]:
    """Return where torch.compile and Ortrain keep what they have compiled."""
    if cold:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ortrain-bench-"))
    else:
        folder = str(Path(tempfile.gettempdir()) / f"ortrain-bench-{os.getuid()}")
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        if Path(folder).stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "ORTRAIN_CACHE_DIR": f"{folder}/ortrain",
    }

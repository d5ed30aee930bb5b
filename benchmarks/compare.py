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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import PEERS
from benchmarks.worker import TIME_LIMIT, Worker, WorkerError
from benchmarks.workloads import Workload

TURN_SECONDS = 0.3  # a side does at least this much work before the next one has its turn
GEMM_REPEAT = 20
START_TOGETHER = 8  # cores from which on processes start at once where sides are alone


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
      alone: One side is done before the next begins; so on a device, whose memory they would share.
      profiled: Sides whose kernels are told, of a step after the timed ones.
    """

    peers: Sequence[str] = tuple(PEERS)
    threads: int | None = None
    dtype: str = "f32"
    rounds: int = 7
    cold_compile: bool = False
    device: str = "cpu"
    product_edge: int | None = None
    alone: bool = False
    profiled: Sequence[str] = ()

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
        if self.device != "cpu" and not self.alone:
            raise ValueError(f"sides on {self.device!r} are to be alone")


def compare(
    workload: Workload,
    settings: Settings,
    say: Callable[[str], None] = lambda text: None,
    deadline: float | None = None,
    done: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Return the figures of every side.

    Each side lives in a process of its own and does a few steps per turn while the others sleep;
    or, ``alone``, is done before the next begins. Then, where there are cores for it, all processes
    start and import at once, before anything is timed, and sleep until their turn. A side that
    fails is reported with the reason, and the others go on.

    Args:
      workload: What to train.
      settings: How to compare.
      say: Called with what is being done.
      deadline: When the processes are ended, by ``time.monotonic()``. A side that was not done by
        then has an error beside the figures that it has; what the large products or the count of
        FLOPs lack then is left out.
      done: Called with the result so far when a side is done.

    Returns:
      A dict for JSON with "workload", "settings", "flops", "gemm" and "gemm_best" (median and most
      FLOP/s by library) and "sides". A side has "error", or: seconds "wall" and "cpu" (median, min,
      quartiles, steps) and "block" (a step's, of whole turns), "first_step", page faults per step,
      memory (on a device, of PyTorch's allocator there), and "eta": the time that the
      better library would take for the step's products over that of the step, medians of both,
      since the clock of a machine varies; "eta_best" likewise of the best times. "phases" are the
      seconds of its process. "reference_ready" are those until FLOPs were counted and products
      timed, where sides are alone.
    """
    with contextlib.ExitStack() as stack:
        comparison = _Comparison(workload, settings, say, deadline, stack)
        if settings.alone:
            comparison.run_alone(done)
        else:
            comparison.run_in_turns()
        return comparison.result()


class _Reference:
    """The process that counts FLOPs and times large products; with a deadline, as far as it gets.

    Attributes:
      flops: Of the step's products; None where they could not be counted.
      rates: Of large products, by library.
      error: Why some of it is missing.
    """

    def __init__(self, settings: Settings, deadline: float | None, keep: bool) -> None:
        self.flops: float | None = None
        self.rates: dict[str, list[float]] = {}
        self.error = ""
        self.worker = Worker({}, settings.threads, deadline)
        self._partial = deadline is not None
        self._arguments = {
            "repeat": GEMM_REPEAT,
            "device": settings.device,
            "edge": settings.product_edge,
            "keep": keep,
        }

    def count(self, workload: dict[str, Any]) -> None:
        """Count the FLOPs of a step."""
        self.flops = self._ask("flops", workload=workload)

    def measure(self) -> None:
        """Time large products once more."""
        for library, more in (self._ask("gemm", **self._arguments) or {}).items():
            self.rates.setdefault(library, []).extend(more)

    def _ask(self, request: str, **arguments: Any) -> Any:
        try:
            return self.worker.ask(request, **arguments)
        except WorkerError as error:
            if not self._partial:
                raise
            self.error = str(error)
            return None


class _Comparison:
    """The sides of a comparison and what is known of them so far."""

    def __init__(
        self,
        workload: Workload,
        settings: Settings,
        say: Callable[[str], None],
        deadline: float | None,
        stack: contextlib.ExitStack,
    ) -> None:
        self._workload = workload
        self._plain = dataclasses.asdict(workload)
        self._settings = settings
        self._say = say
        self._deadline = deadline
        self._stack = stack
        self._sides: dict[str, dict[str, Any]] = {}
        self._samples: dict[str, dict[str, list[float]]] = {}
        self._workers: dict[str, Worker] = {}
        self._turn: dict[str, int] = {}
        self._ready: float | None = None
        # A side that is alone has the whole memory.
        self._reference = _Reference(settings, deadline, keep=not settings.alone)
        stack.callback(self._reference.worker.close, at_once=True)

    def run_in_turns(self) -> None:
        """Time all sides in rounds, large products between them."""
        self._reference.count(self._plain)
        self._reference.measure()
        for name in self._settings.peers:
            self._start(name)
            self._begin(name)
        self._rounds(self._reference.measure)
        for name in list(self._workers):
            self._finish(name)

    def run_alone(self, done: Callable[[dict[str, Any]], None]) -> None:
        """Time one side after the other, large products before the first and after the last."""
        start = time.perf_counter()
        together = (os.cpu_count() or 1) >= START_TOGETHER
        for name in self._settings.peers if together else ():
            self._prepare(name)
        self._reference.count(self._plain)
        self._reference.measure()
        self._ready = time.perf_counter() - start
        for name in self._settings.peers if together else ():
            self._wait_until_prepared(name)
        prepared = dict(self._workers)
        for name in self._settings.peers:
            if not together:
                self._prepare(name)
                self._wait_until_prepared(name)
                prepared |= self._workers
            self._workers = {name: prepared[name]} if name in prepared else {}
            if name in self._workers:
                self._begin(name)
                self._rounds()
                self._finish(name)
                self._workers.clear()
                # With caches that are not kept, nothing that its end would write is of use.
                prepared[name].close(at_once=self._settings.cold_compile)
            done(self.result())
        self._reference.measure()

    def result(self) -> dict[str, Any]:
        """Return what is known."""
        rates, flops = self._reference.rates, self._reference.flops
        gemm = {library: statistics.median(each) for library, each in rates.items()}
        gemm_best = {library: max(each) for library, each in rates.items()}
        for side in self._sides.values():
            if "wall" in side and flops is not None and gemm:
                side["eta"] = flops / max(gemm.values()) / side["wall"]["median"]
                side["eta_best"] = flops / max(gemm_best.values()) / side["wall"]["min"]
        made = {
            "workload": {"name": self._workload.name, **self._plain},
            "settings": dataclasses.asdict(self._settings),
            "load": os.getloadavg()[0],
            "flops": flops,
            "gemm": gemm,
            "gemm_best": gemm_best,
            "reference_ready": self._ready,
            "sides": self._sides,
        }
        error = self._reference.error
        return made | ({"reference_error": error} if error else {})

    def _start(self, name: str) -> None:
        environment = dict(PEERS[name].environment)
        environment |= peer_caches(self._stack, cold=self._settings.cold_compile)
        worker = Worker(environment, self._settings.threads, self._deadline)
        self._workers[name] = self._stack.enter_context(worker)
        self._sides[name] = {"phases": {}}

    def _prepare(self, name: str) -> None:
        self._start(name)
        self._workers[name].begin("prepare", workload=self._plain, peer=name)

    def _wait_until_prepared(self, name: str) -> None:
        with self._phase(name, "start"):
            self._workers[name].settle()

    @contextlib.contextmanager
    def _phase(self, name: str, what: str) -> Iterator[None]:
        """Time what a side does; where it fails it takes no further part."""
        side = self._sides[name]
        start = time.perf_counter()
        try:
            yield
        except WorkerError as error:
            side["error"] = str(error)
            if (worker := self._workers.pop(name, None)) is not None:
                worker.close()
        finally:
            spent = side["phases"].get(what, 0.0)
            side["phases"][what] = spent + time.perf_counter() - start

    def _begin(self, name: str) -> None:
        """Let a side build the model and do its first steps."""
        settings, worker, side = self._settings, self._workers[name], self._sides[name]
        self._say(f"{self._workload.name}: {name}, first step")
        with self._phase(name, "build"):
            side |= worker.ask(
                "build",
                workload=self._plain,
                peer=name,
                dtype=settings.dtype,
                device=settings.device,
            )
        if name in self._workers:
            with self._phase(name, "first step"):
                side["first_step"] = worker.ask("first_step")
        if name in self._workers:
            with self._phase(name, "warm-up"):
                step = worker.ask("warm_up")
                self._turn[name] = max(1, min(1000, math.ceil(TURN_SECONDS / step)))
                self._samples[name] = {
                    clock: [] for clock in ("wall", "cpu", "faults", "block", "loss")
                }

    def _rounds(self, between: Callable[[], None] = lambda: None) -> None:
        """Give the sides that run their turns."""
        settings, workers = self._settings, self._workers
        longest = 0.0
        for number in range(settings.rounds):
            # A round that would be cut off is left out; what there is stands.
            late = time.monotonic() + 1.5 * longest
            if number and self._deadline is not None and late > self._deadline:
                break
            start = time.monotonic()
            self._say(f"{self._workload.name}: round {number + 1} of {settings.rounds}")
            between()
            for name in list(workers) if number % 2 == 0 else list(reversed(workers)):
                with self._phase(name, "steps"):
                    steps = workers[name].ask("steps", count=self._turn[name])
                    for clock in ("wall", "cpu", "faults"):
                        self._samples[name][clock] += steps[clock]
                    for clock in ("block", "loss"):
                        self._samples[name][clock].append(steps[clock])
            longest = max(longest, time.monotonic() - start)
        for name, samples in self._samples.items():
            # Of a side that the deadline ended the rounds that were done count.
            if samples["wall"] and self._sides[name].get("error", TIME_LIMIT) == TIME_LIMIT:
                self._sides[name] |= _figures(samples)
        self._samples.clear()

    def _finish(self, name: str) -> None:
        """Ask a side for what is known after its steps."""
        if name not in self._workers:
            return
        worker, side = self._workers[name], self._sides[name]
        with self._phase(name, "finish"):
            side |= worker.ask("finish")
        if name in self._workers and name in self._settings.profiled:
            with self._phase(name, "profile"):
                try:
                    side["profile"] = worker.ask("profile")
                except WorkerError as error:
                    side["profile_error"] = str(error)  # what was timed stands


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


def peer_caches(stack: contextlib.ExitStack, *, cold: bool) -> dict[str, str]:
    """Return where torch.compile and Ortrain keep what they have compiled."""
    if cold:
        # What a process that was ended has left may still write there.
        folder = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="ortrain-bench-", ignore_cleanup_errors=True)
        )
    else:
        folder = str(Path(tempfile.gettempdir()) / f"ortrain-bench-{os.getuid()}")
        Path(folder).mkdir(mode=0o700, exist_ok=True)
        if Path(folder).stat().st_uid != os.getuid():
            raise PermissionError(f"{folder} belongs to another user")
    return {
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "ORTRAIN_CACHE_DIR": f"{folder}/ortrain",
    }

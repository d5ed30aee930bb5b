# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A process that does what the comparison tells it, one request at a time, and sleeps otherwise.

Requests and answers are lines of JSON on standard input and on the original standard output;
whatever libraries print goes to standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from benchmarks import ROOT, package_path

WARM_UP_SECONDS = 0.5
QUIET_SECONDS = 20  # compilers' helpers get this long to come to rest
TIME_LIMIT = "the time limit was reached"


class WorkerError(RuntimeError):
    """A worker could not do what it was asked; the text is the last line of its error."""


class WorkerEndedError(WorkerError):
    """The process of a worker is no more."""


class Worker:
    """Start a worker and talk to it.

    Args:
      environment: Variables set on top of this process's.
      threads: Threads of PyTorch and OpenMP; None leaves them alone.
      deadline: When the process is ended, by ``time.monotonic()``; None for never.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        threads: int | None = None,
        deadline: float | None = None,
    ) -> None:
        # Threads wait as OpenMP's defaults say, as they do for users: its waiting threads go to
        # sleep within milliseconds, so an idle worker takes no time from the one being timed.
        settings = {"TOKENIZERS_PARALLELISM": "false"}
        if threads is not None:
            settings["OMP_NUM_THREADS"] = str(threads)
        path = package_path(os.environ.get("PYTHONPATH"))
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            cwd=ROOT,
            env={**os.environ, **settings, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        self._threads = threads
        self._begun = 0
        self._late = False
        self._timer: threading.Timer | None = None
        if deadline is not None:
            self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._end_late)
            self._timer.daemon = True
            self._timer.start()

    def ask(self, request: str, **arguments: Any) -> Any:
        """Send one request and wait for the answer.

        Raises:
          WorkerError: The worker reported an error, here or to what had begun.
          WorkerEndedError: It ended, or was ended at its deadline.
        """
        self.settle()
        self.begin(request, **arguments)
        return self._answer()

    def begin(self, request: str, **arguments: Any) -> None:
        """Send one request; ``settle`` or the next ``ask`` waits for the answer."""
        assert self._process.stdin is not None
        if request in ("build", "gemm"):
            arguments["threads"] = self._threads
        self._begun += 1
        # A process that has ended is noticed where its answer is missing.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
            self._process.stdin.flush()

    def settle(self) -> None:
        """Wait until what was begun is done; raises as ``ask`` does."""
        while self._begun:
            self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        self._begun -= 1
        line = self._process.stdout.readline()
        if not line:
            raise WorkerEndedError(self._how_it_ended())
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def _end_late(self) -> None:
        self._late = True
        self._process.kill()

    def _how_it_ended(self) -> str:
        status = self._process.wait()
        if self._late:
            return TIME_LIMIT
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f"the process ended with status {status}" + (f": {lines[-1]}" if lines else "")

    def close(self, *, at_once: bool = False) -> None:
        """End the process; ``at_once`` without what Python does at its end."""
        if self._timer is not None:
            self._timer.cancel()
        if at_once:
            self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Requests:
    """What a worker can do; one method per request."""

    def __init__(self) -> None:
        self._step: Any = None
        self._side: Any = None
        self._products: Any = None
        self._device = "cpu"

    def prepare(self, workload: dict[str, Any], peer: str) -> None:
        """Import what ``build`` takes, without touching a device."""
        from benchmarks.peers import PEERS
        from benchmarks.workloads import Workload

        _quiet()
        for module in PEERS[peer].modules:
            importlib.import_module(module)
        Workload(**workload).build_meta()  # transformers imports an architecture when it is used

    def build(
        self,
        workload: dict[str, Any],
        peer: str,
        dtype: str,
        threads: int | None,
        device: str = "cpu",
    ) -> dict[str, Any]:
        """Make the model, its batch and optimizer; nothing has run yet."""
        import torch

        from benchmarks.peers import PEERS, make_step
        from benchmarks.resources import reset_peak_of, resident_bytes
        from benchmarks.workloads import Workload

        _quiet()
        if threads is not None:
            torch.set_num_threads(threads)
        made = Workload(**workload)
        model, batch = made.build(device), made.make_batch()
        if device != "cpu":
            torch.cuda.empty_cache()  # of what drawing the weights took
            reset_peak_of(device)
        torch.manual_seed(2)
        self._device = device
        self._side = PEERS[peer].make(model)
        self._step = make_step(self._side, batch, dtype, device)
        optimizer = type(self._side.optimizer)
        fused = " (fused)" if self._side.optimizer.defaults.get("fused") else ""
        return {
            "threads": torch.get_num_threads(),
            "parameters": sum(p.numel() for p in model.parameters()),
            "parameter_tensors": sum(1 for _ in model.parameters()),
            "optimizer": f"{optimizer.__module__.partition('.')[0]}.{optimizer.__name__}{fused}",
            "resident_bytes": resident_bytes(),
        }

    def rebatch(self, workload: dict[str, Any], dtype: str) -> None:
        """Go on with the batch of another workload, same model and optimizer."""
        from benchmarks.peers import make_step
        from benchmarks.workloads import Workload

        self._step = make_step(self._side, Workload(**workload).make_batch(), dtype, self._device)

    def first_step(self) -> dict[str, Any]:
        """Do the first step and wait for it; CPU time includes child processes.

        "stages" are the seconds of what the engine did in it, where it is the engine's.
        """
        from benchmarks.resources import cpu_seconds, peak_of, reset_peak_of

        wall, cpu = time.perf_counter(), cpu_seconds()
        loss = float(self._step())
        self._synchronize()
        result: dict[str, Any] = {
            "wall": time.perf_counter() - wall,
            "cpu": cpu_seconds() - cpu,
            "loss": loss,
            "peak_bytes": peak_of(self._device),
        }
        if stages := self._side.describe().get("stages"):
            result["stages"] = stages
        reset_peak_of(self._device)
        return result

    def warm_up(self) -> float:
        """Do some steps, wait until child processes are idle; return the seconds of a step."""
        from benchmarks.resources import cpu_seconds

        best = float("inf")
        count = 0
        start = time.perf_counter()
        # On a device the engine records steps when their addresses come again.
        least = 2 if self._device == "cpu" else 6
        while count < least or time.perf_counter() - start < WARM_UP_SECONDS:
            step_start = time.perf_counter()
            self._step()
            self._synchronize()
            best = min(best, time.perf_counter() - step_start)
            count += 1
        deadline = time.perf_counter() + QUIET_SECONDS
        before = cpu_seconds()
        while time.perf_counter() < deadline:
            time.sleep(0.2)
            now = cpu_seconds()
            if now - before <= 0.02:
                break
            before = now
        return best

    def steps(self, count: int) -> dict[str, Any]:
        """Do some steps; see ``benchmarks.step_clock.time_steps``."""
        from benchmarks.step_clock import time_steps

        return time_steps(self._step, count, self._device)

    def finish(self) -> dict[str, Any]:
        """Return what is known after the timed steps: the peak memory since the first.

        On a device it is that of PyTorch's allocator there, which the engine uses too.
        """
        from benchmarks.resources import peak_of

        return {"peak_bytes": peak_of(self._device), **self._side.describe()}

    def profile(self) -> dict[str, Any]:
        """Do one step more; see ``benchmarks.kernel_times``."""
        from benchmarks.kernel_times import kernel_times

        return kernel_times(self._step, self._device)

    def memory(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Measure the memory of a step; see ``benchmarks.memory``."""
        from benchmarks.memory import probe
        from benchmarks.workloads import Workload

        self._step = None  # it holds a batch
        return probe(self._side, Workload(**workload).make_batch())

    def trial(
        self, workload: dict[str, Any], dtype: str, most_rows: int | None = None
    ) -> dict[str, Any]:
        """Train on a batch of another size; see ``benchmarks.memory.try_batch``."""
        from benchmarks.memory import try_batch
        from benchmarks.workloads import Workload

        self._step = None  # it holds a batch
        return try_batch(self._side, Workload(**workload), dtype, self._device, most_rows)

    def call(self, function: str, **arguments: Any) -> Any:
        """Call a function of this package, "module:function", that returns what JSON can hold."""
        module, _, name = function.partition(":")
        _quiet()
        return getattr(importlib.import_module(f"benchmarks.{module}"), name)(**arguments)

    def flops(self, workload: dict[str, Any]) -> float:
        """Count the FLOPs of the matrix products of a step."""
        from benchmarks.workloads import Workload

        _quiet()
        return Workload(**workload).flops()

    def gemm(
        self,
        repeat: int,
        threads: int | None,
        device: str = "cpu",
        edge: int | None = None,
        keep: bool = True,
    ) -> dict[str, list[float]]:
        """Return the FLOP/s of some large products, by library.

        They are float32 on the CPU; given an ``edge``, bfloat16 and square, on any device, whose
        memory is given back unless factors are to be kept for the next time.
        """
        import torch

        from benchmarks.gemm import DeviceProducts, Products

        if threads is not None:
            torch.set_num_threads(threads)
        if self._products is None:
            self._products = Products() if edge is None else DeviceProducts(device, edge)
        rates = self._products.rates(repeat)
        if not keep:
            self._products = None
            if device != "cpu":
                torch.cuda.empty_cache()
        return rates

    def _synchronize(self) -> None:
        from benchmarks.step_clock import StepClock

        StepClock(self._device).synchronize()


def _quiet() -> None:
    try:
        import transformers
    except ImportError:
        return  # only the MLP can be built, and it does without
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def _error_line(error: Exception) -> str:
    lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
    first = lines[0] if lines else ""
    return first if type(error).__name__ in first else f"{type(error).__name__}: {first}"


def main() -> int:
    """Answer requests until the pipe is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    requests = _Requests()
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            result = getattr(requests, arguments.pop("request"))(**arguments)
            answer = {"result": result}
        except Exception as error:
            # The comparison goes on without this side and shows the reason.
            answer = {"error": _error_line(error)}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

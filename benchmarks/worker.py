# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A process that does what the comparison tells it, one request at a time, and sleeps otherwise.

Requests and answers are lines of JSON on standard input and on the original standard output;
whatever libraries print goes to standard error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from typing import Any

from benchmarks import ROOT

WARM_UP_SECONDS = 0.5
QUIET_SECONDS = 20  # compilers' helpers get this long to come to rest


class WorkerError(RuntimeError):
    """A worker could not do what it was asked; the text is the last line of its error."""


class Worker:
    """Start a worker and talk to it.

    Args:
      environment: Variables set on top of this process's.
      threads: Threads of PyTorch and OpenMP; None leaves them alone.
    """

    def __init__(self, environment: Mapping[str, str], threads: int | None = None) -> None:
        # Threads wait as OpenMP's defaults say, as they do for users: its waiting threads go to
        # sleep within milliseconds, so an idle worker takes no time from the one being timed.
        settings = {"TOKENIZERS_PARALLELISM": "false"}
        if threads is not None:
            settings["OMP_NUM_THREADS"] = str(threads)
        path = os.pathsep.join(p for p in (str(ROOT / "python"), os.environ.get("PYTHONPATH")) if p)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            cwd=ROOT,
            env={**os.environ, **settings, "PYTHONPATH": path, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._threads = threads

    def ask(self, request: str, **arguments: Any) -> Any:
        """Send one request and wait for the answer.

        Raises:
          WorkerError: The worker reported an error, or ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        if request in ("build", "gemm"):
            arguments["threads"] = self._threads
        try:
            self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerError(f"the process ended with status {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer["result"]

    def close(self) -> None:
        """End the process."""
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

    def build(
        self, workload: dict[str, Any], peer: str, dtype: str, threads: int | None
    ) -> dict[str, Any]:
        """Make the model, its batch and optimizer; nothing has run yet."""
        import torch

        from benchmarks.peers import PEERS, make_step
        from benchmarks.resources import resident_bytes
        from benchmarks.workloads import Workload

        _quiet()
        if threads is not None:
            torch.set_num_threads(threads)
        made = Workload(**workload)
        model, batch = made.build(), made.make_batch()
        torch.manual_seed(2)
        self._side = PEERS[peer].make(model)
        self._step = make_step(self._side, batch, dtype)
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

        self._step = make_step(self._side, Workload(**workload).make_batch(), dtype)

    def first_step(self) -> dict[str, float]:
        """Do the first step; CPU time includes child processes."""
        from benchmarks.resources import cpu_seconds, peak_bytes, reset_peak

        wall, cpu = time.perf_counter(), cpu_seconds()
        loss = self._step()
        result = {
            "wall": time.perf_counter() - wall,
            "cpu": cpu_seconds() - cpu,
            "loss": loss,
            "peak_bytes": peak_bytes(),
        }
        reset_peak()
        return result

    def warm_up(self) -> float:
        """Do some steps, wait until child processes are idle; return the seconds of a step."""
        from benchmarks.resources import cpu_seconds

        best = float("inf")
        count = 0
        start = time.perf_counter()
        while count < 2 or time.perf_counter() - start < WARM_UP_SECONDS:
            step_start = time.perf_counter()
            self._step()
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
        """Do some steps after one that does not count; return the figures of each and the loss.

        The first one finds what the system took from the sleeping process: caches, and pages of
        libraries, whose faults are not the step's.
        """
        from benchmarks.resources import page_faults

        wall, cpu, faults = [], [], []
        loss = self._step()
        for _ in range(count):
            before = page_faults()
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            loss = self._step()
            wall.append(time.perf_counter() - wall_start)
            cpu.append(time.process_time() - cpu_start)
            faults.append(page_faults() - before)
        return {"wall": wall, "cpu": cpu, "faults": faults, "loss": loss}

    def finish(self) -> dict[str, Any]:
        """Return what is known after the timed steps: the peak memory since the first."""
        from benchmarks.resources import peak_bytes

        return {"peak_bytes": peak_bytes(), **self._side.describe()}

    def memory(self, workload: dict[str, Any]) -> dict[str, Any]:
        """Measure the memory of a step; see ``benchmarks.memory``."""
        from benchmarks.memory import probe
        from benchmarks.workloads import Workload

        self._step = None  # it holds a batch
        return probe(self._side, Workload(**workload).make_batch())

    def flops(self, workload: dict[str, Any]) -> float:
        """Count the FLOPs of the matrix products of a step."""
        from benchmarks.workloads import Workload

        _quiet()
        return Workload(**workload).flops()

    def gemm(self, repeat: int, threads: int | None) -> dict[str, list[float]]:
        """Return the FLOP/s of some large float32 products, by library."""
        import torch

        from benchmarks.gemm import Products

        if threads is not None:
            torch.set_num_threads(threads)
        if self._products is None:
            self._products = Products()
        return self._products.rates(repeat)


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

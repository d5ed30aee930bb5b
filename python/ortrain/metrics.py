# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What each training step takes: time, tokens, memory, captures, what runs in PyTorch.

with StepMetrics(model, log_dir="runs/one") as metrics:
    for batch in batches:
        train_one_step(model, batch)
        metrics.step(tokens=batch["input_ids"].numel())
"""

from __future__ import annotations

import dataclasses
import os
import resource
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import nn

from ortrain import logs, progress_display
from ortrain.module import ORTModule

__all__ = ["StepFigures", "StepMetrics", "modules_in", "peak_memory_bytes"]

_log = logs.get_logger("ortrain.metrics")

# Seconds between two lines in the log.
_LOG_INTERVAL = 10.0


@dataclasses.dataclass(frozen=True, slots=True)
class StepFigures:
    """What one step took, and what there has been until its end.

    Attributes:
      step: Its number, from 1.
      step_time: Seconds.
      tokens_per_second: Of this process; None where tokens were not counted.
      peak_memory_mib: The most memory that this process has ever held, in MiB.
      planned_memory_mib: What the latest forward and backward of all ORTModules take from the
        engine by plan, in MiB; 0 where nothing has been planned.
      captures: Graphs captured so far, those of pieces too.
      escapes: Operators of these graphs that run in PyTorch, and kinds of calls that are no graph
        and run there or in pieces.
      fallbacks: The latter alone.
    """

    step: int
    step_time: float
    tokens_per_second: float | None
    peak_memory_mib: float
    planned_memory_mib: float
    captures: int
    escapes: int
    fallbacks: int

    def scalars(self) -> dict[str, float]:
        """Return the figures by the names under which they are logged, ``ortrain/step_time``."""
        named = dataclasses.asdict(self)
        del named["step"]
        return {f"ortrain/{name}": value for name, value in named.items() if value is not None}

    def __str__(self) -> str:
        parts = [f"{self.step_time:.3f} s"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        parts.append(f"peak {self.peak_memory_mib:,.0f} MiB")
        return ", ".join(parts)


class StepMetrics:
    """Measures training steps, and shows them where somebody looks.

    On a terminal a bar shows the figures; the main process alone draws it. Elsewhere the logger
    ``ortrain.metrics`` gets a line at INFO, every ten seconds at most.

    Args:
      model: An ORTModule, or a module around some, DistributedDataParallel for one.
      log_dir: Folder to which the main process writes TensorBoard's scalars, with the step's number.
      total_steps: How many steps there will be, for the bar.
      show: Whether to show a bar on a terminal.

    Raises:
      TypeError: There is no ORTModule in ``model``, or ``total_steps`` is no int.
      ValueError: ``total_steps`` is below 1.
      ModuleNotFoundError: ``log_dir`` is given and the package tensorboard is not installed.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        log_dir: str | os.PathLike[str] | None = None,
        total_steps: int | None = None,
        show: bool = True,
    ) -> None:
        if total_steps is not None:
            if isinstance(total_steps, bool) or not isinstance(total_steps, int):
                raise TypeError(f"total_steps must be an int, got {type(total_steps).__name__}")
            if total_steps < 1:
                raise ValueError(f"total_steps must be at least 1, got {total_steps}")
        self._modules = modules_in(model)
        main = logs.is_main_process()
        self._writer = _tensorboard_writer(log_dir) if log_dir is not None and main else None
        self._display: progress_display.TrainingDisplay | None = None
        if show and progress_display.is_wanted():
            self._display = progress_display.TrainingDisplay(total_steps)
        self._shown = False
        self._steps = 0
        self._logged = float("-inf")
        self._began = time.perf_counter()

    def __enter__(self) -> StepMetrics:
        if self._display is not None:
            self._display.__enter__()
            self._shown = True
        self.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def begin(self) -> None:
        """Let the next step begin now: what passed since the last one is not part of it."""
        self._began = time.perf_counter()

    def step(self, tokens: int | None = None) -> StepFigures:
        """Take the figures of the step that ends now; the next one begins.

        Args:
          tokens: How many tokens this process has trained on in it.

        Raises:
          TypeError: ``tokens`` is no int.
          ValueError: ``tokens`` is negative.
        """
        if tokens is not None:
            if isinstance(tokens, bool) or not isinstance(tokens, int):
                raise TypeError(f"tokens must be an int, got {type(tokens).__name__}")
            if tokens < 0:
                raise ValueError(f"tokens must not be negative, got {tokens}")
        now = time.perf_counter()
        seconds = now - self._began
        self._steps += 1
        records = [record for m in self._modules for record in _records(m)]
        fallbacks = sum(bool(record.fallback) for record in records)
        figures = StepFigures(
            step=self._steps,
            step_time=seconds,
            tokens_per_second=None if tokens is None else tokens / max(seconds, 1e-9),
            peak_memory_mib=peak_memory_bytes() / 2**20,
            planned_memory_mib=sum(map(_planned_bytes, self._modules)) / 2**20,
            captures=len(records) - fallbacks,
            escapes=fallbacks + sum(len(record.escapes) for record in records),
            fallbacks=fallbacks,
        )
        self._tell(figures)
        self.begin()
        return figures

    def close(self) -> None:
        """Write out what is left, and take the bar away."""
        if self._shown and self._display is not None:
            self._shown = False
            self._display.__exit__(None, None, None)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _tell(self, figures: StepFigures) -> None:
        if self._writer is not None:
            for name, value in figures.scalars().items():
                self._writer.add_scalar(name, value, figures.step)
        if self._shown and self._display is not None:
            self._display.show(str(figures))
        elif time.perf_counter() - self._logged >= _LOG_INTERVAL:
            _log.info("step %d: %s", figures.step, figures)
            self._logged = time.perf_counter()


def modules_in(model: Any) -> list[ORTModule]:
    """Return the ORTModules that a model is or holds, each once.

    Raises:
      TypeError: There is none.
    """
    inner, seen = model, set()
    while not isinstance(inner, nn.Module) and inner is not None and id(inner) not in seen:
        seen.add(id(inner))
        inner = getattr(inner, "module", None)  # a wrapper that is no module itself
    parts = inner.modules() if isinstance(inner, nn.Module) else ()
    found = {id(part): part for part in parts if isinstance(part, ORTModule)}
    if not found:
        raise TypeError(
            f"there is no ORTModule in this {type(model).__name__}; wrap the model first, "
            "model = ORTModule(model)"
        )
    return list(found.values())


def peak_memory_bytes() -> int:
    """Return the most memory that this process has held since it began, in bytes."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        status = ""
    for line in status.splitlines():
        if line.startswith("VmHWM:"):  # getrusage's figure counts from before exec
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _records(module: ORTModule) -> list[Any]:
    report = module.report()
    return [*report.captures, *report.pieces]


def _planned_bytes(module: ORTModule) -> int:
    plan = module.memory_plan()
    return 0 if plan is None else plan.total_bytes


def _tensorboard_writer(log_dir: str | os.PathLike[str]) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(
            "log_dir needs TensorBoard's writer: pip install tensorboard"
        ) from error
    return SummaryWriter(os.fspath(log_dir))

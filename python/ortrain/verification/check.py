# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``verify=`` of an ORTModule does: chosen calls run in PyTorch too, and must agree."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ortrain import logs
from ortrain.capture.errors import CaptureError
from ortrain.capture.tracing import is_capturing, tracing_alone
from ortrain.engine import Engine
from ortrain.errors import VerificationError
from ortrain.verification.comparison import Difference
from ortrain.verification.draws import DrawsOfRun, RepeatedDraws, UnrepeatableError
from ortrain.verification.gradients import Incoming, Witness
from ortrain.verification.locating import Found, first_layer
from ortrain.verification.replay import Replay, ReplayError
from ortrain.verification.schedule import Schedule
from ortrain.verification.trial import Trial
from ortrain.verification.watching import GraphRun, watched

_log = logs.get_logger("ortrain")
_thread = threading.local()


@dataclasses.dataclass(slots=True)
class Verified:
    """What was compared so far.

    Attributes:
      steps: Numbers of the calls whose results agreed, those with gradients.
      gradients: Those of them whose gradients agreed.
      inference: Numbers of the calls without gradients.
      unknown: Why a call could not be compared, by number.
      seconds: What all of it took.
    """

    steps: list[int] = dataclasses.field(default_factory=list)
    gradients: list[int] = dataclasses.field(default_factory=list)
    inference: list[int] = dataclasses.field(default_factory=list)
    unknown: dict[int, str] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [_ranges(self.steps)] if self.steps else []
        if self.gradients:
            parts.append(f"gradients of {_ranges(self.gradients)}")
        if self.inference:
            parts.append(f"without gradients {_ranges(self.inference)}")
        parts += [f"not {step}: {reason}" for step, reason in self.unknown.items()]
        return f"{'; '.join(parts) or 'none'}; {self.seconds:.2f} s"


def _ranges(steps: Sequence[int]) -> str:
    """Return numbers in short: "1-4, 8"."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        elif not spans or step != spans[-1][1]:
            spans.append([step, step])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


class Verification:
    """Verifies calls of one module.

    Calls with gradients and calls without are counted apart, as their graphs are others.

    Args:
      engine: Runs the module.
      verify: As `schedule.parse` returns it.

    Attributes:
      verified: What was compared so far.
    """

    def __init__(self, engine: Engine, verify: int | str) -> None:
        self._engine = engine
        self._schedules = (Schedule(verify), Schedule(verify))
        self.verified = Verified()

    def is_due(self) -> bool:
        """Count a call; tell whether it is to be made by `run`."""
        return self._schedules[torch.is_grad_enabled()].advance()

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Make a call that is due on the engine and in PyTorch; return the engine's result.

        Raises:
          VerificationError: They differ. Gradients are compared, and this raised, in the backward.
        """
        engine, training = self._engine, torch.is_grad_enabled()
        schedule = self._schedules[training]
        if is_capturing():  # a module around this one is; its calls count
            schedule.put_off()
            return engine.run(args, kwargs)
        check = _Check(self, schedule.step, training)
        began = time.perf_counter()
        with contextlib.suppress(CaptureError):  # of such arguments no graph is made
            check.replay = Replay(engine.module, args, kwargs, engine.dropout)
        check.seconds = time.perf_counter() - began
        with watched() as runs, check.of_pieces():
            result = engine.run(args, kwargs)
        own = [run for run in runs if engine.owns(run.entry)]
        if not own and not check.pieces:
            if schedule.postpone():
                _log.info(
                    "%s: PyTorch ran step %d; the next one is verified", check.name, check.step
                )
            else:
                check.agreed(training)
            return result
        schedule.done()
        if check.replay is not None:
            with tracing_alone(), engine.exclusively():  # in the engine's order
                check.compare(own[0] if own else None, result)
        if not own:
            check.agreed(training)
        return result


class _Check:
    """One verified call.

    Attributes:
      replay: The call of the whole module; None where its arguments cannot be copied.
      pieces: How many pieces of the module were compared.
    """

    def __init__(self, verification: Verification, step: int, training: bool) -> None:
        self._engine = verification._engine
        self._verified = verification.verified
        self.name = type(self._engine.module).__name__
        self.step, self._training = step, training
        self.replay: Replay | None = None
        self.pieces = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def of_pieces(self) -> Iterator[None]:
        """Compare pieces that this thread runs meanwhile."""
        outer = getattr(_thread, "check", None)
        _thread.check = self
        try:
            yield
        finally:
            _thread.check = outer

    def compare(self, run: GraphRun | None, result: Any) -> None:
        """Compare the whole call; without a run of its own, as far as nothing is drawn."""
        replay = self.replay
        began = time.perf_counter()
        try:
            trial = Trial(replay, run, result, replay.called_with, replay.call.tensors)
            difference = trial.forward_difference()
        except ReplayError as error:
            found = Found("", None)
            raise self._error(Difference("the call", float("inf"), str(error)), found) from error
        except (UnrepeatableError, CaptureError) as error:
            if run is not None:
                self._unknown(str(error))
            return
        if difference is not None:
            raise self._error(difference, first_layer(replay, run, None))
        if run is None:
            return
        awaits = self._attach(trial, run, replay)
        self.seconds += time.perf_counter() - began
        self.agreed(awaits)

    def compare_piece(self, engine: Engine, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a piece of the module, and compare it."""
        began = time.perf_counter()
        try:
            replay = Replay(engine.module, args, kwargs, engine.dropout)
        except CaptureError:
            return engine.run(args, kwargs)
        self.seconds += time.perf_counter() - began
        with watched() as runs:
            result = engine.run(args, kwargs)
        if len(runs) != 1:
            return result
        began = time.perf_counter()
        run = runs[0]
        try:
            trial = Trial(replay, run, result, replay.called_with, replay.call.tensors)
            difference = trial.forward_difference()
        except (ReplayError, UnrepeatableError, CaptureError) as error:
            self._unknown(str(error))
            return result
        self.pieces += 1
        if difference is not None:
            raise self._error(difference, self._layer_of_piece(None))
        self._attach(trial, run, None)
        self.seconds += time.perf_counter() - began
        return result

    def agreed(self, training: bool) -> None:
        """Take note of a step whose results agree."""
        steps = self._verified.steps if self._training else self._verified.inference
        steps.append(self.step)
        self._verified.seconds += self.seconds
        what = "step" if self._training else "call without gradients"
        _log.info(
            "%s: %s %d is as in PyTorch%s; the check took %.3f s",
            *(self.name, what, self.step, ", gradients are awaited" if training else ""),
            self.seconds,
        )

    def _attach(self, trial: Trial, run: GraphRun, replay: Replay | None) -> bool:
        """Let the gradients of a run be compared; tell whether it will have any."""
        step = run.step
        if step is not None:
            step.witness = self._witness(trial, run, replay)
        # The step leads to its witness: what leads back from there would keep both.
        trial.release_results()
        trial.forget_wide()
        run.step = None
        return step is not None

    def _witness(self, trial: Trial, run: GraphRun, replay: Replay | None) -> Witness:
        def differs(difference: Difference, incoming: Incoming) -> None:
            if replay is None:
                raise self._error(difference, self._layer_of_piece(incoming))
            raise self._error(difference, first_layer(replay, run, incoming))

        def agrees(seconds: float) -> None:
            self._verified.gradients.append(self.step)
            self._verified.seconds += seconds
            _log.info(
                "%s: gradients of step %d are as in PyTorch; the check took %.3f s",
                *(self.name, self.step, seconds),
            )

        return Witness(trial, run, differs, agrees, self._unknown)

    def _layer_of_piece(self, incoming: Incoming | None) -> Found:
        """Look for the layer of a piece's difference; its names are those of the whole module."""
        if self.replay is None:
            return Found("", None)
        seeds: Incoming | None = None
        if incoming is not None:  # those of the whole module are not known
            try:
                with self.replay.rewound():
                    draws = DrawsOfRun(None, self.replay.dropout)
                    results = self.replay.run(RepeatedDraws(draws)).tensors
            except (ReplayError, UnrepeatableError, CaptureError):
                return Found("", None)
            seeds = [torch.ones_like(r) if r.requires_grad else None for r in results]
        return first_layer(self.replay, None, seeds)

    def _unknown(self, reason: str) -> None:
        self._verified.unknown[self.step] = reason
        _log.warning("%s: step %d cannot be verified: %s", self.name, self.step, reason)

    def _error(self, difference: Difference, found: Found) -> VerificationError:
        whole = f"{difference.what} differs by {difference.amount:.3g} ({difference.detail})"
        where = f"layer '{found.layer}'" if found.layer else "the module itself"
        if found.outdated:
            text = f"{whole}; its graph is out of date: captured anew it agrees"
            text += f", and differs first in {where}"
        elif found.difference is not None:
            inner = found.difference
            text = f"{where} is the first that differs from PyTorch: {inner.what} by "
            text += f"{inner.amount:.3g} ({inner.detail}); seen from outside, {whole}"
        else:
            text = f"{whole}; no layer that runs alone differs from PyTorch"
        shown = found.difference or difference
        return VerificationError(
            f"{self.name}, step {self.step}: {text}",
            layer=found.layer,
            what=shown.what,
            difference=shown.amount,
            step=self.step,
        )


def run_piece(engine: Engine, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run a piece of a module, and compare it where this thread is verifying a call."""
    check = getattr(_thread, "check", None)
    if check is None or is_capturing():
        return engine.run(args, kwargs)
    return check.compare_piece(engine, args, kwargs)

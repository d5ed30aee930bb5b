# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps of several processes that share the batch: gradients are put together between the graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ortrain import _core
from ortrain.distributed import Processes
from ortrain.errors import UnsupportedError
from ortrain.trainer.agreement import agree, require_alike
from ortrain.trainer.flat_layout import FlatLayout
from ortrain.trainer.joined_gradients import JoinedGradients
from ortrain.trainer.sharded_states import ShardedStates
from ortrain.trainer.sources import StepSource, Tensors
from ortrain.trainer.step_engine import (
    MadeStep,
    Result,
    StepEngine,
    StepOutcome,
    refuse_wanted_gradients,
)

# Bytes of gradients that a stretch of the backward makes, at least, before others hear of them.
_STRETCH = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Parallelism:
    """How processes share the work.

    Attributes:
      reduces_once: Gradients are put together once per optimizer step instead of once per batch.
      shards_states: Each process keeps a share of the optimizer's states (ZeRO, stage 1).
      adasum: Gradients are put together by Adasum, not averaged.
    """

    reduces_once: bool
    shards_states: bool
    adasum: bool


class ParallelStepEngine(StepEngine):
    """A StepEngine in each of several processes, with equal parameters in all.

    One graph leaves the gradients in one vector per element type, which is reduced where it lies;
    another one runs the optimizer, in all processes or in each for its share. Parameters and buffers
    start as those of process 0, and buffers stay so.

    Args:
      source: Gives the graphs and the tensors; of the same model in all processes.
      options: As for StepEngine; ``accumulation`` counts batches of one process.
      frozen: Names of parameters that do not change.
      processes: Those that train together.
      parallelism: How.
      settings: What else must be alike in all processes, by the words for it in errors; picklable.

    Raises:
      InvalidModelError: The processes have different models or settings; or as StepEngine.
    """

    def __init__(
        self,
        source: StepSource,
        options: Mapping[str, Any],
        frozen: list[str],
        processes: Processes,
        parallelism: Parallelism,
        settings: Mapping[str, Any],
    ) -> None:
        self.processes = processes
        self._parallelism = parallelism
        self._batches: int = options["accumulation"]
        self._gradients = JoinedGradients(
            processes,
            separate=self._batches > 1 and not parallelism.reduces_once,
            by_adasum=parallelism.adasum,
        )
        # Where the next step wants things to lie, and the parameters that were ever trained: what
        # is frozen keeps its place, and the states that it may need again.
        self._wanted_layout = self._gradients.layout
        self._ever_trained: set[str] = set()
        self._summed: list[str] | None = None  # the parameters that the batches so far train
        self._shards: ShardedStates | None = None
        self._plans: list[dict[str, int]] = []
        processes.everywhere(lambda: StepEngine.__init__(self, source, options, frozen))
        numbers = {
            "the optimizer's numbers": repr(sorted(options.items(), key=lambda item: item[0])),
            "the distributed options": repr(parallelism),
        }
        require_alike(processes, {**self._description(), **numbers, **settings})
        self._lay_out()
        processes.broadcast(list(self.tensors.values()))
        increment_version(list(self.tensors.values()))
        self._seed = 0
        self._set_seed(processes.from_first(self.state.seed))

    @property
    def optimizer_state_bytes(self) -> int:
        """The bytes of optimizer states that this process holds, gradients left out."""
        if self._shards is not None:
            return self._shards.bytes
        held = self.state.optimizer.items()
        return sum(t.numel() * t.element_size() for n, t in held if not n.endswith(":grad"))

    @property
    def memory_plan(self) -> dict[str, int]:
        """Bytes that the latest training step needed, by the larger one of its two graphs."""
        return max(self._plans, key=lambda plan: plan["total_bytes"], default={})

    def share_tensors(self) -> None:
        super().share_tensors()
        self._want_layout(name for name, yes in self._requires_grad.items() if yes)
        # Things move, which all processes do together, when a step comes.
        if self._wanted_layout == self._gradients.layout:
            self._share_memory()

    def train_step(self, inputs: Tensors) -> StepOutcome:
        """Run this process's part of a batch; with the last one of a step, the optimizer.

        Raises:
          InvalidModelError: The processes do not train the same parameters in this step, or not
            with the same learning rate and loss scale; nothing has changed.
          RuntimeError: Another process has ended.
        """
        refuse_wanted_gradients(inputs)
        self.follow_module()
        made = self._make_alike(inputs)
        given = made.source.given(inputs)
        before = self.state.kept_batches
        if before == 0:
            self._gradients.clear_without(made.runs.trained)
        last = before + 1 >= self._batches
        if self._gradients.separate:
            outputs = self._add_reduced(made, given, before, last=last)
        else:
            outputs = self._run(made, given, reduces=last)
        if made.buffers:
            self.processes.broadcast([self._tensors[name] for name in made.buffers])
        if not last:
            return StepOutcome(outputs, False, True, None)
        updated, finite, norm = self._update(made)
        self._plans.append(made.runs.memory_plan)
        self.state.kept_batches = 0
        if updated:
            increment_version(self._trained)
        return StepOutcome(outputs, updated, finite, norm)

    def make_states(self, program: Any) -> None:
        if self._shards is not None:
            raise UnsupportedError(
                "the whole step with the optimizer's states is written where one process has them "
                "all: 'distributed.deepspeed_zero_optimization.stage' must be 0"
            )
        super().make_states(program)

    def on_first(self, action: Callable[[], Result]) -> Result:
        return self.processes.on_first(action)

    def everywhere(self, action: Callable[[], Result]) -> Result:
        return self.processes.everywhere(action)

    # --- a step

    def _make_alike(self, inputs: Tensors) -> MadeStep:
        """Return the graph of a call, when all processes are about to do the same."""
        while True:
            if self._wanted_layout != self._gradients.layout:
                own = {"the layout of the gradients": list(self._wanted_layout.places.items())}
                agree(self.processes, own, self._description)
                self._lay_out()
            made = self._find(self._training, inputs) or self._make_training(inputs)
            if self._wanted_layout == self._gradients.layout:  # the capture has added no parameter
                break
        state = self.state
        now: dict[str, Any] = {
            "the learning rate": state.learning_rate,
            "the loss scale": state.loss_scale,
            "the number of steps so far": state.steps,
            "the number of batches since the latest step": state.kept_batches,
            "the list of trained parameters": sorted(made.runs.trained),
            "the list of written buffers": sorted(made.buffers),
        }
        agree(self.processes, now, lambda: self._description(made))
        return made

    def _add_reduced(
        self, made: MadeStep, given: list[torch.Tensor], before: int, *, last: bool
    ) -> Any:
        """Add the gradients of a batch, put together over the processes, to those before it."""
        trained = made.runs.trained
        if before > 0 and self._summed not in (None, trained):
            raise UnsupportedError(
                "the batches of one optimizer step train different parameters; accumulate batches "
                "of one kind"
            )
        self.state.kept_batches = 0  # the graph starts anew
        try:
            outputs = self._run(made, given, reduces=True)
        finally:
            self.state.kept_batches = before
        self._gradients.add_up(first=before == 0, last=last)
        self._summed = trained
        self.state.kept_batches = before + 1
        return outputs

    def _run(self, made: MadeStep, given: list[torch.Tensor], *, reduces: bool) -> Any:
        """Run a batch and return the outputs; with ``reduces`` gradients are put together meanwhile."""
        runs, gradients = made.runs, self._gradients
        if reduces and not gradients.by_adasum:
            buckets = gradients.buckets(runs.trained)
            outputs = runs.add_gradients(self.state, given, buckets.finished, _STRETCH)[0]
            buckets.wait()
        else:
            outputs = runs.add_gradients(self.state, given)[0]
            if reduces:
                gradients.reduce()
        self._plans = [runs.memory_plan]
        return outputs

    def _update(self, made: MadeStep) -> tuple[bool, bool, float | None]:
        if self._shards is None:
            _, updated, finite, norm = made.runs.optimizer_step(self.state)
            return updated, finite, norm
        share, whole = self._shards.state, self.state
        share.steps, share.kept_batches = whole.steps, 1
        share.learning_rate, share.loss_scale = whole.learning_rate, whole.loss_scale
        _, updated, finite, norm = made.runs.optimizer_step(share)
        whole.steps = share.steps
        if self._options["step"] == "LambStep":
            self._shards.join_norms(made.runs.trained)
        if updated:
            self._shards.send_parameters(made.runs.trained)
        return updated, finite, norm

    # --- the state

    def whole_state(self, *, optimizer: bool = True, on_all: bool = True) -> Any:
        whole = _core.TrainingState()
        for name, tensor in self._tensors.items():
            whole.share(name, tensor)
        whole.learning_rate, whole.loss_scale = self.state.learning_rate, self.state.loss_scale
        whole.seed, whole.runs, whole.steps = self._seed, self.state.runs, self.state.steps
        if not optimizer:
            return whole
        holder = self.state if self._shards is None else self._shards.state
        whole.updates = holder.updates
        if self._shards is not None:
            states = self._shards.gather(on_all=on_all)
        else:
            held = self.state.optimizer.items()
            states = {name: t for name, t in held if not name.endswith(":grad")}
        if self.state.kept_batches > 0:
            whole.kept_batches = self.state.kept_batches
            kept = self._gradients.means()
            states.update({f"{name}:grad": view for name, view in kept.items()})
        for target, tensor in states.items():
            whole.share_state(target, tensor)
        return whole

    def adopt_state(self, *, optimizer: bool, seed: int | None = None) -> None:
        if seed is not None:
            self._set_seed(seed)
        if not optimizer:
            return
        held = self.state.optimizer
        if self._shards is not None:
            # States of what is frozen wait for the day that it is trained again.
            self._want_layout(target.rpartition(":")[0] for target in held)
            if self._wanted_layout != self._gradients.layout:
                self._lay_out()
            self._shards.take(held, self.state.steps, self.state.updates)
            self.state.clear_optimizer()
        # What was put together before stands in all processes, and its mean is the same.
        kept = held if self.state.kept_batches > 0 else {}
        names = self._gradients.layout.places
        self._gradients.take({n: kept[f"{n}:grad"] for n in names if f"{n}:grad" in kept})
        self._summed = None
        self._share_gradients()

    def _set_seed(self, seed: int) -> None:
        """Draw other random numbers in each process; process 0 as one alone."""
        self._seed = seed
        stream = self.processes.rank * 0x9E3779B97F4A7C15  # Fibonacci hashing
        self.state.seed = (seed ^ stream) & 0xFFFF_FFFF_FFFF_FFFF

    # --- memory

    def _want_layout(self, trained: Iterable[str]) -> None:
        """Have places for these parameters too; those that are gone lose theirs."""
        self._ever_trained.update(trained)
        self._ever_trained &= self._requires_grad.keys()
        kept = [name for name in self._requires_grad if name in self._ever_trained]
        self._wanted_layout = FlatLayout({name: self._tensors[name] for name in kept})

    def _lay_out(self) -> None:
        """Move gradients and shares of states to where they are wanted; all processes call it."""
        layout = self._wanted_layout
        whole = self._shards.gather(on_all=True) if self._shards is not None else {}
        updates = self._shards.state.updates if self._shards is not None else {}
        self._gradients.move(layout)
        if self._parallelism.shards_states:
            flats = self._gradients.flats
            self._shards = ShardedStates(layout, self._kinds(), flats, self.processes)
            self._shards.take(whole, self.state.steps, updates)
            self._options["owned"] = self._shards.slices
            self._options["sum_norms"] = self._shards.sum_norms_key
        self._training.clear()  # the slices stand in the graphs
        self._share_memory()

    def _share_memory(self) -> None:
        if self._shards is not None:
            self._shards.follow(self._tensors)
        self._share_gradients()

    def _share_gradients(self) -> None:
        for name, view in self._gradients.views().items():
            self.state.share_state(f"{name}:grad", view)

    def _kinds(self) -> list[str]:
        """Return the names of the states that the optimizer keeps of any parameter."""
        rules = (self._options["attributes"], *(g["attributes"] for g in self._options["groups"]))
        kinds = [_core.optimizer_states(self._options["step"], rule) for rule in rules]
        return sorted({kind for names in kinds for kind in names})

    def _description(self, made: MadeStep | None = None) -> dict[str, Any]:
        """Return shape, type and flag of each tensor, and what a step does with it."""
        result: dict[str, Any] = {
            f"'{name}'": (tuple(t.shape), str(t.dtype), self._requires_grad.get(name))
            for name, t in self._tensors.items()
        }
        if made is not None:
            trained = made.runs.trained
            for name in self._gradients.layout.places:
                result[f"'{name}' in this step"] = "trained" if name in trained else "not trained"
        return result

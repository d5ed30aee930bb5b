# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps of several processes that share the batch: gradients are put together between the graphs."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import increment_version

from ortrain import _core, logs
from ortrain.capture.errors import CaptureError
from ortrain.distributed import Processes
from ortrain.errors import UnsupportedError
from ortrain.trainer.agreement import agree, are_alike, have_graphs, require_alike
from ortrain.trainer.flat_layout import FlatLayout
from ortrain.trainer.joined_gradients import JoinedGradients
from ortrain.trainer.piecewise_step import PiecewiseStep
from ortrain.trainer.sharded_states import ShardedStates
from ortrain.trainer.sources import StepSource, Tensors
from ortrain.trainer.step_engine import (
    MadeStep,
    Result,
    StepEngine,
    StepOutcome,
    refuse_wanted_gradients,
)

_log = logs.get_logger("ortrain")

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
        # Those that have gradients of the batches so far, in this process or, put together, in any; whether
        # some of these batches ran in pieces.
        self._reached: list[str] = []
        self._joined: set[str] = set()  # tensors that started as those of process 0
        self._names = ""  # of all parameters, and which are trained, folded
        self._has_pieces = False
        self._shards: ShardedStates | None = None
        self._plans: list[dict[str, int]] = []
        processes.everywhere(lambda: StepEngine.__init__(self, source, options, frozen))
        numbers = {
            "the optimizer's numbers": repr(sorted(options.items(), key=lambda item: item[0])),
            "the distributed options": repr(parallelism),
        }
        require_alike(processes, {**self._description(), **numbers, **settings})
        self._lay_out()
        self._join_new_tensors()
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
        said = repr(self._requires_grad)
        self._names = hashlib.blake2b(said.encode(), digest_size=8).hexdigest()
        self._want_layout(name for name, yes in self._requires_grad.items() if yes)
        # Things move, which all processes do together, when a step comes.
        if self._wanted_layout == self._gradients.layout:
            self._share_memory()

    def train_step(self, inputs: Tensors) -> StepOutcome:
        """Run this process's part of a batch; with the last one of a step, the optimizer.

        Raises:
          InvalidModelError: The processes do not have the same parameters, learning rate or loss scale, or have ONNX
            models that train different ones in this step; nothing has changed.
          RuntimeError: Another process has ended.
        """
        refuse_wanted_gradients(inputs)
        self.follow_module()
        before = self.state.kept_batches
        last = before + 1 >= self._batches
        if before == 0:
            self._reached, self._has_pieces = [], False
        made, why = self._make_alike(inputs)
        if made is not None:
            outputs = self._run_graph(made, inputs, before, last=last)
        else:
            outputs = self._run_pieces(inputs, before, last=last)
        outcome = self._finished(made, outputs, last=last)
        if made is None:  # said behind all collectives: a warning may be an error here
            self._has_run_in_pieces(why, training=True)
        return outcome

    def _finished(self, made: MadeStep | None, outputs: Any, *, last: bool) -> StepOutcome:
        if not last:
            return StepOutcome(outputs, False, True, None)
        if self._has_pieces:
            runs, trained = self._pieces.optimizer_of(tuple(self._reached)), self._reached
        else:
            runs, trained = made.runs, made.runs.trained
        updated, finite, norm = self._update(runs, trained)
        self._plans.append(runs.memory_plan)
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

    def _make_alike(self, inputs: Tensors) -> tuple[MadeStep | None, CaptureError | None]:
        """Return the graph of a call, when all processes are about to do the same.

        Where one has none, or another one than others, or has run an earlier batch of the optimizer step without, all
        run in pieces: there is no graph then, but why there is none, if this process has found that out just now.
        """
        while True:
            if self._wanted_layout != self._gradients.layout:
                agree(self.processes, self._own_layout(), self._description)
                self._lay_out()
            found, failed, goes_on = None, None, False
            try:
                if not self._has_pieces:
                    found = self._find_or_make(inputs, training=True)
                goes_on = not isinstance(found, MadeStep) or self._goes_on(found)
            except Exception as error:
                failed = error
            if self._wanted_layout == self._gradients.layout:  # the capture has added no parameter
                break
        made = found if isinstance(found, MadeStep) and goes_on else None
        state = self.state
        numbers: dict[str, Any] = {
            "the learning rate": state.learning_rate,
            "the loss scale": state.loss_scale,
            "the number of steps so far": state.steps,
            "the number of batches since the latest step": state.kept_batches,
            "the list of parameters": self._names,
        }
        step = None if made is None else self._step_of(made)
        alike = have_graphs(
            self.processes,
            numbers,
            step,
            failed,
            self._description,
            self._may_do_without_graphs,
        )
        made = made if alike else None
        self._join_new_tensors()
        return made, None if isinstance(found, MadeStep) else found

    def _goes_on(self, made: MadeStep) -> bool:
        """Tell whether a graph trains what the batches before it, of the same optimizer step, have trained.

        Raises:
          UnsupportedError: It does not, and nothing else does.
        """
        if self.state.kept_batches == 0 or set(self._reached) == set(made.runs.trained):
            return True
        text = "the batches of one optimizer step train different parameters"
        if not self._may_do_without_graphs():
            raise UnsupportedError(f"{text}; accumulate batches of one kind")
        if text not in self._told:
            self._told.add(text)
            _log.warning("no graph runs this step: %s", text)
        return False

    def _may_do_without_graphs(self) -> bool:
        return self._may_run_in_pieces() and self._pieces_here() is not None

    def _pieces_here(self) -> PiecewiseStep | None:
        if self._pieces is None:
            self._pieces = self.source.in_pieces(self._options)
        return self._pieces

    def _run_graph(self, made: MadeStep, inputs: Tensors, before: int, *, last: bool) -> Any:
        """Run a batch by a graph; keep its gradients, or put them together."""
        given = made.source.given(inputs)
        if before == 0:
            self._gradients.clear_without(made.runs.trained)
        if self._gradients.separate:
            outputs = self._add_reduced(made, given, before, last=last)
        else:
            outputs = self._run(made, given, reduces=last)
        if made.buffers:
            self.processes.broadcast([self._tensors[name] for name in made.buffers])
        self._reached = self._in_order({*self._reached, *made.runs.trained})
        return outputs

    def _run_pieces(self, inputs: Tensors, before: int, *, last: bool) -> list[torch.Tensor]:
        """Run a batch in pieces; keep its gradients, or put them together. Where one process fails, all do.

        Of a parameter that the batches of some processes reach, others have a gradient of zeros.
        """
        outputs: Tensors = {}
        gradients: Tensors = {}
        failed: Exception | None = None
        try:
            pieces = self._pieces_here()
            if pieces is None:
                raise UnsupportedError("other processes run this step in pieces; here are none")
            outputs, gradients = pieces.gradients(self.state, inputs, self._take_new_tensors)
        except Exception as error:
            failed = error
        own = {**self._own_layout(), "the list of parameters": self._names}
        agree(self.processes, own, self._description, failed)
        if self._wanted_layout != self._gradients.layout:
            self._lay_out()
        self._join_new_tensors()
        joined = self._gradients
        joined.put(gradients, first=before == 0)
        self._has_pieces = True
        self._reached = self._in_order({*self._reached, *gradients})
        if last or joined.separate:
            joined.reduce()
            self._reached = self._reached_anywhere()
        if joined.separate:
            joined.add_up(first=before == 0, last=last)
        # All of them: not every write of PyTorch's counts as one (running statistics, `.data`).
        buffers = {n: t for n, t in self._tensors.items() if n not in self._requires_grad}
        self.processes.broadcast(self._alike_in_all(buffers))
        self.state.kept_batches = before + 1
        self._plans = []
        return list(outputs.values())

    def _reached_anywhere(self) -> list[str]:
        """Return the parameters that have gradients in some process."""
        names = list(self._gradients.layout.places)
        own = frozenset(self._reached)
        flags = torch.tensor([name in own for name in names], dtype=torch.uint8)
        self.processes.all_reduce(flags, "MAX")
        return [name for name, flag in zip(names, flags.tolist(), strict=True) if flag]

    def _join_new_tensors(self) -> None:
        """Let parameters that have come, and buffers with them, be those of process 0.

        All processes have the same parameters, and call it.
        """
        if self._joined.issuperset(self._requires_grad):
            return
        new = {name: t for name, t in self._tensors.items() if name not in self._joined}
        self._joined = set(self._tensors)
        alike = self._alike_in_all(new)
        self.processes.broadcast(alike)
        increment_version(alike)

    def _alike_in_all(self, tensors: Tensors) -> list[torch.Tensor]:
        """Return those that have the same shapes and types in all processes, in one order."""
        own = {name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()}
        if are_alike(self.processes, own):
            return [tensors[name] for name in sorted(own)]
        every = self.processes.from_all(own)
        return [
            tensors[name]
            for name in sorted(own)
            if all(other.get(name) == own[name] for other in every)
        ]

    def _in_order(self, names: set[str]) -> list[str]:
        return [name for name in self._gradients.layout.places if name in names]

    def _own_layout(self) -> dict[str, Any]:
        return {"the layout of the gradients": list(self._wanted_layout.places.items())}

    def _add_reduced(
        self, made: MadeStep, given: list[torch.Tensor], before: int, *, last: bool
    ) -> Any:
        """Add the gradients of a batch, put together over the processes, to those before it."""
        self.state.kept_batches = 0  # the graph starts anew
        try:
            outputs = self._run(made, given, reduces=True)
        finally:
            self.state.kept_batches = before
        self._gradients.add_up(first=before == 0, last=last)
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

    def _update(self, runs: Any, trained: list[str]) -> tuple[bool, bool, float | None]:
        if self._shards is None:
            _, updated, finite, norm = runs.optimizer_step(self.state)
            return updated, finite, norm
        share, whole = self._shards.state, self.state
        share.steps, share.kept_batches = whole.steps, 1
        share.learning_rate, share.loss_scale = whole.learning_rate, whole.loss_scale
        _, updated, finite, norm = runs.optimizer_step(share)
        whole.steps = share.steps
        if self._options["step"] == "LambStep":
            self._shards.join_norms(trained)
        if updated:
            self._shards.send_parameters(trained)
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
            reduced = not self._has_pieces or self._gradients.separate
            reached = self._reached if reduced else self._reached_anywhere()
            states.update({f"{name}:grad": kept[name] for name in reached})
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
        self._reached = [n for n in names if f"{n}:grad" in kept and self._requires_grad.get(n)]
        self._has_pieces = False
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
        if self._pieces is not None:
            self._pieces.take_options(self._options)
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

    def _step_of(self, made: MadeStep) -> dict[str, Any]:
        """Return what a graph does, by what processes with another one are told."""
        trained = made.runs.trained
        parts = {
            f"'{name}' in this step": "trained" if name in trained else "not trained"
            for name in self._gradients.layout.places
        }
        return parts | {"the list of written buffers": sorted(made.buffers)}

    def _description(self) -> dict[str, Any]:
        """Return shape, type and flag of each tensor."""
        return {
            f"'{name}'": (tuple(t.shape), str(t.dtype), self._requires_grad.get(name))
            for name, t in self._tensors.items()
        }

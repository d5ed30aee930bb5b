# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Training and evaluation steps of one model: graphs for the calls that come, one state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.autograd.graph import increment_version

from ortrain import _core, devices, logs, progress, progress_display
from ortrain.capture.errors import CallError, CaptureError, OutsideGradientError
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.fallback import is_strict, tell_fallback
from ortrain.memory_budget import MemoryBudget
from ortrain.overlap import any_overlap
from ortrain.program import ESCAPES, Program
from ortrain.report import CaptureRecord, ModuleReport
from ortrain.trainer.flat_layout import state_dtype
from ortrain.trainer.piecewise_step import PiecewiseStep
from ortrain.trainer.sources import StepGraph, StepSource, Tensors

Result = TypeVar("Result")

# Graphs that are kept for calls of different kinds, the least recently used goes first.
_MOST_GRAPHS = 16
# Of one kind of step; more are more than modes and sizes come to.
_MANY_STATES = 6

_log = logs.get_logger("ortrain")


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a training step gave.

    Attributes:
      outputs: The outputs that are described, in order.
      updated: Whether the optimizer changed the parameters.
      all_finite: Whether the gradients were finite, where that is looked at.
      gradient_norm: The norm of all gradients before clipping, where it is known; a tensor on a
        device other than the CPU.
    """

    outputs: list[torch.Tensor]
    updated: bool
    all_finite: bool
    gradient_norm: float | torch.Tensor | None


@dataclasses.dataclass(frozen=True, slots=True)
class MadeStep:
    """A graph for calls of one kind, and what runs it."""

    source: StepGraph
    runs: Any  # a TrainingProgram or a Session
    state: int  # of the model, that it holds for
    buffers: tuple[str, ...] = ()  # those that it writes

    def record(self, training: bool) -> CaptureRecord:
        """Return what a report says of it."""
        nodes = self.source.graph.nodes()
        escaped = sum(node["op"] in ESCAPES for node in nodes)
        return CaptureRecord(
            reason="a graph with the optimizer" if training else "a graph",
            training=training,
            native_nodes=len(nodes) - escaped,
            fallback="",
            aten_nodes=0,
            stages={},
            escaped_nodes=escaped,
        )


class StepEngine:
    """Owns the step: forward, loss, backward and optimizer run as one graph.

    Args:
      source: Gives the graphs and the tensors.
      options: The optimizer as `_OptimizerConfig.engine_options` gives it, with ``loss``,
        ``accumulation``, ``scales_loss``, ``memory_limit`` and what a `MemoryBudget` gives.
      frozen: Names of parameters that do not change.
      device: Where the tensors of the source are.

    Raises:
      InvalidModelError: ``frozen`` or a group of the optimizer names no parameter.
    """

    def __init__(
        self,
        source: StepSource,
        options: Mapping[str, Any],
        frozen: list[str],
        device: torch.device = devices.CPU,
    ) -> None:
        progress_display.attach()
        self.source = source
        self._options = dict(options)
        trains = source.parameters()
        for name in (*frozen, *(n for g in options["groups"] for n in g["params"])):
            if name not in trains:
                raise InvalidModelError(f"'{name}' is no parameter of the model")
        self._frozen = frozenset(frozen)
        self._device, provider = device, devices.provider_of(device)
        self.state = _core.TrainingState(provider)
        # Seeded by torch.manual_seed; a state that is loaded brings its own.
        self.state.seed = int(torch.empty((), dtype=torch.int64).random_())
        self._tensors: Tensors = {}
        self._requires_grad: dict[str, bool] = {}
        self._trained: list[torch.Tensor] = []
        self._training: list[MadeStep] = []
        self._told_of_states = False
        self._evaluation: list[MadeStep] = []
        # What runs steps that no graph holds, and of which kind there are some: training or not.
        self._pieces: PiecewiseStep | None = None
        self._in_pieces: set[bool] = set()
        self._told: set[str] = set()  # of what runs so, by reasons
        # Calls that differ from those that a graph would hold for, in kind, state and why.
        self._apart: list[tuple[bool, int, Any]] = []
        self.share_tensors()

    def share_tensors(self) -> None:
        """Take the model's tensors as they are now."""
        self._tensors = self.source.tensors()
        self.state.keep(list(self._tensors))
        for name, tensor in self._tensors.items():
            self.state.share(name, tensor)
        for target, held in self.state.optimizer.items():
            wide = state_dtype(self._tensors[target.rpartition(":")[0]])
            if held.dtype != wide:
                self.state.set_optimizer_state(target, held.to(wide))
        trains = self.source.parameters()
        self._requires_grad = {n: yes and n not in self._frozen for n, yes in trains.items()}
        self._trained = [self._tensors[n] for n, yes in self._requires_grad.items() if yes]
        self.source.settle()  # only now: what could not be taken is looked at again

    @property
    def tensors(self) -> Tensors:
        """Parameters and buffers by name, in the memory that training writes to."""
        return self._tensors

    @property
    def trains(self) -> dict[str, bool]:
        """Whether each parameter is trained, by name."""
        return dict(self._requires_grad)

    @property
    def memory_plan(self) -> dict[str, int]:
        """Bytes that the latest training step needed; empty before the first."""
        return self._training[-1].runs.memory_plan if self._training else {}

    def report(self) -> ModuleReport:
        """Return what was captured, and what of the model runs in pieces or in PyTorch."""
        made = [
            *(m.record(True) for m in self._training),
            *(m.record(False) for m in self._evaluation),
        ]
        pieces = self._pieces
        if pieces is None:
            return ModuleReport(made)
        return ModuleReport(made + pieces.captures, pieces.pieces)

    def follow_module(self) -> None:
        """Take over tensors that were replaced or moved, and flags that were set, since the last step.

        Whoever reads or writes the state has to: it names memory, which is no longer the model's then.
        """
        if not self.source.changed():
            return
        # Element types, what is trained, and modes of layers stand in the graphs, each of which is for one state.
        self.share_tensors()
        if self._in_pieces:  # which hold for any state
            self._forget_states()

    def train_step(self, inputs: Tensors) -> StepOutcome:
        """Run a batch, and the optimizer when it is due.

        Where no graph holds the model whole, forward and backward run in pieces.

        Raises:
          CaptureError: The model cannot be captured whole, and may not run in pieces: a limit of memory is
            set, it is an ONNX model, or ORTRAIN_STRICT is.
          UnsupportedError: An input wants a gradient, or lies in the memory of a tensor of the model, where a graph
            runs the step.
          ShapeError: An input does not fit the graph.
          OutOfMemoryError: The step needs more than ``memory_limit``, or cannot be brought down to
            the budget; nothing has changed.
        """
        refuse_wanted_gradients(inputs)
        self.follow_module()
        devices.follow_tf32(self._device)
        made = self._find_or_make(inputs, training=True)
        if not isinstance(made, MadeStep):
            outputs, updated, finite, norm = self._train_in_pieces(inputs, made)
        else:
            given = made.source.given(inputs)
            outputs, updated, finite, norm = made.runs.train_step(self.state, given)
            increment_version([self._tensors[name] for name in made.buffers])
        if updated:
            increment_version(self._trained)
        return StepOutcome(outputs, updated, finite, norm)

    def eval_step(self, inputs: Tensors) -> list[torch.Tensor]:
        """Run the model alone, as in eval mode.

        Raises:
          CaptureError: As train_step.
        """
        self.follow_module()
        devices.follow_tf32(self._device)
        made = self._find_or_make(inputs, training=False)
        if not isinstance(made, MadeStep):
            return self._evaluate_in_pieces(inputs, made)
        self._refuse_shared_memory(inputs, made.buffers)
        user = iter(made.source.given(inputs))
        given = []
        for entry in made.source.graph.inputs:
            if entry["role"] == "user":
                given.append(next(user))
            elif entry["role"] == "seed":
                seed = torch.empty((), dtype=torch.int64, device=self._device)
                given.append(seed.random_())
            else:
                given.append(self._tensors[entry["target"]])
        outputs = _core.Run(made.runs).forward(given)
        kept = []
        for entry, output in zip(made.source.graph.outputs, outputs, strict=True):
            if entry["role"] == "user":
                kept.append(output)
            elif entry["role"] == "buffer_update":
                with torch.no_grad():
                    self._tensors[entry["target"]].copy_(output)
        return kept

    def model_graph(self, inputs: Tensors) -> Any:
        """Return the graph of the model alone for a call, as in eval mode."""
        made = self._find(self._evaluation, inputs)
        if made is not None and made.source.stands_alone:
            return made.source.graph
        source = self.source.graph(inputs, training=False, alone=True)
        self._adopt_new_tensors(source)
        return source.graph

    def training_program(self, inputs: Tensors) -> tuple[StepGraph, Any]:
        """Return the graph of a training call before autodiff, and the program made of it."""
        made = self._find(self._training, inputs) or self._make_training(inputs)
        if made.source.stands_alone:
            return made.source, made.runs
        source = self.source.graph(inputs, training=True, alone=True)
        return source, self._training_program(source)

    def make_states(self, program: Any) -> None:
        """Make the optimizer's states that there are not yet, as zeros."""
        program.make_states(self.state)

    def whole_state(self, *, optimizer: bool = True, on_all: bool = True) -> Any:
        """Return the state as one process has it, to be read.

        Args:
          optimizer: With the states of the optimizer.
          on_all: In all processes that train together; otherwise in the first alone.
        """
        del optimizer, on_all
        return self.state

    def adopt_state(self, *, optimizer: bool, seed: int | None = None) -> None:
        """Go on from what was put into ``state``, as ``whole_state`` gives it.

        Args:
          optimizer: States of the optimizer and gradients that are kept are part of it.
          seed: The seed that ``whole_state`` had; None where it stays.
        """
        del optimizer
        if seed is not None:
            self.state.seed = seed

    def on_first(self, action: Callable[[], Result]) -> Result:
        """Return the result of an action that one process makes for all."""
        return action()

    def everywhere(self, action: Callable[[], Result]) -> Result:
        """Return the result of an action; where it fails in one process it does in all."""
        return action()

    def _refuse_shared_memory(self, inputs: Tensors, written: tuple[str, ...]) -> None:
        """Raise UnsupportedError for inputs in the memory of buffers that a forward writes, which it may see."""
        for owner in written:
            for name, tensor in inputs.items():
                if any_overlap([self._tensors[owner]], [tensor]):
                    raise UnsupportedError(
                        f"input '{name}' lies in the memory of '{owner}'; pass a copy"
                    )

    def _find(self, made: list[MadeStep], inputs: Tensors) -> MadeStep | None:
        state = self.source.state
        for position in range(len(made) - 1, -1, -1):
            if made[position].state == state and made[position].source.fits(inputs):
                made.append(made.pop(position))
                return made[-1]
        return None

    def _keep(self, made: list[MadeStep], new: MadeStep) -> MadeStep:
        made.append(new)
        del made[:-_MOST_GRAPHS]
        self._forget_states()
        states = {each.state for each in made}
        if len(states) >= _MANY_STATES and not self._told_of_states:
            self._told_of_states = True
            _log.warning(
                "the model was captured in %d different states: what its forward or the loss reads (attributes, globals, "
                "modes) changes from step to step, and each new value costs a capture; pass it as an input",
                len(states),
            )
        return new

    def _forget_states(self) -> None:
        self.source.keep_states({each.state for each in (*self._training, *self._evaluation)})

    # --- in pieces

    def _find_or_make(self, inputs: Tensors, *, training: bool) -> MadeStep | CaptureError | None:
        """Return the graph of a call; where it is to run in pieces, why, or None if all of its kind do."""
        made = self._find(self._training if training else self._evaluation, inputs)
        if made is not None or training in self._in_pieces:
            return made
        for kind, state, error in reversed(self._apart):
            if kind == training and state == self.source.state and error.holds(inputs):
                if is_strict():
                    raise error
                return error
        try:
            return self._make_training(inputs) if training else self._make_evaluation(inputs)
        except CaptureError as error:
            if not self._may_run_in_pieces():
                raise
            if isinstance(error, OutsideGradientError):
                raise  # which nothing here would train
            if isinstance(error, CallError) and error.holds is not None:
                self._apart.append((training, self.source.state, error))
                del self._apart[:-_MOST_GRAPHS]
            if self._pieces is None:
                self._pieces = self.source.in_pieces(self._options)
            if self._pieces is None:
                raise
            _log.info("no graph holds a step whole: %s", error)
            return error

    def _may_run_in_pieces(self) -> bool:
        """Tell whether steps without a graph are allowed: what memory pieces take nobody knows beforehand."""
        limits = ("memory_limit", "max_bytes", "max_share")
        return not is_strict() and not any(self._options[name] for name in limits)

    def _train_in_pieces(
        self, inputs: Tensors, why: CaptureError | None
    ) -> tuple[list[torch.Tensor], bool, bool, float | torch.Tensor | None]:
        pieces, state = self._pieces, self.state
        outputs = pieces.add_gradients(state, inputs, self._take_new_tensors)
        self._has_run_in_pieces(why, training=True)
        updated, finite, norm = False, True, None
        if state.kept_batches >= self._options["accumulation"]:
            updated, finite, norm = pieces.optimizer_step(state)
        return list(outputs.values()), updated, finite, norm

    def _evaluate_in_pieces(self, inputs: Tensors, why: CaptureError | None) -> list[torch.Tensor]:
        outputs = self._pieces.evaluate(inputs)
        self._has_run_in_pieces(why, training=False)
        return list(outputs.values())

    def _take_new_tensors(self) -> dict[str, bool]:
        """Take in what a forward may have made; return whether each parameter is trained."""
        self.follow_module()
        return self._requires_grad

    def _has_run_in_pieces(self, why: CaptureError | None, *, training: bool) -> None:
        """Leave calls of a kind to pieces, now that one has run, unless it was for this call; say so once."""
        if why is None:
            return
        if not isinstance(why, CallError):
            self._in_pieces.add(training)
        told = self._pieces.captures[-1:]
        if told and told[0].fallback and told[0].fallback not in self._told:
            self._told.add(told[0].fallback)
            tell_fallback(self.source.name, told[0])

    def _make_training(self, inputs: Tensors) -> MadeStep:
        source = self.source.graph(inputs, training=True)
        self._adopt_new_tensors(source)
        program = self._training_program(source)
        made = MadeStep(source, program, self.source.state, _written_buffers(source))
        return self._keep(self._training, made)

    def _training_program(self, source: StepGraph) -> Any:
        names = {i["target"]: i["name"] for i in source.graph.inputs if i["role"] == "parameter"}
        source.graph.set_requires_grad(
            {name: self._requires_grad[target] for target, name in names.items()}
        )
        # Groups may name what the forward does not reach.
        groups = [
            {**group, "params": [n for n in group["params"] if n in names]}
            for group in self._options["groups"]
        ]
        options = {**self._options, "groups": groups}
        graph = source.graph
        if (count := self._options.get("recompute_layers")) is not None:
            graph = graph.copy()
            layers = graph.checkpoint_layers(count)
            tell = _log.info if layers else _log.warning
            tell("transformer_layer_recompute: %d layers are computed again", layers)
        with progress.stage("passes"):
            return _core.TrainingProgram(graph, options, devices.provider_of(self._device))

    def _make_evaluation(self, inputs: Tensors) -> MadeStep:
        source = self.source.graph(inputs, training=False)
        self._adopt_new_tensors(source)
        budget = MemoryBudget(self._options["max_bytes"], self._options["max_share"])
        session = Program(
            source.graph, (), None, self._device, budget if budget.bytes else None
        ).session
        made = MadeStep(source, session, self.source.state, _written_buffers(source))
        return self._keep(self._evaluation, made)

    def _adopt_new_tensors(self, source: StepGraph) -> None:
        """Take in what a layer made before it was traced, or while, in the place of another tensor too."""
        targets = [i["target"] for i in source.graph.inputs if i["role"] in ("parameter", "buffer")]
        if any(target not in self._tensors for target in targets) or self.source.changed():
            self.share_tensors()
        self.source.settle()


def _written_buffers(source: StepGraph) -> tuple[str, ...]:
    return tuple(o["target"] for o in source.graph.outputs if o["role"] == "buffer_update")


def refuse_wanted_gradients(inputs: Tensors) -> None:
    """Raise UnsupportedError for an input of a step that wants a gradient, which nobody would give it."""
    for name, tensor in inputs.items():
        if tensor.requires_grad:
            raise UnsupportedError(
                f"input '{name}' wants a gradient, which a step with its optimizer does not give: "
                "detach() it"
            )

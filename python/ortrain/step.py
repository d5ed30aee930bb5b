# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One run of a program, forward and backward, as a node of PyTorch's autograd graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ortrain import _core, devices, progress
from ortrain.capture.dynamo_internals import untraced
from ortrain.capture.torch_internals import any_accumulation_hooks, is_batched, keeps_graph
from ortrain.entry import Entry
from ortrain.fallback import is_refusal
from ortrain.forward_again import ForwardAgain, with_own_history
from ortrain.program import BackwardPart, CallersMemory, Form, Program, inputs_with_gradients
from ortrain.random_numbers import GeneratorStates, draw_seed
from ortrain.verification import watching

_NOT_DIFFERENTIABLE = (
    "PyTorch cannot take over the gradients of this ORTModule: {}; or run the module itself, "
    "ORTModule.module"
)

_AS_IT_IS = contextlib.nullcontext()


@functools.cache
def _anchor(device: torch.device) -> torch.Tensor:
    """Return the tensor that links nodes of PyTorch's graph; it has no elements."""
    with torch.inference_mode(False):  # whatever the first caller is in
        return torch.empty(0, device=device)


def _without_gradients() -> contextlib.AbstractContextManager[Any]:
    """Return `torch.no_grad`; most backwards are in it already, and entering it costs more than asking."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


class ForwardError(Exception):
    """The forward of a graph has failed before anything that others see had changed.

    Attributes:
      cause: Why.
    """

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


def execute(
    entry: Entry,
    inputs: list[torch.Tensor],
    targets: list[torch.Tensor],
    on_run: Callable[[Any], None],
    again: ForwardAgain | None,
) -> list[torch.Tensor]:
    """Run the graph of an entry under autograd and return the user outputs.

    Args:
      entry: The captured graph.
      inputs: Its inputs; the seed among them is drawn here.
      targets: What it writes to.
      on_run: Is handed the `_core.Run` once its forward has run.
      again: The call in PyTorch, where gradients are differentiated; None where it has none.

    Raises:
      ForwardError: The plan, of the backward too, or a node of the forward refuses the call.
    """
    draws, seed_at = entry.captured.draws, entry.seed_at
    before = None if not draws and seed_at is None else GeneratorStates(entry.device)
    try:
        if before is not None and seed_at is not None:
            # PyTorch's draws are those of a module without the engine's, which count behind them.
            inputs[seed_at] = before.seed() if draws else draw_seed(entry.device)
        done = _run_forward(entry, inputs, again, before if draws else None)
    except Exception as error:
        if before is not None:
            before.restore()
        raise ForwardError(error) from error
    on_run(done.run)
    entry.apply_updates(targets, done.outputs)
    step, outputs = done.step, done.outputs
    if step is not None:
        positions, token = range(len(done.inputs)), None
        if _gradients_are_awaited(step.program, done.inputs):
            positions, token = step.append_parts(done.inputs)
        outputs = _Step.apply(step, outputs, positions, token, *(done.inputs[p] for p in positions))
    watching.tell(entry, done.inputs, done.form, step)
    if draws and seed_at is not None:
        draw_seed(entry.device)  # the next forward has another one
    return list(outputs[: entry.num_user_outputs])


class _Forward(NamedTuple):
    """A forward that has run and has written to nothing yet."""

    step: _Pass | None  # None without a backward
    run: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    form: Form


def _run_forward(
    entry: Entry,
    inputs: list[torch.Tensor],
    again: ForwardAgain | None,
    generators: GeneratorStates | None,
) -> _Forward:
    devices.follow_tf32(entry.device)
    form: Form = None
    selected = entry.rows.select(inputs) if entry.rows is not None else None
    if selected is not None:
        form, derived = selected
        inputs = [*inputs, *derived]
    program = entry.program(entry.preferred, form)
    if not entry.planned:
        with progress.stage("plan") as timing:
            program.session.plan([list(t.shape) for t in inputs_with_gradients(program, inputs)])
        entry.record.stages["plan"] = timing.seconds
        entry.planned = True
    if not program.gradient_of:
        run = _core.Run(program.session)
        return _Forward(None, run, inputs, entry.laid_out(run.forward(inputs)), form)
    step = _Pass(entry, program, inputs, again, generators)
    outputs = step.forward()
    return _Forward(step, step.run, inputs, outputs, form)


def _gradients_are_awaited(program: Program, inputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether somebody acts on single gradients while the backward goes on."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return True
    return any_accumulation_hooks([inputs[p] for p in program.outgoing])


class _Pass:
    """One forward of a program and its backward, which may be asked for in parts.

    Args:
      entry: The captured graph.
      program: The form of it that runs.
      inputs: Its inputs.
      again: The call in PyTorch.
      generators: What the forward's draws in PyTorch start from; None where there are none.

    Attributes:
      witness: Is told of the gradients; None for nobody.
    """

    witness: watching.GradientWitness | None = None

    def __init__(
        self,
        entry: Entry,
        program: Program,
        inputs: Sequence[torch.Tensor],
        again: ForwardAgain | None,
        generators: GeneratorStates | None,
    ) -> None:
        self.entry, self.program, self.generators = entry, program, generators
        self.again, self.originals = again, with_own_history(inputs, entry.with_gradient)
        # Aliases keep the memory that this step reads, whatever `.data` is set to meanwhile.
        self.inputs = [t.detach() for t in inputs]
        for position in entry.copied_inputs:  # backward may run the forward again
            self.inputs[position] = self.inputs[position].clone()
        self.run = _core.Run(program.session)
        self.parts: list[BackwardPart] = []
        self._unfinished: Any = None  # the run whose backward goes on with the next part
        self._made: dict[int, torch.Tensor] = {}  # by position, not handed over yet
        self.refusal = ""  # why what was made cannot be differentiated
        self._freed: frozenset[int] = frozenset()  # outputs that have no backward any more

    def forward(self) -> list[torch.Tensor]:
        """Run the forward."""
        outputs = self.run.forward(self.inputs)
        for position in self.program.reads(self.run).copied:
            self.run.replace_input(position, self.inputs[position].clone())
        self.versions = [t._version for t in self.inputs]
        # Aliases share the version counter but not the history: no reference cycle.
        self.outputs = [t.detach() for t in outputs[: self.entry.num_user_outputs]]
        self.output_versions = [t._version for t in self.outputs]
        self.results, self.result_versions = self.outputs, self.output_versions
        if self.entry.orders:  # what the caller gets is no memory of the graph's
            outputs = self.entry.laid_out(outputs)
            self.results = [t.detach() for t in outputs[: self.entry.num_user_outputs]]
            self.result_versions = [t._version for t in self.results]
        return outputs

    def append_parts(self, inputs: Sequence[torch.Tensor]) -> tuple[list[int], Any]:
        """Put a node for each part of the backward but the first into PyTorch's graph.

        Returns:
          The inputs whose gradients come with the first part, and what links it to the second.
        """
        program = self.program
        self.parts = program.parts(self.run)
        token = None
        for index in range(len(self.parts) - 1, 0, -1):
            positions = self.parts[index].positions
            token = _Part.apply(self, index, token, *(inputs[p] for p in positions))
        later = {p for part in self.parts[1:] for p in part.positions}
        return [p for p in range(len(inputs)) if p not in later], token

    def begin(self, gradients: Sequence[torch.Tensor | None], kept: bool) -> None:
        """Take the gradients of the outputs; run the forward again where it must be.

        Args:
          gradients: Those.
          kept: Whether all of it may be asked for again, by retain_graph.
        """
        entry = self.entry
        given = tuple(
            i
            for i, gradient in enumerate(gradients[: entry.num_user_outputs])
            if gradient is not None and entry.differentiable[i]
        )
        if not self._freed.isdisjoint(given):
            raise RuntimeError(
                "Trying to backward through the graph a second time: what the gradient needs was "
                "freed by an earlier backward() or autograd.grad(); specify retain_graph=True there"
            )
        if entry.captured.needed_results:
            read = entry.results_read(given)
            _check_unwritten(self.results, self.result_versions, read)
        self._unfinished = None  # an earlier backward may have stopped half-way
        self.refusal = ""
        batched = any(map(is_batched, gradients))
        if torch.is_grad_enabled() or batched:
            self.refusal = self.again.why_not()
            if batched and torch.is_grad_enabled():
                self.refusal = "a batch of gradients comes in at once (vectorize=False takes each)"
            if batched and self.refusal:
                raise RuntimeError(_NOT_DIFFERENTIABLE.format(self.refusal))
        if (torch.is_grad_enabled() or batched) and not self.refusal:
            self._begin_in_pytorch(gradients)
        else:
            with _without_gradients():
                self._begin_or_ask_pytorch(gradients, given)
        if not kept:
            common = entry.captured.common_saves
            self._freed = self._freed.union(*(common[i] for i in given))

    def _begin_or_ask_pytorch(
        self, gradients: Sequence[torch.Tensor | None], given: tuple[int, ...]
    ) -> None:
        """Run the backward; where the engine has none for these gradients, PyTorch's."""
        try:
            self._begin(gradients, given)
        except _core.OrtrainError as error:
            if not is_refusal(error) or self.entry.budget is not None or self.again.why_not():
                raise
            self._begin_in_pytorch(gradients)
            self.again.tell_backward(error)

    def _begin_in_pytorch(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Compute the gradients such that they can be differentiated, or for a batch at once."""
        _check_versions(self, CallersMemory(list(range(len(self.inputs))), []))
        user = gradients[: self.entry.num_user_outputs]
        self._made = self.again.gradients(self.inputs, self.originals, user, self.generators)

    def _begin(self, gradients: Sequence[torch.Tensor | None], given: tuple[int, ...]) -> None:
        entry, program = self.entry, self.program
        if given != program.gradient_of:
            # Other outputs than guessed: run the forward of the program for these, with the same
            # seed, and expect them from now on. Zeros for the others would not do: they turn into
            # NaN where a derivative is infinite, and None into a gradient.
            entry.preferred = given
            program = entry.program(given, program.form)
            run = _core.Run(program.session)
        else:
            run = self.run
            _check_versions(self, program.reads(run))
        if not run.can_run_backward or run.in_backward:
            # Others may have changed: an optimizer has stepped since the backward of another output.
            _check_versions(self, CallersMemory(entry.inputs_of(given, len(self.inputs)), []))
            with self.generators.replayed() if self.generators else contextlib.nullcontext():
                run.forward(self.inputs)
        if self.witness is not None:
            self.witness.begin(gradients[: entry.num_user_outputs], program.outgoing)
        self._made.clear()
        incoming = [gradients[i] for i in program.incoming]
        if run is self.run and len(self.parts) > 1:
            run.begin_backward(incoming)
            self._unfinished = run
            return
        made = run.backward(incoming)
        self._made.update(zip(program.outgoing, made, strict=True))

    def gradients(self, index: int, positions: Iterable[int]) -> list[torch.Tensor | None]:
        """Run a part where it has not run, and hand over what it made."""
        run = self._unfinished
        if run is not None:
            if index > 0:
                _check_versions(self, self.parts[index].reads)
            outgoing = self.program.outgoing
            for place, gradient in run.continue_backward(self.parts[index].end):
                self._made[outgoing[place]] = gradient
            if not run.in_backward:
                self._unfinished = None
        handed_over = [self._made.pop(p, None) for p in positions]
        if self.witness is not None:
            self.witness.compare(list(positions), handed_over)
        return handed_over


class _Step(torch.autograd.Function):
    """A forward, and the backward or its first part, as a node of PyTorch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        step: _Pass,
        outputs: Sequence[torch.Tensor],
        positions: Sequence[int],
        token: torch.Tensor | None,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        entry = step.entry
        ctx.step, ctx.positions, ctx.linked = step, positions, token is not None
        ctx.set_materialize_grads(False)
        user = outputs[: entry.num_user_outputs]
        fixed = [t for t, yes in zip(user, entry.differentiable, strict=True) if not yes]
        ctx.mark_non_differentiable(*fixed, *outputs[entry.num_user_outputs :])
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step = ctx.step
        step.begin(gradients, keeps_graph())
        with _without_gradients():
            made = step.gradients(0, ctx.positions)
        token = _anchor(step.entry.device) if ctx.linked else None
        return (None, None, None, token, *_marked(made, step))


class _Part(torch.autograd.Function):
    """A later part of a backward; its node comes after the one of the part before it."""

    @staticmethod
    def forward(
        ctx: Any, step: _Pass, index: int, token: torch.Tensor | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.step, ctx.index, ctx.linked = step, index, token is not None
        # On the device, so that PyTorch runs the backward on its stream.
        return torch.empty(0, device=step.entry.device)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        with _without_gradients():
            made = ctx.step.gradients(ctx.index, ctx.step.parts[ctx.index].positions)
        token = _anchor(ctx.step.entry.device) if ctx.linked else None
        return (None, None, token, *_marked(made, ctx.step))


def _marked(gradients: list[torch.Tensor | None], step: _Pass) -> list[torch.Tensor | None]:
    """Return the gradients; with a refusal they cannot be differentiated."""
    present = [g for g in gradients if g is not None] if step.refusal else []
    if not present:
        return gradients
    # What they depend on stands there too: to autograd.grad they must not seem to be independent of it.
    sources = [torch.empty(0, requires_grad=True), *step.originals.values()]
    marked = iter(_SecondDerivative.apply(step.refusal, len(present), *present, *sources))
    return [None if g is None else next(marked) for g in gradients]


class _SecondDerivative(torch.autograd.Function):
    """Stands in a graph that create_graph=True asks for, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, refusal: str, count: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.refusal = refusal
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(_NOT_DIFFERENTIABLE.format(ctx.refusal))


def _check_versions(step: _Pass, reads: CallersMemory) -> None:
    """Refuse to read inputs and outputs that were written to since the forward."""
    for position in reads.inputs:
        tensor, version = step.inputs[position], step.versions[position]
        if tensor._version != version:
            # Only here: describing the graph's inputs costs more than the whole check.
            described = [i for i in step.program.graph.inputs if i["role"] != "gradient"]
            name = described[position]["target"] or described[position]["name"]
            raise RuntimeError(
                f"'{name}' is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )
    _check_unwritten(step.outputs, step.output_versions, reads.outputs)


def _check_unwritten(
    outputs: Sequence[torch.Tensor], versions: Sequence[int], read: Iterable[int]
) -> None:
    for i in read:
        tensor, version = outputs[i], versions[i]
        if tensor._version != version:
            raise RuntimeError(
                f"output {i} is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )

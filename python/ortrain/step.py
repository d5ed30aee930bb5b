# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One run of a program, forward and backward, as a node of PyTorch's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ortrain import _core, devices, progress
from ortrain.capture.dynamo_internals import untraced
from ortrain.capture.torch_internals import any_accumulation_hooks, current_task
from ortrain.entry import Entry
from ortrain.forward_again import ForwardAgain
from ortrain.forward_and_backward import NOT_DIFFERENTIABLE, Backward, Pass
from ortrain.gradient_groups import Collected, Groups
from ortrain.program import Form, Program, inputs_with_gradients
from ortrain.random_numbers import GeneratorStates, draw_seed
from ortrain.verification import watching
from ortrain.watched_results import WatchedResults


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
        entry.refuse_other_branches(done.outputs)
    except Exception as error:
        if before is not None:
            before.restore()
        raise ForwardError(error) from error
    on_run(done.run)
    entry.apply_updates(targets, done.outputs)
    step, outputs = done.step, done.outputs
    if step is not None:
        if entry.groups is not None:
            outputs = _in_groups(step, entry.groups, outputs, done.inputs)
        else:
            positions, token = range(len(done.inputs)), None
            if _gradients_are_awaited(step.program, done.inputs):
                positions, token = _append_parts(step, done.inputs)
            given = [done.inputs[p] for p in positions]
            outputs = _Step.apply(step, outputs, positions, token, *given)
        step.watched = WatchedResults(entry, outputs)
    watching.tell(entry, done.inputs, done.form, step)
    if draws and seed_at is not None:
        draw_seed(entry.device)  # the next forward has another one
    return list(outputs[: entry.num_user_outputs])


class _Forward(NamedTuple):
    """A forward that has run and has written to nothing yet."""

    step: Pass | None  # None without a backward
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
    step = Pass(entry, program, inputs, again, generators)
    outputs = step.forward()
    return _Forward(step, step.run, inputs, outputs, form)


def _gradients_are_awaited(program: Program, inputs: Sequence[torch.Tensor]) -> bool:
    """Tell whether somebody acts on single gradients while the backward goes on."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return True
    return any_accumulation_hooks([inputs[p] for p in program.outgoing])


def _append_parts(step: Pass, inputs: Sequence[torch.Tensor]) -> tuple[list[int], Any]:
    """Put a node for each part of the backward but the first into PyTorch's graph.

    Returns:
      The inputs whose gradients come with the first part, and what links it to the second.
    """
    parts = step.parts = step.program.parts(step.run)
    token = None
    for index in range(len(parts) - 1, 0, -1):
        token = _Part.apply(step, index, token, *(inputs[p] for p in parts[index].positions))
    later = {p for part in parts[1:] for p in part.positions}
    return [p for p in range(len(inputs)) if p not in later], token


def _in_groups(
    step: Pass, groups: Groups, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Put nodes into PyTorch's graph from each result to the inputs that it reaches; return the outputs behind them.

    PyTorch runs later nodes first: all that comes in for results, which is of nodes behind this forward, is there when
    the first group of inputs wants its gradients.
    """

    def run(gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        step.watched.tell_lost_gradients(gradients)
        made, backward = step.first_part(gradients, range(len(inputs)))
        return _marked(made, step, backward)

    collected = Collected(step.entry.num_user_outputs, run)
    tokens = [
        _Inputs.apply(step, collected, positions, *(inputs[p] for p in positions))
        for positions in groups.inputs
    ]
    made = list(outputs)
    for results, numbers in groups.results:
        own = [outputs[i] for i in results]
        behind = _Results.apply(collected, results, own, *(tokens[n] for n in numbers))
        for i, output in zip(results, behind, strict=True):
            made[i] = output
    return made


class _Inputs(torch.autograd.Function):
    """Inputs that the same results reach, in front of a token that leads to them."""

    @staticmethod
    def forward(
        ctx: Any, step: Pass, collected: Collected, positions: list[int], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.collected, ctx.positions = collected, positions
        ctx.set_materialize_grads(False)
        return _token(step)

    @staticmethod
    @untraced
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if gradient is None:
            return (None,) * (3 + len(ctx.positions))
        return (None, None, None, *ctx.collected.take(current_task(), ctx.positions))


class _Results(torch.autograd.Function):
    """Results that reach the same inputs, behind their tokens."""

    @staticmethod
    def forward(
        ctx: Any,
        collected: Collected,
        results: list[int],
        outputs: Sequence[torch.Tensor],
        *tokens: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.collected, ctx.results, ctx.count = collected, results, len(tokens)
        ctx.token = torch.empty_like(tokens[0]) if tokens else None
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        come = ctx.collected.add(current_task(), ctx.results, gradients)
        return (None, None, None, *((ctx.token if come else None),) * ctx.count)


def _token(step: Pass) -> torch.Tensor:
    """Return a tensor that links nodes of PyTorch's graph; it has no elements.

    On the device, so that PyTorch runs the backward on its stream.
    """
    return torch.empty(0, dtype=torch.float32, device=step.entry.device)


class _Step(torch.autograd.Function):
    """A forward, and the backward or its first part, as a node of PyTorch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        step: Pass,
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
        step.watched.tell_lost_gradients(gradients)
        made, backward = step.first_part(gradients, ctx.positions)
        token = backward.linked(_token(step)) if ctx.linked else None
        return (None, None, None, token, *_marked(made, step, backward))


class _Part(torch.autograd.Function):
    """A later part of a backward; its node comes after the one of the part before it."""

    @staticmethod
    def forward(
        ctx: Any, step: Pass, index: int, token: torch.Tensor | None, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.step, ctx.index, ctx.linked = step, index, token is not None
        return _token(step)

    @staticmethod
    @untraced
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        step = ctx.step
        made, backward = step.later_part(ctx.index)
        token = backward.linked(_token(step)) if ctx.linked else None
        return (None, None, token, *_marked(made, step, backward))


def _marked(
    gradients: list[torch.Tensor | None], step: Pass, backward: Backward
) -> list[torch.Tensor | None]:
    """Return the gradients; with a refusal they cannot be differentiated."""
    present = [g for g in gradients if g is not None] if backward.refusal else []
    if not present:
        return gradients
    # What they depend on stands there too: to autograd.grad they must not seem to be independent of it.
    sources = [torch.empty(0, requires_grad=True), *step.originals.values()]
    marked = iter(_SecondDerivative.apply(backward.refusal, len(present), *present, *sources))
    return [None if g is None else next(marked) for g in gradients]


class _SecondDerivative(torch.autograd.Function):
    """Stands in a graph that create_graph=True asks for, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, refusal: str, count: int, *tensors: torch.Tensor) -> tuple[Any, ...]:
        ctx.refusal = refusal
        return tuple(g.view_as(g) for g in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(NOT_DIFFERENTIABLE.format(ctx.refusal))

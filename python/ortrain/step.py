# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One run of a program, forward and backward, as a node of PyTorch's autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ortrain import _core, progress
from ortrain.entry import Entry
from ortrain.program import Form, Program, inputs_with_gradients

_ANCHOR = torch.empty(0)


def execute(
    entry: Entry,
    inputs: list[torch.Tensor],
    targets: list[torch.Tensor],
    on_run: Callable[[Any], None],
) -> list[torch.Tensor]:
    """Run the graph of an entry under autograd and return the user outputs.

    Args:
      entry: The captured graph.
      inputs: Its inputs.
      targets: What it writes to.
      on_run: Is handed the `_core.Run` once its forward has run.

    Raises:
      UnsupportedError: No kernel takes the shapes.
    """
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
    if program.gradient_of:
        outputs = _Step.apply(on_run, entry, program, targets, inputs, *inputs)
    else:
        run = _core.Run(program.session)
        outputs = run.forward(inputs)
        on_run(run)
        entry.apply_updates(targets, outputs)
    return list(outputs[: entry.num_user_outputs])


class _Step(torch.autograd.Function):
    """One forward and backward of a program as a node of PyTorch's autograd graph."""

    @staticmethod
    def forward(
        ctx: Any,
        on_run: Callable[[Any], None],
        entry: Entry,
        program: Program,
        targets: list[torch.Tensor],
        inputs: list[torch.Tensor],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        # Aliases keep the memory that this step reads, whatever `.data` is set to meanwhile.
        inputs = [t.detach() for t in inputs]
        for position in entry.updated_inputs:  # backward may run the forward again
            inputs[position] = inputs[position].clone()
        run = _core.Run(program.session)
        outputs = run.forward(inputs)
        on_run(run)
        entry.apply_updates(targets, outputs)
        ctx.entry, ctx.program, ctx.run, ctx.inputs = entry, program, run, inputs
        ctx.save_for_backward(_ANCHOR)  # PyTorch frees it, and refuses a second backward then
        ctx.versions = [t._version for t in inputs]
        user = outputs[: entry.num_user_outputs]
        # Aliases share the version counter but not the history: no reference cycle.
        ctx.outputs = [t.detach() for t in user]
        ctx.output_versions = [t._version for t in ctx.outputs]
        ctx.set_materialize_grads(False)
        fixed = [t for t, yes in zip(user, entry.differentiable, strict=True) if not yes]
        ctx.mark_non_differentiable(*fixed, *outputs[entry.num_user_outputs :])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        with torch.no_grad():
            result = _Step._gradients(ctx, gradients)
        if torch.is_grad_enabled():  # create_graph=True
            present = [g for g in result if g is not None]
            marked = iter(_SecondDerivative.apply(torch.empty(0, requires_grad=True), *present))
            result = [None if g is None else next(marked) for g in result]
        return (None, None, None, None, None, *result)

    @staticmethod
    def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> list[Any]:
        """Run the backward; one gradient, or None, per input."""
        entry, program, run = ctx.entry, ctx.program, ctx.run
        given = tuple(
            i
            for i, gradient in enumerate(gradients[: entry.num_user_outputs])
            if gradient is not None and entry.differentiable[i]
        )
        if given != program.gradient_of:
            # Other outputs than guessed: run the forward of the program for these, with the same
            # seed, and expect them from now on. Zeros for the others would not do: they turn into
            # NaN where a derivative is infinite, and None into a gradient.
            entry.preferred = given
            program = entry.program(given, program.form)
            run = _core.Run(program.session)
        else:
            _check_versions(ctx, program.late_inputs)
            _check_output_versions(ctx, program.late_outputs)
        if not run.can_run_backward:
            _check_versions(ctx, range(len(ctx.inputs)))
            run.forward(ctx.inputs)
        made = run.backward([gradients[i] for i in program.incoming])
        result: list[torch.Tensor | None] = [None] * len(ctx.inputs)
        for position, gradient in zip(program.outgoing, made, strict=True):
            result[position] = gradient
        return result


class _SecondDerivative(torch.autograd.Function):
    """Stands in a graph that create_graph=True asks for, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(
            "a gradient of a gradient through ORTModule is not supported; run the module itself, "
            "ORTModule.module, where second derivatives are needed"
        )


def _check_versions(ctx: Any, positions: Iterable[int]) -> None:
    """Refuse inputs that were written to since the forward read them."""
    for position in positions:
        tensor, version = ctx.inputs[position], ctx.versions[position]
        if tensor._version != version:
            # Only here: describing the graph's inputs costs more than the whole check.
            described = [i for i in ctx.program.graph.inputs if i["role"] != "gradient"]
            name = described[position]["target"] or described[position]["name"]
            raise RuntimeError(
                f"'{name}' is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )


def _check_output_versions(ctx: Any, positions: Iterable[int]) -> None:
    """Refuse outputs that were written to: backward reads them where they are."""
    for i in positions:
        tensor, version = ctx.outputs[i], ctx.output_versions[i]
        if tensor._version != version:
            raise RuntimeError(
                f"output {i} is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )

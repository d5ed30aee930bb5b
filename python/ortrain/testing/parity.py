# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Comparison of training steps: a graph in the reference executor, the engine, eager PyTorch."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ortrain.capture.captured import CapturedModule, OutputRole
from ortrain.capture.convert import Converted, convert
from ortrain.capture.convert.registry import conversion
from ortrain.capture.export import capture
from ortrain.capture.signature import CallSignature, flatten_outputs
from ortrain.capture.use_cache import without_cache
from ortrain.testing.reference import ReferenceBuilder


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What one training step yields.

    Attributes:
      outputs: The results, in the order in which the module returns them.
      gradients: Gradient per parameter; a parameter that got none is left out.
      buffers: Buffers after the step.
    """

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]


def loss_of(outputs: list[torch.Tensor]) -> torch.Tensor:
    """Return one number to differentiate: the weighted sum of all floating point results."""
    terms = [
        (
            o.double()
            * torch.linspace(0.5, 1.5, max(o.numel(), 1), dtype=torch.float64)[: o.numel()].reshape(
                o.shape
            )
        ).sum()
        for o in outputs
        if o.is_floating_point() and o.requires_grad
    ]
    return torch.stack(terms).sum()


def eager_step(module: nn.Module, batch: Mapping[str, Any]) -> Step:
    """Run forward and backward of a copy of ``module`` in eager PyTorch."""
    module = copy.deepcopy(module)
    module.zero_grad(set_to_none=True)
    with without_cache(module):
        outputs, _ = flatten_outputs(module(**batch))
    loss_of(outputs).backward()
    gradients = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    return Step([o.detach() for o in outputs], gradients, buffers)


def is_known(target: Any) -> bool:
    """Tell whether an operator has a conversion."""
    return conversion(target) is not None


def capture_known(module: nn.Module, batch: Mapping[str, Any]) -> CapturedModule:
    """Capture ``module`` for a batch of keyword arguments, decomposing unknown operators."""
    return capture(module, (), batch, known=is_known)


def reference_graph(captured: CapturedModule) -> Converted:
    """Convert a captured module into a graph of the reference executor."""
    hints = {dim.name: dim.hint for dim in captured.dims}
    return convert(captured, ReferenceBuilder(captured.module_name, hints))


Runner = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


def graph_step(
    module: nn.Module,
    captured: CapturedModule,
    converted: Converted,
    batch: Mapping[str, Any],
    run: Runner | None = None,
) -> Step:
    """Run forward and backward of a converted graph with the parameters of ``module``."""
    parameters = {
        n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in module.named_parameters()
    }
    buffers = {n: b.detach().clone() for n, b in module.named_buffers()}
    flat = CallSignature(module.forward).flatten((), batch)
    inputs = {name: flat.tensors[index] for name, index in converted.user_inputs}
    inputs |= {n: parameters[n] for n in converted.parameters}
    inputs |= {n: buffers[n] for n in converted.buffers}
    if converted.has_seed:
        inputs["seed"] = torch.tensor(0)
    results = (run or converted.graph.run)(inputs)
    result = captured.output_tree.rebuild([results[name] for name in converted.user_outputs])
    outputs, _ = flatten_outputs(result)
    loss_of(outputs).backward()
    for output in captured.outputs:
        if output.role is OutputRole.BUFFER_UPDATE:
            buffers[output.target] = results[output.name].detach()
    gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
    return Step([o.detach() for o in outputs], gradients, buffers)


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Largest differences between two steps, and what exists in one only.

    A difference is relative to the largest number of its tensor where that exceeds 1.
    """

    outputs: float
    gradients: float
    buffers: float
    missing: tuple[str, ...]

    def largest(self) -> float:
        """Return the largest of the three."""
        return max(self.outputs, self.gradients, self.buffers)


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    if a.dtype is not b.dtype or a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    difference = (a.double() - b.double()).abs()
    # Equal infinities, and NaN in the same place, are no difference.
    alike = (a == b) | (a.isnan() & b.isnan())
    scale = max(1.0, float(b.double().abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return float(difference.masked_fill(alike, 0.0).nan_to_num(float("inf")).max()) / scale


def difference(a: Step, b: Step) -> Difference:
    """Compare two steps."""
    missing = sorted(a.gradients.keys() ^ b.gradients.keys())
    if len(a.outputs) != len(b.outputs):
        missing.append(f"{len(a.outputs)} and {len(b.outputs)} outputs")
    shared = a.gradients.keys() & b.gradients.keys()
    return Difference(
        max((_distance(x, y) for x, y in zip(a.outputs, b.outputs, strict=False)), default=0.0),
        max((_distance(a.gradients[n], b.gradients[n]) for n in shared), default=0.0),
        max((_distance(a.buffers[n], b.buffers[n]) for n in a.buffers), default=0.0),
        tuple(missing),
    )


class EngineRunner:
    """Runs steps of one model on the engine."""

    def __init__(self, module: nn.Module, batch: Mapping[str, Any]) -> None:
        from ortrain import ORTModule

        del batch
        self._plain = copy.deepcopy(module)
        self._state = copy.deepcopy(dict(self._plain.named_buffers()))
        self._module = ORTModule(self._plain)

    def step(self, batch: Mapping[str, Any]) -> Step:
        """Run one step with the parameters and buffers that the module came with."""
        with torch.no_grad():
            for name, buffer in self._plain.named_buffers():
                buffer.copy_(self._state[name])
        self._plain.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            outputs, _ = flatten_outputs(self._module(**batch))
            loss_of(outputs).backward()
        return Step(
            [o.detach() for o in outputs],
            {n: p.grad for n, p in self._plain.named_parameters() if p.grad is not None},
            {n: b.detach().clone() for n, b in self._plain.named_buffers()},
        )

    def summary(self) -> tuple[float, int, int, str]:
        """Return the native share, nodes, graphs, and why something ran in PyTorch."""
        report = self._module.report()
        reasons = [r.fallback for r in report.captures if r.fallback]
        return report.native_share, report.native_nodes, len(report.captures), "; ".join(reasons)


class ReferenceRunner:
    """Runs steps of one model's graph in PyTorch."""

    def __init__(self, module: nn.Module, batch: Mapping[str, Any]) -> None:
        self._module = module
        self._captured = capture_known(module, batch)
        self._converted = reference_graph(self._captured)

    def step(self, batch: Mapping[str, Any]) -> Step:
        """Run one step with the parameters and buffers that the module came with."""
        return graph_step(self._module, self._captured, self._converted, batch)

    def summary(self) -> tuple[float, int, int, str]:
        """Return the native share, nodes, graphs, and why something ran in PyTorch."""
        return 1.0, len(self._converted.graph.nodes), 1, ""

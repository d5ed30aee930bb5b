# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own database of operators, each run by the engine and by eager PyTorch.

``torch.testing._internal.common_methods_invocations.op_db`` names the operators and makes sample
arguments. Outputs and the gradients of a random cotangent are compared.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ortrain.engine import Engine

RTOL, ATOL = 1.3e-6, 1e-5  # those of PyTorch's own tests for float32
# Where both differ, the engine may be this much further from float64 than eager PyTorch is.
ERROR_RATIO = 3.0


class Outcome(enum.Enum):
    """How an operator ran; of several samples, the worst counts."""

    native = "native"
    random = "random numbers, not compared"
    escaped = "in PyTorch, as nodes of a graph"
    refused = "in PyTorch, no graph"
    failed = "raised an error that PyTorch does not raise"
    wrong = "wrong values"


_ORDER = list(Outcome)


@dataclasses.dataclass(frozen=True)
class OperatorResult:
    """What became of one operator.

    Attributes:
      name: As the database names it, with its variant.
      outcome: The worst of all samples.
      samples: How many were run.
      detail: Of the worst: what differed, or why it is no graph.
    """

    name: str
    outcome: Outcome
    samples: int
    detail: str


class _Call(nn.Module):
    """A call of an operator; the tensors among its arguments are the module's.

    Attributes:
      copies: Whether results are copied. A graph of views alone is none: they are PyTorch's own.
    """

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        self.copies = False
        self._function = function
        leaves, self._tree = pytree.tree_flatten((args, kwargs))
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [leaves[i] for i in self._places]

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self._leaves)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        result = self._function(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, torch.clone, result) if self.copies else result


def entries(device: str = "cpu") -> list[Any]:
    """Return the entries of the database whose float32 form has a gradient on a device."""
    from torch.testing._internal.common_methods_invocations import op_db

    return [
        op
        for op in op_db
        if torch.float32 in op.supported_dtypes(device)
        and torch.float32 in op.supported_backward_dtypes(device)
        and op.supports_autograd
    ]


def run_entry(op: Any, most_samples: int, device: str = "cpu") -> OperatorResult:
    """Run some samples of an operator, spread over all that there are.

    Args:
      op: An entry of the database.
      most_samples: How many at most.
      device: Where.
    """
    samples = list(op.sample_inputs(device, torch.float32, requires_grad=True))
    step = max(1, -(-len(samples) // most_samples))
    chosen = samples[::step]
    worst, detail = Outcome.native, ""
    for sample in chosen:
        found, why = _run_sample(op, sample)
        if _ORDER.index(found) > _ORDER.index(worst):
            worst, detail = found, why
    name = f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name
    return OperatorResult(name, worst, len(chosen), detail)


def _run_sample(op: Any, sample: Any) -> tuple[Outcome, str]:
    call = _Call(op.op, (sample.input, *sample.args), sample.kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = _evaluate(call, call.tensors, 0)
            with mock.patch.object(torch, "manual_seed"):  # some entries set a seed themselves
                again = _evaluate(call, call.tensors, None)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError):
            return Outcome.random, "PyTorch does not differentiate this sample"
        if _difference(again, expected, None):
            return Outcome.random, ""
        try:
            engine, actual = _evaluate_on_engine(call)
            if _makes_views_alone(engine) and not _difference(actual, expected, call):
                call.copies = True
                engine, actual = _evaluate_on_engine(call)
        except Exception as error:  # whatever it is, PyTorch does not raise it
            return Outcome.failed, f"{type(error).__name__}: {_line(error)} ({_shapes(call)})"
        difference = _difference(actual, expected, call)
    if difference:
        return Outcome.wrong, f"{difference} ({_shapes(call)})"
    for record in engine.records:
        if record.fallback:
            return Outcome.refused, record.fallback.partition("\n")[0]
        if record.escaped_nodes:
            return Outcome.escaped, str(record.escapes[0])
    return Outcome.native, ""


def _evaluate_on_engine(call: _Call) -> tuple[Engine, Any]:
    engine = Engine(call)
    return engine, _evaluate(lambda *tensors: engine.run(tensors, {}), call.tensors, 0)


def _makes_views_alone(engine: Engine) -> bool:
    return any("it computes nothing" in (record.fallback or "") for record in engine.records)


def _evaluate(
    run: Callable[..., Any], tensors: Sequence[torch.Tensor], seed: int | None
) -> list[torch.Tensor | None]:
    """Return the results, then the gradient of each argument that wants one, None for zeros."""
    if seed is not None:
        torch.manual_seed(seed)
    leaves = [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in tensors]
    # The engine refuses to write to leaves as PyTorch does, so operators get what is none.
    inputs = [leaf.clone() if leaf.requires_grad else leaf for leaf in leaves]
    results = [r for r in pytree.tree_leaves(run(*inputs)) if isinstance(r, torch.Tensor)]
    differentiable = [r for r in results if r.requires_grad]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Sequence[torch.Tensor | None] = [None] * len(wanted)
    if differentiable and wanted:
        generator = torch.Generator().manual_seed(7)
        cotangents = [
            torch.randn(r.shape, generator=generator, dtype=torch.float64).to(r.device, r.dtype)
            for r in differentiable
        ]
        gradients = torch.autograd.grad(differentiable, wanted, cotangents, allow_unused=True)
    return [r.detach() for r in results] + list(gradients)


def _difference(
    actual: Sequence[torch.Tensor | None],
    expected: Sequence[torch.Tensor | None],
    call: _Call | None,
) -> str:
    """Return what differs between two evaluations; empty if nothing does.

    Rounding may differ: with ``call`` given, values apart are held against those in float64.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results and gradients, expected {len(expected)}"
    exact: Sequence[torch.Tensor | None] | None = None
    for i, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        if mine is None or theirs is None:
            # None and zeros mean the same.
            rest = mine if theirs is None else theirs
            if rest is not None and bool(rest.ne(0).any()):
                return f"result {i} is {mine}, expected {theirs}"
            continue
        try:
            torch.testing.assert_close(mine, theirs, rtol=RTOL, atol=ATOL, equal_nan=True)
            continue
        except AssertionError as error:
            text = _line(error)
            if call is None or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                return f"result {i}: {text}"
        if exact is None:
            exact = _in_float64(call)
        if exact is None or exact[i] is None or not _as_close(mine, theirs, exact[i]):
            return f"result {i}: {text}"
    return ""


def _in_float64(call: _Call) -> list[torch.Tensor | None] | None:
    wide = [t.double() if t.is_floating_point() else t for t in call.tensors]
    wide = [
        w.detach().requires_grad_(t.requires_grad) for w, t in zip(wide, call.tensors, strict=True)
    ]
    try:
        return _evaluate(call, wide, 0)
    except (RuntimeError, TypeError, ValueError):
        return None


def _as_close(mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor | None) -> bool:
    """Tell whether our error is of the size of eager PyTorch's."""
    if exact is None or exact.shape != mine.shape or not mine.is_floating_point():
        return False
    special = ~(mine.isfinite() & theirs.isfinite())
    if not torch.allclose(mine[special], theirs[special], equal_nan=True):
        return False
    finite = mine.isfinite() & exact.isfinite()

    def error_of(values: torch.Tensor) -> float:
        apart = (values.double() - exact)[finite]
        return float(apart.square().mean().sqrt()) if apart.numel() else 0.0

    scale = float(exact[finite].abs().max()) if finite.any() else 0.0
    return error_of(mine) <= ERROR_RATIO * error_of(theirs) + RTOL * scale


def _line(error: BaseException) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return text[:160]


def _shapes(call: _Call) -> str:
    tensors = ", ".join(str(tuple(t.shape)) for t in call.tensors)
    others = [leaf for leaf in call._leaves if leaf is not None]
    return f"{tensors}; {others}" if others else tensors

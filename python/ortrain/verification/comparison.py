# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether results of the engine and of PyTorch are the same but for rounding."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ortrain.capture.shallow_copies import MISSING
from ortrain.capture.signature import Constant, Container, Number, OutputTree, Slot, Tree


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """What rounding may do, by the least precise type that takes part.

    Attributes:
      relative: Share of the largest number of a tensor.
      floor: Share of the largest number of all tensors of a kind: what cancels out is noise.
    """

    relative: float
    floor: float


_TOLERANCES = {
    torch.float64: Tolerance(1e-8, 1e-12),
    torch.float32: Tolerance(1e-4, 2e-6),
    torch.float16: Tolerance(1e-2, 1e-3),
    torch.bfloat16: Tolerance(4e-2, 4e-3),
}
# The engine may be this much further from float64 than PyTorch is, at the worst element and on average.
_WORST_FACTOR, _MEAN_FACTOR = 4.0, 2.0
_MOST_DEPTH = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """What differs first.

    Attributes:
      what: "output 'logits'", "gradient of parameter 'fc.weight'", "buffer 'norm.running_mean'".
      amount: The largest difference of two numbers; infinity where they are no numbers.
      detail: Both sides, in words.
    """

    what: str
    amount: float
    detail: str


@dataclasses.dataclass(slots=True)
class Pair:
    """Two tensors that should be the same; None for one that is not there.

    Attributes:
      what: Its name in messages.
      actual: The engine's.
      expected: PyTorch's.
      absent_is_zero: Whether None stands for zeros, as it does for gradients.
    """

    what: str
    actual: torch.Tensor | None
    expected: torch.Tensor | None
    absent_is_zero: bool = False


def first_difference(
    pairs: Sequence[Pair],
    precision: torch.dtype,
    scale: float,
    exact: Callable[[], Sequence[torch.Tensor | None] | None],
) -> Difference | None:
    """Return the first pair that differs by more than rounding explains.

    Close are numbers within a `Tolerance`. Others are held against those of float64: the engine's
    error may be a few times PyTorch's.

    Args:
      pairs: Of one kind.
      precision: The least precise type that takes part.
      scale: The largest number of the kind.
      exact: Makes the same in float64, in the order of the pairs; None where that cannot be done.
    """
    tolerance = _TOLERANCES[precision]
    truth: Sequence[torch.Tensor | None] | None = None
    for index, pair in enumerate(pairs):
        found = _difference(pair, tolerance, scale)
        if found is None:
            continue
        if math.isfinite(found.amount) and precision is not torch.float64:
            truth = truth if truth is not None else exact()
            if truth is not None and _is_rounding(pair, truth[index], tolerance, scale):
                continue
        return found
    return None


def largest(tensors: Sequence[torch.Tensor | None]) -> float:
    """Return the largest finite number of floating point tensors, 0 where there is none."""
    return max((_largest(t) for t in tensors if t is not None), default=0.0)


def _largest(tensor: torch.Tensor) -> float:
    tensor = _dense(tensor)
    if not (tensor.is_floating_point() or tensor.is_complex()) or not tensor.numel():
        return 0.0
    return float(_wide(tensor).abs().nan_to_num(0.0, 0.0, 0.0).max())


def _difference(pair: Pair, tolerance: Tolerance, scale: float) -> Difference | None:
    actual, expected = pair.actual, pair.expected
    if actual is None and expected is None:
        return None
    if actual is None or expected is None:
        there = _dense(expected if actual is None else actual)
        side = "PyTorch" if actual is None else "the engine"
        amount = _largest(there) if there.is_floating_point() else math.inf
        if pair.absent_is_zero and not bool(there.count_nonzero()):
            return None
        if pair.absent_is_zero and actual is None and amount <= tolerance.floor * scale:
            return None
        return Difference(pair.what, amount, f"only {side} has one")
    actual, expected = _dense(actual), _dense(expected)
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        sides = [
            f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in (actual, expected)
        ]
        return Difference(pair.what, math.inf, f"{sides[0]} on the engine, {sides[1]} in PyTorch")
    actual = actual.to(expected.device)
    apart = _apart(actual, expected)
    if not apart.numel():
        return None
    position = int(apart.argmax())
    amount = float(apart.flatten()[position])
    allowed = 0.0
    if expected.is_floating_point() or expected.is_complex():
        allowed = max(tolerance.relative * _largest(expected), tolerance.floor * scale)
    if amount <= allowed:
        return None
    index = [int(i) for i in torch.unravel_index(torch.tensor(position), expected.shape)]
    place = f" at {index}" if index else ""
    mine, theirs = (t.flatten()[position].item() for t in (actual, expected))
    detail = f"{_shown(mine)} on the engine, {_shown(theirs)} in PyTorch{place}"
    return Difference(pair.what, amount, f"{detail}; rounding explains up to {allowed:.1e}")


def _apart(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return how far apart elements are; infinity where one of them alone is no number."""
    alike = actual == expected
    if expected.is_floating_point() or expected.is_complex():
        alike |= actual.isnan() & expected.isnan()
    apart = (_wide(actual) - _wide(expected)).abs().nan_to_num(math.inf, math.inf, math.inf)
    return apart.masked_fill(alike, 0.0)


def _is_rounding(
    pair: Pair, truth: torch.Tensor | None, tolerance: Tolerance, scale: float
) -> bool:
    actual, expected = pair.actual, pair.expected
    if truth is None or actual is None or expected is None or not expected.is_floating_point():
        return False
    if truth.shape != expected.shape:
        return False
    exact = _dense(truth).double()
    mine, theirs = (
        (_wide(_dense(t).to(exact.device)) - exact).abs().nan_to_num(math.inf, math.inf, math.inf)
        for t in (actual, expected)
    )
    floor = tolerance.floor * scale
    worst = float(mine.max()) <= _WORST_FACTOR * float(theirs.max()) + floor
    means = [float(error.square().mean().sqrt()) for error in (mine, theirs)]
    return worst and means[0] <= _MEAN_FACTOR * means[1] + floor


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


# --- what is no tensor


def structure_difference(actual: OutputTree, expected: OutputTree) -> Difference | None:
    """Compare the structures of two results, numbers and names in them too."""
    return _tree_difference(actual.tree, expected.tree)


def _tree_difference(a: Tree, b: Tree) -> Difference | None:
    if type(a) is type(b):
        if isinstance(a, Slot) and isinstance(b, Slot) and a.index == b.index:
            return None
        if isinstance(a, Number) and isinstance(b, Number) and a.index == b.index:
            return None
        if isinstance(a, Constant) and isinstance(b, Constant):
            return value_difference("a result that is no tensor", a.value, b.value)
        if isinstance(a, Container) and isinstance(b, Container):
            same = a.build.kind is b.build.kind and a.build.keys == b.build.keys
            if same and len(a.children) == len(b.children):
                children = zip(a.children, b.children, strict=True)
                return next((d for d in (_tree_difference(x, y) for x, y in children) if d), None)
    return Difference(
        "the structure of the results", math.inf, f"{a} on the engine, {b} in PyTorch"
    )


def value_difference(
    what: str,
    actual: Any,
    expected: Any,
    precision: torch.dtype = torch.float32,
    depth: int = 0,
) -> Difference | None:
    """Compare attributes: plain values, tensors, arrays, containers and objects of these.

    Objects that are none of these are taken for the same where their types are.
    """
    if actual is expected or depth > _MOST_DEPTH:
        return None
    if all(type(x).__module__ == "numpy" and hasattr(x, "tobytes") for x in (actual, expected)):
        if actual.dtype.kind not in "biuf" or expected.dtype.kind not in "biuf":
            return None
        actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor):
        pair = Pair(what, actual, expected)
        return first_difference([pair], precision, largest([expected]), lambda: None)
    if type(actual) is type(expected):
        if isinstance(actual, float):
            return _float_difference(what, actual, expected)
        if isinstance(actual, (bool, int, complex, str, bytes, type(None))):
            return None if actual == expected else _unequal(what, actual, expected)
        if isinstance(actual, (list, tuple)) and len(actual) == len(expected):
            both = enumerate(zip(actual, expected, strict=True))
            items = ((f"{what}[{i}]", x, y) for i, (x, y) in both)
            return _first_of(items, precision, depth)
        if isinstance(actual, dict) and actual.keys() == expected.keys():
            items = ((f"{what}[{k!r}]", actual[k], expected[k]) for k in actual)
            return _first_of(items, precision, depth)
        if not isinstance(actual, (list, tuple, dict, set, frozenset)):
            attributes = [getattr(x, "__dict__", None) for x in (actual, expected)]
            if isinstance(actual, type) or callable(actual) or None in attributes:
                return None
            return value_difference(what, *attributes, precision, depth + 1)
        if isinstance(actual, (set, frozenset)) and len(actual) == len(expected):
            return None
    return _unequal(what, actual, expected)


def _first_of(items: Any, precision: torch.dtype, depth: int) -> Difference | None:
    found = (value_difference(what, x, y, precision, depth + 1) for what, x, y in items)
    return next((difference for difference in found if difference), None)


def _float_difference(what: str, actual: float, expected: float) -> Difference | None:
    close = math.isclose(actual, expected, rel_tol=_TOLERANCES[torch.float32].relative)
    if close or (math.isnan(actual) and math.isnan(expected)):
        return None
    return _unequal(what, actual, expected, abs(actual - expected))


def _unequal(what: str, actual: Any, expected: Any, amount: float = math.inf) -> Difference:
    sides = ["nothing" if v is MISSING else repr(v)[:60] for v in (actual, expected)]
    return Difference(what, amount, f"{sides[0]} on the engine, {sides[1]} in PyTorch")

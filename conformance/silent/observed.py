# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Values as they were when a program showed them, and whether two such records are equal."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

# Relative, and absolute to 1 or a tensor's largest value; what is not here must be equal.
_TOLERANCES = {
    torch.float64: (1e-9, 1e-10),
    torch.complex128: (1e-9, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (5e-3, 2e-3),
    torch.bfloat16: (2e-2, 1e-2),
}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor as it was."""

    values: torch.Tensor
    strides: tuple[int, ...]
    requires_grad: bool


@dataclasses.dataclass(frozen=True)
class Raised:
    """What a block raised that may; "" if nothing."""

    said: str


NOT_RAISED = Raised("")


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two programs' records differ first.

    Attributes:
      text: How, "" if they do not.
      refused: Whether it is an exception where the other has none.
    """

    text: str = ""
    refused: bool = False


@dataclasses.dataclass(frozen=True)
class Run:
    """What became of one program in one way.

    Attributes:
      seen: What the program told.
      error: The exception that ended it, "" if none did.
      how: How the modules ran, for Ortrain: "native", "in pieces", "in PyTorch", or several.
      why: Why not native.
    """

    seen: list[tuple[str, Any]]
    error: str = ""
    how: str = ""
    why: str = ""


def observe(value: Any) -> Any:
    """Return a record of ``value`` that later changes leave alone.

    Tensors are copied with their strides; containers become (kind, parts), keys in their order.
    """
    if isinstance(value, torch.Tensor):
        detached = value.detach()
        copied = torch.empty(detached.shape, dtype=detached.dtype, device="cpu").copy_(detached)
        return Tensor(copied, tuple(value.stride()), value.requires_grad)
    if isinstance(value, np.ndarray):
        return ("ndarray", value.dtype.str, value.tolist())
    if isinstance(value, Mapping):
        kind = "dict" if type(value) is dict else type(value).__name__
        return (kind, [(observe(k), observe(v)) for k, v in value.items()])
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, sorted(map(repr, value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, observe(getattr(value, f.name))) for f in dataclasses.fields(value)]
        return (type(value).__name__, fields)
    if isinstance(value, collections.deque):
        return ("deque", [value.maxlen, *map(observe, value)])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, [observe(part) for part in value])
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, (torch.dtype, torch.Size, torch.device)):
        return str(value)
    raise TypeError(f"a program shows a {type(value).__name__}, which cannot be compared")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """How values are compared.

    Attributes:
      layout: Whether strides of tensors count.
      coarse: The least exact dtype that results come from, whatever theirs is.
    """

    layout: bool = False
    coarse: torch.dtype | None = None

    def tolerances(self, dtype: torch.dtype) -> tuple[float, float]:
        """Return how far values may differ, relatively and absolutely."""
        own = _TOLERANCES.get(dtype, (0.0, 0.0))
        return max(own, _TOLERANCES[self.coarse]) if self.coarse and own[0] else own


def difference(expected: Any, found: Any, how: Comparison) -> str:
    """Return how ``found`` differs from ``expected``, both of `observe`; "" if it does not."""
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return _tensor_difference(expected, found, how)
    if type(expected) is not type(found):
        return f"{_short(found)} for {_short(expected)}"
    if isinstance(expected, (list, tuple)):
        if len(expected) != len(found):
            return f"{len(found)} parts for {len(expected)}"
        for position, (a, b) in enumerate(zip(expected, found, strict=True)):
            said = difference(a, b, how)
            if said:
                return said if isinstance(expected, tuple) else f"[{position}]: {said}"
        return ""
    if isinstance(expected, float) and math.isnan(expected) and math.isnan(found):
        return ""
    if isinstance(expected, float) and math.isclose(expected, found, rel_tol=1e-5, abs_tol=1e-6):
        return ""
    return "" if expected == found else f"{_short(found)} for {_short(expected)}"


def first_difference(
    expected: Sequence[tuple[str, Any]], found: Sequence[tuple[str, Any]], how: Comparison
) -> Difference:
    """Return where two programs' records differ first, over the length of the shorter."""
    for (label, a), (other, b) in zip(expected, found, strict=False):
        raises, refuses = (isinstance(x, Raised) and bool(x.said) for x in (a, b))
        if raises and refuses:
            continue  # what an exception says may differ
        if refuses:
            return Difference(f"{other}: {b.said}", refused=True)
        if raises:
            return Difference(f"{label}: went on where PyTorch raises {a.said}")
        if label != other:
            return Difference(f"{other} where PyTorch has {label}")
        said = difference(a, b, how)
        if said:
            return Difference(f"{label}: {said}")
    return Difference()


def _tensor_difference(expected: Tensor, found: Tensor, how: Comparison) -> str:
    a, b = expected.values, found.values
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{b.dtype} {tuple(b.shape)} for {a.dtype} {tuple(a.shape)}".replace("torch.", "")
    if expected.requires_grad != found.requires_grad:
        return f"requires_grad {found.requires_grad} for {expected.requires_grad}"
    rtol, atol = how.tolerances(a.dtype)
    if atol:
        atol *= max(1.0, float(a[a.isfinite()].abs().max())) if bool(a.isfinite().any()) else 1.0
    close = torch.isclose(b, a, rtol=rtol, atol=atol, equal_nan=True)
    if not bool(close.all()):
        at = tuple((~close).nonzero()[0].tolist()) if a.dim() else ()
        count = int((~close).sum())
        return f"{count} of {a.numel()} values, {b[at].item():.6g} for {a[at].item():.6g} at {at}"
    if how.layout and expected.strides != found.strides and a.numel():
        return f"strides {found.strides} for {expected.strides}"
    return ""


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.values.shape)}"
    return repr(value)[:60]

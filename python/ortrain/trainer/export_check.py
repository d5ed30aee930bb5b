# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether an exported graph computes what PyTorch does, within what its element types allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortrain.amp import MixedPrecision
from ortrain.errors import InvalidModelError

# Of float32 and float64.
_TOLERANCE = 1e-3

# Roundings of a 16-bit type that an output may be away, relative to its largest element, or
# to 1: chains are rounded once here and after each operator there, and lists differ from float32.
_ROUNDINGS = 16


def check_outputs(
    names: Sequence[str],
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
    precision: MixedPrecision | None,
) -> None:
    """Compare the outputs of a graph with PyTorch's.

    Args:
      names: Of the outputs.
      ours: Those of the graph.
      theirs: Those of the module in PyTorch.
      precision: What the graph computes in 16 bits; None for nothing.

    Raises:
      InvalidModelError: An output is too far away.
    """
    for name, got, expected in zip(names, ours, theirs, strict=True):
        a, b = got.double(), expected.double()
        relative = absolute = _TOLERANCE
        if precision is not None:
            finite = b[b.isfinite()]
            largest = finite.abs().max().item() if finite.numel() else 0.0
            rounding = torch.finfo(precision.dtype).eps
            relative, absolute = 0.0, _ROUNDINGS * rounding * max(1.0, largest)
        if not torch.allclose(a, b, rtol=relative, atol=absolute):
            raise InvalidModelError(
                f"output '{name}' of the exported graph differs from PyTorch's by up to "
                f"{(a - b).abs().max().item():.3g}"
            )

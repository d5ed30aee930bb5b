# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Our shape operators as PyTorch computes them."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("ortrain::SumToShape")
def sum_to_shape(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return x summed to the given shape."""
    x, shape = inputs
    return [torch.from_numpy(x).sum_to_size([int(n) for n in shape]).numpy()]

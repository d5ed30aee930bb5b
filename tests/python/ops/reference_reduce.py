# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Our reduction operators as PyTorch computes them."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("ortrain::ReduceProdGrad")
def reduce_prod_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return the gradient of torch.prod over each axis in turn."""
    dy, data = inputs
    x = torch.from_numpy(data.astype(np.float64)).requires_grad_()
    y = x
    for axis in attrs["axes"]:
        y = y.prod(axis, keepdim=True)
    y.backward(torch.from_numpy(dy.astype(np.float64)))
    return [x.grad.numpy().astype(data.dtype)]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, group by group."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("ortrain::GroupedMatMul")
def grouped_matmul(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, w = (torch.from_numpy(np.array(v)) for v in inputs[:2])
    if attrs.get("trans_w", 0):
        w = w.transpose(1, 2)
    y = torch.zeros(x.shape[0], w.shape[2], dtype=x.dtype)
    begin = 0
    for expert, end in enumerate(inputs[2].tolist()):
        y[begin:end] = x[begin:end] @ w[expert]
        begin = end
    return [y.numpy()]


@reference("ortrain::GroupedMatMulWeightGrad")
def grouped_matmul_weight_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    x, dy = (torch.from_numpy(np.array(v)) for v in inputs[:2])
    ends = inputs[2].tolist()
    dw = torch.zeros(len(ends), x.shape[1], dy.shape[1], dtype=x.dtype)
    begin = 0
    for expert, end in enumerate(ends):
        dw[expert] = x[begin:end].T @ dy[begin:end]
        begin = end
    return [dw.numpy()]

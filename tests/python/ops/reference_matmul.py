# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Matrix products as NumPy computes them, in float64."""

from __future__ import annotations

import numpy as np

from tests.python.ops.registry import reference


def wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype.kind == "f" else x


@reference("Gemm")
def gemm(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    a, b = (wide(x) for x in inputs[:2])
    a = a.T if attrs.get("transA", 0) else a
    b = b.T if attrs.get("transB", 0) else b
    y = attrs.get("alpha", 1.0) * (a @ b)
    if len(inputs) > 2 and inputs[2] is not None:
        y = y + attrs.get("beta", 1.0) * wide(inputs[2])
    return [y]


@reference("ortrain::FusedMatMul")
def fused_matmul(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    a, b = (wide(x) for x in inputs)
    a = a.swapaxes(-1, -2) if attrs.get("transA", 0) else a
    b = b.swapaxes(-1, -2) if attrs.get("transB", 0) else b
    return [attrs.get("alpha", 1.0) * (a @ b)]


@reference("ortrain::Linear")
def linear(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    y = wide(inputs[0]) @ wide(inputs[1]).T
    return [y + wide(inputs[2]) if len(inputs) > 2 else y]


@reference("ortrain::WideLinearWeightGrad")
@reference("ortrain::LinearWeightGrad")
def linear_weight_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dy, x = (wide(v) for v in inputs[:2])
    rows = int(np.prod(x.shape[:-1]))
    dw = dy.reshape(rows, dy.shape[-1]).T @ x.reshape(rows, x.shape[-1])
    return [dw + wide(inputs[2]) if len(inputs) > 2 else dw]


@reference("ortrain::LinearInputGrad")
def linear_input_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    dx = wide(inputs[0]) @ wide(inputs[1])
    return [dx + wide(inputs[2]) if len(inputs) > 2 else dx]

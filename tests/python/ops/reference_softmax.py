# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Softmax as PyTorch computes it; its gradients from their formulas."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference


@reference("Softmax")
def softmax(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    return [torch.softmax(torch.from_numpy(inputs[0]), attrs.get("axis", -1)).numpy()]


@reference("LogSoftmax")
def log_softmax(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    return [torch.log_softmax(torch.from_numpy(inputs[0]), attrs.get("axis", -1)).numpy()]


def along(x: np.ndarray, attrs: dict) -> dict:
    return {"axis": attrs.get("axis", -1) if x.ndim else None, "keepdims": True}


@reference("ortrain::SoftmaxGrad")
def softmax_grad(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    dy, y = (x.astype(np.float64) for x in inputs)
    return [y * (dy - np.sum(dy * y, **along(y, attrs)))]


@reference("ortrain::LogSoftmaxGrad")
def log_softmax_grad(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    dy, y = (x.astype(np.float64) for x in inputs)
    return [dy - np.exp(y) * np.sum(dy, **along(y, attrs))]

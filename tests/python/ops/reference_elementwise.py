# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Elementwise operators: PyTorch's formulas, and Philox written out in numpy.

Standard operators stand here where ONNX's reference implementation rounds to float32 (also their
attributes) or refuses shapes that the standard allows.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from tests.python.ops.registry import reference

MASK32 = np.uint64(0xFFFFFFFF)


def philox_words(seed: int, stream: int, count: int) -> np.ndarray:
    """Return the first ``count`` words of Philox 4x32-10, four per counter."""
    blocks = np.arange((count + 3) // 4, dtype=np.uint64)
    high = np.uint64(32)
    counter = [
        blocks & MASK32,
        blocks >> high,
        np.full_like(blocks, stream & 0xFFFFFFFF),
        np.full_like(blocks, (stream >> 32) & 0xFFFFFFFF),
    ]
    key = [seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF]
    for _ in range(10):
        first = counter[0] * np.uint64(0xD2511F53)
        second = counter[2] * np.uint64(0xCD9E8D57)
        counter = [
            (second >> high) ^ counter[1] ^ np.uint64(key[0]),
            second & MASK32,
            (first >> high) ^ counter[3] ^ np.uint64(key[1]),
            first & MASK32,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return np.stack(counter, axis=1).reshape(-1)[:count]


def dropout_mask(shape: tuple[int, ...], seed: int, ratio: float, stream: int) -> np.ndarray:
    """Return which elements are kept."""
    count = int(np.prod(shape))
    threshold = min(int(ratio * 2.0**32), 0xFFFFFFFF)
    kept = philox_words(seed, stream, count) >= np.uint64(threshold)
    return (kept & (ratio < 1.0)).reshape(shape)


@reference("ortrain::FloorDiv")
def floor_div(inputs: list, attrs: dict) -> list[np.ndarray]:
    return [np.floor_divide(inputs[0], inputs[1])]


@reference("ortrain::TruncDiv")
def trunc_div(inputs: list, attrs: dict) -> list[np.ndarray]:
    return [np.trunc(inputs[0] / inputs[1])]


@reference("ortrain::Trunc")
def trunc(inputs: list, attrs: dict) -> list[np.ndarray]:
    return [np.trunc(inputs[0])]


@reference("ortrain::StopGradient")
def stop_gradient(inputs: list, attrs: dict) -> list[np.ndarray]:
    return [inputs[0]]


@reference("ortrain::GeluGrad")
def gelu_grad(inputs: list, attrs: dict) -> list[np.ndarray]:
    x = torch.from_numpy(inputs[1]).requires_grad_()
    y = F.gelu(x, approximate=attrs.get("approximate", "none"))
    y.backward(torch.from_numpy(inputs[0]))
    return [x.grad.numpy()]


@reference("ortrain::Dropout")
def dropout(inputs: list, attrs: dict) -> list[np.ndarray]:
    ratio = attrs.get("ratio", 0.5)
    kept = dropout_mask(inputs[0].shape, int(inputs[1]), ratio, attrs.get("stream", 0))
    scale = 1.0 / (1.0 - ratio) if ratio < 1.0 else 0.0
    return [np.where(kept, inputs[0] * scale, 0.0).astype(inputs[0].dtype)]


@reference("ortrain::DropoutMask")
def dropout_mask_of(inputs: list, attrs: dict) -> list[np.ndarray]:
    ratio = attrs.get("ratio", 0.5)
    return [dropout_mask(inputs[0].shape, int(inputs[1]), ratio, attrs.get("stream", 0))]


@reference("Dropout")
def onnx_dropout(inputs: list, attrs: dict) -> list[np.ndarray]:
    # The standard leaves the generator open: ours is Philox with stream 0.
    x, ratio, training = (*inputs, None, None)[:3]
    if training is None or not bool(training):
        return [x, np.ones(x.shape, dtype=bool)]
    drop = 0.5 if ratio is None else float(ratio)
    kept = dropout_mask(x.shape, attrs["seed"], drop, 0)
    return [np.where(kept, x / (1.0 - drop), 0.0).astype(x.dtype), kept]


def torch_unary(function):
    """Wrap a PyTorch function of one tensor and the attributes."""

    def run(inputs: list, attrs: dict) -> list[np.ndarray]:
        return [function(torch.from_numpy(np.asarray(inputs[0])), attrs).numpy()]

    return run


reference("Erf")(torch_unary(lambda x, attrs: torch.erf(x)))
# At +inf, PyTorch's tanh form gives NaN where the limit is +inf.
reference("Gelu")(
    torch_unary(
        lambda x, attrs: torch.where(
            x == torch.inf, x, F.gelu(x, approximate=attrs.get("approximate", "none"))
        )
    )
)
reference("HardSigmoid")(
    torch_unary(lambda x, attrs: (attrs.get("alpha", 0.2) * x + attrs.get("beta", 0.5)).clamp(0, 1))
)
reference("HardSwish")(torch_unary(lambda x, attrs: F.hardswish(x)))
reference("LeakyRelu")(torch_unary(lambda x, attrs: F.leaky_relu(x, attrs.get("alpha", 0.01))))
reference("Elu")(torch_unary(lambda x, attrs: F.elu(x, attrs.get("alpha", 1.0))))
reference("Celu")(torch_unary(lambda x, attrs: F.celu(x, attrs.get("alpha", 1.0))))
reference("Softsign")(torch_unary(lambda x, attrs: F.softsign(x)))


@reference("Mean")
def mean(inputs: list, attrs: dict) -> list[np.ndarray]:
    return [np.asarray(sum(inputs[1:], inputs[0]) / len(inputs), dtype=inputs[0].dtype)]


@reference("ortrain::Expm1")
def expm1(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    return [np.expm1(inputs[0])]


@reference("ortrain::Log1p")
def log1p(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    return [np.log1p(inputs[0])]


@reference("ortrain::CastEach")
def cast_each(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Return what PyTorch casts each to: float32, float16, float64 or bfloat16, by ONNX's numbers."""
    to = {1: torch.float32, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16}[attrs["to"]]
    return [torch.from_numpy(np.asarray(x)).to(to).double().numpy() for x in inputs]

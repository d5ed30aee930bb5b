# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Resize as one dense matrix per axis, in float64, checked against ONNX's evaluator.

The evaluator alone is not enough: it holds cubic_coeff_a in float32 and has no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx.helper
import onnx.reference

from tests.python.ops.registry import reference


def cubic(distance: float, a: float) -> float:
    d = abs(distance)
    if d <= 1:
        return (a + 2) * d**3 - (a + 3) * d**2 + 1
    return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0


def coordinate(attrs: dict[str, Any], o: int, n: int, out: int, scale: float, roi: Any) -> float:
    """Return the place in an axis of `n` elements of element `o` of the result."""
    mode = attrs.get("coordinate_transformation_mode", "half_pixel")
    width = scale * n
    if mode == "align_corners":
        return 0.0 if width == 1 else o * (n - 1) / (width - 1)
    if mode == "asymmetric":
        return o / scale
    if mode == "tf_crop_and_resize":
        begin, end = float(roi[0]), float(roi[1])
        step = (end - begin) * (n - 1)
        return begin * (n - 1) + (step / 2 if width == 1 else o * step / (width - 1))
    centred = (o + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel" and out <= 1:
        return 0.0
    if mode == "half_pixel_symmetric":
        return n / 2 * (1 - out / width) + centred
    return centred


def weights(attrs: dict[str, Any], x: float, scale: float) -> dict[int, float]:
    """Return the weight of each input position, which may lie outside, for place `x`."""
    mode, base = attrs.get("mode", "nearest"), math.floor(x)
    ratio = x - base
    if mode == "nearest":
        rounding = attrs.get("nearest_mode", "round_prefer_floor")
        up = {
            "round_prefer_floor": ratio > 0.5,
            "round_prefer_ceil": ratio >= 0.5,
            "floor": False,
            "ceil": ratio > 0,
        }[rounding]
        return {base + int(up): 1.0}
    stretch = min(scale, 1.0) if attrs.get("antialias", 0) else 1.0
    radius = math.ceil((1 if mode == "linear" else 2) / stretch)
    a = attrs.get("cubic_coeff_a", -0.75)
    result = {}
    for k in range(-radius, radius + 2):
        d = (k - ratio) * stretch
        result[base + k] = max(0.0, 1 - abs(d)) if mode == "linear" else cubic(d, a)
    total = sum(result.values()) if attrs.get("antialias", 0) else 1.0
    return {k: w / total for k, w in result.items()}


def axis_matrix(
    attrs: dict[str, Any], n: int, out: int, scale: float, roi: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Return the [n, out] matrix of one axis and which results are extrapolated."""
    matrix, outside = np.zeros((n, out)), np.zeros(out, bool)
    for o in range(out):
        x = coordinate(attrs, o, n, out, scale, roi)
        if roi is not None and not 0 <= x <= n - 1:
            outside[o] = True
            continue
        taps = weights(attrs, x, scale)
        if attrs.get("exclude_outside", 0):
            taps = {k: w for k, w in taps.items() if 0 <= k < n}
            taps = {k: w / sum(taps.values()) for k, w in taps.items()}
        for k, w in taps.items():
            matrix[min(max(k, 0), n - 1), o] += w
    return matrix, outside


def axis_matrices(
    attrs: dict[str, Any], shape: list[int], roi: Any, scales: Any, sizes: Any
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Return (axis, matrix, extrapolated) for every axis that Resize works on."""
    axes = [axis % len(shape) for axis in attrs.get("axes", range(len(shape)))]
    extents = [shape[axis] for axis in axes]
    if scales is not None:
        factors = [float(s) for s in scales]
        outs = [math.floor(n * s) for n, s in zip(extents, factors, strict=True)]
    else:
        factors = [int(s) / n if n else 1.0 for n, s in zip(extents, sizes, strict=True)]
        outs = [int(s) for s in sizes]
        policy = attrs.get("keep_aspect_ratio_policy", "stretch")
        if policy != "stretch":
            factors = [(min if policy == "not_larger" else max)(factors)] * len(axes)
            outs = [math.floor(n * s + 0.5) for n, s in zip(extents, factors, strict=True)]
    crops = attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    result = []
    for i, axis in enumerate(axes):
        part = (roi[i], roi[i + len(axes)]) if crops else None
        result.append((axis, *axis_matrix(attrs, extents[i], outs[i], factors[i], part)))
    return result


def run_onnx(inputs: list[np.ndarray | None], attrs: dict[str, Any]) -> np.ndarray:
    """Run Resize in ONNX's evaluator."""
    given = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    if "axes" in attrs:
        rank = inputs[0].ndim
        attrs = {**attrs, "axes": [axis % rank for axis in attrs["axes"]]}
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Resize", names, ["y"], **attrs)],
        "resize",
        [
            value(k, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in given.items()
        ],
        [onnx.helper.make_empty_tensor_value_info("y")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)])
    return onnx.reference.ReferenceEvaluator(model).run(None, given)[0]


@reference("Resize")
def resize(inputs: list[np.ndarray | None], attrs: dict[str, Any]) -> list[np.ndarray]:
    x, roi, scales, sizes = [*inputs, *[None] * (4 - len(inputs))]
    y = x.astype(np.float64)
    for axis, matrix, outside in axis_matrices(attrs, list(x.shape), roi, scales, sizes):
        moved = np.moveaxis(y, axis, -1) @ matrix
        moved[..., outside] = attrs.get("extrapolation_value", 0.0)
        y = np.moveaxis(moved, -1, axis)
    if x.size:
        np.testing.assert_allclose(y, run_onnx(inputs, attrs), rtol=1e-4, atol=1e-4)
    return [y.astype(x.dtype)]


@reference("ortrain::ResizeGrad")
def resize_grad(inputs: list[np.ndarray | None], attrs: dict[str, Any]) -> list[np.ndarray]:
    dy, shape, roi, scales, sizes = [*inputs, *[None] * (5 - len(inputs))]
    dx = dy.astype(np.float64)
    for axis, matrix, _ in axis_matrices(attrs, [int(n) for n in shape], roi, scales, sizes):
        dx = np.moveaxis(np.moveaxis(dx, axis, -1) @ matrix.T, -1, axis)
    return [dx.astype(dy.dtype)]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The gradient of Resize from one matrix per axis, made by ONNX's reference of Resize itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.helper
import onnx.reference

from tests.python.ops.registry import reference


def axis_matrix(extent: int, attrs: dict[str, Any], tensors: dict[str, Any]) -> np.ndarray:
    """Return the [in, out] matrix of Resize along one axis."""
    inputs = {"x": np.eye(extent)} | {k: v for k, v in tensors.items() if v is not None}
    names = ["x", *(k if k in inputs else "" for k in ("roi", "scales", "sizes"))]
    attributes = {k: v for k, v in attrs.items() if k != "keep_aspect_ratio_policy"}
    attributes |= {"axes": [1], "extrapolation_value": 0.0}
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Resize", names, ["y"], **attributes)],
        "axis",
        [
            value(k, onnx.helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for k, v in inputs.items()
        ],
        [onnx.helper.make_empty_tensor_value_info("y")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 19)])
    return onnx.reference.ReferenceEvaluator(model).run(None, inputs)[0]


@reference("ortrain::ResizeGrad")
def resize_grad(inputs: list[np.ndarray | None], attrs: dict[str, Any]) -> list[np.ndarray]:
    dy, shape, roi, scales, sizes = [*inputs, *[None] * (5 - len(inputs))]
    extents = [int(n) for n in shape]
    axes = [axis % len(extents) for axis in attrs.get("axes", range(len(extents)))]
    policy = attrs.get("keep_aspect_ratio_policy", "stretch")
    if policy != "stretch":
        ratios = [int(n) / extents[axis] for n, axis in zip(sizes, axes, strict=True)]
        scale = min(ratios) if policy == "not_larger" else max(ratios)
    dx = dy.astype(np.float64)
    for i, axis in enumerate(axes):
        tensors: dict[str, Any] = {}
        if roi is not None:
            tensors["roi"] = roi[[i, i + len(axes)]]
        if scales is not None:
            tensors["scales"] = scales[i : i + 1]
        elif policy == "stretch":
            tensors["sizes"] = sizes[i : i + 1]
        else:
            tensors["scales"] = np.array([scale], np.float32)
        if extents[axis] == 0:
            continue
        matrix = axis_matrix(extents[axis], attrs, tensors)
        dx = np.moveaxis(np.moveaxis(dx, axis, -1) @ matrix.T, -1, axis)
    return [dx.astype(dy.dtype)]

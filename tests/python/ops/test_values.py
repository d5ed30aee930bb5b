# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Kernels against references outside of the project: ONNX's own and PyTorch."""

from __future__ import annotations

import collections
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.reference
import pytest
import torch

from ortrain import _core
from tests.python.ops.registry import find_reference

# float64 shows whether the formula is right; float32 whether the kernels of daily use are.
TYPES = ("float64", "float32")
TOLERANCE = {"float64": 1e-9, "float32": 3e-5}
OPSET = 23

_cases = [
    (index, case)
    for index, case in enumerate(_core.op_cases())
    if not case["refusal"] and ("::" not in case["op"] or find_reference(case["op"]) is not None)
]


def onnx_reference(op: str, inputs: list[Any], attrs: dict[str, Any], outputs: int) -> list[Any]:
    """Run one standard operator in ONNX's reference implementation."""
    arrays = {f"x{i}": x for i, x in enumerate(inputs) if x is not None}
    names = [f"x{i}" if x is not None else "" for i, x in enumerate(inputs)]
    while names and not names[-1]:
        names.pop()
    attributes = {
        k: onnx.numpy_helper.from_array(v.numpy()) if isinstance(v, torch.Tensor) else v
        for k, v in attrs.items()
    }
    made = [f"y{i}" for i in range(outputs)]
    node = onnx.helper.make_node(op, names, made, **attributes)
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [node],
        "case",
        [
            value(name, onnx.helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
            for name, array in arrays.items()
        ],
        [onnx.helper.make_empty_tensor_value_info(name) for name in made],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)])
    return onnx.reference.ReferenceEvaluator(model).run(None, arrays)


def as_array(value: Any) -> np.ndarray | None:
    """Return a numpy array; 16-bit brain floats, unknown to numpy, widened."""
    if value is None:
        return None
    return value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()


def expected(case: dict[str, Any], ran: dict[str, Any]) -> list[Any]:
    inputs = [as_array(x) for x in ran["inputs"]]
    own = find_reference(case["op"])
    if own is not None:
        # In float64, so that the reference's own rounding does not count.
        inputs = [
            x.astype(np.float64) if x is not None and x.dtype.kind == "f" else x for x in inputs
        ]
        attrs = {
            k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in ran["attributes"].items()
        }
        return own(inputs, attrs)
    return onnx_reference(case["op"], inputs, ran["attributes"], case["outputs"])


@pytest.mark.parametrize("index, case", _cases, ids=[f"{c['op']}-{c['name']}" for _, c in _cases])
def test_values_equal_reference(index: int, case: dict[str, Any]) -> None:
    types = [t for t in TYPES if t in case["types"]] or case["types"][:1]
    for dtype in types:
        ran = _core.run_case(index, dtype)
        wanted = expected(case, ran)
        for i, (actual, truth) in enumerate(zip(ran["outputs"], wanted, strict=False)):
            if truth is None:
                continue
            got = as_array(actual)
            truth = np.asarray(truth)
            assert got.shape == truth.shape, f"output {i}: {got.shape}, expected {truth.shape}"
            tolerance = TOLERANCE.get(dtype, 1e-2)
            if dtype == "float32":  # ill-conditioned cases say so
                tolerance = max(tolerance, case["tolerance"])
            np.testing.assert_allclose(
                got, truth, rtol=tolerance, atol=tolerance, err_msg=f"output {i} in {dtype}"
            )


# What they compute is not the engine's to say: ortrain/ops/external/external_test.cpp.
OUTSIDE = {"ortrain::External", "ortrain::ExternalGrad"}


def test_every_own_operator_has_a_reference() -> None:
    own = {f"ortrain::{op['name']}" for op in _core.ops() if op["domain"] == "ortrain"}
    assert not [name for name in own - OUTSIDE if find_reference(name) is None]


def test_every_operator_has_cases_and_a_kernel() -> None:
    counts = collections.Counter(case["op"] for case in _core.op_cases())
    for op in _core.ops():
        name = f"{op['domain']}::{op['name']}" if op["domain"] else op["name"]
        assert counts[name] or name in OUTSIDE, f"{name} has no case"
        assert op["kernels"], f"{name} has no kernel"

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What operators of earlier opsets meant; ONNX's own models of opset 6 are in the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from ortrain import _core

_generator = torch.Generator().manual_seed(5)


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def load(
    op: str, opset: int, inputs: list[torch.Tensor], attributes: dict[str, Any], outputs: int = 1
) -> Any:
    names = [f"x{i}" for i in range(len(inputs))]
    given = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.numpy().dtype), x.shape)
        for n, x in zip(names, inputs, strict=True)
    ]
    made = [f"y{i}" for i in range(outputs)]
    held = []
    for index in (1,) if op in ("TopK", "Split", "Resize") and len(inputs) > 1 else ():
        held.append(onnx.numpy_helper.from_array(inputs[index].numpy(), names[index]))
        del given[index]
    graph = helper.make_graph(
        [helper.make_node(op, names, made, **attributes)],
        "g",
        given,
        [helper.make_tensor_value_info(y, TensorProto.UNDEFINED, None) for y in made],
        held,
    )
    opsets = [helper.make_opsetid("", opset)]
    return _core.load_onnx(
        helper.make_model(graph, opset_imports=opsets, ir_version=6).SerializeToString()
    )


X = f(2, 3, 4)
FORMS: list[tuple[str, int, list[torch.Tensor], dict[str, Any], Callable[..., Any]]] = [
    ("ReduceSum", 12, [X], {"axes": [1, -1]}, lambda x: x.sum((1, 2), keepdim=True)),
    ("ReduceSum", 1, [X], {"keepdims": 0}, lambda x: x.sum()),
    ("ReduceMax", 17, [X], {"axes": [0], "keepdims": 0}, lambda x: x.amax(0)),
    ("ReduceLogSumExp", 11, [X], {"axes": [2]}, lambda x: x.logsumexp(2, keepdim=True)),
    ("Squeeze", 12, [f(2, 1, 3)], {"axes": [1]}, lambda x: x.squeeze(1)),
    ("Squeeze", 12, [f(1, 2, 1)], {}, lambda x: x.squeeze()),
    ("Unsqueeze", 11, [X], {"axes": [0, 4]}, lambda x: x[None, ..., None]),
    ("Reshape", 4, [X], {"shape": [0, -1]}, lambda x: x.reshape(2, 12)),
    ("Softmax", 12, [X], {}, lambda x: x.reshape(2, 12).softmax(1).reshape(2, 3, 4)),
    ("LogSoftmax", 11, [X], {"axis": 2}, lambda x: x.log_softmax(2)),
    ("Hardmax", 1, [X], {"axis": 0}, lambda x: (x == x.max()).float()),
    ("Split", 11, [X], {"axis": 2, "split": [1, 3]}, lambda x: x.split([1, 3], 2)),
    ("Split", 2, [X], {"axis": 2}, lambda x: x.split(2, 2)),
    ("Split", 13, [X, torch.tensor([3, 1])], {"axis": 2}, lambda x, n: x.split([3, 1], 2)),
    ("ConvTranspose", 10, [f(1, 2, 3), f(2, 1, 2)], {"strides": [2]},
     lambda x, w: torch.nn.functional.conv_transpose1d(x, w, stride=2)),
    ("Split", 17, [X], {"axis": 2}, lambda x: x.split(2, 2)),
    ("Slice", 9, [X], {"starts": [1, -3], "ends": [9, -1]}, lambda x: x[1:9, -3:-1]),
    ("Slice", 1, [X], {"starts": [1], "ends": [3], "axes": [2]}, lambda x: x[..., 1:3]),
    ("Pad", 10, [f(2, 3)], {"pads": [0, 1, 1, 0], "value": 2.0},
     lambda x: torch.nn.functional.pad(x, (1, 0, 0, 1), value=2.0)),
    ("Pad", 1, [f(2, 3)], {"paddings": [0, 1, 1, 0]},
     lambda x: torch.nn.functional.pad(x, (1, 0, 0, 1))),
    ("TopK", 9, [X], {"k": 2}, lambda x: tuple(x.topk(2))),
    ("TopK", 10, [X, torch.tensor([2])], {"axis": 1}, lambda x, k: tuple(x.topk(2, 1))),
    ("Add", 6, [X, f(3)], {"axis": 1, "broadcast": 1}, lambda x, y: x + y[:, None]),
    ("Mul", 1, [X, f(4)], {"broadcast": 1}, lambda x, y: x * y),
    ("Less", 6, [X, f(2, 3)], {"axis": 0, "broadcast": 1}, lambda x, y: x < y[..., None]),
    ("Sum", 6, [X, X, X], {}, lambda *x: sum(x)),
    ("Max", 7, [f(3), f(3)], {}, torch.maximum),
    ("Clip", 10, [X], {"max": 0.5}, lambda x: x.clamp(max=0.5)),
    ("Clip", 6, [X], {"min": -0.1, "max": 0.5}, lambda x: x.clamp(-0.1, 0.5)),
    ("Dropout", 10, [X], {"ratio": 0.9}, lambda x: x),
    ("Dropout", 6, [X], {"is_test": 1}, lambda x: x),
    ("PRelu", 6, [X, f(3)], {}, lambda x, s: torch.nn.functional.prelu(x, s)),
    ("PRelu", 7, [X, f(4)], {}, lambda x, s: torch.where(x < 0, x * s, x)),
    ("Relu", 5, [X], {"consumed_inputs": [0]}, lambda x: x.relu()),
    ("LeakyRelu", 1, [X], {"alpha": 0.3}, lambda x: torch.nn.functional.leaky_relu(x, 0.3)),
    ("Gemm", 6, [f(2, 3), f(4, 3), f(4)], {"transB": 1, "broadcast": 1},
     lambda a, b, c: a @ b.T + c),
    ("Upsample", 7, [f(1, 1, 2, 2)], {"scales": [1.0, 1.0, 2.0, 2.0]},
     lambda x: torch.nn.functional.interpolate(x, scale_factor=2)),
    ("Resize", 10, [f(1, 1, 2, 2), torch.tensor([1.0, 1.0, 2.0, 2.0])], {},
     lambda x, _: torch.nn.functional.interpolate(x, scale_factor=2)),
    ("BatchNormalization", 9, [f(2, 3, 4), f(3), f(3), f(3), f(3).abs()], {"epsilon": 0.1},
     lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w, b, eps=0.1)),
    ("BatchNormalization", 6, [f(2, 3, 4), f(3), f(3), f(3), f(3).abs()], {"is_test": 1},
     lambda x, w, b, m, v: torch.nn.functional.batch_norm(x, m, v, w, b)),
    ("MaxPool", 1, [f(1, 1, 4)], {"kernel_shape": [2]},
     lambda x: torch.nn.functional.max_pool1d(x, 2, 1)),
    ("AveragePool", 7, [f(1, 1, 4)], {"kernel_shape": [2]},
     lambda x: torch.nn.functional.avg_pool1d(x, 2, 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "opset", "inputs", "attributes", "expected"),
    FORMS,
    ids=lambda value: str(value) if isinstance(value, (str, int)) else "",
)
def test_forms(op: str, opset: int, inputs: Any, attributes: Any, expected: Any) -> None:
    wanted = expected(*inputs)
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    graph = load(op, opset, inputs, attributes, len(wanted))
    given = {f"x{i}": x for i, x in enumerate(inputs)}
    made = _core.Run(_core.Session(graph)).forward([given[i["name"]] for i in graph.inputs])
    for actual, value in zip(made, wanted, strict=True):
        torch.testing.assert_close(actual, value)


@pytest.mark.parametrize(
    ("op", "opset", "inputs", "attributes", "outputs", "message"),
    [
        ("Dropout", 6, [X], {}, 1, "dropout while training"),
        ("Dropout", 10, [X], {}, 2, "'mask' before opset 12"),
        ("BatchNormalization", 9, [X] + [f(3)] * 4, {}, 3, "statistics of the batch"),
        ("BatchNormalization", 7, [X] + [f(3)] * 4, {"spatial": 0}, 1, "spatial must be 1"),
        ("Split", 2, [X], {"axis": 1}, 2, "into 2 equal parts"),
        ("Split", 13, [X], {}, 0, "has no output"),
        ("ConvTranspose", 1, [f(1, 2, 3), f(2, 1, 2)], {"output_shape": [5]}, 1, "before opset 11"),
        ("Add", 6, [X, f(3, 4)], {"axis": 2, "broadcast": 1}, 1, "from axis 2 on"),
        ("ReduceSum", 12, [X], {"axes": [5]}, 1, "out of range|axis 5"),
        ("Unsqueeze", 12, [X], {}, 1, "'axes' is required"),
        ("Cast", 5, [X], {"to": "FLOAT"}, 1, "since opset 6"),
        ("GroupNormalization", 18, [X, f(3), f(3)], {"num_groups": 3}, 1, "since opset 21"),
    ],
)
def test_refusals(
    op: str, opset: int, inputs: Any, attributes: Any, outputs: int, message: str
) -> None:
    with pytest.raises((_core.InvalidModelError, _core.UnsupportedError), match=message):
        load(op, opset, inputs, attributes, outputs)


@pytest.mark.parametrize("outputs", [["y", ""], ["", "y"]])
def test_a_part_that_nobody_wants(outputs: list[str]) -> None:
    node = helper.make_node("Split", ["x"], outputs)
    given = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])]
    made = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [2])]
    graph = helper.make_graph([node], "g", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)
    loaded = _core.load_onnx(model.SerializeToString())
    (y,) = _core.Run(_core.Session(loaded)).forward([torch.arange(4.0)])
    assert y.tolist() == ([0.0, 1.0] if outputs[0] else [2.0, 3.0])

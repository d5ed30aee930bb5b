# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ONNX models in and out: ONNX's own node models, its checker, its reference evaluator."""

import collections
import random
import warnings

import numpy as np
import onnx
import onnx.checker
import onnx.helper
import onnx.numpy_helper
import pytest
import torch
from onnx.reference import ReferenceEvaluator

from ortrain import _core

TRAINING_GRAPH = """
graph mlp (float32[b, 4] x, float32[4, 3] w [parameter "fc.weight" grad],
           float32[3] bias [parameter "fc.bias" grad]) => (y) {
  h = MatMul(x, w) @fc/MatMul
  s = Add(h, bias) @fc/Add
  y = Softmax <axis = -1> (s) @act/Softmax
}
"""


@pytest.fixture(scope="module")
def node_cases():
    """ONNX's node tests, as (name, model bytes, data sets)."""
    loader = pytest.importorskip("onnx.backend.test.loader")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = loader.load_model_tests(kind="node")
    assert len(cases) > 1500
    return [(case.name, case.model.SerializeToString(), case.data_sets) for case in cases]


@pytest.fixture(scope="module")
def loadable(node_cases):
    """Load every node test, or see it refused with an error of one of two types."""
    loaded, counts = [], collections.Counter()
    for name, model, data_sets in node_cases:
        try:
            loaded.append((name, model, data_sets, _core.load_onnx(model)))
        except _core.UnsupportedError as error:
            assert str(error)
            counts["unsupported"] += 1
    counts["loaded"] = len(loaded)
    print(dict(counts))
    return loaded


@pytest.mark.slow
def test_node_models_load_or_are_refused(loadable):
    # ONNX's own models are valid: none may be called invalid.
    assert len(loadable) >= 450
    for _, _, _, graph in loadable:
        graph.verify()


@pytest.mark.slow
def test_saved_node_models_pass_the_checker_and_mean_the_same(loadable):
    compared = 0
    for name, model, data_sets, graph in loadable:
        saved = graph.to_onnx_bytes()
        assert _core.load_onnx(saved).text() == graph.text(), name
        before = onnx.load_model_from_string(model)
        if before.opset_import[0].version > 23:
            continue  # saved at 23, which may not have the element type yet (Celu in float16)
        after = onnx.load_model_from_string(saved)
        onnx.checker.check_model(after, full_check=True)
        operators = [[(n.domain, n.op_type) for n in m.graph.node] for m in (before, after)]
        if operators[0] != operators[1]:
            continue  # others stand in their place, which round otherwise
        for inputs, _ in data_sets:
            feed = dict(zip([value.name for value in before.graph.input], inputs, strict=False))
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = ReferenceEvaluator(before).run(None, feed)
                actual = ReferenceEvaluator(after).run(None, feed)
            for left, right in zip(expected, actual, strict=True):
                np.testing.assert_array_equal(left, right, err_msg=name)
            compared += 1
    assert compared >= 450


INTS = [-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 5, 100, 2**31, 2**62, 2**63 - 1]
STRINGS = [b"", b"x", b"SAME_UPPER", b"ij,jk->ik", b"...", b"->", b"i" * 100]


def damage(data: bytes, rng: random.Random) -> bytes:
    """Change one thing that keeps the bytes a model: an attribute, an extent, a type, an edge."""
    model = onnx.ModelProto.FromString(data)
    node = rng.choice(list(model.graph.node))
    inputs = list(model.graph.input)
    kind = rng.randrange(7)
    if kind == 0 and node.attribute:
        attribute = rng.choice(list(node.attribute))
        attribute.i = rng.choice(INTS)
        attribute.f = rng.choice([0.0, -1.0, float("nan"), float("inf")])
        attribute.s = rng.choice(STRINGS)
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(INTS)
    elif kind == 1 and inputs:
        dims = rng.choice(inputs).type.tensor_type.shape.dim
        if dims and rng.random() < 0.7:
            rng.choice(list(dims)).dim_value = rng.choice([0, 1, 2, 7, 2**31, 2**62, 2**63 - 1])
        else:
            dims.add().dim_value = 2
    elif kind == 2 and inputs:
        rng.choice(inputs).type.tensor_type.elem_type = rng.choice([1, 2, 6, 7, 9, 10, 11, 16])
    elif kind == 3 and node.input:
        node.input[rng.randrange(len(node.input))] = ""
    elif kind == 4 and node.input:
        node.input.pop()
    elif kind == 5 and inputs:
        dims = rng.choice(inputs).type.tensor_type.shape.dim
        if dims:
            rng.choice(list(dims)).dim_param = rng.choice(["b", "2*b + 1", "b*s", "max(b, s)"])
    elif inputs:
        value = rng.choice(inputs)
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        count = int(np.prod(shape))
        if value.type.tensor_type.elem_type == onnx.TensorProto.INT64 and count <= 64:
            array = np.array(rng.choices(INTS, k=count), dtype=np.int64).reshape(shape)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, value.name))
    if rng.random() < 0.5:
        for value in model.graph.output:
            value.ClearField("type")
    return model.SerializeToString()


@pytest.mark.slow
def test_damaged_node_models_load_or_are_refused(loadable):
    rng = random.Random(20240607)
    counts = collections.Counter()
    for _ in range(4000):
        name, model, _, _ = rng.choice(loadable)
        damaged = damage(model, rng)
        try:
            _core.load_onnx(damaged).verify()
            counts["loaded"] += 1
        except (_core.InvalidModelError, _core.UnsupportedError):
            counts["refused"] += 1
        except Exception as error:
            pytest.fail(f"{name}: {error!r}")
    assert counts["loaded"] > 100
    assert counts["refused"] > 100


def test_a_training_graph_is_a_valid_model():
    graph = _core.Graph.parse(TRAINING_GRAPH)
    graph.build_backward([0])
    graph.verify()
    model = onnx.load_model_from_string(graph.to_onnx_bytes())
    onnx.checker.check_model(model, full_check=True)
    assert _core.load_onnx(model.SerializeToString()).text() == graph.text()


def test_names_are_those_of_the_layers():
    model = onnx.load_model_from_string(_core.Graph.parse(TRAINING_GRAPH).to_onnx_bytes())
    assert [node.name for node in model.graph.node] == ["fc/MatMul", "fc/Add", "act/Softmax"]
    assert [dim.dim_param for dim in model.graph.input[0].type.tensor_type.shape.dim] == ["b", ""]


def test_values_of_parameters(tmp_path):
    graph = _core.Graph.parse(TRAINING_GRAPH)
    values = {"fc.weight": torch.randn(4, 3), "fc.bias": torch.randn(3)}
    path = tmp_path / "model.onnx"
    graph.save(path, values)
    loaded, again = _core.load_onnx_model(path)
    assert loaded.text() == graph.text()
    assert again.keys() == values.keys()
    for name, value in values.items():
        assert torch.equal(again[name], value)
    x = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)
    (y,) = ReferenceEvaluator(onnx.load_model(path)).run(None, {"x": x})
    expected = torch.softmax(torch.from_numpy(x) @ values["fc.weight"] + values["fc.bias"], -1)
    torch.testing.assert_close(torch.from_numpy(y), expected)
    with pytest.raises(_core.InvalidModelError, match=r"fc\.bias"):
        graph.save(path, {"fc.bias": torch.zeros(4)})
    with pytest.raises(_core.InvalidModelError, match="nothing"):
        graph.save(path, {"nothing": torch.zeros(4)})


@pytest.mark.parametrize(
    "dtype", ["float64", "float16", "bfloat16", "int8", "uint8", "int64", "bool"]
)
def test_values_of_every_element_type(dtype):
    graph = _core.Graph.parse(f"graph ({dtype}[3] w [parameter w]) => (w) {{ }}")
    value = torch.tensor([0, 1, 1]).to(getattr(torch, dtype))
    _, values = _core.load_onnx_model(graph.to_onnx_bytes({"w": value}))
    assert values["w"].dtype == value.dtype
    assert torch.equal(values["w"], value)


def test_external_data_of_ours_is_read_by_onnx(tmp_path):
    graph = _core.Graph.parse(TRAINING_GRAPH)
    values = {"fc.weight": torch.randn(4, 3), "fc.bias": torch.randn(3)}
    graph.save(tmp_path / "m.onnx", values, external_data_threshold=16, external_data_file="m.data")
    assert (tmp_path / "m.data").stat().st_size == 48
    model = onnx.load_model(tmp_path / "m.onnx")
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_array_equal(arrays["w"], values["fc.weight"].numpy())
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)


def test_external_data_of_onnx_is_read(tmp_path):
    weight = np.arange(12, dtype=np.float32).reshape(4, 3)
    inputs = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["b", 4])]
    outputs = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["b", 3])]
    node = onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="fc")
    graph = onnx.helper.make_graph(
        [node], "g", inputs, outputs, [onnx.numpy_helper.from_array(weight, "w")]
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)])
    onnx.save_model(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0)
    loaded, values = _core.load_onnx_model(tmp_path / "m.onnx", initializers="parameters")
    np.testing.assert_array_equal(values["w"].numpy(), weight)
    assert [row["role"] for row in loaded.inputs] == ["user", "parameter"]
    with pytest.raises(_core.UnsupportedError, match="folder"):
        _core.load_onnx((tmp_path / "m.onnx").read_bytes())


def test_errors_have_their_python_types(tmp_path):
    with pytest.raises(OSError, match=r"missing\.onnx"):
        _core.load_onnx(tmp_path / "missing.onnx")
    with pytest.raises(ValueError, match="no ONNX model"):
        _core.load_onnx(b"hello, world")
    (tmp_path / "m.onnx").write_bytes(b"hello, world")
    with pytest.raises(ValueError, match=r"m\.onnx"):
        _core.load_onnx(str(tmp_path / "m.onnx"))
    with pytest.raises(_core.InvalidModelError, match="initializers"):
        _core.load_onnx_model(b"", initializers="everything")
    with pytest.raises(OSError, match="plain file name"):
        graph = _core.Graph.parse(TRAINING_GRAPH)
        values = {"fc.weight": torch.zeros(4, 3)}
        graph.save(tmp_path / "m.onnx", values, 0, "../m.data")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Branches and loops of ONNX files are written out where the file tells how they go."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortrain import _core
from ortrain.program import Program

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


def info(name: str, code: int, *dims: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, code, list(dims))


def constant(name: str, value: Any) -> onnx.TensorProto:
    return onnx.numpy_helper.from_array(np.asarray(value), name)


def model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[str],
    constants: Sequence[onnx.TensorProto] = (),
    opset: int = 21,
) -> onnx.ModelProto:
    made = [helper.make_tensor_value_info(name, FLOAT, None) for name in outputs]
    graph = helper.make_graph(nodes, "g", inputs, made, constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def same_as_reference(made: onnx.ModelProto, *inputs: np.ndarray) -> None:
    graph = _core.load_onnx(made.SerializeToString())
    graph.verify()
    feed = {i.name: x for i, x in zip(made.graph.input, inputs, strict=True)}
    expected = ReferenceEvaluator(made).run(None, feed)
    given = [torch.from_numpy(feed[i["name"]]) for i in graph.inputs]
    actual = _core.Run(_core.Session(graph)).forward(given)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a.numpy(), b, rtol=1e-6)


def branch(op: str, output: str) -> onnx.GraphProto:
    node = helper.make_node(op, ["x"], [output])
    return helper.make_graph([node], op, [], [info(output, FLOAT, None)])


def if_model(condition: bool, **branches: onnx.GraphProto) -> onnx.ModelProto:
    node = helper.make_node("If", ["c"], ["y"], **branches)
    return model([node], [info("x", FLOAT, 2, 3)], ["y"], [constant("c", condition)])


@pytest.mark.parametrize("condition", [True, False])
def test_the_known_branch_is_taken(condition: bool) -> None:
    x = np.random.default_rng(0).standard_normal((2, 3)).astype(np.float32)
    made = if_model(condition, then_branch=branch("Abs", "a"), else_branch=branch("Neg", "b"))
    same_as_reference(made, x)


def test_a_branch_may_follow_from_shapes() -> None:
    nodes = [
        helper.make_node("Shape", ["x"], ["s"], start=0, end=1),
        helper.make_node("Equal", ["s", "two"], ["c"]),
        helper.make_node(
            "If", ["c"], ["y"], then_branch=branch("Abs", "a"), else_branch=branch("Neg", "b")
        ),
    ]
    for rows in (2, 3):
        made = model(nodes, [info("x", FLOAT, rows)], ["y"], [constant("two", [2])])
        same_as_reference(made, np.arange(-1, rows - 1, dtype=np.float32))


def loop_body() -> onnx.GraphProto:
    """Double and shift the state by the step, read w from outside, collect the sums."""
    nodes = [
        helper.make_node("Cast", ["i"], ["step"], to=FLOAT),
        helper.make_node("Mul", ["h", "two"], ["doubled"]),
        helper.make_node("Add", ["doubled", "step"], ["moved"]),
        helper.make_node("Mul", ["moved", "w"], ["h_out"]),
        helper.make_node("ReduceSum", ["h_out"], ["sum"], keepdims=0),
        helper.make_node("Identity", ["go"], ["go_out"]),
    ]
    inputs = [info("i", INT64), info("go", BOOL), info("h", FLOAT, None)]
    outputs = [info("go_out", BOOL), info("h_out", FLOAT, None), info("sum", FLOAT)]
    return helper.make_graph(nodes, "body", inputs, outputs, [constant("two", np.float32(2))])


def loop_model(trips: int | None) -> onnx.ModelProto:
    inputs = ["m", "yes", "x"] if trips is not None else ["", "", "x"]
    node = helper.make_node("Loop", inputs, ["y", "sums"], body=loop_body())
    constants = [constant("yes", True)]
    if trips is not None:
        constants.append(constant("m", np.int64(trips)))
    given = [info("x", FLOAT, 3), info("w", FLOAT, 3)]
    return model([node], given, ["y", "sums"], constants)


def test_a_loop_is_written_out_and_differentiated() -> None:
    x = np.array([0.5, -1.0, 2.0], dtype=np.float32)
    w = np.array([1.5, 0.5, -1.0], dtype=np.float32)
    graph = _core.load_onnx(loop_model(4).SerializeToString())
    graph.set_requires_grad({"x": True, "w": True})
    program = Program(graph, (0, 1), None)
    given = {"x": torch.tensor(x), "w": torch.tensor(w)}
    step = _core.Run(program.session)
    outputs = step.forward([given[i["name"]] for i in graph.inputs])
    ones = [torch.ones(3), torch.ones(4)]
    made = step.backward([ones[i] for i in program.incoming])

    leaves = {name: value.clone().requires_grad_() for name, value in given.items()}
    h, sums = leaves["x"], []
    for i in range(4):
        h = (h * 2 + i) * leaves["w"]
        sums.append(h.sum())
    torch.testing.assert_close(outputs[0], h.detach())
    torch.testing.assert_close(outputs[1], torch.stack(sums).detach())
    (h.sum() + torch.stack(sums).sum()).backward()
    for position, gradient in zip(program.outgoing, made, strict=True):
        torch.testing.assert_close(gradient, leaves[graph.inputs[position]["name"]].grad)


def test_loops_in_loops_and_a_condition_that_ends_them() -> None:
    inner = helper.make_graph(
        [
            helper.make_node("Add", ["a", "outer_i"], ["a_out"]),
            helper.make_node("Identity", ["k_go"], ["k_go_out"]),
        ],
        "inner",
        [info("k", INT64), info("k_go", BOOL), info("a", INT64)],
        [info("k_go_out", BOOL), info("a_out", INT64)],
    )
    outer = helper.make_graph(
        [
            helper.make_node("Identity", ["i"], ["outer_i"]),
            helper.make_node("Loop", ["three", "", "total"], ["total_out"], body=inner),
            helper.make_node("Less", ["i", "last"], ["go_out"]),
        ],
        "outer",
        [info("i", INT64), info("go", BOOL), info("total", INT64)],
        [info("go_out", BOOL), info("total_out", INT64)],
        [constant("three", np.int64(3)), constant("last", np.int64(4))],
    )
    nodes = [
        helper.make_node("Loop", ["", "yes", "zero"], ["n"], body=outer),
        helper.make_node("Cast", ["n"], ["scale"], to=FLOAT),
        helper.make_node("Mul", ["x", "scale"], ["y"]),
    ]
    held = [constant("yes", True), constant("zero", np.int64(0))]
    made = model(nodes, [info("x", FLOAT, 2)], ["y"], held)
    graph = _core.load_onnx(made.SerializeToString())
    (y,) = _core.Run(_core.Session(graph)).forward([torch.ones(2)])
    assert y.tolist() == [30.0, 30.0]  # 3 (0 + 1 + 2 + 3 + 4)


@pytest.mark.parametrize("backward", [0, 1])
def test_a_scan_follows_its_axes_and_directions(backward: int) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "part"], ["state_out"]),
            helper.make_node("Mul", ["state_out", "part"], ["made"]),
        ],
        "body",
        [info("state", FLOAT, 2), info("part", FLOAT, 2)],
        [info("state_out", FLOAT, 2), info("made", FLOAT, 2)],
    )
    node = helper.make_node(
        "Scan",
        ["s", "x"],
        ["last", "y"],
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_output_axes=[1],
        scan_input_directions=[backward],
        scan_output_directions=[1 - backward],
    )
    made = model([node], [info("s", FLOAT, 2), info("x", FLOAT, 2, 3)], ["last", "y"])
    graph = _core.load_onnx(made.SerializeToString())
    state, x = torch.tensor([1.0, -2.0]), torch.arange(6.0).reshape(2, 3)
    last, y = _core.Run(_core.Session(graph)).forward([state, x])
    expected = []
    for t in range(3):
        part = x[:, 2 - t if backward else t]
        state = state + part
        expected.append(state * part)
    if not backward:
        expected.reverse()
    torch.testing.assert_close(last, state)
    torch.testing.assert_close(y, torch.stack(expected, 1))


def test_what_depends_on_data_is_refused() -> None:
    node = helper.make_node(
        "If", ["c"], ["y"], then_branch=branch("Abs", "a"), else_branch=branch("Neg", "b")
    )
    made = model([node], [info("x", FLOAT, 2), info("c", BOOL)], ["y"])
    with pytest.raises(
        _core.UnsupportedError, match=r"\[If '-> y'\] its condition depends on data"
    ):
        _core.load_onnx(made.SerializeToString())
    loop = loop_model(None)
    loop.graph.input.append(info("m", INT64))
    loop.graph.node[0].input[0] = "m"
    with pytest.raises(_core.UnsupportedError, match="trip count depends on data"):
        _core.load_onnx(loop.SerializeToString())


def test_endless_loops_end_with_an_error() -> None:
    started = time.monotonic()
    for trips in (None, 2**62):
        with pytest.raises(_core.UnsupportedError, match="would take more than 67108864 bytes"):
            _core.load_onnx(loop_model(trips).SerializeToString())
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda node: node.attribute.pop(), "'body' is no graph"),
        (lambda node: node.input.pop(), "2 inputs, expected|takes 3 inputs"),
        (lambda node: node.output.append("more"), "3 outputs"),
        (lambda node: node.attribute[0].g.output.pop(0), "depends on data|outputs"),
        (lambda node: node.attribute[0].g.node.pop(4), "sum. is not there"),
        (lambda node: node.attribute[0].g.node[0].output.__setitem__(0, "h"), "defined twice"),
        (lambda node: node.input.__setitem__(2, "q"), "q. is made by nothing"),
        (
            lambda node: node.attribute[0].g.initializer.append(constant("two", np.float32(1))),
            "defined twice",
        ),
    ],
)
def test_damaged_loops_are_invalid(change: Any, message: str) -> None:
    made = loop_model(2)
    change(made.graph.node[0])
    with pytest.raises((_core.InvalidModelError, _core.UnsupportedError), match=message):
        _core.load_onnx(made.SerializeToString())


def body_of(
    nodes: Sequence[onnx.NodeProto],
    outputs: Sequence[str],
    constants: Sequence[onnx.TensorProto] = (),
) -> onnx.GraphProto:
    inputs = [info("i", INT64), info("go", BOOL), info("h", FLOAT, None)]
    made = [info("go_out", BOOL), *(info(name, FLOAT, None) for name in outputs)]
    again = helper.make_node("Identity", ["go"], ["go_out"])
    return helper.make_graph([*nodes, again], "body", inputs, made, constants)


@pytest.mark.parametrize("given", [["m", "", "x"], ["m", "yes", "x"]])
def test_without_a_condition_the_body_decides_nothing(given: list[str]) -> None:
    nodes = [
        helper.make_node("Add", ["h", "x"], ["h_out"]),
        helper.make_node("Not", ["go"], ["go_out"]),
    ]
    body = body_of(nodes, ["h_out"])
    del body.node[-1]
    node = helper.make_node("Loop", given, ["y"], body=body)
    held = [constant("m", np.int64(3)), constant("yes", True)]
    made = model([node], [info("x", FLOAT, 2)], ["y"], held)
    graph = _core.load_onnx(made.SerializeToString())
    (y,) = _core.Run(_core.Session(graph)).forward([torch.ones(2)])
    assert y.tolist() == ([4.0, 4.0] if not given[1] else [2.0, 2.0])


def test_a_loop_may_carry_nothing() -> None:
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["go_out"]),
            helper.make_node("Cast", ["i"], ["step"], to=FLOAT),
            helper.make_node("Mul", ["step", "x"], ["part"]),
        ],
        "body",
        [info("i", INT64), info("go", BOOL)],
        [info("go_out", BOOL), info("part", FLOAT, None)],
    )
    node = helper.make_node("Loop", ["m"], ["y"], body=body)
    made = model([node], [info("x", FLOAT, 2)], ["y"], [constant("m", np.int64(2))])
    graph = _core.load_onnx(made.SerializeToString())
    (y,) = _core.Run(_core.Session(graph)).forward([torch.ones(2)])
    assert y.tolist() == [[0.0, 0.0], [1.0, 1.0]]


def test_absent_inputs_inside_of_a_body_stay_absent() -> None:
    nodes = [helper.make_node("Clip", ["h", "", "most"], ["h_out"])]
    body = body_of(nodes, ["h_out"], [constant("most", np.float32(5))])
    node = helper.make_node("Loop", ["m", "", "x"], ["y"], body=body)
    made = model([node], [info("x", FLOAT, 2)], ["y"], [constant("m", np.int64(1))])
    graph = _core.load_onnx(made.SerializeToString())
    (y,) = _core.Run(_core.Session(graph)).forward([torch.tensor([-3.0, 9.0])])
    assert y.tolist() == [-3.0, 5.0]
    body.initializer.append(constant("", np.float32(3)))
    made.graph.node[0].attribute[0].g.CopyFrom(body)
    with pytest.raises(_core.InvalidModelError, match="empty name"):
        _core.load_onnx(made.SerializeToString())


def test_what_is_written_out_counts_with_all_that_it_holds() -> None:
    neg = helper.make_node("Neg", ["h"], ["h_out"])
    wide = body_of([neg], ["h_out", *["h"] * 400])
    many = body_of([neg], ["h_out"], [constant(f"c{i}", np.float32(0)) for i in range(3000)])
    named = body_of([neg], ["h_out"])
    named.node[0].name = "n" * 200_000
    big = helper.make_graph(
        [], "big", [], [info("w", FLOAT, None)], [constant("w", np.zeros(50_000))]
    )
    held = helper.make_node("If", ["go"], ["ignored"], then_branch=big, else_branch=big)
    heavy = body_of([neg, held], ["h_out"])
    started = time.monotonic()
    padded = body_of(
        [neg, helper.make_node("If", ["go"], ["q"], then_branch=big, else_branch=big)], ["h_out"]
    )
    branch_info = padded.node[1].attribute[0].g.value_info
    branch_info.extend(onnx.ValueInfoProto() for _ in range(50_000))
    for body, steps in (
        (wide, 2000),
        (many, 65_000),
        (named, 1000),
        (heavy, 1000),
        (padded, 10_000),
    ):
        extra = [f"s{i}" for i in range(len(body.output) - 2)]
        node = helper.make_node("Loop", ["m", "", "x"], ["y", *extra], body=body)
        made = model([node], [info("x", FLOAT, 2)], ["y"], [constant("m", np.int64(steps))])
        with pytest.raises(_core.UnsupportedError, match="would take more than"):
            _core.load_onnx(made.SerializeToString())
    assert time.monotonic() - started < 30


def test_a_gradient_names_values_of_a_body() -> None:
    nodes = [
        helper.make_node("Mul", ["h", "h"], ["square"]),
        helper.make_node(
            "Gradient", ["h"], ["h_out"], domain="ai.onnx.preview.training", xs=["h"], y="square"
        ),
    ]
    node = helper.make_node("Loop", ["m", "", "x"], ["Abs"], body=body_of(nodes, ["h_out"]))
    outer = [
        helper.make_node("LpPool", ["x"], ["z"], kernel_shape=[1], p=1),
        node,
        helper.make_node(
            "Gradient", ["x"], ["d"], domain="ai.onnx.preview.training", xs=["x"], y="Abs"
        ),
    ]
    held = [constant("m", np.int64(2))]
    made = model(outer, [info("x", FLOAT, 1, 1, 3)], ["Abs", "d", "z"], held)
    made.opset_import.append(helper.make_opsetid("ai.onnx.preview.training", 1))
    graph = _core.load_onnx(made.SerializeToString())
    x = torch.tensor([[[1.0, -2.0, 3.0]]])
    y, d, _ = _core.Run(_core.Session(graph)).forward([x])
    torch.testing.assert_close(y, 4 * x)
    torch.testing.assert_close(d, torch.full_like(x, 4.0))

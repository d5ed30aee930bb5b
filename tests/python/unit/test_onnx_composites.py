# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ONNX operators that stand for others: values, gradients, sizes that vary, refusals.

Their many forms are compared with ONNX's own data by the conformance suite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortrain import _core
from ortrain.program import Program

_generator = torch.Generator().manual_seed(3)
TRAINING = "ai.onnx.preview.training"


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values)


@dataclasses.dataclass(frozen=True)
class Case:
    """One node; integer inputs are constants unless they vary.

    Attributes:
      dynamic: Extents of the first input that the model leaves open.
      opset: Of the model.
      outputs: How many outputs.
    """

    op: str
    inputs: Sequence[torch.Tensor | None]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    dynamic: tuple[int, ...] = (0,)
    opset: int = 23
    outputs: int = 1
    domain: str = ""
    constant: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.op


def model_of(case: Case) -> onnx.ModelProto:
    names = ["" if x is None else f"x{i}" for i, x in enumerate(case.inputs)]
    given, held = [], []
    for i, (name, x) in enumerate(zip(names, case.inputs, strict=True)):
        if x is None:
            continue
        if i in case.constant:
            held.append(onnx.numpy_helper.from_array(x.numpy(), name))
            continue
        code = helper.np_dtype_to_tensor_dtype(x.numpy().dtype)
        dims: list[Any] = list(x.shape)
        if i == 0:
            dims = [f"d{k}" if k in case.dynamic else n for k, n in enumerate(dims)]
        given.append(helper.make_tensor_value_info(name, code, dims))
    made = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, made, domain=case.domain, **case.attributes)
    outputs = [helper.make_tensor_value_info(y, TensorProto.UNDEFINED, None) for y in made]
    graph = helper.make_graph([node], "g", given, outputs, held)
    opsets = [helper.make_opsetid("", case.opset), helper.make_opsetid(TRAINING, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


E = {"equation": "bij,bjk->bik"}
RNN = {"hidden_size": 2}
CASES = [
    Case("CastLike", [f(3), f(2)]),
    Case("PRelu", [f(2, 3), f(3)]),
    Case("ThresholdedRelu", [f(3, 4)], {"alpha": 0.3}),
    Case("Shrink", [f(3, 4)], {"lambd": 0.4, "bias": 0.1}),
    Case("Swish", [f(3, 4)], {"alpha": 1.5}, opset=24),
    Case("LpNormalization", [f(2, 3, 4).abs()], {"axis": 1, "p": 1}),
    Case("LpNormalization", [f(2, 3, 4)], {"p": 2}),
    Case("MeanVarianceNormalization", [f(2, 3, 4, 2)]),
    Case("LRN", [f(2, 5, 3, 1)], {"size": 4, "alpha": 0.3, "beta": 0.6, "bias": 1.2}),
    Case("LpPool", [f(1, 2, 5, 4)], {"kernel_shape": [2, 3], "p": 3, "strides": [2, 1]}),
    Case("GlobalLpPool", [f(2, 3, 4, 2)], {"p": 2}),
    Case("DepthToSpace", [f(2, 8, 2, 3)], {"blocksize": 2}, (0, 2, 3)),
    Case("DepthToSpace", [f(2, 8, 2, 3)], {"blocksize": 2, "mode": "CRD"}, (0, 2, 3)),
    Case("SpaceToDepth", [f(2, 3, 4, 6)], {"blocksize": 2}, (0, 2, 3)),
    Case("CenterCropPad", [f(5, 3, 4), ints(2, 6)], {"axes": [1, 2]}, constant=(1,)),
    Case("Compress", [f(4, 3), torch.tensor([True, False, True])], {"axis": 1}, constant=(1,)),
    Case("ReverseSequence", [f(4, 3, 2), ints(4, 1, 2)], {}, ()),
    Case("ReverseSequence", [f(3, 4), ints(4, 0, 2)], {"batch_axis": 0, "time_axis": 1}),
    Case("Einsum", [f(2, 3, 4), f(2, 4, 5)], E),
    Case("Einsum", [f(3, 4)], {"equation": "ij->ji"}, (0, 1)),
    Case("Einsum", [f(3, 3, 2)], {"equation": "iij"}, ()),
    Case("Einsum", [f(3, 3)], {"equation": "ii"}, ()),
    Case("Einsum", [f(2, 3), f(4), f(3, 4)], {"equation": "ai,j,ij->a"}),
    Case("Einsum", [f(2, 3, 4), f(4, 5)], {"equation": "...ij,jk->...ik"}),
    Case("Einsum", [f(2, 1, 3), f(4, 3)], {"equation": "...i, ...i -> ..."}),
    Case("Einsum", [f(2, 3), f(4)], {"equation": "ab,c"}),
    Case("Einsum", [f(2, 3, 4, 5), f(3, 5, 2, 6)], {"equation": "abcd,bdae->ce"}),
    Case("GridSample", [f(2, 3, 4, 5), f(2, 2, 3, 2)], {}, (0, 2, 3)),
    Case(
        "GridSample",
        [f(1, 2, 4, 5), f(1, 2, 3, 2)],
        {"mode": "cubic", "padding_mode": "border", "align_corners": 1},
        (),
    ),
    Case(
        "GridSample",
        [f(1, 2, 3, 4, 2), f(1, 2, 2, 1, 3)],
        {"padding_mode": "reflection"},
        (2,),
    ),
    Case("AffineGrid", [f(2, 2, 3), ints(2, 3, 4, 5)], {}, opset=20, constant=(1,)),
    Case("LSTM", [f(3, 2, 4), f(1, 8, 4), f(1, 8, 2), f(1, 16)], RNN, (0, 1), outputs=3),
    Case(
        "LSTM",
        [f(3, 2, 4), f(2, 8, 4), f(2, 8, 2), None, None, f(2, 2, 2), f(2, 2, 2), f(2, 6)],
        {**RNN, "direction": "bidirectional"},
        (1,),
        outputs=3,
    ),
    Case("GRU", [f(3, 2, 4), f(1, 6, 4), f(1, 6, 2), f(1, 12)], RNN, (1,), outputs=2),
    Case(
        "GRU",
        [f(3, 2, 4), f(1, 6, 4), f(1, 6, 2), f(1, 12)],
        {**RNN, "linear_before_reset": 1},
        (0, 1),
        outputs=2,
    ),
    Case("RNN", [f(3, 2, 4), f(1, 2, 4), f(1, 2, 2)], RNN, (0, 1), outputs=2),
    Case("Attention", [f(2, 2, 3, 4), f(2, 2, 5, 4), f(2, 2, 5, 3)]),
    Case(
        "Attention",
        [f(2, 4, 3, 4), f(2, 2, 5, 4), f(2, 2, 5, 3), f(3, 5)],
        {"is_causal": 1, "softcap": 2.0},
        (2,),
    ),
    Case(
        "Attention",
        [f(2, 3, 8), f(2, 5, 4), f(2, 5, 6)],
        {"q_num_heads": 4, "kv_num_heads": 2, "scale": 0.3},
    ),
    Case("RotaryEmbedding", [f(2, 3, 4, 6), f(2, 4, 3), f(2, 4, 3)], {"interleaved": 1}),
    Case(
        "RotaryEmbedding", [f(2, 4, 12), f(2, 4, 2), f(2, 4, 2)],
        {"num_heads": 2, "rotary_embedding_dim": 4},
    ),
]  # fmt: skip


def local_response_norm(x: torch.Tensor) -> torch.Tensor:
    # One channel before, two behind; ONNX's reference leaves out channels.
    sums = [(x[:, max(0, c - 1) : c + 3] ** 2).sum(1) for c in range(x.shape[1])]
    return x / (1.2 + 0.3 / 4 * torch.stack(sums, 1)) ** 0.6


# Forms for which ONNX has no reference in float64, by PyTorch.
BY_PYTORCH: dict[str, Callable[[Any], Any]] = {
    "MeanVarianceNormalization": lambda x: (
        (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), correction=0, keepdim=True)
    ),
    "LRN": local_response_norm,
    "GlobalLpPool": lambda x: x.norm(p=2, dim=(2, 3), keepdim=True),
}


def run(graph: Any, inputs: Sequence[torch.Tensor | None], constant: Sequence[int] = ()) -> Any:
    feed = {f"x{i}": x for i, x in enumerate(inputs) if x is not None and i not in constant}
    return _core.Run(_core.Session(graph)).forward([feed[i["name"]] for i in graph.inputs])


def has_reference(case: Case) -> bool:
    """Grids are compared with PyTorch; ONNX's own cases cover what its reference does otherwise."""
    return case.op != "GridSample" and "linear_before_reset" not in case.attributes


@pytest.mark.parametrize("case", [c for c in CASES if has_reference(c)], ids=str)
def test_values_are_those_of_onnx(case: Case) -> None:
    model = model_of(case)
    feed = {
        f"x{i}": x.numpy()
        for i, x in enumerate(case.inputs)
        if x is not None and i not in case.constant
    }
    if case.op in BY_PYTORCH:
        expected = [BY_PYTORCH[case.op](case.inputs[0]).numpy()]
    else:
        expected = ReferenceEvaluator(model).run(None, feed)
    made = run(_core.load_onnx(model.SerializeToString()), case.inputs, case.constant)
    for actual, wanted in zip(made, expected, strict=True):
        torch.testing.assert_close(actual.numpy(), wanted, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_finite_differences(case: Case) -> None:
    graph = _core.load_onnx(model_of(case).SerializeToString())
    graph.set_requires_grad({i["name"]: i["dtype"] == TensorProto.DOUBLE for i in graph.inputs})
    program = Program(graph, tuple(range(case.outputs)), None)
    given = {f"x{i}": x for i, x in enumerate(case.inputs) if i not in case.constant}
    inputs = [given[i["name"]] for i in graph.inputs]
    step = _core.Run(program.session)
    outputs = step.forward(inputs)[: case.outputs]
    weights = [torch.randn(y.shape, generator=_generator, dtype=y.dtype) for y in outputs]
    gradients = step.backward([weights[i] for i in program.incoming])

    def weighted(values: Sequence[torch.Tensor]) -> float:
        made = _core.Run(program.session).forward(values)[: case.outputs]
        return sum(float((y * w).sum()) for y, w in zip(made, weights, strict=True))

    assert program.outgoing
    for position, gradient in zip(program.outgoing, gradients, strict=True):
        direction = torch.randn(gradient.shape, generator=_generator, dtype=torch.float64)
        moved = [list(inputs), list(inputs)]
        for values, sign in zip(moved, (1, -1), strict=True):
            values[position] = inputs[position] + sign * 1e-6 * direction
        numeric = (weighted(moved[0]) - weighted(moved[1])) / 2e-6
        assert float((gradient * direction).sum()) == pytest.approx(numeric, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("align", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["linear", "nearest", "cubic"])
def test_grids_are_read_as_pytorch_reads_them(mode: str, padding: str, align: int) -> None:
    attributes = {"mode": mode, "padding_mode": padding, "align_corners": align}
    names = {"linear": "bilinear", "cubic": "bicubic"}
    shapes = [((2, 3, 4, 5), (2, 6, 7, 2)), ((1, 1, 1, 1), (1, 3, 2, 2))]
    if mode != "cubic":
        shapes += [((2, 2, 3, 4, 5), (2, 3, 2, 4, 3))]
    for shape, grid_shape in shapes:
        x, grid = f(*shape), f(*grid_shape) * 1.3
        grid.view(-1)[0] = -1.0  # a corner
        case = Case("GridSample", [x, grid], attributes, (0, 2, 3))
        (made,) = run(_core.load_onnx(model_of(case).SerializeToString()), [x, grid])
        expected = torch.nn.functional.grid_sample(
            x, grid, names.get(mode, mode), padding, bool(align)
        )
        torch.testing.assert_close(made, expected)


def test_windows_that_end_outside_have_the_norm_of_what_is_inside() -> None:
    x = f(1, 1, 7, 6)
    attributes = {"kernel_shape": [3, 2], "strides": [3, 4], "pads": [1, 0, 0, 1], "ceil_mode": 1}
    (made,) = run(
        _core.load_onnx(model_of(Case("LpPool", [x], attributes)).SerializeToString()), [x]
    )
    padded = torch.nn.functional.pad(x[0, 0], (0, 1, 1, 0))  # 8 rows, 7 columns
    expected = [
        [padded[i : i + 3, j : j + 2].norm() for j in range(0, 7, 4)] for i in range(0, 8, 3)
    ]
    torch.testing.assert_close(made[0, 0], torch.tensor(expected, dtype=torch.float64))

    few = Case("LpPool", [x], {"kernel_shape": [2, 2], "strides": [9, 4], "ceil_mode": 1, "p": 1})
    (made,) = run(_core.load_onnx(model_of(few).SerializeToString()), [x])
    expected = [[x[0, 0, :2, j : j + 2].abs().sum() for j in (0, 4)]]
    torch.testing.assert_close(made[0, 0], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["border", "reflection"])
def test_gradients_of_grids_at_the_border_are_pytorchs(padding: str, align: bool) -> None:
    attributes = {"mode": "linear", "padding_mode": padding, "align_corners": int(align)}
    x = f(1, 1, 3, 3) if align else f(1, 1, 4, 4)
    # Both ends, the points outside of which coordinates are moved, others. All are exact in binary.
    ends = [-1.0, -0.25, 0.5, 1.0, 1.25] if align else [-1.0, -0.75, 0.125, 0.75, 1.0]
    grid = torch.tensor([[[[a, b] for a in ends] for b in ends]], dtype=torch.float64)
    graph = _core.load_onnx(model_of(Case("GridSample", [x, grid], attributes)).SerializeToString())
    graph.set_requires_grad({"x1": True})
    program = Program(graph, (0,), None)
    step = _core.Run(program.session)
    (y,) = step.forward([x, grid])[:1]
    (made,) = step.backward([torch.ones_like(y)])
    leaf = grid.clone().requires_grad_()
    torch.nn.functional.grid_sample(x, leaf, "bilinear", padding, align).sum().backward()
    torch.testing.assert_close(made, leaf.grad)


def test_small_files_stay_small() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    size = torch.tensor([1, 1, 20_000, 20_000])
    case = Case("AffineGrid", [f(1, 2, 3), size], {}, opset=20, constant=(1,))
    graph = _core.load_onnx(model_of(case).SerializeToString())
    assert graph.outputs[0]["shape"] == ["d0", 20_000, 20_000, 2]
    x = torch.empty(0, 1, dtype=torch.float64)
    model = model_of(Case("ReverseSequence", [x, ints(1)], {}, ()))
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 2**27
    other = _core.load_onnx(model.SerializeToString())
    # The graphs hold what they are made of; a peak of the process would hide behind earlier ones.
    assert resident() - before < 100 * 2**20
    del graph, other


def gradient_model(inputs: Sequence[str], xs: Sequence[str], **more: Any) -> onnx.ModelProto:
    nodes = [
        helper.make_node("PRelu", ["a", "slope"], ["h"]),
        helper.make_node("Mul", ["h", "b"], ["y"]),
        helper.make_node(
            "Gradient",
            inputs,
            [f"d{i}" for i in range(len(xs))],
            domain=TRAINING,
            xs=xs,
            **{"y": "y", **more},
        ),
    ]
    code = TensorProto.DOUBLE
    given = [helper.make_tensor_value_info(n, code, [3]) for n in ("a", "b", "other")]
    outputs = [helper.make_tensor_value_info(f"d{i}", code, None) for i in range(len(xs))]
    slope = onnx.numpy_helper.from_array(np.array([0.25]), "slope")
    graph = helper.make_graph(nodes, "g", given, outputs, [slope])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(TRAINING, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def test_named_gradients() -> None:
    a, b, other = f(3), f(3), f(3)
    feed = {"a": a, "b": b, "other": other}

    def run_model(model: onnx.ModelProto) -> Any:
        graph = _core.load_onnx(model.SerializeToString())
        return _core.Run(_core.Session(graph)).forward([feed[i["name"]] for i in graph.inputs])

    def slope(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x < 0, 0.25, 1.0).double()

    da, db = run_model(gradient_model(["a", "b"], ["a", "b"]))
    torch.testing.assert_close(da, slope(a) * b)
    torch.testing.assert_close(db, a * slope(a))
    # At other values than those that the graph was run with, and from a value inside.
    da, db = run_model(gradient_model(["other", "b"], ["a", "b"]))
    torch.testing.assert_close(da, slope(other) * b)
    torch.testing.assert_close(db, other * slope(other))
    dh, dother = run_model(gradient_model(["h", "other", "b"], ["h", "other"], zs=["b"]))
    torch.testing.assert_close(dh, b)
    torch.testing.assert_close(dother, torch.zeros_like(b))


@pytest.mark.parametrize(
    ("inputs", "xs", "more", "message"),
    [
        (["a"], ["a", "b"], {}, "names 2 values, has 1"),
        (["a"], ["q"], {}, "q. is made by nothing"),
        (["a"], ["a"], {"y": "q"}, "q. is made by nothing"),
        (["slope"], ["a"], {}, r"input 0 is float64\[1\], 'a', which it stands for, float64\[3\]"),
        (["a", "b"], ["a", "a"], {}, "named twice"),
        (["a"], ["a"], {"y": "b"}, "no result of a node"),
    ],
)
def test_wrong_named_gradients(inputs: Any, xs: Any, more: Any, message: str) -> None:
    with pytest.raises(_core.InvalidModelError, match=message):
        _core.load_onnx(gradient_model(inputs, xs, **more).SerializeToString())


UPDATES = {
    "Adagrad": ({"norm_coefficient": 0.1, "decay_factor": 0.2, "epsilon": 1e-5}, 3),
    "Adam": ({"norm_coefficient": 0.1, "norm_coefficient_post": 0.05, "epsilon": 1e-4}, 4),
    "Momentum": ({"norm_coefficient": 0.1, "alpha": 0.9, "beta": 0.3, "mode": "nesterov"}, 3),
}


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("name", UPDATES)
def test_optimizers_take_several_tensors(name: str, step: int) -> None:
    attributes, kinds = UPDATES[name]
    shapes = [(2, 3), (4,)]
    tensors = [f(*shape).abs() for _ in range(kinds) for shape in shapes]
    inputs = [torch.tensor(0.1, dtype=torch.float64), torch.tensor(step), *tensors]
    made_kinds = kinds - 1
    both = Case(name, inputs, attributes, (), outputs=2 * made_kinds, domain=TRAINING)
    made = run(_core.load_onnx(model_of(both).SerializeToString()), inputs)
    for i in range(2):
        alone = [*inputs[:2], *tensors[i::2]]
        one = Case(name, alone, attributes, (), outputs=made_kinds, domain=TRAINING)
        expected = ReferenceEvaluator(model_of(one)).run(
            None, {f"x{k}": x.numpy() for k, x in enumerate(alone)}
        )
        for actual, wanted in zip(made[i::2], expected, strict=True):
            torch.testing.assert_close(actual.numpy(), np.asarray(wanted), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case("PRelu", [f(2), f(2)], {"slope": 1.0}), "'slope' is not known"),
        (Case("LpNormalization", [f(2, 3)], {"p": 3}), "expected 1 or 2"),
        (
            Case(
                "LpPool",
                [f(1, 1, 4)],
                {"kernel_shape": [2], "pads": [2**62, 2**62], "ceil_mode": 1},
            ),
            "'pads' has the entry",
        ),
        (Case("Reshape", [f(2), torch.zeros(100, dtype=torch.int64)]), "result of rank 100"),
        (Case("LRN", [f(2, 3)], {"size": 0}), "'size' is 0"),
        (Case("LRN", [f(2)], {"size": 1}), "without channels"),
        (Case("DepthToSpace", [f(1, 6, 2, 2)], {"blocksize": 2}), "no multiple of 2 squared"),
        (Case("DepthToSpace", [f(4, 2, 2)], {"blocksize": 2}), r"expected \[N, C, H, W\]"),
        (Case("SpaceToDepth", [f(1, 1, 3, 2)], {"blocksize": 2}), "no multiple of 2"),
        (Case("CenterCropPad", [f(2, 3), ints(2)], constant=(1,)), "1 entries for 2 axes"),
        (Case("CenterCropPad", [f(2, 3), ints(2, 2)]), "must be a constant"),
        (Case("Compress", [f(2), torch.tensor([True, True])]), "must be a constant"),
        (Case("ReverseSequence", [f(2, 2), ints(1, 1)], {"time_axis": 1}), "must be 0 and 1"),
        (Case("Einsum", [f(2, 3)], {"equation": "ij,jk"}), "2 terms for 1 inputs"),
        (Case("Einsum", [f(2, 3)], {"equation": "ijk"}), "3 labels"),
        (Case("Einsum", [f(2, 3)], {"equation": "ij->ik"}), "not possible"),
        (Case("Einsum", [f(2, 3)], {"equation": "i1"}), "no sum over labelled axes"),
        (Case("Einsum", [f(2, 3)], {"equation": "ii"}, ()), "takes a diagonal"),
        (Case("GridSample", [f(1, 2, 3, 3), f(1, 2, 2, 3)]), "number of axes"),
        (Case("GridSample", [f(1, 2, 3), f(1, 2, 1)], {"mode": "cubic"}), "over 1 axes"),
        (Case("GridSample", [f(1, 2, 3), f(1, 2, 1)], {"mode": "round"}), "'round' is not known"),
        (Case("AffineGrid", [f(2, 2, 3), ints(2, 3, 4, 5)]), "must be a constant"),
        (Case("GridSample", [f(1, 1, 1, 1, 1, 1), f(1, 1, 1, 1, 1, 4)]), "up to 3"),
        (Case("GRU", [f(2000, 1, 1), f(1, 3, 1), f(1, 3, 1)], {}, (), outputs=2), "up to 1024"),
        (Case("DepthToSpace", [f(1, 4, 2, 2)], {"blocksize": 2**32}), "'blocksize' is 4294967296"),
        (Case("OneHot", [ints(1), ints(1)[:0], f(2)], constant=(1,)), "must be one number"),
        (Case("GRU", [f(3, 2, 4), f(1, 6, 4), f(1, 6, 2)], RNN, (0,), outputs=2), "must be known"),
        (Case("RNN", [f(3, 2, 4), f(1, 4, 4), f(1, 3, 2)], RNN, outputs=2), "hidden_size 2"),
        (
            Case("RNN", [f(3, 2, 4), f(1, 2, 4), f(1, 2, 2)], {"activations": ["Sin"]}, outputs=2),
            "activation 'Sin'",
        ),
        (Case("Attention", [f(2, 3, 8)] * 3), "q_num_heads"),
        (
            Case("Attention", [f(2, 3, 3, 4), f(2, 2, 3, 4), f(2, 2, 3, 4)], {"softcap": 1.0}),
            "cannot share 2 key heads",
        ),
        (
            Case("Attention", [f(1, 1, 2, 4)] * 3 + [None, f(), f()]),
            "earlier calls are of rank 4",
        ),
        (Case("RotaryEmbedding", [f(2, 4, 6), f(2, 4, 3), f(2, 4, 3)]), "num_heads is 0"),
        (Case("RotaryEmbedding", [f(1, 1, 2, 6), f(1, 2, 2), f(1, 2, 2)]), "for 3 angles"),
        (
            Case("Momentum", [f(), ints(0)[0], f(2)], {"mode": "best"}, outputs=2, domain=TRAINING),
            "required and absent",
        ),
        (
            Case("Adagrad", [f(), ints(0)[0], f(2), f(2)], {}, outputs=2, domain=TRAINING),
            "3 tensors per optimized one",
        ),
    ],
)  # fmt: skip
def test_refusals(case: Case, message: str) -> None:
    with pytest.raises((_core.InvalidModelError, _core.UnsupportedError), match=message) as caught:
        _core.load_onnx(model_of(case).SerializeToString())
    assert case.op in str(caught.value)

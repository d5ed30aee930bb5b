# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ONNX's own node tests (``onnx.backend.test``), each run by the engine on the data it comes with.

A case passes, or its model is refused with a typed error that says why. Results are held to ONNX's
own tolerances.
"""

from __future__ import annotations

import dataclasses
import enum
import pathlib
import re
import warnings
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import torch
from google.protobuf.message import DecodeError

from ortrain import _core
from ortrain.errors import UnsupportedError

RTOL, ATOL = 1e-3, 1e-7  # of onnx.backend.test.runner
# Two units in the last place: ONNX's reference rounds after each of its steps.
ROUNDINGS = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# What the engine must run: a case fewer is a step back.
CASES_BAR = 1500
# Inputs of floats this small are settings: scales, a ratio, an angle.
_MOST_SETTINGS = 8
# Dropout by NumPy's generator: which elements go is not ONNX's to say.
_RANDOM = ("test_training_dropout",)


class NodeOutcome(enum.Enum):
    """How a case ended."""

    passed = "right"
    random = "random numbers, not compared"
    refused = "refused"
    wrong = "wrong"


@dataclasses.dataclass(frozen=True)
class NodeResult:
    """What became of one case.

    Attributes:
      name: As ONNX names it.
      operators: The operators of its model.
      outcome: How it ended.
      detail: Why it was refused, or what is wrong.
    """

    name: str
    operators: tuple[str, ...]
    outcome: NodeOutcome
    detail: str = ""


# Of onnx.backend.test.loader: operators one by one, and small models, those of PyTorch of old opsets.
_KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")


@dataclasses.dataclass(frozen=True)
class NodeCase:
    """One test of ONNX's.

    Attributes:
      name: As ONNX names it.
      model: The model.
      data_sets: Inputs and expected outputs, in the order of the model's.
      rtol: Relative tolerance; 0 where the usual one holds.
      atol: Absolute tolerance, likewise.
    """

    name: str
    model: Any
    data_sets: list[tuple[list[Any], list[Any]]]
    rtol: float = 0.0
    atol: float = 0.0


def cases() -> list[NodeCase]:
    """Return ONNX's cases."""
    from onnx.backend.test import loader

    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in _KINDS:
            found += [_loaded(case) for case in loader.load_model_tests(kind=kind)]
    return found


def _loaded(case: Any) -> NodeCase:
    if case.model is not None:
        return NodeCase(case.name, case.model, case.data_sets, case.rtol or 0.0, case.atol or 0.0)
    folder = pathlib.Path(case.model_dir)
    data_sets = []
    for data in sorted(folder.glob("test_data_set_*")):
        files = [
            sorted(data.glob(f"{side}_*.pb"), key=lambda f: int(f.stem.rpartition("_")[2]))
            for side in ("input", "output")
        ]
        inputs, outputs = ([_message(f.read_bytes()) for f in side] for side in files)
        data_sets.append((inputs, outputs))
    return NodeCase(case.name, onnx.load(str(folder / "model.onnx")), data_sets)


def _message(contents: bytes) -> Any:
    """Return the array in a file; None for what is no dense tensor."""
    tensor = onnx.TensorProto()
    try:
        tensor.ParseFromString(contents)
        return onnx.numpy_helper.to_array(tensor)
    except (ValueError, TypeError, DecodeError):
        return None


def _tensor(value: Any) -> torch.Tensor | None:
    """Return a tensor with the contents of an array of NumPy; None for what is no tensor of ours."""
    if isinstance(value, onnx.TensorProto):
        value = onnx.numpy_helper.to_array(value)
    if not isinstance(value, (np.ndarray, np.generic)):
        return None
    array = np.ascontiguousarray(value).reshape(np.shape(value))
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    try:
        return torch.from_numpy(array.copy())
    except TypeError:
        return None


def _difference(actual: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> str:
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if actual.dtype != expected.dtype:
        return f"{actual.dtype}, expected {expected.dtype}"
    if not actual.is_floating_point():
        return "" if torch.equal(actual, expected) else "other values"
    try:
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, equal_nan=True)
    except AssertionError as error:
        return re.sub(r"\s+", " ", str(error))[:200]
    return ""


def run_case(case: Any) -> NodeResult:
    """Load the model of a case, run it on each data set and compare the results."""
    operators = tuple(dict.fromkeys(node.op_type for node in case.model.graph.node))

    def ended(outcome: NodeOutcome, detail: str = "") -> NodeResult:
        return NodeResult(case.name, operators, outcome, detail)

    try:
        try:
            difference = _run(case.model, case)
        except UnsupportedError:
            # The engine wants to know shapes, axes and flags when it builds a graph.
            difference = _run(_with_constants(case), case)
    except UnsupportedError as error:
        return ended(NodeOutcome.refused, str(error))
    except Exception as error:  # any other error is a defect
        return ended(NodeOutcome.wrong, f"{type(error).__name__}: {error}")
    if difference and case.name.startswith(_RANDOM):
        return ended(NodeOutcome.random, difference)
    return ended(NodeOutcome.wrong, difference) if difference else ended(NodeOutcome.passed)


def _with_constants(case: Any) -> Any:
    """Return the model with those inputs as initializers that say what to do, not with what.

    Raises:
      UnsupportedError: Its data sets differ in them.
    """
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for index, value in list(enumerate(case.model.graph.input))[::-1]:
        arrays = [inputs[index] for inputs, _ in case.data_sets if index < len(inputs)]
        if not all(isinstance(a, np.ndarray | np.generic) for a in arrays) or not arrays:
            continue
        first = np.asarray(arrays[0])
        if index == 0 and first.size > 1 and len(case.model.graph.input) > 1:
            continue
        if first.dtype.kind not in "iub" and first.size > _MOST_SETTINGS:
            continue
        if any(not np.array_equal(first, other) for other in arrays[1:]):
            raise UnsupportedError("its data sets differ in what must be constant")
        model.graph.initializer.append(onnx.numpy_helper.from_array(first, value.name))
        del model.graph.input[index]
    return model


def _run(model: Any, case: Any) -> str:
    """Run a model on the data of a case; return what differs, empty if nothing does."""
    graph = _core.load_onnx(model.SerializeToString())
    session = _core.Session(graph)
    given = [value.name for value in case.model.graph.input]
    wanted = [value.name for value in case.model.graph.output]
    for inputs, outputs in case.data_sets:
        feed = {n: _tensor(v) for n, v in zip(given, inputs, strict=False)}
        expected = dict(zip(wanted, map(_tensor, outputs), strict=False))
        needed = [feed[i["name"]] for i in graph.inputs]
        if None in needed or None in expected.values():
            raise UnsupportedError("its data are no tensors of the engine")
        made = _core.Run(session).forward(needed)
        for output, value in zip(graph.outputs, made, strict=True):
            rtol, atol = case.rtol or RTOL, case.atol or ATOL
            rtol = max(rtol, ROUNDINGS.get(value.dtype, 0.0))
            difference = _difference(value, expected[output["name"]], rtol, atol)
            if difference:
                return f"{output['name']}: {difference}"
    return ""

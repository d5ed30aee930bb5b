# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m conformance.bad_inputs``: labels, indices and sizes that no caller should give.

Every operator that looks up memory by the contents of a tensor gets random contents, forward and
backward; operators that take sizes get wild ones while a graph is built and planned. Each call
succeeds or raises a typed error. What only a sanitizer sees is seen under ``make asan``.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import torch

from ortrain import _core
from ortrain.errors import OrtrainError

_WILD = [-(2**63), -(2**31) - 1, -(2**31), -100, -7, -2, -1, 0, 1, 2, 3, 4, 5, 99]
_WILD += [2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 1]
_AS_SIZE = [-(2**63), -(2**31), -100, -3, -2, -1, 0, 1, 2, 3, 4, 6, 7, 2**31, 2**62, 2**63 - 1]


@dataclasses.dataclass(frozen=True)
class Lookup:
    """An operator that reads or writes where integers say.

    Attributes:
      inputs: Types, symbols of extents and names, as in the text form of a graph.
      node: The node.
      integers: The names of the inputs with wild contents.
    """

    inputs: str
    node: str
    integers: tuple[str, ...] = ("i",)


_REDUCTIONS = ("none", "add", "mul", "max", "min")
LOOKUPS: tuple[Lookup, ...] = (
    *(
        Lookup("float32[a, b] x [user grad], {t}[n] i", f"Gather <axis = {axis}> (x, i)")
        for axis in (0, 1)
    ),
    Lookup("float32[a] x [user grad], {t}[] i", "Gather <axis = 0> (x, i)"),
    *(
        Lookup("float32[a, b] x [user grad], {t}[c, d] i", f"GatherElements <axis = {axis}> (x, i)")
        for axis in (0, 1)
    ),
    Lookup("float32[a, b, c] x [user grad], int64[n, 2] i", "GatherND (x, i)"),
    Lookup("float32[a, b, c] x [user grad], int64[a, n, 1] i", "GatherND <batch_dims = 1> (x, i)"),
    *(
        Lookup(
            "float32[a, b] x [user grad], {t}[c, d] i, float32[c, d] u [user grad]",
            f'ScatterElements <axis = {axis}, reduction = "{reduction}"> (x, i, u)',
        )
        for axis in (0, 1)
        for reduction in _REDUCTIONS
    ),
    *(
        Lookup(
            "float32[a, b] x [user grad], int64[n, 1] i, float32[n, b] u [user grad]",
            f'ScatterND <reduction = "{reduction}"> (x, i, u)',
        )
        for reduction in _REDUCTIONS
    ),
    Lookup("float32[a, b] x [user grad], {t}[n, c] i", "ortrain::Embedding (x, i)"),
    Lookup("float32[a, b] x [user grad], {t}[n] i", "ortrain::Embedding <padding_idx = 2> (x, i)"),
    *(
        Lookup(
            "float32[n, c] x [user grad], {t}[n] i, float32[c] w",
            f'{op} <reduction = "{reduction}"> (x, i, w)',
        )
        for op in ("ortrain::CrossEntropy", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
        for reduction in ("none", "mean", "sum")
    ),
    Lookup("float32[n, c, d] x [user grad], {t}[n, d] i", "ortrain::CrossEntropy (x, i)"),
    Lookup(
        "float32[n, c] x [user grad], float32[g, c, d] w [user grad], {t}[g] i",
        "ortrain::GroupedMatMul (x, w, i)",
    ),
    Lookup("{t}[n] i, float32[2] v", "OneHot (i, int64 5, v)"),
)

# Operators whose integers are known while the graph is built.
SIZES: tuple[Lookup, ...] = (
    Lookup("float32[2, 6] x [user grad]", "Reshape (x, int64[2] {{{i}, {i}}})"),
    Lookup("float32[2, 6] x [user grad]", "Expand (x, int64[2] {{{i}, {i}}})"),
    Lookup("float32[2, 6] x [user grad]", "Tile (x, int64[2] {{{i}, {i}}})"),
    Lookup(
        "float32[2, 6] x [user grad]",
        "Slice (x, int64[1] {{{i}}}, int64[1] {{{i}}}, int64[1] {{{a}}}, int64[1] {{{i}}})",
    ),
    Lookup("float32[2, 6] x [user grad]", "Pad (x, int64[4] {{{i}, {i}, {i}, {i}}})"),
    Lookup(
        "float32[2, 6] x [user grad]", 'Pad <mode = "reflect"> (x, int64[4] {{{i}, {i}, {i}, {i}}})'
    ),
    Lookup("float32[2, 6] x [user grad]", "Trilu <upper = 0> (x, int64 {i})"),
    Lookup("float32[2, 6] x [user grad]", "CumSum (x, int64 {i})"),
    Lookup("float32[2, 6] x [user grad]", "Unsqueeze (x, int64[2] {{{i}, {a}}})"),
    Lookup("float32[1, 6] x [user grad]", "Squeeze (x, int64[1] {{{i}}})"),
    Lookup("float32[2, 6] x [user grad]", "ReduceSum (x, int64[1] {{{i}}})"),
    Lookup("float32[2, 6] x [user grad]", "Softmax <axis = {i}> (x)"),
    Lookup("float32[2, 6] x [user grad]", "Concat <axis = {i}> (x, x)"),
    Lookup("float32[2, 6] x [user grad]", "Flatten <axis = {i}> (x)"),
    Lookup("float32[2, 6] x [user grad]", "Transpose <perm = [{a}, {i}]> (x)"),
    Lookup("float32[2, 6] x [user grad]", "Gather <axis = {i}> (x, int64[2] {{{i}, {a}}})"),
    Lookup("float32[2, 6] x", "ConstantOfShape (int64[2] {{{i}, {i}}})"),
    Lookup("float32[2, 6] x", "Range (int64 {i}, int64 {i}, int64 {i})"),
    Lookup("int64[3] x", "OneHot (x, int64 {i}, float32[2] {{0, 1}})"),
    Lookup(
        "float32[1, 2, 5] x [user grad], float32[3, 2, 2] w [user grad]",
        "Conv <pads = [{i}, {i}], strides = [{i}], dilations = [{i}]> (x, w)",
    ),
    Lookup(
        "float32[1, 2, 5] x [user grad]",
        "MaxPool <kernel_shape = [{i}], pads = [{i}, {i}], strides = [{i}]> (x)",
    ),
    Lookup(
        "float32[1, 2, 5] x [user grad]",
        "AveragePool <kernel_shape = [{i}], pads = [{i}, {i}], strides = [{i}]> (x)",
    ),
    Lookup("float32[1, 2, 5] x [user grad]", "Resize (x, _, _, int64[3] {{{i}, {i}, {i}}})"),
    Lookup(
        "float32[1, 2, 5] x [user grad], float32[2, 3, 2] w [user grad]",
        "ConvTranspose <pads = [{i}, {i}], strides = [{i}], output_padding = [{i}]> (x, w)",
    ),
)

# A result of more elements would only test the allocator.
MOST_ELEMENTS = 1 << 20


class _Draw:
    """Graphs, and random arguments for them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self._sessions: dict[tuple[Lookup, str], tuple[Any, Any]] = {}

    def lookup(self) -> tuple[Any, Any, list[torch.Tensor]]:
        """Return session, graph and tensors of an operator that looks up memory."""
        case = self.rng.choice(LOOKUPS)
        kind = self.rng.choice(["int64", "int32"])
        if (case, kind) not in self._sessions:
            graph = _graph(case.inputs.format(t=kind), case.node)
            self._sessions[case, kind] = graph, _core.Session(graph, max_plan_bytes=1 << 20)
        graph, session = self._sessions[case, kind]
        extents = {s: self.rng.choice([0, 1, 2, 3, 5]) for s in "abcdgn"}
        tensors = []
        for value in graph.inputs:
            if value["role"] == "gradient":
                continue
            shape = [extents[s] if isinstance(s, str) else s for s in value["shape"]]
            if self.rng.random() < 0.02 and shape:
                shape[self.rng.randrange(len(shape))] += 1
            tensors.append(self._tensor(shape, value["dtype"], value["name"] in case.integers))
        return session, graph, tensors

    def _tensor(self, shape: Sequence[int], code: int, wild: bool) -> torch.Tensor:
        if code == 1:
            return torch.randn(shape, generator=self.generator)
        dtype = torch.int64 if code == 7 else torch.int32
        count = 1
        for extent in shape:
            count *= extent
        most = 5 if not wild or self.rng.random() < 0.5 else None
        numbers = [self.rng.randrange(-1, most) if most else self._wild() for _ in range(count)]
        info = torch.iinfo(dtype)
        clipped = [min(max(n, info.min), info.max) for n in numbers]
        return torch.tensor(clipped, dtype=dtype).reshape(shape)

    def _wild(self) -> int:
        return self.rng.choice(_WILD)

    def sized(self) -> Any:
        """Return a graph with random sizes in it; building it may raise."""
        case = self.rng.choice(SIZES)
        small = self.rng.random() < 0.4
        node, rest = "", case.node
        while "{i}" in rest or "{a}" in rest:
            at = min(p for p in (rest.find("{i}"), rest.find("{a}")) if p >= 0)
            among = [-1, 0, 1, 2, 3] if small or rest[at + 1] == "a" else _AS_SIZE
            node += rest[:at] + str(self.rng.choice(among))
            rest = rest[at + 3 :]
        return _graph(case.inputs, (node + rest).replace("{{", "{").replace("}}", "}"))


def _graph(inputs: str, node: str) -> Any:
    graph = _core.Graph.parse(f"graph g ({inputs}) => (y) {{\n  y = {node}\n}}\n")
    if any(value["requires_grad"] for value in graph.inputs):
        graph.build_backward([0])
    return graph


def _elements(graph: Any) -> int:
    """Return the elements of the largest result whose extents are known."""
    most = 0
    for output in graph.outputs:
        count = 1
        for extent in output["shape"]:
            count *= extent if isinstance(extent, int) else 1
        most = max(most, count)
    return most


def _run(session: Any, graph: Any, tensors: Sequence[torch.Tensor]) -> None:
    run = _core.Run(session)
    outputs = run.forward(list(tensors))
    if any(value["role"] == "gradient" for value in graph.inputs):
        run.backward([torch.ones_like(outputs[0])])


def run(count: int, seed: int = 0) -> collections.Counter[str]:
    """Make ``count`` calls; return how many ended in which way.

    Raises:
      Exception: A call raised something that is no error of the engine, or an InternalError.
    """
    draw = _Draw(seed)
    ends: collections.Counter[str] = collections.Counter()
    for _ in range(count):
        try:
            if draw.rng.random() < 0.75:
                _run(*draw.lookup())
            else:
                graph = draw.sized()
                if _elements(graph) > MOST_ELEMENTS:
                    ends["too large to run"] += 1
                    continue
                tensors = [
                    torch.ones([int(s) for s in v["shape"]], dtype=torch.float32)
                    if v["dtype"] == 1
                    else torch.zeros([int(s) for s in v["shape"]], dtype=torch.int64)
                    for v in graph.inputs
                    if v["role"] != "gradient"
                ]
                _run(_core.Session(graph, max_plan_bytes=1), graph, tensors)
            ends["accepted"] += 1
        except _core.InternalError:
            raise
        except (OrtrainError, IndexError) as error:
            ends[type(error).__name__] += 1
    return ends


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.bad_inputs", description=__doc__)
    parser.add_argument("--count", type=int, default=100_000, help="calls")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    ends = run(options.count, options.seed)
    print(f"{options.count} calls:", ", ".join(f"{n} {name}" for name, n in ends.most_common()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Graphs of a few bytes do not become graphs of a hundred thousand nodes, nor take their square of time."""

from __future__ import annotations

import random

import pytest
import torch

from ortrain import _core
from ortrain.errors import UnsupportedError


def run(graph: object, *inputs: torch.Tensor) -> tuple[object, torch.Tensor]:
    """Return a run of the forward, and its first output."""
    made = _core.Run(_core.Session(graph))
    return made, made.forward(list(inputs))[0]


@pytest.mark.parametrize("seed", range(12))
def test_gradients_of_splits_of_which_parts_are_used(seed: int) -> None:
    draw = random.Random(seed)
    parts = draw.randrange(2, 9)
    sizes = [draw.randrange(0, 4) for _ in range(parts)]
    sizes[-1] += sum(sizes) == 0
    wanted = sorted(draw.sample(range(parts), draw.randrange(1, parts + 1)))
    rows = draw.choice(["2", "n"])
    names = ", ".join(f"p{i}" for i in range(parts))
    listed = ", ".join(map(str, sizes))
    outputs = ", ".join(f"t{i}" for i in wanted)
    used = "\n".join(f"t{i} = Mul(p{i}, float32 {i + 2}.0)" for i in wanted)
    graph = _core.Graph.parse(
        f"graph g (float32[{rows}, {sum(sizes)}] x [user grad]) => ({outputs}) {{\n"
        f"{names} = Split<axis = 1>(x, int64[{parts}] {{{listed}}})\n{used}\n}}\n"
    )
    graph.run_passes("simplify")
    graph.build_backward(list(range(len(wanted))))
    graph.run_passes("fuse")
    x = torch.randn(2, sum(sizes), requires_grad=True)
    made = _core.Run(_core.Session(graph))
    made.forward([x.detach()])
    gradients = [torch.randn(2, sizes[i]) for i in wanted]
    results = [x.split(sizes, 1)[i] * (i + 2) for i in wanted]
    (expected,) = torch.autograd.grad(results, [x], gradients)
    (got,) = made.backward(gradients)
    torch.testing.assert_close(got, expected)


def test_a_split_into_many_parts_has_a_small_gradient() -> None:
    text = "graph g (float32[65536] x [user grad]) => (y) {\n"
    for i in range(4):
        text += f"a{i} = Mul(x, float32 {i}.5)\ns{i} = Split<num_outputs = 65536>(a{i})\n"
    graph = _core.Graph.parse(text + "y = Sum(s0, s1, s2, s3)\n}\n")
    graph.run_passes("simplify")
    graph.build_backward([0])
    assert graph.num_nodes < 100
    graph.run_passes("fuse")
    made, y = run(graph, torch.full((65536,), 2.0))
    assert y.tolist() == [16.0]
    (gradient,) = made.backward([torch.ones(1)])
    assert gradient[0] == 8.0
    assert not gradient[1:].any()
    graph = _core.Graph.parse(
        "graph g (float32[n] x [user grad]) => (y) {\ny = Split<num_outputs = 65536>(x)\n}\n"
    )
    with pytest.raises(UnsupportedError, match="65535 are not used"):
        graph.build_backward([0])


@pytest.mark.parametrize("operator", ["MatMul", "Cast", "Transpose"])
def test_long_chains_are_rewritten_in_linear_time(operator: str) -> None:
    """No clock: where each rewrite walked all nodes, this alone would take a minute."""
    count = 6000
    of = {
        "MatMul": lambda i: f"MatMul(v{i}, w)",
        "Cast": lambda i: f"Cast<to = {(10, 1)[i % 2]}>(v{i})",
        "Transpose": lambda i: f"Transpose<perm = [1, 0]>(v{i})",
    }[operator]
    text = "graph g (float32[2, 2] v0 [user grad], float32[2, 2] w [parameter grad]) => (y) {\n"
    text += "".join(f"v{i + 1} = {of(i)}\n" for i in range(count))
    graph = _core.Graph.parse(text + f"y = Add(v{count}, w)\n}}\n")
    graph.run_passes("simplify")
    graph.build_backward([0])
    graph.run_passes("fuse")
    graph.verify()

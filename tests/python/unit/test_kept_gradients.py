# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random models: gradients that are kept, added up and told of are those of one batch, whatever feeds what."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ortrain import _core

OPTIONS = {
    "loss": "loss",
    "scales_loss": False,
    "memory_limit": 0,
    "max_bytes": 0,
    "max_share": 0.0,
    "step": "SgdStep",
    "max_norm": 0.0,
    "attributes": {},
    "groups": [],
}
_UNARY = ["Neg", "Sigmoid", "Tanh", "Abs", "Identity"]
_BINARY = ["Sub", "Add", "Mul", "Max", "MatMul"]


def model(draw: random.Random) -> tuple[str, list[str]]:
    """Return a model of matrices of [4, 4], and the names of its parameters."""
    parameters = [f"p{i}" for i in draw.sample(range(20), draw.randrange(1, 6))]
    values, lines = ["x", *parameters], []
    for number in range(draw.randrange(3, 14)):
        name = f"v{number}"
        # Recent values more often, so that chains grow.
        a, b = (draw.choice(values[-4:] if draw.random() < 0.6 else values) for _ in range(2))
        if draw.random() < 0.15:
            lines.append(f"{name}r = ReduceSum<keepdims = 1>({a}, int64[1] {{0}})")
            lines.append(f"{name} = Add({name}r, {b})")
        elif draw.random() < 0.15:
            lines.append(f"{name}t = Transpose<perm = [1, 0]>({a})")
            lines.append(f"{name} = Mul({name}t, {b})")
        elif draw.random() < 0.4:
            lines.append(f"{name} = {draw.choice(_UNARY)}({a})")
        else:
            lines.append(f"{name} = {draw.choice(_BINARY)}({a}, {b})")
        values.append(name)
    last = f"v{number}"
    lines.append(f"used = Add({last}, {draw.choice(parameters)})")
    lines.append("squared = Tanh(used)")
    lines.append("loss = ReduceSum<keepdims = 0>(squared)")
    inputs = ", ".join(f'float32[4, 4] {p} [parameter "{p}" grad]' for p in parameters)
    text = "\n".join(lines)
    return f"graph g (float32[4, 4] x, {inputs}) => (loss) {{\n{text}\n}}\n", parameters


def state_of(parameters: list[str]) -> Any:
    state = _core.TrainingState()
    for number, name in enumerate(parameters):
        generator = torch.Generator().manual_seed(number)
        state.share(name, torch.randn(4, 4, generator=generator) * 0.5)
    state.learning_rate = 0.25
    return state


@pytest.mark.parametrize("seed", range(60))
def test_batches_add_up(seed: int) -> None:
    draw = random.Random(seed)
    text, parameters = model(draw)
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
    results = []
    for batches in (1, 2, 3):
        graph = _core.Graph.parse(text)
        graph.run_passes("simplify")
        program = _core.TrainingProgram(graph, {**OPTIONS, "accumulation": batches})
        state = state_of(parameters)
        for _ in range(2 * batches):
            program.train_step(state, [x])
        results.append({name: t.clone() for name, t in state.tensors.items()})
        if batches == 1:
            continue
        told = state_of(parameters)
        for _ in range(2):
            for batch in range(batches):
                seen: dict[str, torch.Tensor] = {}

                def finished(names: list[str], seen: Any = seen, told: Any = told) -> None:
                    assert not seen.keys() & set(names), "each is told of once"
                    seen.update({n: told.optimizer[f"{n}:grad"].clone() for n in names})

                program.add_gradients(told, [x], finished, draw.choice([1, 65, 200]))
                assert seen.keys() == set(program.trained), batch
                for name, gradient in seen.items():
                    assert torch.equal(gradient, told.optimizer[f"{name}:grad"]), name
            program.optimizer_step(told)
            told.kept_batches = 0
        results.append({name: t.clone() for name, t in told.tensors.items()})
    for other in results[1:]:
        for name, tensor in results[0].items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)

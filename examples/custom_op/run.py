# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""An operator, a gradient, a rewrite and an optimizer of your own: python examples/custom_op/run.py

1. `scaled_swish.cpp` holds an operator with gradient and kernels. It is compiled here, loaded, and
   takes the place of an operator that is registered with PyTorch.
2. A second operator of the library gets its gradient from Python.
3. A pass in Python rewrites x * sigmoid(x) into the operator.
4. An optimizer (Lion) is written as an update rule and trains the model.

Each is compared with PyTorch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortrain import ORTModule, extension
from ortrain.optim import Expression, GraphOptimizer, RuleBuilder

SOURCE = Path(__file__).resolve().parent / "scaled_swish.cpp"


# 1. The operator, as PyTorch knows it.


@torch.library.custom_op("example::scaled_swish", mutates_args=())
def scaled_swish(x: torch.Tensor, beta: float) -> torch.Tensor:
    return x * torch.sigmoid(beta * x)


@scaled_swish.register_fake
def _(x: torch.Tensor, beta: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.beta = inputs[1]


def _swish_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    (x,) = ctx.saved_tensors
    s = torch.sigmoid(ctx.beta * x)
    return dy * (s + ctx.beta * x * s * (1 - s)), None


scaled_swish.register_autograd(_swish_backward, setup_context=_keep)


@torch.library.custom_op("example::scaled_square", mutates_args=())
def scaled_square(x: torch.Tensor, scale: float) -> torch.Tensor:
    return scale * x * x


@scaled_square.register_fake
def _(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.empty_like(x)


def _square_backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
    (x,) = ctx.saved_tensors
    return 2 * ctx.beta * x * dy, None


scaled_square.register_autograd(_square_backward, setup_context=_keep)


def build_library(folder: Path) -> Path:
    """Compile the library of operators with the system's C++ compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "c++"
    library = folder / "scaled_swish.so"
    command = [compiler, "-std=c++20", "-O2", "-shared", "-fPIC", str(SOURCE), "-o", str(library)]
    subprocess.run([*command, f"-I{extension.include_dir()}"], check=True)
    return library


def register() -> None:
    """Tell the engine which of PyTorch's operators become the library's, and the gradients."""

    @extension.register_conversion("example::scaled_swish.default")
    def _(g: Any, x: Any, beta: float) -> Any:
        return g.node("ScaledSwish", x, domain="example", beta=beta)

    @extension.register_conversion("example::scaled_square.default")
    def _(g: Any, x: Any, scale: float) -> Any:
        return g.node("ScaledSquare", x, domain="example", scale=scale)

    # 2. Gradient rules from Python: of the second operator, and of the first one's gradient.
    @extension.register_gradient("example::ScaledSquare")
    def _(g: Any) -> Any:
        return 2.0 * g.attributes["scale"] * g.input(0) * g.output_grad(0)

    @extension.register_gradient("example::ScaledSwishGrad")
    def _(g: Any) -> Any:
        x, dy, incoming, beta = g.input(0), g.input(1), g.output_grad(0), g.attributes["beta"]
        s = g.op("Sigmoid", beta * x)
        slope = s * (1.0 - s)
        second = beta * slope * (2.0 + beta * x * (1.0 - 2.0 * s))
        return [incoming * dy * second, incoming * (s + beta * x * slope)]

    # 3. A rewrite: x * sigmoid(x), written out by hand, is the operator with beta = 1.
    @extension.register_pass("swish_from_parts", summary="x sigmoid(x) becomes ScaledSwish.")
    def _(graph: Any) -> bool:
        changed = False
        for node in graph.nodes():
            if node.op != "Mul":
                continue
            for x, gate in (node.inputs, node.inputs[::-1]):
                made = gate.producer
                if made is not None and made.op == "Sigmoid" and made.inputs[0] == x:
                    graph.at(node)
                    graph.replace(node.outputs[0], graph.op("ScaledSwish", x, domain="example"))
                    changed = True
                    break
        return changed


# 4. The optimizer.


class Lion(GraphOptimizer):
    """Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms", algorithm 2."""

    state_names = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def update(
        self,
        g: RuleBuilder,
        param: Expression,
        grad: Expression,
        state: Mapping[str, Expression],
        options: Mapping[str, Any],
    ) -> tuple[Expression, Mapping[str, Expression]]:
        (beta1, beta2), average = options["betas"], state["exp_avg"]
        direction = g.sign(beta1 * average + (1.0 - beta1) * grad)
        updated = param - options["lr"] * (direction + options["weight_decay"] * param)
        return updated, {"exp_avg": beta2 * average + (1.0 - beta2) * grad}


@torch.no_grad()
def lion_step(params: list[nn.Parameter], averages: list[torch.Tensor], lr: float) -> None:
    """The same rule in PyTorch, for the comparison."""
    for param, average in zip(params, averages, strict=True):
        direction = (0.9 * average + (1 - 0.9) * param.grad).sign()
        param -= lr * (direction + 0.01 * param)
        average.mul_(0.99).add_(param.grad, alpha=1 - 0.99)


class Model(nn.Module):
    """Two linear layers around the three activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = scaled_swish(self.first(x), 1.5)
        h = h * torch.sigmoid(h) + scaled_square(h, 0.25)
        return nn.functional.mse_loss(self.second(h).squeeze(1), y)


def main(steps: int = 100) -> None:
    with tempfile.TemporaryDirectory() as folder:
        print("loaded:", ", ".join(extension.load_library(build_library(Path(folder)))))
    register()

    torch.manual_seed(0)
    eager, mine = Model(), Model()
    mine.load_state_dict(eager.state_dict())
    model = ORTModule(mine)
    optimizer = Lion(model.parameters(), lr=1e-3, weight_decay=0.01)
    averages = [torch.zeros_like(p) for p in eager.parameters()]

    worst = 0.0
    for step in range(steps):
        x = torch.randn(64, 16)
        y = x.sin().sum(dim=1)
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        expected = eager(x, y)
        expected.backward()
        lion_step(list(eager.parameters()), averages, 1e-3)
        eager.zero_grad()
        worst = max(worst, abs(loss.item() - expected.item()) / max(1.0, expected.item()))
        if step % 25 == 0:
            print(f"step {step:3}: loss {loss.item():.4f}, PyTorch {expected.item():.4f}")

    report = model.report()
    print(f"last loss {loss.item():.4f}; losses differ by at most {worst:.1e} of PyTorch's")
    print(report)
    if worst > 1e-3:
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()

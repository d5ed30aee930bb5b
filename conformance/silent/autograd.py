# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Backward: losses that share a forward, gradients inside of it, second order, what is refused."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import forward_ad

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


@program()
def two_losses_of_one_forward(s: Session) -> None:
    """Two losses of one forward, a backward each; the first retains the graph."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x).tanh()
            return y.sum(), y.square().sum()

    net = Net()
    model = s.wrap(net)
    for _ in range(3):
        x = s.leaf(3, 4)
        first, second = model(x)
        first.backward(retain_graph=True)
        s.see("after the first", [net.linear.weight.grad, x.grad])
        second.backward()
        s.gradients(model, x)


@program()
def backward_from_one_of_two(s: Session) -> None:
    """Backward from the second output alone, then from the first in the next call."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x).tanh(), self.b(x).relu()

    model = s.wrap(Net())
    for which in (1, 0, 1, 0):
        x = s.leaf(3, 4)
        outputs = model(x)
        outputs[which].square().sum().backward()
        s.gradients(model, x)


@program()
def backward_twice(s: Session) -> None:
    """A second backward without a retained graph: PyTorch refuses it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh().sum()

    model = s.wrap(Net())
    for _ in range(3):
        x = s.leaf(3, 4)
        loss = model(x)
        loss.backward()
        with s.may_raise("second backward"):
            loss.backward()
        s.gradients(model, x)


@program()
def gradient_accumulates_over_forwards(s: Session) -> None:
    """Two forwards before one backward over both, in the order that PyTorch sums."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    model = s.wrap(Net())
    for _ in range(3):
        a, b = s.leaf(3, 4), (s.values(3, 4) + 1).requires_grad_()
        first = model(a)
        second = model(first)
        third = model(b)
        (second.sum() * third.sum()).backward()
        s.gradients(model, a, b)


@program()
def operand_changed_before_backward(s: Session) -> None:
    """The caller changes an input in place between forward and backward, where its value is needed."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh() * x

    net = Net()
    model = s.wrap(net)
    for changed in ("nothing", "input", "weight", "output", "nothing"):
        x = s.values(3, 4) + 0
        y = model(x)
        with torch.no_grad():
            if changed == "input":
                x.mul_(2)
            elif changed == "weight":
                net.linear.weight.mul_(1.0)
            elif changed == "output":
                y.mul_(2)
        with s.may_raise(f"backward after a change of {changed}"):
            y.sum().backward()
        net.zero_grad()


@program()
def weight_changed_before_backward(s: Session) -> None:
    """An optimizer steps between the forward of one loss and its backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).tanh()).sum()

    net = Net()
    model = s.wrap(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        first, second = model(s.values(3, 4)), model(s.values(3, 4) + 1)
        first.backward()
        if step % 2:
            optimizer.step()
        with s.may_raise("second backward"):
            second.backward()
        s.gradients(model)


@program()
def gradient_of_the_input_in_forward(s: Session) -> None:
    """Forces: forward differentiates its energy by the input, and the loss differentiates forces."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                energy = self.linear(x).tanh().square().sum()
                (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            return energy, -slope

    model = s.wrap(Net())
    for step in range(3):
        s.train(model, s.values(3, 4) + step)


@program()
def input_gradient_without_higher_order(s: Session) -> None:
    """A saliency map in forward, without a graph of the gradient, weighs the features."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            probe = x.detach().requires_grad_()
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.linear(probe).relu().sum(), probe)
            return self.linear(x * slope.abs())

    model = s.wrap(Net())
    for step in range(3):
        s.train(model, s.leaf(3, 4) + step)


@program("pytorch#181581", 2026)
def gradient_penalty(s: Session) -> None:
    """The caller differentiates the gradient: create_graph, then backward through it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh().sum(-1)

    model = s.wrap(Net())
    for _ in range(3):
        x = s.leaf(3, 4)
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        s.see("gradient", slope)
        s.see("has a history", slope.grad_fn is not None)
        (slope.square().sum() + y.sum()).backward()
        s.gradients(model, x)


@program()
def forward_mode(s: Session) -> None:
    """Forward-mode differentiation: duals in, duals out."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    net = Net()
    model = s.wrap(net)
    s.train(model, s.leaf(3, 4))
    for _ in range(2):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(s.values(3, 4), torch.ones(3, 4))
            value, tangent = forward_ad.unpack_dual(model(dual))
            s.see("value, tangent", [value, tangent])
    value, tangent = torch.func.jvp(model, (s.values(3, 4),), (torch.ones(3, 4),))
    s.see("value, tangent of jvp", [value, tangent])


@program()
def transforms_around_the_call(s: Session) -> None:
    """torch.func.vmap and grad around the module, functional_call with other weights."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh().sum(-1)

    net = Net()
    model = s.wrap(net)
    s.train(model, s.leaf(3, 4))
    rows = s.values(5, 4)
    s.see("vmap of grad", torch.func.vmap(torch.func.grad(lambda row: model(row)))(rows))
    weights = {name: p.detach() * 2 for name, p in model.named_parameters()}
    s.see("functional_call", torch.func.functional_call(model, weights, (rows,)))
    s.train(model, s.leaf(3, 4))


@program()
def no_grad_then_grad(s: Session) -> None:
    """Evaluation without gradients, in inference mode, and training take turns on one module."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y * 2 if torch.is_grad_enabled() else y

    model = s.wrap(Net())
    s.train(model, s.leaf(3, 4))
    with torch.no_grad():
        s.call(model, s.values(3, 4))
    with torch.inference_mode():
        y = s.call(model, s.values(3, 4))
        s.see("inference tensor", y.is_inference())
    s.train(model, s.leaf(3, 4))
    with torch.no_grad():
        s.call(model, s.leaf(3, 4))


@program("pytorch#100977", 2023)
def grad_mode_inside(s: Session) -> None:
    """Forward disables gradients for a part, enables them within, and detaches another part."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with torch.no_grad():
                frozen = self.a(x)
                with torch.enable_grad():
                    warm = self.b(x)
            return frozen, warm, self.a(frozen) + warm.detach()

    model = s.wrap(Net())
    with torch.no_grad():
        s.call(model, s.values(3, 4))
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


@program("pytorch#114338", 2023)
def equal_results_with_and_without_gradient(s: Session) -> None:
    """The same expression once with and once without gradients is two different tensors."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            with torch.enable_grad():
                a = self.linear(x) + 1
            with torch.no_grad():
                b = self.linear(x) + 1
            return a, b

    model = s.wrap(Net())
    for _ in range(2):
        s.train(model, s.leaf(3, 4))
        with torch.no_grad():
            a, b = model(s.leaf(3, 4))
            s.see("outputs", [a, b])
            s.same_tensor("outputs", a, b)


@program()
def requires_grad_changes(s: Session) -> None:
    """The input learns in one call and not in the next; a layer is frozen and thawed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x).tanh())

    net = Net()
    model = s.wrap(net)
    for learns, frozen in (
        (True, False),
        (False, False),
        (True, True),
        (False, True),
        (True, False),
    ):
        net.a.requires_grad_(not frozen)
        s.train(model, s.values(3, 4).requires_grad_(learns))

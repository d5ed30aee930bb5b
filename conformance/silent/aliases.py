# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Outputs that share memory with inputs, parameters, buffers or one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


@program()
def views_of_the_input(s: Session) -> None:
    """Forward returns views of its input beside a result; the caller writes into a view."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return self.linear(x), x.view(-1), x.t(), x[1:]

    model = s.wrap(Net())
    for _ in range(3):
        x = s.values(3, 4)
        y, flat, turned, rows = s.train(model, x)
        s.same_tensor("flat", flat, x)
        s.same_tensor("turned", turned, x)
        flat[5] = 7.0
        s.see("after a write through the view", [x, turned, rows])


@program()
def input_returned(s: Session) -> None:
    """Forward returns its input itself, and the same result twice."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x)
            return y, x, y

    model = s.wrap(Net())
    for _ in range(3):
        x = s.values(3, 4)
        y, same, again = s.train(model, x)
        s.same_tensor("input", same, x)
        s.same_tensor("result", y, again)
        with torch.no_grad():
            same.zero_()
            y.zero_()
        s.see("after writes", [x, again])


@program()
def weight_returned(s: Session) -> None:
    """Forward returns a parameter, a view of it and a buffer, which the caller writes."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            weight = self.linear.weight
            return self.linear(x) + self.mean, weight, weight[0], self.mean

    net = Net()
    model = s.wrap(net)
    for _ in range(3):
        x = s.leaf(3, 4)
        y, weight, row, mean = model(x)
        s.see("outputs", [y, weight, row, mean])
        s.same_tensor("weight", weight, net.linear.weight)
        s.same_tensor("mean", mean, net.mean)
        (y.sum() + weight.square().sum() + row.sum()).backward()
        s.gradients(model, x)
        with torch.no_grad():
            weight[0, 0] += 1
            mean += 1
        s.see("after writes", [net.linear.weight, net.mean])


@program()
def views_of_one_result(s: Session) -> None:
    """Outputs are chunks of one tensor; the caller writes one in place and runs backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x)
            return y[:, :3], y[:, 3:], y

    model = s.wrap(Net())
    for _ in range(3):
        x = s.leaf(3, 4)
        left, right, whole = model(x)
        left.mul_(2)
        s.see("after a write", [left, right, whole])
        whole.square().sum().backward()
        s.gradients(model, x)


@program()
def result_kept_across_calls(s: Session) -> None:
    """The caller keeps outputs and gradients of earlier calls; later calls leave them alone."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    net = Net()
    wrapped = s.wrap(net)
    kept: list[Any] = []
    for step in range(5):
        x = s.leaf(3, 4) + step
        y = wrapped(x)
        y.sum().backward()
        kept.append([y, net.linear.weight.grad])
        net.linear.weight.grad = None
        s.see("kept", kept)


@program("pytorch#191449", 2026)
def resize_of_a_view(s: Session) -> None:
    """A view of an intermediate is resized; the tensor that it is a view of keeps its shape."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = x + 1
            alias = base.view(-1)
            alias.resize_(12)
            return (base + 1) * self.scale

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.values(3))


@program("pytorch#191844", 2026)
def view_under_no_grad_is_the_same_data(s: Session) -> None:
    """A result and a view of it made without gradients are both returned, and share memory."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            with torch.no_grad():
                flat = y.view(-1)
            return y, flat

    model = s.wrap(Net())
    for _ in range(3):
        x = s.leaf(3, 4)
        y, flat = model(x)
        s.same_tensor("view", y, flat)
        y.sum().backward()
        s.gradients(model, x)


@program("pytorch#173926", 2026)
def loss_and_a_view_without_gradient(s: Session) -> None:
    """Forward returns a loss and a view of the layer's output made under no_grad."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            with torch.no_grad():
                flat = y.view(-1)
            return y.square().mean(), flat

    model = s.wrap(Net())
    for _ in range(3):
        x = s.leaf(3, 4)
        loss, flat = model(x)
        s.see("loss, view", [loss, flat.detach()])
        loss.backward()
        s.gradients(model, x)


@program("pytorch#194760", 2026)
def detached_beside_views(s: Session) -> None:
    """Differentiable views of a tensor are returned beside a detached alias of it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x)
            return y[:2], (y * 1).detach(), y + 0, y.detach()

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


@program("pytorch#97083", 2023)
def view_of_a_constant_made_in_forward(s: Session) -> None:
    """Forward makes a tensor, takes views of it, writes it between reads, returns a view."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            table = torch.ones(4)
            same, part = table.reshape(4), table[0:2]
            same[0] = 2
            before = part.sum()
            table[1] = 5
            return x[:2] * part * self.scale + before

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(4))


@program()
def one_tensor_as_two_arguments(s: Session) -> None:
    """The caller passes a tensor twice, then two equal ones, then a tensor and a view of it."""

    class Net(Linear):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a = self.linear(a)
            return a * b + (1.0 if a is b else 0.0)

    model = s.wrap(Net())
    x = s.leaf(3, 4)
    for other in (x, x, x.detach().clone().requires_grad_(), x[:], x.detach()):
        s.train(model, x, other)


@program()
def overlapping_arguments_written(s: Session) -> None:
    """Forward writes one argument in place; another argument is a view of the same memory."""

    class Net(Linear):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            a.mul_(2)
            return self.linear(b)

    model = s.wrap(Net())
    for kind in ("apart", "apart", "overlap", "overlap", "apart"):
        storage = s.values(5, 4)
        a, b = storage[:3], (storage[2:] if kind == "overlap" else s.values(3, 4))
        s.train(model, a, b)
        s.see("storage", storage)


@program()
def buffer_made_in_forward(s: Session) -> None:
    """Forward registers a buffer at its first call and updates it afterwards."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if not hasattr(self, "mean"):
                self.register_buffer("mean", torch.zeros(4))
            self.mean.lerp_(y.detach().mean(0), 0.5)
            return y - self.mean

    net = Net()
    model = s.wrap(net)
    for step in range(4):
        s.train(model, s.leaf(3, 4) + step)
        s.see("names", [name for name, _ in net.named_buffers()])


@program()
def shared_parameter_untied(s: Session) -> None:
    """Two layers share a weight; between calls the tie is cut."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 5, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(ids))

    net = Net()
    model = s.wrap(net)
    for step in range(4):
        if step == 2:
            net.head.weight = nn.Parameter(net.embed.weight.detach() * 2)
        s.train(model, torch.tensor([0, 3, 3]))

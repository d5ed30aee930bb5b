# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Patterns of trainings: queues, code books, schedules, checkpoints, wrapped parts, loaded weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


@program()
def queue_with_a_pointer(s: Session) -> None:
    """MoCo: forward writes keys into a queue at a pointer that it takes out of a buffer."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.zeros(6, 4))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            logits = y @ self.queue.clone().detach().t()
            at = int(self.pointer)
            self.queue[at : at + x.shape[0]] = y.detach()
            self.pointer[0] = (at + x.shape[0]) % 6
            return logits

    model = s.wrap(Net())
    for step in range(5):
        s.train(model, s.leaf(2, 4) + step)


@program()
def buffer_that_grows(s: Session) -> None:
    """Forward appends rows to a buffer by assignment: its size is another in each call."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("memory", torch.zeros(1, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            scores = (y @ self.memory.t()).softmax(-1)
            y = y + scores @ self.memory
            self.memory = torch.cat((self.memory, y.detach()[:1]))
            return y

    model = s.wrap(Net())
    for step in range(5):
        s.train(model, s.leaf(2, 4) + step)


@program()
def code_book_by_moving_means(s: Session) -> None:
    """VQ-VAE: the code book is a parameter without gradient, moved in forward under no_grad."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.codes = nn.Parameter(s.values(3, 4), requires_grad=False)
            self.register_buffer("counts", torch.ones(3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            nearest = torch.cdist(y.detach(), self.codes).argmin(-1)
            hot = nn.functional.one_hot(nearest, 3).float()
            if self.training:
                with torch.no_grad():
                    self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                    sums = hot.t() @ y
                    self.codes.data.mul_(0.9).add_(sums / self.counts.unsqueeze(1), alpha=0.1)
            chosen = self.codes[nearest]
            return y + (chosen - y).detach(), (y - chosen).square().mean()

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        if step == 3:
            model.eval()
        s.train(model, s.leaf(5, 4) * (step + 1))
        s.see("codes", net.codes)


@program()
def batch_norm_used_twice(s: Session) -> None:
    """One normalization is applied to both halves of a pair: its statistics move twice."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Without a bias, whose gradient is what rounding leaves.
            self.linear, self.norm = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)

        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return (self.norm(self.linear(a)) - self.norm(self.linear(b))).square().sum(-1)

    model = s.wrap(Net())
    for step in range(4):
        s.train(model, s.leaf(5, 4) + step, s.leaf(5, 4).neg())


@program()
def schedule_of_many_steps(s: Session) -> None:
    """A number of Python grows with each call, and weighs a term, for 20 steps."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            y = self.linear(x)
            return y + min(1.0, self.step / 10) * y.square()

    net = Net()
    model = s.wrap(net)
    for _ in range(20):
        s.train(model, s.leaf(3, 4))
    s.see("step", net.step)


@program()
def schedule_set_by_the_caller(s: Session) -> None:
    """The caller sets a weight of the loss before each of 14 steps."""

    class Net(Linear):
        beta = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y + self.beta * y.square()

    net = Net()
    model = s.wrap(net)
    for step in range(14):
        net.beta = step / 7 if step < 10 else 1.0
        s.train(model, s.leaf(3, 4))


@program()
def checkpoint_that_counts(s: Session) -> None:
    """A layer under torch.utils.checkpoint counts its runs: once forward, once in backward."""

    class Block(Linear):
        runs = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return self.linear(x).tanh()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False)

    net = Net()
    model = s.wrap(net)
    for _ in range(4):
        s.train(model, s.leaf(3, 4))
        s.see("runs", net.block.runs)


@program()
def weights_loaded(s: Session) -> None:
    """Weights are loaded between calls: copied, assigned, and through a deep copy."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    net = Net()
    model = s.wrap(net)
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))
    others = {name: t.detach() * 2 + 1 for name, t in net.state_dict().items()}
    net.load_state_dict(copy.deepcopy(others))
    s.train(model, s.leaf(3, 4))
    net.load_state_dict({name: t * 3 for name, t in others.items()}, assign=True)
    s.train(model, s.leaf(3, 4))
    net.linear.weight.data = others["linear.weight"]
    s.train(model, s.leaf(3, 4))


@program()
def parts_wrapped(s: Session) -> None:
    """Two parts of a model are wrapped, share a layer, and are called from PyTorch in turns."""
    shared = nn.Linear(4, 4)
    first = s.wrap(nn.Sequential(shared, nn.Tanh()))
    second = s.wrap(nn.Sequential(nn.Linear(4, 4), shared))
    for step in range(4):
        x = s.leaf(3, 4)
        y = second(first(x) * (step + 1))
        s.see("output", y)
        s.backward(y)
        s.see("gradient", [shared.weight.grad, x.grad])
        shared.zero_grad()
        with torch.no_grad():
            shared.weight.add_(0.1)


@program()
def module_wrapped_twice(s: Session) -> None:
    """One module is wrapped twice; statistics and weights change through both."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x))

    net = Net()
    one, two = s.wrap(net), s.wrap(net)
    for step in range(4):
        s.train(one if step % 2 else two, s.leaf(5, 4) + step)


@program()
def recursion(s: Session) -> None:
    """Forward calls the module itself, and a part of it, with another argument."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            y = self.linear(x).tanh()
            return y + self(y, depth - 1) if depth else y

    model = s.wrap(Net())
    for depth in (2, 2, 1, 3):
        s.train(model, s.leaf(3, 4), depth)


@program()
def call_of_the_module_overridden(s: Session) -> None:
    """The module's class has a __call__ of its own, around forward."""

    class Net(Linear):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 2 + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


@program()
def other_methods_called(s: Session) -> None:
    """The caller runs forward and another method of the module in turns; both write a buffer."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(()))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            self.total += 1
            return self.linear(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encode(x).relu() * self.total

    net = Net()
    model: Any = s.wrap(net)
    for _ in range(3):
        s.train(model, s.leaf(3, 4))
        y = model.encode(s.values(3, 4))
        s.see("encoded", [y, net.total])


@program()
def optimizer_steps(s: Session) -> None:
    """Adam with decay and clipping over ten steps, a group frozen half-way."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.b(self.a(x).relu()), y)

    net = Net()
    model = s.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    for step in range(10):
        loss = model(s.values(3, 4) + step / 10, torch.tensor([0, 1, step % 2]))
        s.see("loss", loss)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        s.see("norm", norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if step == 5:
            net.a.requires_grad_(False)
    s.see("weights", list(net.parameters()))


@program()
def gradients_accumulate(s: Session) -> None:
    """Gradients of three batches add up in tensors that the caller holds, then are zeroed in place."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh().mean()

    net = Net()
    model = s.wrap(net)
    held: torch.Tensor | None = None
    for step in range(6):
        model(s.values(3, 4) + step).backward()
        gradient = net.linear.weight.grad
        s.see("gradient", gradient)
        s.see("same tensor", held is None or held is gradient)
        held = gradient
        if step % 3 == 2:
            net.zero_grad(set_to_none=False)
            s.see("zeroed", held)


@program()
def sparse_gradient_of_an_embedding(s: Session) -> None:
    """An embedding that asks for sparse gradients gets them, or equal ones."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(6, 3, sparse=True, padding_idx=0)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embed(ids).tanh()

    net = Net()
    model = s.wrap(net)
    for _ in range(3):
        y = model(torch.tensor([[0, 2], [2, 5]]))
        s.backward(y)
        gradient = net.embed.weight.grad
        s.see("is sparse", gradient.is_sparse)
        s.see("gradient", gradient.to_dense())
        net.zero_grad()


@program()
def fourier_features(s: Session) -> None:
    """A real transform, a learnt complex filter, and back; gradients of a complex parameter."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            values = s.values(5, 2)
            self.filter = nn.Parameter(torch.view_as_complex(values).clone())
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.irfft(torch.fft.rfft(self.linear(x)) * self.filter, n=8)

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 8))

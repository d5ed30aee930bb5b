# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Hooks: of tensors in forward, of modules, of parameters, of saved tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


@program("pytorch#172020", 2026)
def tensor_hook_in_forward(s: Session) -> None:
    """Forward registers a hook on an intermediate that changes its gradient."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.linear(x)
            if z.requires_grad:
                z.register_hook(lambda gradient: gradient * 2 + 1)
            return z.tanh()

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


@program()
def tensor_hook_keeps_gradients(s: Session) -> None:
    """Grad-CAM: forward's hook stores the gradient of a feature map in the module."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(2, 3, 3), nn.Linear(3, 2)
            self.kept: list[torch.Tensor] = []
            self.features: torch.Tensor | None = None

        def keep(self, gradient: torch.Tensor) -> None:
            self.kept.append(gradient)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            features = self.conv(x).relu()
            features.register_hook(self.keep)
            self.features = features
            return self.head(features.mean((2, 3)))

    net = Net()
    model = s.wrap(net)
    for _ in range(3):
        s.train(model, s.leaf(2, 2, 5, 5))
        s.see("kept", net.kept)
        s.see("features", net.features)


@program("pytorch#91468", 2022)
def retain_grad_in_forward(s: Session) -> None:
    """Forward retains the gradient of what it returns; the caller reads it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z = self.linear(x)
            z.retain_grad()
            return z, z.tanh()

    model = s.wrap(Net())
    for _ in range(3):
        x = s.leaf(3, 4)
        z, y = model(x)
        y.square().sum().backward()
        s.see("gradient of the intermediate", z.grad)
        s.gradients(model, x)


@program()
def hook_on_the_input(s: Session) -> None:
    """The caller's hook on an input and on an output sees and changes gradients."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    model = s.wrap(Net())
    seen: list[torch.Tensor] = []
    for _ in range(3):
        leaf = s.leaf(3, 4)
        x = leaf * 1
        x.register_hook(lambda gradient: gradient * 3)
        y = model(x)
        y.register_hook(lambda gradient: seen.append(gradient.clone()))
        s.backward(y)
        s.see("seen", seen)
        s.gradients(model, leaf)


@program("pytorch#117265", 2024)
def module_backward_hooks_added_later(s: Session) -> None:
    """Backward hooks of a submodule are registered after the first calls, then removed."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    net = Net()
    model = s.wrap(net)
    for _ in range(2):
        s.train(model, s.leaf(3, 4))
    linear = net.linear
    pre = linear.register_full_backward_pre_hook(lambda m, out: tuple(g * 2 for g in out))
    s.train(model, s.leaf(3, 4))
    full = linear.register_full_backward_hook(lambda m, inp, out: tuple(g * 3 for g in inp))
    s.train(model, s.leaf(3, 4))
    pre.remove()
    full.remove()
    s.train(model, s.leaf(3, 4))


@program("pytorch#117758", 2024)
def forward_hooks_added_later(s: Session) -> None:
    """Forward hooks and pre-hooks are registered after the first calls and record or change values."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    net = Net()
    model = s.wrap(net)
    norms: list[torch.Tensor] = []

    def record(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        norms.append(output.detach().norm())

    for _ in range(2):
        s.train(model, s.leaf(3, 4))
    recorded = net.linear.register_forward_hook(record)
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4) + 1)
    s.see("norms", norms)
    scaled = net.linear.register_forward_pre_hook(lambda m, inputs: (inputs[0] * 2,))
    s.train(model, s.leaf(3, 4))
    recorded.remove()
    s.train(model, s.leaf(3, 4))
    scaled.remove()
    s.train(model, s.leaf(3, 4))
    s.see("norms", norms)


@program()
def hooks_of_the_wrapped_module(s: Session) -> None:
    """Forward hooks on the module itself and on what wraps it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    net = Net()
    told: list[str] = []
    net.register_forward_hook(lambda m, inputs, output: told.append("module") or output * 2)
    model = s.wrap(net)
    for step in range(4):
        if step == 2:
            model.register_forward_hook(lambda m, inputs, output: output + 1)
        s.train(model, s.leaf(3, 4))
        s.see("told", told)


@program()
def parameter_hooks(s: Session) -> None:
    """Hooks on parameters clip, count and step; some are registered after the first calls."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    net = Net()
    model = s.wrap(net)
    calls: list[int] = []
    s.train(model, s.leaf(3, 4))
    net.linear.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    s.train(model, s.leaf(3, 4))

    def step(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=0.1)
        calls.append(parameter.dim())
        parameter.grad = None

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        s.train(model, s.leaf(3, 4))
        s.see("weights", [net.linear.weight, sorted(calls)])


@program("pytorch#116221", 2023)
def saved_tensor_hooks(s: Session) -> None:
    """Around the call, hooks of saved tensors change what backward reads."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(s.values(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = s.wrap(Net())
    s.train(model, s.leaf(3, 4))
    packed: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.dim())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor * 2):
        for _ in range(2):
            s.train(model, s.leaf(3, 4))
    s.see("packed any", bool(packed))
    s.train(model, s.leaf(3, 4))


@program()
def global_module_hooks(s: Session) -> None:
    """A hook for all modules is registered after the first calls."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    model = s.wrap(Net())
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))

    def double(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output * 2 if isinstance(module, nn.Linear) else None

    hook = nn.modules.module.register_module_forward_hook(double)
    try:
        s.train(model, s.leaf(3, 4))
        s.train(model, s.leaf(3, 4))
    finally:
        hook.remove()
    s.train(model, s.leaf(3, 4))

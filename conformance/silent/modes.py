# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modes around the call and inside of it: function and dispatch modes, autocast, training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


class Residual(Linear):
    """One layer and a sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the layer's output plus its input, through tanh."""
        return torch.tanh(self.linear(x) + x)


class DoubledTanh(TorchFunctionMode):
    """Doubles what tanh returns."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (torch.tanh, torch.Tensor.tanh) else result


class AddIsMultiply(TorchDispatchMode):
    """Multiplies where the program adds."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.add.Tensor:
            function = torch.ops.aten.mul.Tensor
        return function(*args, **(kwargs or {}))


class Counts(TorchDispatchMode):
    """Counts the matrix products that PyTorch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.products += function is torch.ops.aten.addmm.default
        return function(*args, **(kwargs or {}))


@program("pytorch#115741", 2023)
def function_mode_around_the_call(s: Session) -> None:
    """A TorchFunctionMode changes a function, in the first calls, then not, then again."""
    for first in (True, False):
        model = s.wrap(Residual())
        for active in (first, first, not first, first):
            if active:
                with DoubledTanh():
                    s.train(model, s.leaf(3, 4))
            else:
                s.train(model, s.leaf(3, 4))


@program("pytorch#105929", 2023)
def dispatch_mode_around_the_call(s: Session) -> None:
    """A TorchDispatchMode replaces an operator, before and after calls without it."""
    for first in (True, False):
        model = s.wrap(Residual())
        for active in (first, first, not first, first):
            x = s.leaf(3, 4)
            if active:
                with AddIsMultiply():
                    y = model(x)
            else:
                y = model(x)
            s.see("output", y)
            s.backward(y)
            s.gradients(model, x)


@program("pytorch#115653", 2023)
def dispatch_mode_counts(s: Session) -> None:
    """A mode that counts matrix products must see those of the module."""
    model = s.wrap(Residual())
    for _ in range(3):
        with Counts() as counts:
            model(s.values(3, 4))
        s.see("products", counts.products)


@program()
def function_mode_inside(s: Session) -> None:
    """Forward enters a TorchFunctionMode for a part of its work."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with DoubledTanh():
                y = torch.tanh(self.linear(x))
            return y + torch.tanh(x)

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


@program()
def training_mode_switches(s: Session) -> None:
    """train() and eval() of the whole and of one layer between calls, with batch statistics."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(self.norm(x))
            return y * 2 if self.training else y

    net = Net()
    model = s.wrap(net)
    s.train(model, s.leaf(6, 4))
    model.eval()
    s.train(model, s.leaf(6, 4) + 1)
    model.train()
    s.train(model, s.leaf(6, 4) + 1)
    net.norm.eval()
    s.train(model, s.leaf(6, 4) + 2)
    net.train()
    s.train(model, s.leaf(6, 4))


@program(coarse=torch.bfloat16)
def autocast_switches(s: Session) -> None:
    """The same call with and without autocast, and with a part of forward outside of it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.linear(x)
            with torch.autocast("cpu", enabled=False):
                z = self.linear(y.float())
            return y, z

    model = s.wrap(Net())
    for enabled in (False, True, True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y, z = model(s.values(3, 4))
        s.see("outputs", [y, z])
        (y.float().sum() + z.sum()).backward()
        s.gradients(model)


@program()
def dtype_of_the_module_changes(s: Session) -> None:
    """The module goes to float64 and back between calls; a scalar of Python follows."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * 0.1 + torch.full((), 1 / 3, dtype=x.dtype)

    model = s.wrap(Net())
    for dtype in (torch.float32, torch.float64, torch.float64, torch.float32):
        model.to(dtype)
        s.train(model, s.leaf(3, 4, dtype=dtype))


@program()
def switches_of_pytorch(s: Session) -> None:
    """Switches of PyTorch that forward asks for, and the rounding of products, change."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if torch.are_deterministic_algorithms_enabled():
                y = y * 2
            return y + 1 if torch.get_float32_matmul_precision() == "high" else y

    model = s.wrap(Net())
    try:
        for switched, products in ((0, "highest"), (0, "highest"), (1, "highest"), (0, "high")):
            torch.use_deterministic_algorithms(bool(switched))
            torch.set_float32_matmul_precision(products)
            s.train(model, s.leaf(3, 4))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What forward asks: of its arguments, of tensors, of the process. Arguments that compare equal."""

from __future__ import annotations

import enum
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


def _kind(value: Any) -> float:
    """Return a number that tells 1, True, 1.0, 0.0 and -0.0 apart."""
    if isinstance(value, bool):
        return 3.0
    return 2.0 if isinstance(value, int) else math.copysign(1.0, value)


@program()
def arguments_that_compare_equal(s: Session) -> None:
    """1, True and 1.0 compare equal, 0.0 and -0.0 too; forward tells them apart."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, value: Any) -> torch.Tensor:
            return self.linear(x) * _kind(value)

    model = s.wrap(Net())
    for value in (1, 1, True, 1.0, 1, 0.0, -0.0, 0, False, 0.0):
        s.train(model, s.leaf(3, 4), value)


@program()
def attributes_that_compare_equal(s: Session) -> None:
    """The same for an attribute, and for the dtype of a result that depends on it."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.value: Any = 1

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x) * _kind(self.value), torch.arange(3) * self.value

    net = Net()
    model = s.wrap(net)
    for value in (1, 1, True, 1.0, 0.0, -0.0, 0, 1):
        net.value = value
        s.train(model, s.leaf(3, 4))


@program("pytorch#196173", 2026)
def equal_lists_told_apart(s: Session) -> None:
    """Two equal lists; forward asks which of them a third name is."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = [1], [1]
            self.active = self.first

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y if self.active is self.first else y.neg()

    net = Net()
    model = s.wrap(net)
    for step in range(5):
        net.active = net.second if step in (2, 4) else net.first
        s.train(model, s.leaf(3, 4))


@program()
def facts_about_the_argument(s: Session) -> None:
    """Forward asks for requires_grad, is_leaf, strides, offset and history of its input."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            facts = [
                x.requires_grad,
                x.is_leaf,
                x.is_contiguous(),
                tuple(x.stride()),
                x.storage_offset(),
                x.grad_fn is None,
                x._base is None,
            ]
            return self.linear(x) * (1 + sum(map(bool, facts))), facts

    model = s.wrap(Net())
    rows = s.values(6, 4)
    inputs = (
        s.values(3, 4),
        s.leaf(3, 4),
        s.leaf(3, 4) * 1,
        s.values(4, 3).t(),
        rows[3:],
        nn.Parameter(s.values(3, 4)),
        rows[::2],
        s.values(1, 4).expand(3, 4),
    )
    for x in (inputs[0], *inputs):
        output, facts = model(x)
        s.see("facts", facts)
        s.see("output", output)


@program()
def class_of_the_argument(s: Session) -> None:
    """Forward asks whether its input is exactly a Tensor or a Parameter."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
            y = self.linear(x)
            y = y * 2 if type(x) is torch.Tensor else y
            return y * 3 if isinstance(x, nn.Parameter) else y, type(x).__name__

    model = s.wrap(Net())
    for x in (s.values(3, 4), s.values(3, 4), nn.Parameter(s.values(3, 4)), s.values(3, 4)):
        s.see("output", model(x))


@program()
def kinds_of_arguments_change(s: Session) -> None:
    """An optional tensor, an enum, a string, a named tuple and more arguments come and go."""

    class Mode(enum.Enum):
        plain = 1
        squared = 2

    class Pair(NamedTuple):
        a: torch.Tensor
        b: torch.Tensor | None

    class Net(Linear):
        def forward(self, pair: Pair, *more: torch.Tensor, mode: Any = None, **named: Any) -> Any:
            y = self.linear(pair.a)
            if pair.b is not None:
                y = y + pair.b
            for other in more:
                y = y * other
            if mode is Mode.squared or mode == "squared":
                y = y.square()
            return {"y": y, **{name: y * value for name, value in named.items()}}

    model = s.wrap(Net())
    x, b = s.values(3, 4), s.values(4)
    calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]] = (
        ((Pair(x, None),), {}),
        ((Pair(x, b),), {}),
        ((Pair(x, None), b), {}),
        ((Pair(x, b), b, b), {"mode": Mode.squared}),
        ((Pair(x, b), b, b), {"mode": Mode.plain}),
        ((Pair(x, None),), {"mode": "squared", "double": 2}),
        ((Pair(x, None),), {"mode": "squared", "triple": 3}),
        ((Pair(x, None),), {"mode": "other"}),
    )
    for args, kwargs in calls:
        s.train(model, *args, **kwargs)


@program()
def list_of_changing_length(s: Session) -> None:
    """A list of tensors is longer in one call than in another, and has a None in a third."""

    class Net(Linear):
        def forward(self, parts: list[torch.Tensor | None]) -> torch.Tensor:
            return sum(self.linear(p) * i for i, p in enumerate(parts, 1) if p is not None)

    model = s.wrap(Net())
    x = s.values(3, 4)
    for parts in ([x], [x, x + 1], [x, None, x + 2], [x, x + 1], [x]):
        s.train(model, parts)


@program()
def values_asked(s: Session) -> None:
    """Forward takes numbers out of tensors: item, tolist, float, numpy."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
            first = x[0, 0].item()
            row = x[1].tolist()
            spread = float(np.ptp(x.detach().numpy()))
            return self.linear(x) * first + sum(row) * spread, [first, row]

    model = s.wrap(Net())
    for step in range(4):
        s.train(model, s.leaf(3, 4) * (step + 1))


@program()
def constant_from_values(s: Session) -> None:
    """Forward makes a tensor from numbers that it takes out of its input by NumPy."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            ranks = np.argsort(x.detach().numpy(), axis=0).astype(np.float32)
            return self.linear(x) + torch.from_numpy(ranks)

    model = s.wrap(Net())
    for step in range(4):
        s.train(model, (s.values(3, 4) + step).cos().requires_grad_())


@program()
def number_of_results_depends_on_values(s: Session) -> None:
    """nonzero, masked_select and unique give as many results as the values say."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.linear(x)
            chosen = x > 0.2
            return y[chosen], chosen.nonzero(), torch.unique((x * 3).long()), y[chosen[:, 0]]

    model = s.wrap(Net())
    for shift in (0.0, 0.0, 0.5, -2.0, 2.0):
        s.train(model, s.values(3, 4) + shift)


@program()
def sizes_that_were_equal(s: Session) -> None:
    """Sizes that agree in the first calls differ later, and a size of 1 comes first."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) @ keys.transpose(-1, -2)).softmax(-1) @ keys + x.shape[-2]

    model = s.wrap(Net())
    for rows, columns in ((1, 1), (1, 1), (3, 3), (3, 5), (5, 3), (1, 4), (4, 1)):
        s.train(model, s.leaf(rows, 4), s.leaf(columns, 4))


@program()
def broadcast_of_a_size_of_one(s: Session) -> None:
    """An axis has one element in the first call, and broadcasts; later it has more."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            y = self.linear(x) + bias
            return y.sum(0) if bias.shape[0] == 1 else y.sum(0) * 2

    model = s.wrap(Net())
    for rows in (1, 1, 3, 1, 3):
        s.train(model, s.leaf(3, 4), s.leaf(rows, 4))


@program()
def environment_and_files(s: Session) -> None:
    """Forward reads a number from an environment variable, another one from a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scale"

        class Net(Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                scale = float(os.environ.get("SILENT_SCALE", "1"))
                return self.linear(x) * scale + float(file.read_text())

        model = s.wrap(Net())
        for variable, content in (("1", "0"), ("1", "0"), ("2", "0"), ("2", "5"), ("1", "0")):
            os.environ["SILENT_SCALE"] = variable
            file.write_text(content)
            s.train(model, s.leaf(3, 4))
        del os.environ["SILENT_SCALE"]


def _activation(x: torch.Tensor) -> torch.Tensor:
    return x.relu()


@program()
def function_of_the_module_replaced(s: Session) -> None:
    """A global function that forward calls is replaced, as tests and plugins do."""
    global _activation
    before = _activation

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _activation(self.linear(x))

    model = s.wrap(Net())
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))
    try:
        _activation = torch.tanh
        s.train(model, s.leaf(3, 4))
        _activation = lambda x: x * 3  # noqa: E731
        s.train(model, s.leaf(3, 4))
    finally:
        _activation = before
    s.train(model, s.leaf(3, 4))


@program()
def function_of_pytorch_replaced(s: Session) -> None:
    """torch.nn.functional.relu is replaced and put back."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.relu(self.linear(x))

    model = s.wrap(Net())
    s.train(model, s.leaf(3, 4))
    s.train(model, s.leaf(3, 4))
    before = nn.functional.relu
    try:
        nn.functional.relu = lambda x, inplace=False: before(x) * 10
        s.train(model, s.leaf(3, 4))
    finally:
        nn.functional.relu = before
    s.train(model, s.leaf(3, 4))


class Scaled(torch.Tensor):
    """A tensor of the user's own class, which doubles what mul returns."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_function__(function, types, args, kwargs or {})
        return result + result if function is torch.Tensor.mul else result


@program()
def tensor_of_an_own_class(s: Session) -> None:
    """The caller passes a tensor of a class of his own, and a plain one before and after."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).mul(2.0)

    model = s.wrap(Net())
    plain = s.values(3, 4)
    for x in (plain, plain, plain.as_subclass(Scaled), plain):
        y = model(x)
        s.see("class", type(y).__name__)
        s.see("output", y.as_subclass(torch.Tensor))


@program()
def gradient_read_in_forward(s: Session) -> None:
    """Forward scales by the gradient that its weight has from the step before."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            if self.linear.weight.grad is not None:
                y = y * self.linear.weight.grad.abs().sum()
            return y

    net = Net()
    model = s.wrap(net)
    for _ in range(4):
        y = model(s.values(3, 4))
        s.see("output", y)
        y.sum().backward()
    net.zero_grad()
    s.see("output", model(s.values(3, 4)))

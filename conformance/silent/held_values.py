# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Values that a module holds: containers in containers, their order, classes, types, settings of layers."""

from __future__ import annotations

import array
import collections
import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from conformance.silent.parts import Linear, Reads, train_through
from conformance.silent.program import Session, program


@program()
def mappings_around_a_dict(s: Session) -> None:
    """A MappingProxyType, a ChainMap, a UserDict and a dict's view show what the dict has now."""
    table = {"scale": 1.0}
    proxy, chain = types.MappingProxyType(table), collections.ChainMap({}, table)
    user, view = collections.UserDict(table), table.values()

    def read() -> float:
        return proxy["scale"] * chain["scale"] + sum(view) + user["scale"]

    train_through(
        s,
        Reads(read),
        lambda: table.update(scale=2.0),
        lambda: chain.update(scale=3.0),
        lambda: user.update(scale=4.0),
        lambda: table.update(more=1.0),
    )


@program()
def buffers_of_bytes(s: Session) -> None:
    """A bytearray, a memoryview, an array.array and a scalar of NumPy in an array of no dimensions."""
    raw, numbers, scalar = bytearray(b"\x01\x02"), array.array("d", [1.0]), np.array(1.0)
    view = memoryview(raw)

    def change_scalar() -> None:
        scalar[()] = 3.0

    train_through(
        s,
        Reads(lambda: raw[0] * view[1] * numbers[0] * float(scalar)),
        lambda: operator.setitem(raw, 0, 5),
        lambda: operator.setitem(view, 1, 1),
        lambda: operator.setitem(numbers, 0, 2.0),
        change_scalar,
    )


@program()
def nested_containers(s: Session) -> None:
    """A list in a tuple in a named tuple in a dict in a frozen dataclass's attribute."""
    Pair = collections.namedtuple("Pair", ("left", "right"))
    deep = {"pair": Pair(([1.0],), {"b": (2.0, [3.0])})}

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.deep = deep

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pair = self.deep["pair"]
            return self.linear(x) * pair.left[0][0] + pair.right["b"][1][-1]

    def replace() -> None:
        deep["pair"] = Pair(([5.0],), {"b": (2.0, [3.0])})

    train_through(
        s,
        Net(),
        lambda: operator.setitem(deep["pair"].left[0], 0, 2.0),
        lambda: deep["pair"].right["b"][1].append(7.0),
        replace,
    )


@program()
def containers_shared_with_the_caller(s: Session) -> None:
    """A list, a dict and a list in a tuple are attributes that the caller holds too, and changes."""
    scales, options, pair = [1.0], {"offset": 0.0}, ([1.0],)

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.scales, self.options, self.pair = scales, options, pair

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scales[-1] * self.pair[0][0] + self.options["offset"]

    net = Net()
    train_through(
        s,
        net,
        lambda: scales.append(2.0),
        lambda: options.update(offset=1.0),
        lambda: operator.setitem(pair[0], 0, 3.0),
    )
    s.see("still shared", [net.scales is scales, net.options is options, net.pair[0] is pair[0]])


@program()
def order_of_a_dict(s: Session) -> None:
    """The first value of an OrderedDict and of a plain dict, whose order changes, not what they hold."""
    ordered = collections.OrderedDict(a=1.0, b=2.0)
    table = {"a": 1.0, "b": 2.0}

    def read() -> float:
        return next(iter(ordered.values())) * 10 + next(iter(table.values()))

    def turn() -> None:
        table["a"] = table.pop("a")

    train_through(s, Reads(read), lambda: ordered.move_to_end("a"), turn)


@program()
def layers_in_another_order(s: Session) -> None:
    """The layers of a Sequential and of a ModuleDict change places."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
            self.named = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Sigmoid()})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.chain(x)
            for layer in self.named.values():
                x = layer(x)
            return x

    net = Net()

    def swap() -> None:
        net.chain[0], net.chain[2] = net.chain[2], net.chain[0]

    def turn() -> None:
        net.named["a"] = net.named.pop("a")

    train_through(s, net, swap, turn, lambda: net.chain.append(nn.ReLU()))


@program()
def class_of_an_object_changes(s: Session) -> None:
    """An object and a layer are given another class; a method of a class is exchanged."""

    class Gain:
        def get(self) -> float:
            return 1.0

    class Other(Gain):
        def get(self) -> float:
            return 2.0

    gain = Gain()
    net = Reads(lambda: gain.get())

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    train_through(
        s,
        net,
        lambda: setattr(gain, "__class__", Other),
        lambda: setattr(Other, "get", lambda self: 3.0),
        lambda: setattr(gain, "get", lambda: 4.0),
        lambda: setattr(net.linear, "__class__", Doubled),
        lambda: setattr(Doubled, "forward", nn.Linear.forward),
    )


@program(coarse=torch.float32)
def types_and_dtypes_as_attributes(s: Session) -> None:
    """A dtype, a class, a slice, a range and a string of einsum are attributes that change."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.dtype: torch.dtype = torch.float32
            self.cls: type[nn.Module] = nn.ReLU
            self.part: Any = slice(0, 2)
            self.steps = range(2)
            self.equation = "ij,kj->ik"

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.cls()(self.linear(x)).to(self.dtype)[:, self.part]
            for step in self.steps:
                y = y + step
            return torch.einsum(self.equation, y, y)

    net = Net()
    train_through(
        s,
        net,
        lambda: setattr(net, "dtype", torch.float64),
        lambda: setattr(net, "cls", nn.Tanh),
        lambda: setattr(net, "part", slice(1, 3)),
        lambda: setattr(net, "steps", range(1, 3)),
        lambda: setattr(net, "equation", "ij,kj->ki"),
    )


@program()
def properties_of_layers(s: Session) -> None:
    """Strides, paddings, epsilon, slopes and probabilities of PyTorch's own layers are changed."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(2, 3, 3)
            self.norm, self.act, self.pool = nn.LayerNorm(3), nn.LeakyReLU(0.1), nn.AvgPool1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.pool(self.conv(x))
            return self.act(self.norm(y.transpose(1, 2)))

    net = Net()
    model = s.wrap(net)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: setattr(net.conv, "stride", (2,)),
        lambda: setattr(net.conv, "padding", (2,)),
        lambda: setattr(net.norm, "eps", 1.0),
        lambda: setattr(net.act, "negative_slope", 0.7),
        lambda: setattr(net.pool, "kernel_size", 3),
    )
    for change in changes:
        change()
        s.train(model, s.leaf(2, 2, 12))

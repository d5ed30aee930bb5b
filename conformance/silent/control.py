# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Arguments and names: dicts of the caller, order of keys, closures, local classes, what is caught."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


@program("pytorch#189042", 2026)
def dict_argument_in_another_order(s: Session) -> None:
    """The first value of a dict of numbers counts; the caller reorders the dict."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, scales: dict[str, float]) -> torch.Tensor:
            y = self.linear(x) * next(iter(scales.values()))
            for position, scale in enumerate(scales.values()):
                y = y + position * scale
            return y

    model = s.wrap(Net())
    for scales in ({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}, {"b": 2.0, "a": 1.0}):
        s.train(model, s.leaf(3, 4), scales)


@program()
def tensors_of_a_dict_in_another_order(s: Session) -> None:
    """Forward concatenates the values of a dict of tensors in the order that it has."""

    class Net(Linear):
        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.linear(torch.cat(list(batch.values()), -1))

    model = s.wrap(Net())
    a, b = s.leaf(3, 2), (s.values(3, 2) * 3).requires_grad_()
    for batch in ({"a": a, "b": b}, {"a": a, "b": b}, {"b": b, "a": a}):
        s.train(model, batch)


@program("pytorch#175858", 2026)
def dict_of_the_caller_changes(s: Session) -> None:
    """Forward adds keys to the caller's dict, pops one and overwrites one."""

    class Net(Linear):
        def forward(self, batch: dict[str, Any]) -> torch.Tensor:
            y = self.linear(batch.pop("x"))
            batch["hidden"] = y.detach() * 2
            batch["calls"] = batch.get("calls", 0) + 1
            return y * batch["calls"]

    model = s.wrap(Net())
    for step in range(4):
        batch: dict[str, Any] = {"x": s.values(3, 4) + step, "other": 1}
        if step == 3:
            batch["calls"] = 5
        s.train(model, batch)
        s.see("batch", batch)


@program()
def list_of_the_caller_grows(s: Session) -> None:
    """Forward appends its hidden states to a list that the caller passes, and sorts another."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, hidden: list[Any], order: list[int]) -> torch.Tensor:
            order.sort()
            for _ in order[:2]:
                x = self.linear(x).tanh()
                hidden.append(x)
            return x * order[0]

    model = s.wrap(Net())
    for _ in range(4):
        hidden: list[Any] = []
        order = [3, 1, 2]
        x = s.leaf(3, 4)
        y = model(x, hidden, order)
        s.see("lists", [hidden, order])
        (y.sum() + sum(h.square().sum() for h in hidden)).backward()
        s.gradients(model, x)


@program("pytorch#197896", 2026)
def local_class_writes_a_closure(s: Session) -> None:
    """Forward makes an object of a local class whose method writes a captured list and dict."""
    log: list[int] = []
    state = {"calls": 0}

    class Meter:
        def touch(self, rows: int) -> None:
            log.append(rows)
            state["calls"] += 1

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Meter().touch(x.shape[0])
            return self.linear(x) * state["calls"]

    model = s.wrap(Net())
    for rows in (3, 3, 5, 3):
        s.train(model, s.leaf(rows, 4))
        s.see("closure", [log, state])


@program()
def nonlocal_counter(s: Session) -> None:
    """A function that forward calls counts in a variable of its enclosing function."""

    def counter() -> Any:
        calls = 0

        def count() -> int:
            nonlocal calls
            calls += 1
            return calls

        return count

    count = counter()

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * count()

    model = s.wrap(Net())
    for _ in range(4):
        s.train(model, s.leaf(3, 4))
    s.see("calls", count())


@program("pytorch#134030", 2024)
def context_manager_with_state(s: Session) -> None:
    """Forward enters a context manager that sets and restores a global switch."""
    switches = {"fast": False}
    entered = []

    @contextlib.contextmanager
    def fast() -> Iterator[None]:
        before = switches["fast"]
        switches["fast"] = True
        entered.append(1)
        try:
            yield
        finally:
            switches["fast"] = before

    class Net(Linear):
        def scale(self) -> float:
            return 2.0 if switches["fast"] else 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with fast():
                y = self.linear(x) * self.scale()
            return y + self.scale()

    model = s.wrap(Net())
    for step in range(4):
        switches["fast"] = step == 2
        s.train(model, s.leaf(3, 4))
        s.see("switches", [switches, len(entered)])


@program()
def default_argument_is_a_list(s: Session) -> None:
    """A list as the default of an argument grows with each call."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, seen: list[int] = []) -> torch.Tensor:  # noqa: B006
            seen.append(x.shape[0])
            return self.linear(x) * len(seen)

    model = s.wrap(Net())
    for rows in (3, 3, 3, 2):
        s.train(model, s.leaf(rows, 4))


@program()
def branch_on_a_value(s: Session) -> None:
    """Forward takes a branch by the mean of its input, another by a value of a buffer."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            y = self.linear(x)
            if x.mean() > 0:
                y = y * 2
            return y.relu() if int(self.steps) % 2 else y

    model = s.wrap(Net())
    for shift in (-1.0, -1.0, 1.0, 1.0, -1.0):
        s.train(model, s.leaf(3, 4) + shift)


@program()
def output_object_with_state(s: Session) -> None:
    """Forward returns a dataclass that holds a tensor, a number and the caller's own object."""

    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        rows: int
        extra: dict[str, Any]

    class Net(Linear):
        def forward(self, x: torch.Tensor, extra: dict[str, Any]) -> Output:
            return Output(self.linear(x), x.shape[0], extra)

    model = s.wrap(Net())
    for rows in (3, 3, 5):
        extra = {"name": f"batch of {rows}"}
        x = s.leaf(rows, 4)
        output = model(x, extra)
        s.see("output", output)
        s.see("same extra", output.extra is extra)
        output.logits.sum().backward()
        s.gradients(model, x)


@program()
def print_and_log_once_per_call(s: Session) -> None:
    """Forward calls a logger of the user's, which must be told once per call."""
    told: list[str] = []

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            told.append(f"{tuple(x.shape)}")
            return self.linear(x)

    model = s.wrap(Net())
    for rows in (3, 3, 5, 5):
        s.train(model, s.leaf(rows, 4))
        s.see("told", told)


@program("pytorch#138015", 2024)
def default_dtype_changes(s: Session) -> None:
    """Forward makes tensors of the default dtype, which the caller changes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(s.values(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + torch.ones(4) / 3 + torch.arange(0.0, 1.0, 0.25)

    model = s.wrap(Net())
    try:
        for dtype in (torch.float32, torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            s.train(model, s.leaf(3, 4))
    finally:
        torch.set_default_dtype(torch.float32)

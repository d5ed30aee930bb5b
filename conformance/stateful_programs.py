# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random modules that keep state, draw, hook and share memory, against eager PyTorch, call after call.

A program is a module that holds values in places of all kinds (attributes, containers, objects, closures, globals, arrays,
tensors outside of the module), and a list of actions: what its forward does with a place, and what somebody else does with
one between the calls. ``python -m conformance.stateful_programs --count 2000`` runs so many; status 1 where one differs.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import random
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from ortrain import ORTModule

WIDTH = 4
CALLS = 5
RTOL, ATOL = 1e-4, 1e-5


class Box:
    """An object with attributes."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Slots:
    """An object without a dictionary."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Place:
    """Where a module holds a number or a tensor.

    Attributes:
      read: Returns what stands there.
      write: Puts something there.
    """

    read: Callable[[], Any]
    write: Callable[[Any], None]


def _attribute(owner: Any, name: str) -> Place:
    return Place(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _item(container: Any, key: Any) -> Place:
    return Place(lambda: container[key], lambda value: container.__setitem__(key, value))


def _cell(value: Any) -> Place:
    held = value

    def write(given: Any) -> None:
        nonlocal held
        held = given

    return Place(lambda: held, write)


def _set_of_one(module: nn.Module, value: Any) -> Place:
    module.only = {value}

    def write(given: Any) -> None:
        module.only.clear()
        module.only.add(given)

    return Place(lambda: next(iter(module.only)), write)


def _array(module: nn.Module, value: Any) -> Place:
    module.array = np.full(2, float(value))
    return Place(
        lambda: float(module.array[0]), lambda given: module.array.__setitem__(0, float(given))
    )


def _holding(module: nn.Module, name: str, container: Any, key: Any) -> Place:
    setattr(module, name, container)
    return _item(container, key)


# Of numbers: the module and the number.
NUMBERS: dict[str, Callable[[nn.Module, float], Place]] = {
    "attribute": lambda m, v: (setattr(m, "number", v), _attribute(m, "number"))[1],
    "layer's attribute": lambda m, v: (setattr(m.layer, "n", v), _attribute(m.layer, "n"))[1],
    "object": lambda m, v: (setattr(m, "box", Box(v)), _attribute(m.box, "value"))[1],
    "slots": lambda m, v: (setattr(m, "slots", Slots(v)), _attribute(m.slots, "value"))[1],
    "namespace": lambda m, v: (
        setattr(m, "space", types.SimpleNamespace(value=v)),
        _attribute(m.space, "value"),
    )[1],
    "list": lambda m, v: _holding(m, "rows", [0, v], 1),
    "deque": lambda m, v: _holding(m, "queue", collections.deque([v, 1]), 0),
    "dictionary": lambda m, v: _holding(m, "table", {"a": v}, "a"),
    "counter": lambda m, v: _holding(m, "counts", collections.Counter(a=int(v)), "a"),
    "defaultdict": lambda m, v: _holding(m, "defaults", collections.defaultdict(int, a=v), "a"),
    "nested": lambda m, v: (
        setattr(m, "nest", {"a": [Box(v)]}),
        _attribute(m.nest["a"][0], "value"),
    )[1],
    "closure": lambda m, v: _cell(v),
    "set": _set_of_one,
    "array": _array,
}


def _outside(module: nn.Module, value: torch.Tensor) -> Place:
    module.outside = [value]
    return _item(module.outside, 0)


# Of tensors without a gradient.
TENSORS: dict[str, Callable[[nn.Module, torch.Tensor], Place]] = {
    "buffer": lambda m, v: (m.register_buffer("kept", v), _attribute(m, "kept"))[1],
    "plain attribute": lambda m, v: (setattr(m, "plain", v), _attribute(m, "plain"))[1],
    "in a list": _outside,
    "in an object": lambda m, v: (setattr(m, "held", Box(v)), _attribute(m.held, "value"))[1],
    "in a closure": lambda m, v: _cell(v),
}


class Program(nn.Module):
    """A module of random state.

    Args:
      seed: What it is made from; equal seeds give equal modules.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._drawn = random.Random(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(
                    torch.from_numpy(np.random.RandomState(seed).randn(*parameter.shape))
                )
        draw = self._drawn
        self.numbers = [
            NUMBERS[name](self, float(draw.randint(1, 3)))
            for name in draw.sample(sorted(NUMBERS), draw.randint(0, 3))
        ]
        self.tensors = [
            TENSORS[name](self, torch.full((WIDTH,), float(draw.randint(1, 3))))
            for name in draw.sample(sorted(TENSORS), draw.randint(0, 2))
        ]
        self.in_forward = [draw.choice(FORWARD) for _ in range(draw.randint(1, 3))]
        self.between = [
            [draw.choice(BETWEEN) for _ in range(draw.randint(0, 2))] for _ in range(CALLS)
        ]
        self.results = draw.choice(RESULTS)
        del self._drawn

    def forward(self, x: torch.Tensor) -> Any:
        """Run the layer, and do what the program says."""
        y = self.layer(x)
        for place in self.numbers:
            y = y * place.read()
        for place in self.tensors:
            y = y + place.read()
        for act in self.in_forward:
            y = act(self, y)
        return self.results(self, x, y)


def _reads(module: Program, y: torch.Tensor) -> torch.Tensor:
    return y.tanh()


def _counts(module: Program, y: torch.Tensor) -> torch.Tensor:
    for place in module.numbers[:1]:
        place.write(place.read() + 1)
    return y


def _counts_in_training(module: Program, y: torch.Tensor) -> torch.Tensor:
    return _counts(module, y) if module.training else y


def _keeps(module: Program, y: torch.Tensor) -> torch.Tensor:
    for place in module.tensors[:1]:
        place.write(y.detach().mean(0))
    return y


def _keeps_in_place(module: Program, y: torch.Tensor) -> torch.Tensor:
    for place in module.tensors[:1]:
        place.read().mul_(0.5)
    return y


def _draws_python(module: Program, y: torch.Tensor) -> torch.Tensor:
    return y * random.random()


def _draws_numpy(module: Program, y: torch.Tensor) -> torch.Tensor:
    return y * float(np.random.rand())


def _skips_at_random(module: Program, y: torch.Tensor) -> torch.Tensor:
    return y if random.random() < 0.5 else y.sigmoid()


def _draws_torch(module: Program, y: torch.Tensor) -> torch.Tensor:
    return y + torch.randn_like(y)


def _hooks(module: Program, y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y * 1


def _writes(module: Program, y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y[0] = 0
    return y.add_(1)


def _branches(module: Program, y: torch.Tensor) -> torch.Tensor:
    return y * 2 if y.sum() > 0 else y - 1


FORWARD = (
    *(_reads, _reads, _reads, _counts, _counts_in_training, _keeps, _keeps_in_place),
    *(_draws_python, _draws_numpy, _skips_at_random, _draws_torch, _hooks, _writes, _branches),
)


def _new_number(module: Program, draw: random.Random) -> None:
    for place in module.numbers[-1:]:
        place.write(float(draw.randint(1, 4)))


def _new_tensor(module: Program, draw: random.Random) -> None:
    for place in module.tensors[-1:]:
        place.write(torch.full((WIDTH,), float(draw.randint(1, 4))))


def _through_data(module: Program, draw: random.Random) -> None:
    for place in module.tensors[-1:]:
        place.read().data.add_(draw.randint(1, 3))


def _switch_mode(module: Program, draw: random.Random) -> None:
    module.train(not module.training)


def _new_parameter(module: Program, draw: random.Random) -> None:
    module.layer.bias = nn.Parameter(torch.full((WIDTH,), float(draw.randint(0, 2))))


def _freeze(module: Program, draw: random.Random) -> None:
    module.layer.weight.requires_grad_(not module.layer.weight.requires_grad)


def _layer_hook(module: Program, draw: random.Random) -> None:
    module.layer.register_forward_hook(lambda layer, args, result: result * 1.5)


def _unread(module: Program, draw: random.Random) -> None:
    module.metric = draw.random()


BETWEEN = (
    *(_new_number, _new_tensor, _through_data, _switch_mode),
    *(_new_parameter, _freeze, _layer_hook, _unread),
)

RESULTS: tuple[Callable[..., Any], ...] = (
    lambda m, x, y: y,
    lambda m, x, y: (y, x),
    lambda m, x, y: {"y": y, "flat": y.view(-1), "row": x[0]},
    lambda m, x, y: (y.t(), m.layer.weight),
    lambda m, x, y: (y, y.detach(), y[:, 1:]),
)


def _observed(module: Program, result: Any) -> Iterator[Any]:
    yield result
    yield [place.read() for place in (*module.numbers, *module.tensors)]
    yield [p.grad for p in module.parameters()]
    yield random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()


def _run(seed: int, wrap: Callable[[nn.Module], Callable[..., Any]]) -> list[Any]:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    module = Program(seed)
    called = wrap(module)
    draw = random.Random(seed + 1)
    seen = []
    for call in range(CALLS):
        x = torch.from_numpy(np.random.RandomState(seed + call).randn(2 + call // 3, WIDTH)).float()
        try:
            result = called(x)
            leaves = result.values() if isinstance(result, dict) else result
            leaves = [leaves] if isinstance(leaves, torch.Tensor) else leaves
            total = sum(t.square().sum() for t in leaves if t.requires_grad)
            if isinstance(total, torch.Tensor):
                total.backward()
            seen.append(copy.deepcopy([_plain(o) for o in _observed(module, result)]))
        except Exception as error:  # which both must raise
            seen.append(type(error).__mro__[-3 if len(type(error).__mro__) > 3 else 0].__name__)
        for act in module.between[call]:
            act(module, draw)
    return seen


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value


def _is_close(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
            return False
        return bool(torch.allclose(a.double(), b.double(), RTOL, ATOL, equal_nan=True))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_is_close(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


def difference(seed: int) -> str:
    """Return what a program does otherwise under ORTModule than in PyTorch; "" for nothing."""
    kept = []

    def wrapped(module: nn.Module) -> Callable[..., Any]:
        kept.append(ORTModule(module))
        return kept[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = _run(seed, lambda module: module), _run(seed, wrapped)
    for call, (a, b) in enumerate(zip(expected, found, strict=True)):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return f"call {call}: {b if isinstance(b, str) else 'no error'} for {a if isinstance(a, str) else 'none'}"
            continue
        names = ("result", "state", "gradients", "generators")
        for name, theirs, ours in zip(names, a, b, strict=True):
            if not _is_close(theirs, ours):
                return f"call {call}: {name}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    options = parser.parse_args()
    console = Console()
    wrong = []
    seeds = range(options.first, options.first + options.count)
    for seed in track(seeds, "programs", console=console, transient=True):
        if told := difference(seed):
            wrong.append(seed)
            console.print(f"program {seed}: {told}", markup=False)
    console.print(f"random stateful programs: {len(wrong)} of {options.count} wrong")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())

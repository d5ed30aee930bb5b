# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random modules that change shapes, write to views and return what they were given, against eager PyTorch.

A program is a list of steps over a pool of tensors; a step takes two of them and puts its result into the pool, or writes
to one. Steps that PyTorch refuses for the first sizes are left out; for later sizes both have to refuse. Compared are shapes,
values, gradients (zeros are not nothing), arguments and buffers afterwards, and what of the results shares memory with what.
``python -m conformance.shape_programs --count 1000`` runs so many; status 1 where one differs.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn
from torch.nn import functional as F

from ortrain import ORTModule

Step = Callable[[torch.Tensor, torch.Tensor, int], Any]


def _axis(a: torch.Tensor, p: int) -> int:
    return p % max(a.dim(), 1)


def _size(a: torch.Tensor, p: int) -> int:
    return a.shape[_axis(a, p)]


_MAKING: dict[str, Step] = {
    "slice to n - p": lambda a, b, p: a[: max(1, a.shape[0] - p)],
    "slice to n // p": lambda a, b, p: a[..., : a.shape[-1] // (p + 1)],
    "slice from p": lambda a, b, p: a[p:],
    "slice by another's size": lambda a, b, p: a[: b.shape[0]],
    "narrow": lambda a, b, p: a.narrow(_axis(a, p), 0, max(1, _size(a, p) // 2)),
    "select": lambda a, b, p: a.select(_axis(a, p), -1),
    "last": lambda a, b, p: a[-1],
    "squeeze": lambda a, b, p: a.squeeze(),
    "squeeze an axis": lambda a, b, p: a.squeeze(_axis(a, p)),
    "squeeze two axes": lambda a, b, p: a.squeeze((0, -1)),
    "unsqueeze": lambda a, b, p: a.unsqueeze(p % (a.dim() + 1)),
    "flatten": lambda a, b, p: a.flatten(p % 2),
    "reshape": lambda a, b, p: a.reshape(-1),
    "view": lambda a, b, p: a.view(a.shape[0], -1),
    "reshape by halves": lambda a, b, p: a.reshape(a.shape[0], 2, -1),
    "transpose": lambda a, b, p: a.transpose(0, -1),
    "unbind": lambda a, b, p: a.unbind(_axis(a, p))[0],
    "chunk": lambda a, b, p: a.chunk(2, _axis(a, p))[-1],
    "split": lambda a, b, p: a.split(max(1, _size(a, p) // 2), _axis(a, p))[0],
    "unsafe_chunk": lambda a, b, p: a.unsafe_chunk(2, _axis(a, p))[0],
    "tensor_split": lambda a, b, p: a.tensor_split(2, _axis(a, p))[0],
    "windows": lambda a, b, p: a.unfold(-1, min(2, a.shape[-1]), 1),
    "diagonal": lambda a, b, p: a.diagonal(0, 0, -1),
    "expand": lambda a, b, p: a[:1].expand(3, *a.shape[1:]),
    "expand as": lambda a, b, p: a.expand_as(b),
    "repeat": lambda a, b, p: a.repeat(*(1,) * (a.dim() - 1), p % 3 + 1),
    "sum": lambda a, b, p: a.sum(_axis(a, p), keepdim=p % 2 == 0),
    "amax": lambda a, b, p: a.amax(_axis(a, p)),
    "max": lambda a, b, p: a.max(_axis(a, p))[0],
    "mean of all": lambda a, b, p: a.mean(),
    "pool": lambda a, b, p: F.avg_pool1d(a, a.shape[-1] // (p + 1)),
    "pool by p": lambda a, b, p: F.max_pool1d(a, p + 1, 1),
    "convolution": lambda a, b, p: F.conv1d(a, a.new_ones(2, a.shape[-2], p + 1)),
    "add": lambda a, b, p: a + b,
    "mul": lambda a, b, p: a * b,
    "cat": lambda a, b, p: torch.cat([a, b], _axis(a, p)),
    "stack": lambda a, b, p: torch.stack([a, b], p % 2),
    "matmul": lambda a, b, p: a @ b.transpose(0, -1),
    "where": lambda a, b, p: torch.where(b > 0, a, b),
    "sine": lambda a, b, p: a.sin(),
    "times a size": lambda a, b, p: a * _size(a, p),
    "by whether a size is 1": lambda a, b, p: a * 2 if _size(b, p) == 1 else a - 1,
    "by the number of elements": lambda a, b, p: a * 2 if b.numel() % 2 == 0 else a + 1,
    "by the rank": lambda a, b, p: a * (b.dim() + 1),
    "dropout that drops nothing": lambda a, b, p: F.dropout(a, 0.5, training=False),
    "dropout of 0": lambda a, b, p: F.dropout(a, 0.0, training=True),
    "type_as": lambda a, b, p: a.type_as(b),
    "contiguous": lambda a, b, p: a.contiguous(),
    "to": lambda a, b, p: a.to(b.dtype),
    "detach": lambda a, b, p: a.detach(),
    "clone": lambda a, b, p: a.clone(),
    "zeros like": lambda a, b, p: torch.zeros_like(a) + p,
    "itself": lambda a, b, p: a,
}
_WRITING: dict[str, Step] = {
    "add_": lambda a, b, p: a.add_(1),
    "mul_": lambda a, b, p: a.mul_(p + 0.5),
    "add_ another": lambda a, b, p: a.add_(b),
    "copy_": lambda a, b, p: a.copy_(b),
    "fill_": lambda a, b, p: a.fill_(p + 0.25),
    "zero_": lambda a, b, p: a.zero_(),
    "masked_fill_": lambda a, b, p: a.masked_fill_(a > 0, p + 0.25),
    "set a row": lambda a, b, p: a.__setitem__(0, p + 0.25),
    "set the last": lambda a, b, p: a.__setitem__((..., -1), b.mean()),
    "set by another": lambda a, b, p: a.__setitem__(slice(None, 1), b[:1]),
    "squeeze_": lambda a, b, p: a.squeeze_(),
    "unsqueeze_": lambda a, b, p: a.unsqueeze_(0),
    "transpose_": lambda a, b, p: a.transpose_(0, -1),
    "relu_": lambda a, b, p: a.relu_(),
    "write without gradients": lambda a, b, p: _without_gradients(a, p),
}
_SHAPES = ((2, 3, 4), (1, 3, 4), (3, 3, 2), (2, 1, 4), (1, 1, 1), (5, 4, 4), (2, 2), (1, 6), (4, 1))


def _without_gradients(a: torch.Tensor, p: int) -> None:
    with torch.no_grad():
        a.mul_(p + 0.5)


class ShapeProgram(nn.Module):
    """Runs steps over a pool that begins with an argument, a parameter and a buffer.

    Args:
      seed: What the steps are drawn from.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.shapes = draw.sample(_SHAPES, 5)
        rank = len(self.shapes[0])
        self.shapes = [shape for shape in self.shapes if len(shape) == rank]
        self.wants_gradient = draw.random() < 0.5
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, self.shapes[0][-1], dtype=torch.float64))
        self.register_buffer("b", torch.linspace(-1, 1, 4, dtype=torch.float64))
        self.steps: list[tuple[str, int, int, int]] = []
        self.results = draw.choice((1, 1, 2, 3))
        for _ in range(draw.randint(1, 8)):
            for _ in range(6):
                names = _WRITING if draw.random() < 0.25 else _MAKING
                step = (
                    draw.choice(list(names)),
                    draw.randrange(8),
                    draw.randrange(8),
                    draw.randrange(4),
                )
                self.steps.append(step)
                trial = copy.deepcopy(self)
                try:
                    _run(trial, self.shapes[0])
                    break
                except (RuntimeError, IndexError, ValueError, TypeError):
                    self.steps.pop()

    def forward(self, x: torch.Tensor) -> Any:
        pool = [
            x,
            x * self.w[: x.shape[-1]] if x.shape[-1] <= len(self.w) else x * self.w[0],
            self.b,
        ]
        pool.append(self.w * 2)
        for name, first, second, p in self.steps:
            a, b = pool[-1 - first % len(pool)], pool[-1 - second % len(pool)]
            if name in _WRITING:
                _WRITING[name](a, b, p)
            else:
                pool.append(_MAKING[name](a, b, p))
        return tuple(pool[-1 - i] for i in range(self.results))


def _run(module: nn.Module, shape: tuple[int, ...]) -> list[Any]:
    """Return what a call leaves behind."""
    module.zero_grad()
    draw = torch.Generator().manual_seed(sum(shape))  # no sums near 0, whose sign is rounding's
    plain = torch.rand(shape, generator=draw, dtype=torch.float64) - 0.37
    x = plain.clone().requires_grad_(module.wants_gradient)
    results = module(x)
    seen: list[Any] = [[(r.shape, r.dtype, r.requires_grad) for r in results]]
    seen += [r.detach().clone() for r in results]
    total = sum((r.sin() * (i + 1)).sum() for i, r in enumerate(results) if r.requires_grad)
    if isinstance(total, torch.Tensor):
        total.backward()
    seen += [None if t.grad is None else t.grad.clone() for t in (x, module.w)]
    seen += [x.detach().clone(), module.b.detach().clone(), module.b.requires_grad]
    with torch.no_grad():
        for r in results:
            if _shows_once(r):
                r.add_(1)  # who shares its memory sees it
                seen += [[t.detach().clone() for t in (*results, x, module.b)]]
    seen.append([r is x or r is module.b for r in results])
    return seen


def _shows_once(tensor: torch.Tensor) -> bool:
    """Tell whether no two elements lie in the same place, so that a write means something."""
    places = torch.arange(tensor.untyped_storage().nbytes() // tensor.element_size())
    shown = places.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return shown.unique().numel() == tensor.numel()


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        if not isinstance(a, torch.Tensor) or a.shape != b.shape:
            return False
        return torch.allclose(a, b, rtol=1e-9, atol=1e-9, equal_nan=True)
    if isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


def difference(seed: int) -> str:
    """Return where a program is not PyTorch's, or ''."""
    plain = ShapeProgram(seed)
    ours = ORTModule(copy.deepcopy(plain))
    for shape in [*plain.shapes, plain.shapes[0]]:
        seen: list[Any] = []
        for module in (plain, ours):
            try:
                seen.append(_run(module, shape))
            except (RuntimeError, IndexError, ValueError, TypeError) as error:
                seen.append(f"raises {type(error).__name__}")
        theirs, mine = seen
        if isinstance(theirs, str) or isinstance(mine, str):
            if not (isinstance(theirs, str) and isinstance(mine, str)):
                return f"{shape}: PyTorch {_short(theirs)}, Ortrain {_short(mine)}"
            break  # what an error leaves behind is nobody's promise
        place = next(
            (i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if not _same(a, b)), None
        )
        if place is not None or len(mine) != len(theirs):
            return (
                f"{shape}, item {place}: PyTorch {theirs[place or 0]}, Ortrain {mine[place or 0]}"
            )
    return ""


def _short(seen: Any) -> str:
    return seen if isinstance(seen, str) else "runs"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance.shape_programs")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    arguments = parser.parse_args()
    console, wrong = Console(stderr=True), 0
    seeds = range(arguments.first, arguments.first + arguments.count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seed in track(seeds, "random programs", console=console, transient=True):
            if found := difference(seed):
                wrong += 1
                steps = ", ".join(f"{n}({a}, {b}, {p})" for n, a, b, p in ShapeProgram(seed).steps)
                print(f"seed {seed}: {found}\n  {steps}", flush=True)
    print(f"random programs of shapes: {wrong} of {arguments.count} wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

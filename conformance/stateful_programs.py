# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random modules that keep state, draw, hook and share memory, against eager PyTorch, call after call.

A program is a module that holds values in places of all kinds (attributes, containers, objects, closures, globals, arrays,
tensors outside of the module), and a list of actions: what its forward does with a place, and what somebody else does with
one between the calls. ``python -m conformance.stateful_programs --count 2000`` runs so many; status 1 where one differs.
With ``--from-disk`` each call is made by an ORTModule of its own, which may find the graph of another one on disk.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from conformance import stateful_actions
from conformance.stateful_actions import BETWEEN, FORWARD, OWN_RESULTS, READING, RESULTS, SETUP
from conformance.stateful_places import NUMBERS, TENSORS, WIDTH
from ortrain import ORTModule

CALLS = 5


class UnbuildableError(TypeError):
    """A program cannot be on the device."""


RTOL, ATOL = 1e-4, 1e-5


class Program(nn.Module):
    """A module of random state.

    Args:
      seed: What it is made from; equal seeds give equal modules.
      reading: Whether its forward does nothing but what a graph may stand for.

    Attributes:
      numbers: Places of numbers that the forward reads.
      tensors: Places of tensors that it reads.
      in_forward: What it does.
      results: Makes what it returns.
      tells: Whether it appends to a list of the caller's.
    """

    def __init__(self, seed: int, *, reading: bool = False) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.layer = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.copy_(
                    torch.from_numpy(np.random.RandomState(seed).randn(*parameter.shape))
                )
        self.numbers = [
            NUMBERS[name](self, float(draw.randint(1, 3)))
            for name in draw.sample(sorted(NUMBERS), draw.randint(0, 3))
        ]
        self.tensors = [
            TENSORS[name](self, torch.full((WIDTH,), float(draw.randint(1, 3))))
            for name in draw.sample(sorted(TENSORS), draw.randint(0, 0 if reading else 2))
        ]
        self.in_forward = [
            draw.choice(READING if reading else FORWARD) for _ in range(draw.randint(1, 3))
        ]
        for act in self.in_forward:
            SETUP.get(act, id)(self)
        self.results = draw.choice(OWN_RESULTS if reading else RESULTS)
        self.tells = not reading and draw.random() < 0.1

    def forward(self, x: torch.Tensor, log: list[int] | None = None) -> Any:
        """Run the layer, and do what the program says."""
        if log is not None and self.tells:
            log.append(x.shape[0])
        y = self.layer(x)
        for place in self.numbers:
            y = y * place.read()
        for place in self.tensors:
            y = y + place.read()
        for act in self.in_forward:
            y = act(self, y)
        return self.results(self, x, y)


def _observed(module: Program, result: Any) -> Iterator[Any]:
    yield result
    yield [place.read() for place in (*module.numbers, *module.tensors)]
    yield [p.grad for p in module.parameters()]
    own = getattr(module, "generator", None)
    yield (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state(),
        torch.cuda.get_rng_state() if torch.get_default_device().type == "cuda" else None,
        own and own.get_state(),
    )


def _run(
    seed: int, wrap: Callable[[nn.Module], Callable[..., Any]], *, reading: bool = False
) -> list[Any]:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    stateful_actions.reset()
    try:
        module = Program(seed, reading=reading)
    except TypeError as error:
        if torch.get_default_device().type == "cpu":
            raise
        raise UnbuildableError from error  # it shares memory with NumPy
    called = wrap(module)
    draw = random.Random(seed + 1)
    between = [[draw.choice(BETWEEN) for _ in range(draw.randint(0, 2))] for _ in range(CALLS)]
    writes_to_results = draw.random() < 0.1
    log: list[int] = []
    seen = []
    for call in range(CALLS):
        x = torch.from_numpy(np.random.RandomState(seed + call).randn(2 + call // 3, WIDTH)).float()
        x = x.to(torch.get_default_device())
        try:
            result = called(x, log) if module.tells else called(x)
            leaves = result.values() if isinstance(result, dict) else result
            leaves = [leaves] if isinstance(leaves, torch.Tensor) else leaves
            if writes_to_results:
                next(iter(leaves)).add_(1)
            total = sum(t.square().sum() for t in leaves if t.requires_grad)
            if isinstance(total, torch.Tensor):
                total.backward()
            seen.append(copy.deepcopy([_plain(o) for o in (*_observed(module, result), [x, log])]))
        except Exception as error:  # which both must raise
            seen.append(type(error).__mro__[-3 if len(type(error).__mro__) > 3 else 0].__name__)
        for act in between[call]:
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
        a, b = a.double(), b.double()  # of which sums lose what is small among large numbers
        largest = torch.nan_to_num(a, 0, 0, 0).abs().amax().item() if a.numel() else 0.0
        return bool(torch.allclose(b, a, RTOL, ATOL * max(1.0, largest), equal_nan=True))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(_is_close(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@dataclasses.dataclass
class Captures:
    """How many graphs were used for the first time, and how many of them came from disk."""

    made: int = 0
    from_disk: int = 0


def difference(seed: int, captures: Captures | None = None) -> str:
    """Return what a program does otherwise under ORTModule than in PyTorch; "" for nothing.

    Args:
      seed: That of the program.
      captures: Counts graphs; where it is given, each call is made by an ORTModule of its own, and most programs
        only read.
    """
    kept = []

    def wrapped(module: nn.Module) -> Callable[..., Any]:
        kept.append(ORTModule(module))
        return kept[0]

    def with_one_for_each_call(module: nn.Module) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            ours = ORTModule(module)
            try:
                return ours(*args)
            finally:
                made = ours.report().captures
                captures.made += len(made)
                captures.from_disk += sum(record.from_disk for record in made)

        return call

    wrap, reading = wrapped, False
    if captures is not None:
        wrap, reading = with_one_for_each_call, seed % 4 != 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()  # programs share code, of which it compiles a number of variants
        expected = _run(seed, lambda module: module, reading=reading)
        found = _run(seed, wrap, reading=reading)
    for call, (a, b) in enumerate(zip(expected, found, strict=True)):
        if isinstance(a, str) or isinstance(b, str):
            if a != b:
                return f"call {call}: {b if isinstance(b, str) else 'no error'} for {a if isinstance(a, str) else 'none'}"
            continue
        names = ("result", "state", "gradients", "generators", "arguments")
        for name, theirs, ours in zip(names, a, b, strict=True):
            if not _is_close(theirs, ours):
                return f"call {call}: {name}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    parser.add_argument(
        "--from-disk",
        action="store_true",
        help="each call by a module that may find the graph on disk",
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="no program begins later")
    parser.add_argument("--json", type=Path, help="write there what each program does otherwise")
    parser.add_argument("--device", default="cpu", help="where tensors and modules are")
    options = parser.parse_args()
    if options.device != "cpu":
        torch.set_default_device(options.device)
    if not options.from_disk:
        return _report(options, None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORTRAIN_CACHE_DIR"] = folder
        return _report(options, Captures())


def _report(options: argparse.Namespace, captures: Captures | None) -> int:
    console = Console()
    results: dict[int, str] = {}
    end = time.monotonic() + options.seconds
    seeds = range(options.first, options.first + options.count)
    for seed in track(seeds, "programs", console=console, transient=True):
        if time.monotonic() > end:
            break
        try:
            results[seed] = told = difference(seed, captures)
        except UnbuildableError:
            continue
        if told:
            console.print(f"program {seed}: {told}", markup=False)
    wrong = sum(map(bool, results.values()))
    disk = "" if captures is None else f"; {captures.from_disk} of {captures.made} graphs from disk"
    console.print(f"random stateful programs: {wrong} of {len(results)} wrong{disk}")
    if options.json:
        options.json.write_text(json.dumps({"stateful": list(results.items())}))
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())

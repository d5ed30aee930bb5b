# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random forwards that change lists, dictionaries and queues while iterators and views of them live, against plain Python.

A program is a forward in source code: statements over containers that are local, attributes or arguments, with branches on a
tensor in between, which cut it into pieces. Statements that raise in Python are left out. Compared are results and what
the containers hold afterwards, over several calls between which they change.
``python -m conformance.container_programs --count 300`` runs so many; status 1 where one differs.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import nn

from ortrain import ORTModule

_LISTS = ("items", "m.items", "given", "m.queue", "pair[0]")
_TABLES = ("table", "m.table")
_PLACES = ("kept{}", "pair_{}[0]", "m.kept{}", "m.parts['k{}']", "held[{}]")
_ITERATORS = (
    *("iter({l})", "reversed({l})", "iter({t})", "{t}.keys()", "{t}.values()", "{t}.items()"),
    *("enumerate({l})", "zip({l}, {l})", "map(float, {l})", "filter(None, {l})"),
    *("iter({t}.values())", "reversed({t})", "(v + 1 for v in {l})", "itertools.chain({l}, {t})"),
    *("itertools.islice({l}, 3)", "iter(tuple({l}))", "through({l})"),
)
_CHANGES = (
    *("{l}.append({v})", "{l}[0] = {v}", "{l}[-1] += {v}", "{l}.pop()", "{l}.extend([{v}, 2.0])"),
    *("{l}.insert(0, {v})", "{l}.clear()", "{l}.reverse()", "del {l}[0]", "{l}.remove({l}[-1])"),
    *("{l}[1:] = [{v}]", "{l}.sort()", "{l} += [{v}]", "{l} = [*{l}, {v}]", "{l}.popleft()"),
    *("{t}['a'] = {v}", "{t}['{k}'] = {v}", "{t}.pop('a', None)", "del {t}['{k}']"),
    *("{t}.update(c={v}, a=2.0)", "{t}.setdefault('{k}', {v})", "{t}.popitem()", "{t}.clear()"),
    *("{t} = {{**{t}, '{k}': {v}}}", "{t}['{k}'] = {t}.pop('a', {v})", "{t} |= {{'{k}': {v}}}"),
    *("{l}, items = items, {l}", "m.table, table = table, m.table", "given = {l}"),
    *("{l}.appendleft({v})", "{l}.rotate(1)", "m.items = list({l})", "pair = ({l}, {v})"),
    "change({l}, {t}, {v})",
)
_READS = (
    *("total += folded(next({i}, {v}))", "total += folded(list({i})[:9])", "total += len({i})"),
    *("total += folded([*itertools.islice({i}, 2)])", "total += {v} in {i}"),
    *("total += folded({l})", "total += folded({t})", "total += sum({l}) / 8"),
    *("total += folded(next(iter({i}), {v}))", "total += folded(sum({t}.values()))"),
)
_LOOPS = (
    "for each in {i}:\n    total = total * 0.5 + folded(each)\n    if len({l}) < 6: {l}.append({v})",
    "for each in {l}:\n    total = total * 0.5 + folded(each)\n    if len({l}) < 6: {l}.append({v})",
    "for key in list({t}):\n    {t}.pop(key)\n    total = total * 0.5 + folded(key)",
    "for place, each in enumerate({l}):\n    {l}[place] = each + {v}",
    "while {l} and len({l}) > 1:\n    total += folded({l}.pop())",
    "for each in {i}:\n    total += folded(each)\n    break",
)
_CUT = "if y.sum() > -1e9:\n    y = y + 0"
_HEAD = '''
import itertools


def folded(value):
    """Return a number that shows what a container holds, and in which order."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, str):
        return float(sum(map(ord, value)))
    if isinstance(value, dict):
        return folded([*value.items()])
    total = 0.125
    for each in value:
        total = total * 0.5 + folded(each)
    return total


def through(values):
    for each in values:
        yield each * 2


def change(values, table, number):
    values.append(number)
    table["d"] = number


def forward(m, y, given):
    total = 0.0
    items = [1.0, 2.0, 3.0]
    table = {"a": 1.0, "b": 2.0}
    pair = (given, 1.0)
    held = {}
'''


def _story(draw: random.Random, number: int) -> list[str]:
    """Return statements that make an iterator or a view, change what it goes through, and read it, with cuts in between."""
    made = draw.choice(_ITERATORS)
    known = {"l": draw.choice(_LISTS), "t": draw.choice(_TABLES)}
    place = draw.choice(_PLACES).format(number)

    def words() -> dict[str, str]:
        drawn = {
            "v": draw.choice(("1.5", "4.0", "0.0", "-2.0")),
            "k": draw.choice("abc"),
            "i": place,
        }
        if draw.random() < 0.2:
            return {**drawn, "l": draw.choice(_LISTS), "t": draw.choice(_TABLES)}
        return {**drawn, **known}

    about = "{t}" if "{t}" in made else "{l}"
    changes = [change for change in _CHANGES if about in change]
    start = f"{place[:-3]} = ({made}, 1.0)" if place.startswith("pair_") else f"{place} = {made}"
    lines = [start.format(**words())]
    for _ in range(draw.randint(1, 3)):
        kinds = draw.choices((changes, (_CUT,), _READS, _CHANGES), (5, 3, 2, 1))[0]
        lines.append(draw.choice(kinds).format(**words()))
    kinds = _LOOPS if draw.random() < 0.15 else _READS
    return [*lines, draw.choice(kinds).format(**words())]


def _source(statements: list[str]) -> str:
    body = "\n".join(statements).replace("\n", "\n    ")
    return f"{_HEAD}    {body}\n    return y * total\n"


class Containers(nn.Module):
    """Runs a forward over containers that it holds.

    Args:
      forward: What is called with the module, a tensor and a list.
    """

    def __init__(self, forward: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.compute = forward
        self.items = [5.0, 6.0]
        self.table = {"b": 3.0, "a": 4.0}
        self.queue = collections.deque([7.0, 8.0, 9.0])
        self.parts: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, given: list[float]) -> torch.Tensor:
        y = self.linear(x) * 0 + 1
        if y.sum() > -1e9:
            y = y + 0
        return self.compute(self, y, given)


def _call(module: nn.Module, held: Containers, call: int) -> list[Any]:
    given = [0.5, 0.25 * call]
    if call == 2:
        held.items.append(0.75)
        held.table["e"] = 0.5
        held.queue.append(0.75)
    if call == 3:
        held.table = dict(reversed(held.table.items()))
        held.items = held.items[:3]
    try:
        result: Any = module(torch.ones(1, 4), given).detach().clone()
    except Exception as error:
        result = type(error).__name__
    return [result, list(given), list(held.items), list(held.table.items()), list(held.queue)]


def make(seed: int, folder: Path) -> Any:
    """Return the function of a program whose statements all run in Python, and write its source.

    Args:
      seed: What the statements are drawn from.
      folder: Where its file goes.
    """
    draw = random.Random(seed)
    statements: list[str] = []
    for number in range(draw.randint(1, 3)):
        for line in _story(draw, number):
            statements.append(line)
            try:
                space: dict[str, Any] = {}
                exec(_source(statements), space)
                trial = Containers(space["forward"])
                if all(isinstance(_call(trial, trial, i)[0], torch.Tensor) for i in range(4)):
                    continue
            except SyntaxError:
                pass
            statements.pop()
    path = folder / f"container_program_{seed}.py"
    path.write_text(_source(statements))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    home = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = home
    spec.loader.exec_module(home)
    return home.forward


def differs(seed: int, folder: Path) -> str:
    """Run a program and return what differs from Python; "" for nothing.

    Args:
      seed: Of the program.
      folder: Where its source goes.
    """
    forward = make(seed, folder)
    plain = Containers(forward)
    module = Containers(forward)
    module.load_state_dict(plain.state_dict())
    wrapped = ORTModule(module)
    for call in range(5):
        want, got = _call(plain, plain, call), _call(wrapped, module, call)
        names = ("result", "argument", "list", "dictionary", "queue")
        for name, one, other in zip(names, want, got, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                same = torch.allclose(one, other, rtol=1e-4, atol=1e-5, equal_nan=True)
            else:
                same = type(one) is type(other) and repr(one) == repr(other)
            if not same:
                return f"call {call}, {name}: {one} in Python, {other}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.container_programs", description=__doc__
    )
    parser.add_argument("--count", type=int, default=300, help="programs")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    console, wrong = Console(), 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in track(range(options.first, options.first + options.count), transient=True):
            found = differs(seed, Path(folder))
            torch._dynamo.reset()
            if found:
                wrong += 1
                console.print(f"[red]wrong[/red] {seed}: {found}", highlight=False)
    console.print(f"{wrong} of {options.count} programs wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    raise SystemExit(main())

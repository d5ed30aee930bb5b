# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Graphs on disk that anybody may have written: what is read of them is bounded, conditions on sizes most of all."""

from __future__ import annotations

import ast
import collections
import dataclasses
import json
import math
import operator
import os
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ortrain import ORTModule
from ortrain.capture import cache, graph_files, source_files
from ortrain.capture.cache import CacheSlot
from ortrain.capture.errors import SizeConditionError
from ortrain.capture.graph_files import GraphFiles
from ortrain.capture.guards import Guards, compile_guards
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.signature import CallSignature

X0, X1, Y0 = "L['x'].size()[0]", "L['x'].size()[1]", "L['y'].size()[0]"
SECONDS = 10.0  # each of the attacks took minutes, or gigabytes


def kept(*conditions: str) -> Guards:
    return compile_guards(conditions, ["x", "y"], (), kept=True)


def refused_or_not_held(*conditions: str) -> bool:
    """Tell whether conditions are refused at once, or are read at once and at once do not hold."""
    start = time.perf_counter()
    try:
        held = kept(*conditions).holds([[3, 4], [5]])
    except SizeConditionError as error:
        assert len(str(error)) < 2000
        held = False
    assert time.perf_counter() - start < SECONDS
    return not held


def nested(depth: int) -> str:
    text = X0
    for _ in range(depth):
        text = f"(0 <= {text} <= 9)"
    return text


# --- conditions that take long


@pytest.mark.parametrize(
    "condition",
    [
        "9**9**9 > 0",
        "9**9**9**9 > 0",
        f"{X0}**{X0}**{X0}**{X0} > 0",
        f"(({X0}**99)**99)**99 > 0",
        "2**-(10**12) > -1 and 2**(10**12) > 0",
        "1 << 10**12 > 0",
        f"{X0} << {X0}**40 > 0",
        "('a' * 10**10) != 'b'",
        "'%1000000000d' % 1 != ''",
        "b'a' * 10**10 != b'b'",
        "(1,) * 10**10 != ()",
        "[1] * 10**10 != []",
        f"{'*'.join([X0] * 400)} > 0",
        f"{10**30} > 0",
        f"{'9' * 4000} > 0",
        f"0x{'f' * 100_000} > 0",
        f"{2**63 + 1} > 0",
        "1j == 1j",
        "None == None",
        "... == ...",
        "(-1)**0.5 != 0",
        "round(1, -(10**10)) == 0",
        "round(10**100, -(10**10)) == 0",
        "math.exp(10**5) > 0",
        "int(1e18)**int(1e18) > 0",
        "int('9' * 10**6) > 0",
        "math.factorial(10**7) > 0",
        "min(3) == 3",
        "max() == 3",
        "int(3, 9) == 3",
        f"{'(' * 5000}1{')' * 5000} == 1",
        f"{'-' * 100_000}1 < 2",
        f"{'not ' * 100_000}1",
        f"1{'+1' * 100_000} > 0",
        f"1{'**1' * 100_000} > 0",
        f"1{'<2' * 100_000}",
        f"L{'[0]' * 100_000} == 0",
        f"L{'.size' * 100_000} == 0",
        f"min({'1,' * 70_000}1) == 1",
        "a" * 1_000_000,
        "1 \0",
        "\ud800 == 1",
        "",
        "L['x'].storage_offset(9**9**9) == 0",
        "(9**9**9).storage_offset() == 0",
        "L['z'].storage_offset() == 0",
        "L['x'].size(0)[0] == 3",
        "L['x'].size()[False] == 3",
        "L['x'].size()['0'] == 3",
        "L['x'].size()[-1] == 4",
        f"L['x'].size()[{10**18}] == 4",
        f"L['x'].stride()[{10**18}] == 1",
        "M['x'].size()[0] == 3",
        "L[0].size()[0] == 3",
        "(L['x'] if 1 else L['x']).size()[0] == 3",
        f"min(*{X0}) == 3",
        f"min({X0}, key=1) == 3",
    ],
    ids=lambda text: text[:40].encode("ascii", "replace").decode(),
)
def test_a_condition_that_takes_long_is_refused_or_does_not_hold(condition: str) -> None:
    assert refused_or_not_held(condition)


def test_many_or_long_conditions_are_refused_of_a_kept_graph_alone() -> None:
    many = [f"{X0} != {n + 10}" for n in range(5000)]
    wide = f"min({'1, ' * 70_000}1) == 1"
    assert refused_or_not_held(*many) and refused_or_not_held(wide)
    assert refused_or_not_held(*(f"{X0} != {n + 10}{' ' * 1000}" for n in range(1000)))
    assert refused_or_not_held(*(f"min({'1, ' * 1000}{n}) != -1" for n in range(66)))
    for conditions in (many, [wide]):
        assert compile_guards(conditions, ["x", "y"], ()).holds([[3, 4], [5]])
    assert kept(*many[:4000]).holds([[3, 4], [5]])
    # Sums of many terms lean to the left.
    assert kept(f"{X0}{'+1' * 250} > 0").holds([[3, 4], [5]])
    assert refused_or_not_held(f"{X0}{'+1' * 260} > 0")
    assert compile_guards([f"{X0}{'+1' * 260} > 0"], ["x"], ()).holds([[3]])
    with pytest.raises(SizeConditionError):
        compile_guards([f"{X0}{'+1' * 100_000} > 0"], ["x"], ())


class CountedSizes(list[int]):
    """Sizes that count how often they are asked for."""

    count = 0

    def __getitem__(self, axis: Any) -> Any:
        self.count += 1
        return super().__getitem__(axis)


@pytest.mark.parametrize(
    ("condition", "count"),
    [
        (f"0 < {X0} < 9", 1),
        (f"0 < {X0} < {X1} < 9", 2),
        (f"5 < {X0} < {X1} < 9", 1),
        (nested(50), 1),
    ],
)
def test_each_operand_of_a_chain_is_evaluated_once(condition: str, count: int) -> None:
    sizes = CountedSizes([3, 4])
    start = time.perf_counter()
    kept(condition).holds([sizes, [5]])
    assert sizes.count == count
    assert time.perf_counter() - start < SECONDS


# --- conditions without a value


@pytest.mark.parametrize(
    ("condition", "good", "bad"),
    [
        (f"1 // ({X0} - 5) <= 1", [7, 1], [5, 1]),
        (f"not 1 // ({X0} - 5) > 1", [7, 1], [5, 1]),
        (f"not {X0} % ({X0} - 5) == 7", [7, 1], [5, 1]),
        (f"{X0} / ({X0} - 5) != 1", [7, 1], [5, 1]),
        (f"({X0} - 5)**-1 > 0", [7, 1], [5, 1]),
        (f"not 1 << ({X0} - 5) == 1", [7, 1], [4, 1]),
        (f"({X0} - 5)**0.5 != 0", [9, 1], [4, 1]),
        (f"math.sqrt({X0} - 5) >= 0", [9, 1], [4, 1]),
        (f"not math.log({X0} - 5) < 0", [9, 1], [5, 1]),
        (f"math.exp({X0}) > 0", [9, 1], [9999, 1]),
        (f"2**{X0} > 0", [9, 1], [1000, 1]),
        (f"{X0}**9 > 0", [2, 1], [2**62, 1]),
        (f"{X0} == 3 or {X1} != 7", [3], [4]),
        (f"{X0} == 3 or not L['x'].stride()[1] == 7", [3], [4]),
    ],
)
def test_a_condition_without_a_value_does_not_hold(
    condition: str, good: list[int], bad: list[int]
) -> None:
    for guards in (kept(condition), compile_guards([condition], ["x", "y"], ())):
        assert guards.holds([good, [5]]) is True
        assert guards.violated([good, [5]]) == []
        assert guards.holds([bad, [5]]) is False
        assert guards.violated([bad, [5]]) == list(guards.text)


def test_a_full_stack_holds_nothing() -> None:
    guards = kept(nested(100))
    held: list[bool] = []

    def deep() -> None:
        try:
            deep()
        except RecursionError:
            if not held:
                held.append(guards.holds([[3, 4], [5]]))
            raise

    with pytest.raises(RecursionError):
        deep()
    assert held == [False] and guards.holds([[3, 4], [5]])


def test_axes_and_operands_that_there_are_not() -> None:
    sizes = [[3, 4], [5]]
    kept(f"1 // ({X0} - 3) == 1", f"math.sqrt({X0} - 4) == 1", f"2**{X0}**9 > 0").check(sizes)
    for condition in ("L['x'].size()[2] == 1", "L['y'].stride()[1] == 1", "min(3) == 3"):
        with pytest.raises(SizeConditionError, match="depends on the condition"):
            kept(condition).check(sizes)


# --- against Python


@pytest.mark.parametrize(
    "condition",
    [
        f"1 + (((-1) + (((-1) + ({X0} // 2)) // 2)) // 2) >= 1 and ({X1} // 2) >= 1",
        f"(({X0}*{X1}) % ({Y0} + 1)) == 0 or {X0} % 2 != 1",
        f"max(1, {X0}, {Y0}) == min({Y0}, max({X0}, {X1}))",
        f"{X0}**2*{X1} - {X0}*{X1}**2 <= {Y0}**3",
        f"({X0} // ({X1} + 1)) % 3 < math.ceil({X0} / ({X1} + 1))",
        f"math.trunc(torch.sym_float({X0})*0.5) == {X0} // 2",
        f"round({X0} / 2) >= {X0} // 2 <= {X0} != {Y0}",
        f"({X0} << 3) >> 1 == 4*{X0}",
        f"{X0}*{X1}*{Y0}*{X0}*{X1}*{Y0} < 9223372036854775807",
        f"L['x'].stride()[0] == {X1} and L['x'].stride()[1] == 1",
        f"({X0} and {X1}) == {X1} or ({X0} or {X1}) == {X0}",
    ],
)
def test_conditions_of_captures_are_what_python_says(condition: str) -> None:
    guards = kept(condition)
    memory = compile_guards([condition], ["x", "y"], ())
    answers = set()
    for x0 in (*range(10), 1 << 31):
        for x1 in (0, 1, 2, 7):
            for y0 in (0, 1, 5, 1 << 31):
                sizes = [[x0, x1], [y0]]
                expected = python_says(condition, sizes)
                assert guards.holds(sizes) is memory.holds(sizes) is expected
                answers.add(expected)
    assert True in answers


class BeyondBound(Exception):
    """An int is longer than those of a condition may be."""


OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
}
BOUND = 2**512


def operate(kind: str, a: Any, b: Any) -> Any:
    ints = isinstance(a, int) and isinstance(b, int)
    if kind == "LShift" and b > 512:
        raise BeyondBound
    if kind == "Pow" and ints and b > 1 and abs(a) > 1 and b * math.log2(abs(a)) > 600:
        raise BeyondBound
    result = OPERATORS[getattr(ast, kind)](a, b)
    if isinstance(result, complex):
        raise BeyondBound
    if kind in ("Mult", "Pow", "LShift") and isinstance(result, int) and abs(result) >= BOUND:
        raise BeyondBound
    return result


def rounded(value: Any, *digits: Any) -> Any:
    if digits and abs(digits[0]) > 512:
        raise BeyondBound
    return round(value, *digits)


class Operated(ast.NodeTransformer):
    """Lets ``operate`` see the operands of each operator; all else is left to Python."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        kind = ast.Constant(type(node.op).__name__)
        return ast.Call(ast.Name("operate", ast.Load()), [kind, node.left, node.right], [])


@dataclasses.dataclass(frozen=True)
class Sized:
    sizes: Sequence[int]

    def size(self) -> Sequence[int]:
        return self.sizes

    def stride(self) -> Sequence[int]:
        return [math.prod(self.sizes[axis + 1 :]) for axis in range(len(self.sizes))]

    def storage_offset(self) -> int:
        return 0


def python_says(condition: str, sizes: Sequence[Sequence[int]]) -> bool:
    """Return what Python makes of a condition, False where it has no value or a long one."""
    tree = ast.fix_missing_locations(Operated().visit(ast.parse(condition, mode="eval")))
    names = {
        "L": {name: Sized(each) for name, each in zip("xy", sizes, strict=True)},
        "operate": operate,
        "round": rounded,
        "math": math,
        "torch": types.SimpleNamespace(sym_float=float, sym_int=int),
    }
    try:
        return bool(eval(compile(tree, "condition", "eval"), names))
    except (BeyondBound, ArithmeticError, IndexError, TypeError, ValueError):
        return False


LEAVES = st.one_of(
    st.integers(-9, 9).map(lambda n: str(n) if n >= 0 else f"({n})"),
    st.sampled_from([X0, X1, Y0, "L['x'].stride()[0]", "L['x'].storage_offset()"]),
    st.sampled_from(["True", "False", "0.5", "2.0", "1e18", "1e-18", str(2**63 - 1)]),
    # Axes that there are not, and what makes long numbers.
    st.sampled_from(["L['y'].size()[1]", "L['x'].stride()[5]", "9**9", "10**18", "2**400"]),
)
# Nothing of a condition, though Python knows a value for most.
STRANGE = st.sampled_from(
    [
        "'a'",
        "'a'*9",
        "None",
        "1j",
        "b'a'",
        "[1]",
        "(1,)",
        "{1: 2}",
        "...",
        f"{9**99}",
    ]
    + ["x", "L", "L['z'].size()[0]", "L['x']", "L['x'].size()", "L['x'].dtype", "9 in (9,)"]
    + [
        "__import__('os')",
        "(lambda: 1)()",
        "[a for a in ()]",
        "1 if 1 else 1",
        "~1",
        "1 | 2",
        "1 is 1",
    ]
    + ["f'{1}'", "len('a')", "pow(9, 9)", "round(number=1)", "min(*(1, 2))", "2 @ 3", "(a := 1)"]
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    binary = ["+", "-", "*", "*", "**", "**", "//", "/", "%", "<<", ">>", " and ", " or "]
    compare = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
    one = ["abs", "int", "float", "round", "torch.sym_float", "torch.sym_int", "math.floor"]
    one += ["math.ceil", "math.trunc", "math.sqrt", "math.exp", "math.log", "-", "+", "not "]
    some = ["min", "max", "round", "math.pow", "math.log", "int"]
    return st.one_of(
        st.tuples(inner, st.sampled_from(binary), inner).map(lambda p: f"({p[0]}{p[1]}{p[2]})"),
        st.tuples(inner, compare, inner).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(inner, compare, inner, compare, inner).map(lambda p: f"({' '.join(p)})"),
        st.tuples(st.sampled_from(one), inner).map(lambda p: f"({p[0]}({p[1]}))"),
        st.tuples(st.sampled_from(some), st.lists(inner, max_size=3)).map(
            lambda p: f"{p[0]}({', '.join(p[1])})"
        ),
    )


CONDITIONS = st.recursive(LEAVES, combined, max_leaves=25)
SIZES = st.tuples(
    st.lists(st.sampled_from([0, 1, 2, 3, 8, 2**31, 2**62]), min_size=2, max_size=2),
    st.lists(st.sampled_from([0, 1, 5, 2**40]), min_size=1, max_size=1),
)


@settings(max_examples=500, deadline=None)
@given(CONDITIONS, SIZES)
def test_any_condition_is_what_python_says(condition: str, sizes: list[list[int]]) -> None:
    start = time.perf_counter()
    guards = kept(condition)
    held = guards.holds(sizes)
    assert time.perf_counter() - start < SECONDS
    assert held is python_says(condition, sizes)
    assert guards.violated(sizes) == ([] if held else list(guards.text))
    assert compile_guards([condition], ["x", "y"], ()).holds(sizes) is held


def test_floats_and_the_smallest_integer_are_constants() -> None:
    guards = kept(f"{X0} < 1e30", f"{X0} > -9223372036854775808", f"{X0} < 1e400")
    assert guards.holds([[3, 4], [5]])


@settings(max_examples=300, deadline=None)
@given(STRANGE.flatmap(lambda strange: st.tuples(CONDITIONS, st.just(strange), CONDITIONS)))
def test_conditions_of_other_things_are_refused(parts: tuple[str, str, str]) -> None:
    start = time.perf_counter()
    before, strange, after = parts
    for condition in (strange, f"{before} == ({strange})", f"min({before}, -({strange}), {after})"):
        with pytest.raises(SizeConditionError):
            kept(condition)
    assert time.perf_counter() - start < SECONDS


@settings(max_examples=300, deadline=None)
@given(st.text("L[x'].size()0123459*/%<>=!+-~ ,e\n\\\"andorti#:{}", max_size=60), CONDITIONS, SIZES)
def test_any_text_is_refused_or_has_an_answer(
    text: str, condition: str, sizes: list[list[int]]
) -> None:
    for each in (text, condition + text, text + condition, condition[: len(text)]):
        try:
            guards = kept(each)
        except SizeConditionError:
            continue
        assert guards.holds(sizes) in (True, False)


# --- entries of the cache


class Net(nn.Module):
    """Returns tensors and a number that depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.plain = nn.Linear(4, 4, bias=False)
        self.table = torch.arange(4.0)
        self.register_buffer("offset", torch.zeros(4))
        self.width = 4

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        z = self.plain(self.fc(x)) + self.offset + self.table
        return {"z": z, "rows": x.shape[0] + y.shape[0], "parts": (y.float().mean(), [3, None])}

    @property
    def trap(self) -> int:
        raise AssertionError("a property was asked")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Net, Path, bytes]]:
    """A module, the folder of its cache, and the content of the entry there."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTRAIN_CACHE_DIR", str(folder))
        patch.setattr(source_files, "process_start", lambda: math.inf)
        net = Net()
        ORTModule(net)(*arguments(3))
        (path,) = folder.iterdir()
        content = GraphFiles(folder, cache.size_limit()).read(path.stem)
        assert content is not None
        yield net, folder, content
    graph_files._warned.clear()


def arguments(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 4), torch.arange(2)


@pytest.fixture
def entry(written: tuple[Net, Path, bytes]) -> Entry:
    net, folder, content = written
    for path in folder.iterdir():
        path.unlink()
    return Entry(net, folder, content)


def joined(text: bytes, rest: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


class Entry:
    """An entry of which parts are replaced, behind a right checksum."""

    def __init__(self, net: Net, folder: Path, content: bytes) -> None:
        self.net, self._folder = net, folder
        self._files = GraphFiles(folder, 1 << 30)
        self._slot = CacheSlot(net, CallSignature(net.forward).flatten(arguments(3), {}))
        self._name = self._slot._names[0]
        self._head, graph = self._split(content)
        self._described, self._model = self._split(graph)

    @staticmethod
    def _split(data: bytes) -> tuple[bytes, bytes]:
        end = 8 + int.from_bytes(data[:8], "little")
        return data[8:end], data[end:]

    @property
    def description(self) -> dict[str, Any]:
        return json.loads(self._described)

    @property
    def head(self) -> dict[str, Any]:
        return json.loads(self._head)

    def write(
        self, head: Mapping[str, Any] | bytes = {}, description: Mapping[str, Any] | bytes = {}
    ) -> None:
        """Write the entry with some items of its head and of its description, or all of one, replaced."""
        if not isinstance(head, bytes):
            # One loaded file stands for thousands.
            head = json.dumps({**self.head, "sources": self.head["sources"][:1], **head}).encode()
        if not isinstance(description, bytes):
            description = json.dumps({**self.description, **description}).encode()
        content = joined(head, joined(description, self._model))
        assert self._files.write(self._name, content)

    def load(self) -> PreparedGraph | None:
        start = time.perf_counter()
        loaded = self._slot.load({})
        assert time.perf_counter() - start < SECONDS
        return loaded

    @property
    def is_there(self) -> bool:
        return self._files.read(self._name) is not None

    def is_refused(self) -> bool:
        """Tell whether it is not used, and not kept for the next process either."""
        before = {path: dict(vars(layer)) for path, layer in self.net.named_modules()}
        loaded = self.load()
        assert before == {path: vars(layer) for path, layer in self.net.named_modules()}
        return loaded is None and not self.is_there


@pytest.mark.parametrize(
    "condition",
    [
        "'a' * 10**10 != 'b'",
        "'%1000000000d' % 1 != ''",
        "L['x'].size()[9] == 1",
        "L['y'].stride()[1] == 1",
        "L['z'].size()[0] == 1",
        f"{'-' * 100_000}1 < 2",
        f"1{'+1' * 1000} > 0",
        7,
        ["1"],
        None,
    ],
    ids=lambda condition: str(condition)[:40],
)
def test_entry_with_a_strange_condition_is_damaged(entry: Entry, condition: Any) -> None:
    entry.write()
    assert entry.load() is not None
    entry.write(description={"conditions": [*entry.description["conditions"], condition]})
    assert entry.is_refused()


@pytest.mark.parametrize(
    "condition",
    ["9**9**9 > 0", "1 << 10**12 > 0", f"1 // ({X0} - 3) != 5", "round(1, -(10**9)) == 0"],
)
def test_entry_whose_condition_has_no_value_is_not_used(entry: Entry, condition: str) -> None:
    entry.write(description={"conditions": [condition]})
    assert entry.load() is None
    ours = ORTModule(entry.net)
    assert_same(ours(*arguments(3)), entry.net(*arguments(3)))
    assert not ours.report().captures[0].from_disk


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(actual["z"], expected["z"])
    torch.testing.assert_close(actual["parts"][0], expected["parts"][0])
    assert (actual["rows"], actual["parts"][1]) == (expected["rows"], expected["parts"][1])


@pytest.mark.parametrize(
    "condition",
    [f"1 // ({X0} - 5) <= 1", f"not 1 % ({X0} - 5) > 3", f"{X0} == 3 or L['x'].size()[9] == 1"],
)
def test_a_later_call_for_which_a_condition_has_no_value_is_captured(
    entry: Entry, condition: str
) -> None:
    entry.write(description={"conditions": [*entry.description["conditions"], condition]})
    ours = ORTModule(entry.net)
    for rows in (3, 5, 3, 5):
        assert_same(ours(*arguments(rows)), entry.net(*arguments(rows)))
    assert [record.from_disk for record in ours.report().captures] == [True, False]


class Plain(dict[str, Any]):
    """A mapping that is neither a dataclass nor a ModelOutput."""


@dataclasses.dataclass
class Acting:
    """A dataclass whose __init__ does something."""

    path: str = ""

    def __post_init__(self) -> None:
        raise AssertionError("it was made")


def deep_tree(depth: int) -> list[Any]:
    tree: list[Any] = ["slot", 0]
    for _ in range(depth):
        tree = ["sequence", ["builtins", "list"], [], [tree]]
    return tree


def tree_of(form: str, cls: type | list[str], keys: Sequence[Any], *children: Any) -> list[Any]:
    name = [cls.__module__, cls.__qualname__] if isinstance(cls, type) else cls
    return [form, name, [[type(key).__name__, key] for key in keys], list(children)]


SLOT = ["slot", 0]
TREES = [
    ["slot", 4],
    ["slot", -1],
    ["slot", True],
    ["slot", 0.0],
    ["slot", "0"],
    ["slot", 2**70],
    ["slot"],
    ["slot", 0, 0],
    ["number", 0],
    ["number", -1],
    ["constant", ["list", []]],
    ["constant", ["int", "1"]],
    ["constant", ["int", True]],
    ["constant", ["Popen", None]],
    ["constant", ["dtype", "_dynamo"]],
    ["constant", ["dtype", ["float32"]]],
    ["constant", ["float", 1.0]],
    ["factory", ["collections", "defaultdict"], [], []],
    ["unknown", ["builtins", "dict"], [], []],
    {"slot": 0},
    None,
    deep_tree(100),
    tree_of("sequence", list, (), *([SLOT] * 70_000)),
    tree_of("sequence", list, ("a",), SLOT),
    tree_of("sequence", torch.Size, (), SLOT),
    tree_of("sequence", torch.return_types.max, (), SLOT),
    tree_of("sequence", dict, ()),
    tree_of("sequence", ["torch.nn", "Linear"], ()),
    tree_of("sequence", ["builtins"], ()),
    tree_of("sequence", ["builtins", 3], ()),
    tree_of("sequence", [["builtins"], "list"], ()),
    tree_of("arguments", list, ()),
    tree_of("arguments", ["urllib.parse", "SplitResult"], (), SLOT),
    tree_of("mapping", dict, ("a",)),
    tree_of("mapping", dict, (), SLOT),
    tree_of("mapping", dict, ("a", "a"), SLOT, SLOT),
    tree_of("mapping", Mapping, ("a",), SLOT),
    tree_of("mapping", list, ("a",), SLOT),
    tree_of("keywords", Plain, ("a",), SLOT),
    tree_of("keywords", Acting, ("path",), SLOT),
    tree_of("keywords", dict, (3,), SLOT),
    tree_of("fields", Acting, ("other",), SLOT),
    tree_of("fields", Acting, ()),
    tree_of("fields", dict, ("a",), SLOT),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree)[:60])
def test_entry_of_a_result_that_no_call_could_build_is_damaged(entry: Entry, tree: Any) -> None:
    entry.write(description={"tree": tree})
    assert entry.is_refused()


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Fields:
    tensor: torch.Tensor
    number: float


class Forms(nn.Module):
    """Returns containers of all kinds that have a form as bytes."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "sequence": [x + 1, (x + 2, None, True, 2, 0.1, "text", torch.float16)],
            "arguments": Pair(x + 3, x + 4),
            "fields": Fields(x + 5, 0.5),
            "mapping": collections.OrderedDict([(1, x + 6), (None, x + 7)]),
            "size": x.shape,
            "max": x.max(0),
        }


def test_results_of_all_forms_are_kept(
    written: tuple[Net, Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    for from_disk in (False, True):
        ours = ORTModule(Forms())
        for rows in (3, 5):
            result, expected = ours(torch.ones(rows, 2)), Forms()(torch.ones(rows, 2))
            assert [type(part) for part in result.values()] == list(map(type, expected.values()))
            assert str(result) == str(expected)
        assert [record.from_disk for record in ours.report().captures] == [from_disk]


def test_classes_are_asked_of_modules_that_import_nothing(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = types.ModuleType("lazy_names")

    def imported(name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    lazy.__getattr__ = imported  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_names", lazy)
    entry.write(description={"tree": tree_of("mapping", ["lazy_names", "Mapping"], ("a",), SLOT)})
    assert entry.is_refused()


DAMAGES: list[dict[str, Any]] = [
    *({"user_inputs": [["x", i], ["y", 1]]} for i in (-2, 1, 2, 2**70, 0.0, False, "0", None)),
    {"user_inputs": [["x", 0]]},
    {"user_inputs": [[["x"], 0], ["y", 1]]},
    {"user_inputs": [["x", 0, 0], ["y", 1]]},
    {"user_inputs": {"x": 0}},
    {"input_names": ["y", "x"]},
    {"input_names": ["x", "z"]},
    {"input_names": ["x", "y", "z"]},
    {"input_names": "xy"},
    {"input_names": [0, 1]},
    {"aten_nodes": -1},
    {"aten_nodes": "7"},
    {"aten_nodes": 2**80},
    {"conditions": f"{X0} == 3"},
    {"paths": []},
    {"paths": [1, 2, 3]},
    {"paths": ["a", "b", "c", "d"]},
    *({flag: 1} for flag in ("grad_enabled", "squeezes", "autocast_regions")),
    {"grad_enabled": False},
    *({sets: [[0], [0]]} for sets in ("common_saves", "needed_results")),
    *({sets: [[0], [0], [3]]} for sets in ("common_saves", "needed_results")),
    *({sets: [[0], [0], [-1]]} for sets in ("common_saves", "needed_results")),
    {"common_saves": [[0], [0], {"0": 1}]},
    {"needed_results": None},
    *({texts: [1]} for texts in ("unsaved_inputs", "names_read", "cloned")),
    *({texts: "ab"} for texts in ("unsaved_inputs", "names_read", "cloned")),
    {"outside": {"a": ["", "width"]}, "same": 1},
    {"outside": {}},
    {"outside": []},
    {"fixed": 3},
    {"fixed": None},
]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_entry_with_a_damaged_description_is_not_used(entry: Entry, damage: dict[str, Any]) -> None:
    assert len(entry.description["paths"]) == 3 and entry.description["outside"]
    entry.write(description=damage)
    assert entry.is_refused()


def test_outside_tensors_are_tensors_of_the_form_that_the_graph_takes(entry: Entry) -> None:
    (name,) = entry.description["outside"]
    entry.write(description={"outside": {name: ["", "table"]}})
    assert entry.load() is not None
    for place in (
        ["", "width"],
        ["", "fc"],
        ["none", "table"],
        ["", "none"],
        [["", "table"]],
        "ab",
    ):
        entry.write(description={"outside": {name: place}})
        assert entry.is_refused()


@pytest.mark.parametrize(
    "assignment",
    [
        ["", "", "trap", 3],
        ["", "", "training", None],
        ["", "", "training", 1],
        ["", "", "_compiled_call_impl", 3],
        ["", "", "_forward_hooks", None],
        ["", "", "call_super_init", True],
        ["plain", "", "bias", 3],
        ["", "", "offset", 3],
        ["", "", "fc", None],
        ["", "", "width", [3]],
        ["", "", "width"],
        ["", "", "width", 3, 3],
        [None, "", "width", 3],
        ["", None, "width", 3],
    ],
    ids=str,
)
def test_only_plain_attributes_are_assigned_to(entry: Entry, assignment: list[Any]) -> None:
    entry.write(head={"assignments": [assignment]})
    assert entry.is_refused()


def test_assignments_run_no_setter_and_are_taken_back(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Net, name: str, value: Any) -> None:
        raise ValueError(f"{name} is not to be set")

    monkeypatch.setattr(Net, "__setattr__", refuse)
    before = dict(vars(entry.net))
    entry.write(head={"assignments": [["", "", "width", 5], ["", "", "more", 6]], "compared": ""})
    assert entry.load() is None
    assert vars(entry.net) == before


@pytest.mark.parametrize(
    "state",
    [[3, 1, 1], ["relative.py", "0"], ["/x", 1], ["/x", 1, "1"], ["/x"], [], "/x", 7, {}],
    ids=str,
)
def test_only_states_of_files_are_compared(entry: Entry, state: Any) -> None:
    entry.write(head={"sources": [state]})
    assert entry.is_refused()


def test_only_files_of_sources_are_read(entry: Entry, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("x = 1\n")
    states = [source_files._state(str(source), source.stat())]
    entry.write(head={"sources": states})
    assert entry.load() is not None
    entry.write(head={"sources": states * 2})
    assert entry.is_refused()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "device.py").symlink_to("/dev/zero")
    with (tmp_path / "sparse.py").open("wb") as stream:
        stream.truncate(1 << 40)
    for name in ("pipe.py", "device.py", "sparse.py", "missing.py"):
        entry.write(head={"sources": [[str(tmp_path / name), "0"]]})
        assert entry.is_refused()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"[" + b"[]," * 3_000_000 + b"0]",
        b'{"key": ' + b"9" * 4000 + b"}",
        b'{"key": 1' + b"0" * 1_000_000 + b"}",
        b'{"key": NaN}',
        b'"key"',
        b"7",
        b"null",
        b"",
        b"\xff",
    ],
    ids=lambda text: str(text[:20]),
)
def test_texts_are_bounded(entry: Entry, text: bytes) -> None:
    entry.write(head=text)
    assert entry.is_refused()
    entry.write(description=text)
    assert entry.is_refused()


def test_what_would_not_be_read_is_not_written(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortrain.capture.guards._MOST_CHARACTERS", 1)
    ours = ORTModule(entry.net)
    assert_same(ours(*arguments(3)), entry.net(*arguments(3)))
    assert not entry.is_there

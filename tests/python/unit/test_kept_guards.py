# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conditions on sizes that anybody may have written: bounded in what they say, cost and give."""

from __future__ import annotations

import ast
import dataclasses
import math
import operator
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ortrain.capture.errors import SizeConditionError
from ortrain.capture.guards import Guards, compile_guards

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

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Compilation of size conditions."""

import pytest

from ortrain.capture.errors import CaptureError
from ortrain.capture.guards import compile_guards

A0, A1, B0 = "L['a'].size()[0]", "L['a'].size()[1]", "L['b'].size()[0]"


@pytest.mark.parametrize(
    ("condition", "good", "bad"),
    [
        (f"{A0} == {B0}", [[3, 4], [3]], [[3, 4], [4]]),
        (f"2 <= {A0} and {A0} <= 8", [[8, 1], [0]], [[9, 1], [0]]),
        (f"2 <= {A0} <= 8", [[2, 1], [0]], [[1, 1], [0]]),
        (f"({A0} // 2) >= 1 or {B0} == 0", [[0, 1], [0]], [[1, 1], [5]]),
        (f"min(32, {A1}) == {A1}", [[1, 32], [0]], [[1, 33], [0]]),
        (f"(-1) + {A1} != 1", [[1, 3], [0]], [[1, 2], [0]]),
        (f"{A0} % 4 == 0", [[8, 1], [0]], [[6, 1], [0]]),
        (f"not ({A0} > 2)", [[2, 1], [0]], [[3, 1], [0]]),
        (f"math.ceil({A0} / 2) == 2", [[3, 1], [0]], [[5, 1], [0]]),
        (f"L['a'].stride()[0] == {A1}", [[3, 4], [0]], None),
        ("L['a'].storage_offset() == 0", [[3, 4], [0]], None),
        (f"{A0}**2 < 10", [[3, 4], [0]], [[4, 4], [0]]),
    ],
)
def test_condition(condition: str, good: list[list[int]], bad: list[list[int]] | None) -> None:
    guards = compile_guards([condition], ["a", "b"], [])
    assert guards.holds(good)
    if bad is not None:
        assert not guards.holds(bad)
        assert guards.violated(bad) == list(guards.text)


def test_static_sizes_are_conditions() -> None:
    guards = compile_guards([], ["a"], [(0, 1, 5)])
    assert guards.text == ("a.size()[1] == 5",)
    assert guards.holds([[9, 5]])
    assert not guards.holds([[9, 6]])


@pytest.mark.parametrize(
    "condition",
    [
        "L['c'].size()[0] == 1",
        "__import__('os').system('true')",
        "L['a'].dtype == 3",
        "(lambda: 1)()",
        "L['a'].size()[0] in (1, 2)",
    ],
)
def test_other_conditions_are_refused(condition: str) -> None:
    with pytest.raises(CaptureError, match="condition"):
        compile_guards([condition], ["a"], [])

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which cases of sampled tests 'make test' runs."""

from __future__ import annotations

import itertools

import pytest

from tests.python.conftest import _covering


class Item:
    def __init__(self, name: str, params: dict[str, object], *count: int) -> None:
        self.nodeid = f"test_a.py::test_b[{name}]"
        self.callspec = type("CallSpec", (), {"params": params})
        self._mark = pytest.mark.sampled(*count).mark if count else pytest.mark.sampled.mark

    def get_closest_marker(self, name: str) -> pytest.Mark:
        assert name == "sampled"
        return self._mark


@pytest.mark.parametrize("sizes", [(4, 3), (2, 2, 5), (6,)])
def test_each_value_occurs(sizes: tuple[int, ...]) -> None:
    axes = [[f"{axis}{i}" for i in range(size)] for axis, size in enumerate(sizes)]
    items = [
        Item("-".join(case), dict(enumerate(case)))  # type: ignore[arg-type]
        for case in itertools.product(*axes)
    ]
    kept = _covering(items)  # type: ignore[arg-type]
    seen = {value for item in kept for value in item.callspec.params.values()}
    assert seen == {value for axis in axes for value in axis}
    assert len(kept) == max(sizes)
    assert kept == _covering(items)  # type: ignore[arg-type]


def test_a_number_of_cases_is_kept() -> None:
    items = [Item(str(i), {"i": i}, 3) for i in range(10)]
    assert len(_covering(items)) == 3  # type: ignore[arg-type]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Processes that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ranks import Ranks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests that share processes in one worker of pytest-xdist."""
    for item in items:
        if (
            "group" in getattr(item, "fixturenames", ())
            and item.path.parent == Path(__file__).parent
        ):
            item.add_marker(pytest.mark.xdist_group("ranks"))


@pytest.fixture(scope="session")
def _groups() -> Iterator[dict[int, Ranks]]:
    made: dict[int, Ranks] = {}
    yield made
    for group in made.values():
        group.end()


@pytest.fixture
def group(_groups: dict[int, Ranks]) -> Callable[[int], Ranks]:
    """Return a function that gives so many joined processes; those of before where they live."""

    def of_size(size: int) -> Ranks:
        if size not in _groups or not _groups[size].alive:
            _groups[size] = Ranks(size)
        return _groups[size]

    return of_size

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Python goes on collecting garbage in a program that does little else than capture."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from ortrain.capture.surviving_fakes import FakesMade


class Link:
    """Is part of a cycle."""

    def __init__(self) -> None:
        self.me = self


def test_cycles_that_outlive_their_traces_are_collected() -> None:
    gc.collect()
    first: weakref.ref[Any] | None = None
    objects = len(gc.get_objects())
    made = 0
    while made < objects:  # Python itself waits for a quarter
        with FakesMade().taken_back([]):
            links = [Link() for _ in range(20_000)]
        made += 2 * len(links)
        first = first or weakref.ref(links[0])
        del links
        if first() is None:
            break
    assert first is not None
    assert first() is None


def test_who_has_switched_collections_off_is_left_alone() -> None:
    gc.collect()
    gc.disable()
    try:
        objects, made = len(gc.get_objects()), 0
        count = gc.get_stats()[-1]["collections"]
        while made < objects // 2:
            with FakesMade().taken_back([]):
                links = [Link() for _ in range(50_000)]
            made += len(links)
        assert gc.get_stats()[-1]["collections"] == count
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.collect()

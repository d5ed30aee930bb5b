# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards that call functions under functools.lru_cache, whose caches others empty and write to."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from side_by_side import Linear, assert_same_calls


@functools.lru_cache
def table(length: int) -> torch.Tensor:
    return torch.arange(float(length)).unsqueeze(1)


@functools.cache
def pair_of_tables(length: int) -> dict[str, tuple[torch.Tensor, ...]]:
    return {"both": (torch.ones(length, 1), torch.zeros(length, 1))}


@functools.lru_cache
def factor(name: str) -> float:
    return {"a": 2.0}[name]


@pytest.fixture(autouse=True)
def empty_caches() -> None:
    for function in (table, pair_of_tables, factor):
        function.cache_clear()


class Global(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + table(len(x))


class InAContainer(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + pair_of_tables(len(x))["both"][0]


class InAnAttribute(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.table = functools.lru_cache(lambda length: torch.arange(float(length)).unsqueeze(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (1 + self.table(x.shape[0]))


class HeldElsewhereToo(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.kept = table(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + table(len(x)) + self.kept[:1] * 0


def write_and_empty(net: Any, step: int) -> None:
    caches = [table, getattr(net, "table", table)]
    if step == 0:
        for cache in (*caches, pair_of_tables):
            cache.cache_clear()
    if step == 3:
        for cache in caches:
            cache(3).add_(1)
        pair_of_tables(3)["both"][0].add_(1)
    if step == 4:
        for cache in (*caches, pair_of_tables):
            cache.cache_clear()


@pytest.mark.parametrize("kind", [Global, InAContainer, InAnAttribute, HeldElsewhereToo])
def test_tensors_of_a_cache(kind: type[Linear]) -> None:
    assert_same_calls(kind, write_and_empty, rows=(3, 3, 5, 3, 3))


class Counts(Global):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_cache_in_a_module_that_would_run_in_pieces() -> None:
    model = assert_same_calls(Counts, write_and_empty, rows=(3, 3, 5, 3, 3))
    assert all(record.pieces == 0 for record in model.report().captures)


class Plain(Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * factor("a")


def test_a_cache_of_numbers_does_not_hinder_a_graph() -> None:
    model = assert_same_calls(Plain)
    assert [record.fallback for record in model.report().captures] == [""]

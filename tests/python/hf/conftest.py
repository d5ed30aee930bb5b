# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings of equal models share their graph, as they do where the user's graph cache is on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def graph_cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("graphs"))


@pytest.fixture(autouse=True)
def _uses_graph_cache(graph_cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", graph_cache)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Subprocesses that a test starts find the package of this tree, as the test itself does.

No test reads or writes the graph cache of the user who runs it. Under pytest-xdist (``--dist=loadgroup``)
the tests of a file share a worker, since they share what the first of them loads; a slow test goes to
the worker that is free, unless a fixture of its module serves several. Long work starts first.
"""

from __future__ import annotations

import collections
import logging
import os
from pathlib import Path

import pytest
import torch  # noqa: F401  which makes the logger that is meant below

PACKAGES = str(Path(__file__).resolve().parents[2] / "python")

os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (PACKAGES, os.environ.get("PYTHONPATH")) if part
)
os.environ["ORTRAIN_CACHE_DIR"] = "off"
# pytest listens to loggers that do not propagate. This one then prints every graph of every export: a third of
# a capture's time.
logging.getLogger("torch.__trace").propagate = True


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("ORTRAIN_COVERAGE_DIR")
    # Of several processes the workers run the tests.
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        from tests.python.coverage_recorder import CoverageRecorder

        config.pluginmanager.register(CoverageRecorder(Path(folder)))


def _shares_fixtures(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(d.scope in ("module", "class") for found in definitions for d in found)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not hasattr(config, "workerinput"):  # a worker of pytest-xdist has it
        return
    sizes = collections.Counter(item.path for item in items)
    order = {}
    for item in items:
        if item.get_closest_marker("xdist_group"):
            order[item] = (0, 0, "")
        elif item.get_closest_marker("slow") and not _shares_fixtures(item):
            order[item] = (1, 0, "")
        else:
            item.add_marker(pytest.mark.xdist_group(str(item.path)))
            order[item] = (2, -sizes[item.path], str(item.path))
    items.sort(key=order.__getitem__)

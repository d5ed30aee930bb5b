# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Records which code each test runs, where ORTRAIN_COVERAGE_DIR names a folder; tools/coverage_map.py reads it.

Python code by Coverage.py, test by test. C++ code of an extension built with ORTRAIN_COVERAGE by files of tests.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest


class CoverageRecorder:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._taken = 0
        self._group: str | None = None
        self._tests: list[str] = []
        self._coverage = coverage.Coverage(
            data_file=str(folder / "python"),
            data_suffix=True,
            branch=True,
            source_pkgs=["ortrain"],
            config_file=False,
            messages=False,
        )
        self._coverage.start()
        from ortrain import _core

        _core.op_cases()  # registers operators
        library = ctypes.CDLL(_core.__file__)
        self._take = getattr(library, "ortrain_coverage_take", None)
        if self._take is not None:
            self._take(None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        group = item.nodeid.partition("::")[0]
        if group != self._group:
            self._write()
            self._group = group
        self._tests.append(item.nodeid)
        if item.get_closest_marker("slow"):
            with (self._folder / f"slow-{os.getpid()}").open("a") as slow:
                slow.write(f"{item.nodeid}\n")
        self._coverage.switch_context(item.nodeid)
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self._write()
        self._coverage.stop()
        self._coverage.save()

    def _write(self) -> None:
        if self._take is None or not self._tests:
            return
        folder = self._folder / f"python-{os.getpid()}-{self._taken}"
        self._taken += 1
        folder.mkdir(parents=True)
        (folder / "tests").write_text("\n".join(self._tests) + "\n")
        self._tests = []
        self._take(str(folder).encode())

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Subprocesses that a test starts find the package of this tree, as the test itself does.

No test reads or writes the graph cache of the user who runs it. Under pytest-xdist (``--dist=loadgroup``)
the tests of a file share a worker, since they share what the first of them loads; a slow test goes to
the worker that is free, unless a fixture of its module serves several. Long work starts first.

Tests marked long, and those cases of sampled ones that a fixed draw leaves out, run with ``--everything`` alone,
and nothing else with ``--left-out``. With ``--draw`` costly tests take turns, too (drawn_tests.py).
"""

from __future__ import annotations

import collections
import gc
import importlib
import logging
import os
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  which makes the logger that is meant below

from tests.python.drawn_tests import Costs
from tests.python.process_state import changed, process_state

PACKAGES = str(Path(__file__).resolve().parents[2] / "python")

os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (PACKAGES, os.environ.get("PYTHONPATH")) if part
)
os.environ["ORTRAIN_CACHE_DIR"] = "off"
# Each graph after each pass, and each plan.
os.environ.setdefault("ORTRAIN_VERIFY", "1")
# Pieces of small models would not be worth it.
os.environ["ORTRAIN_PIECES"] = "all"
# pytest listens to loggers that do not propagate. This one then prints every graph of every export: a third of
# a capture's time.
logging.getLogger("torch.__trace").propagate = True


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get("ORTRAIN_COVERAGE_DIR")
    # Of several processes the workers run the tests.
    if folder and (hasattr(config, "workerinput") or not config.getoption("numprocesses", None)):
        from tests.python.coverage_recorder import CoverageRecorder

        config.pluginmanager.register(CoverageRecorder(Path(folder)))


_begun: set[Path] = set()
_state: dict[str, Any] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """See what PyTorch is set to before the first test."""
    if not _state:
        _state.update(process_state())


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Refuse tests that change how others run.

    What is loaded by now is kept out of collections where accelerate trains, which starts two per training: among the
    modules of PyTorch and transformers one takes a third of a second. Elsewhere captures would look at what is frozen.
    """
    if item.path not in _begun:
        _begun.add(item.path)
        gc.collect()
        gc.unfreeze()
        if item.path.parent.name == "hf":
            gc.freeze()
    if nextitem is not None and nextitem.path == item.path and _shares_fixtures(nextitem):
        return  # what fixtures of a file have set is set back with them
    before, after = _state.copy(), process_state()
    _state.update(after)
    if different := changed(before, after):
        raise AssertionError(f"the test leaves PyTorch set otherwise than before: {different}")


def _shares_fixtures(item: pytest.Function) -> bool:
    definitions = item._fixtureinfo.name2fixturedefs.values()
    return any(d.scope in ("module", "class") for found in definitions for d in found)


def _covering(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return some cases of one test in which each value of each parameter occurs, or as many as its mark asks for."""
    left = items.copy()
    random.Random(items[0].nodeid.partition("[")[0]).shuffle(left)
    count = next(iter(items[0].get_closest_marker("sampled").args), 0)
    if count:
        return left[:count]
    chosen, seen = [], set()
    values = {i: {(name, id(v)) for name, v in i.callspec.params.items()} for i in items}
    while left:
        best = max(left, key=lambda item: len(values[item] - seen))
        if not values[best] - seen:
            break
        seen |= values[best]
        chosen.append(best)
        left.remove(best)
    return chosen


def _leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0]].append(item)
    sampled = {item for group in cases.values() for item in group}
    kept = {item for group in cases.values() for item in _covering(group)}
    out = {i for i in items if i.get_closest_marker("long") or i in sampled - kept}
    # Who names a test means it.
    named = {arg.partition("[")[0] for arg in config.args if "::" in arg}
    if draw := config.getoption("draw"):
        drawn = Costs.load().drawn((i.nodeid for i in items), draw)
        always = set(config.getoption("always").splitlines())
        out |= {
            i
            for i in items
            if not {i.nodeid, i.nodeid.partition("::")[0]} & always and i.nodeid not in drawn
        }
    out = {i for i in out if i.nodeid.partition("[")[0] not in named}
    if config.getoption("left_out"):
        out = set(items) - out
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--everything", action="store_true", help="long tests, and all cases of sampled ones"
    )
    parser.addoption(
        "--left-out", action="store_true", help="only what runs with --everything alone"
    )
    parser.addoption("--draw", help="a text that says which of the costly tests run; else all do")
    parser.addoption(
        "--always", default="", help="files and names that no draw leaves out, a line each"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("everything"):
        _leave_out(config, items)
    from ortrain.capture.torch_internals import TORCH_VERSION  # once the environment is set

    for item in items:
        since = item.get_closest_marker("since_torch")
        if since and since.args > TORCH_VERSION:
            item.add_marker(pytest.mark.skip(f"of PyTorch {'.'.join(map(str, since.args))}"))
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


@pytest.fixture
def imported_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., types.ModuleType]]:
    """Return what writes a package and imports it, given its name and the sources of its modules ("" is its own).

    It counts as installed, unless the caller says ``installed=False``, and is forgotten after the test.
    """
    made: list[str] = []

    def imported(
        name: str, sources: Mapping[str, str], *, installed: bool = True
    ) -> types.ModuleType:
        root = tmp_path / "site-packages" if installed else tmp_path
        (root / name).mkdir(parents=True)
        for module, source in sources.items():
            (root / name / f"{module or '__init__'}.py").write_text(source)
        monkeypatch.syspath_prepend(root)
        made.append(name)
        for module in sources:
            importlib.import_module(f"{name}.{module}" if module else name)
        return sys.modules[name]

    yield imported
    for module in [module for module in sys.modules if module.partition(".")[0] in made]:
        sys.modules.pop(module)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what tests cost that run at each draw, since nobody has kept their times."""
    if not config.getoption("draw"):
        return
    times: dict[str, float] = collections.defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                times[report.nodeid] += report.duration
    tests, seconds = Costs.load().untimed(times)
    if tests:
        terminalreporter.write_line(
            f"{tests} costly tests of {seconds:.0f} s in all take no turns yet: "
            "python -m tests.python.drawn_tests build/pytest.xml"
        )

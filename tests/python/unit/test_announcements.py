# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward prints and logs comes at each call, as from PyTorch."""

from __future__ import annotations

import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.announcements import LogThreshold
from ortrain.capture.errors import CaptureError
from ortrain.capture.export import capture
from ortrain.capture.library_places import places_of, variables_at
from ortrain.capture.prepared import NotStorableError

pytestmark = pytest.mark.filterwarnings("ignore:.* runs in P|.* runs in pieces")
logger = logging.getLogger("tests.announcements")


class Talking(nn.Module):
    """A module that says something of the tensors that it is given."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.say = say

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.say(f"rows {x.shape[0]}")
        return self.linear(x).relu()


@pytest.fixture
def shown() -> Iterator[list[str]]:
    """Return the messages that a handler of the logger, which is at INFO, is given."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield messages
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


class OwnLogger(logging.Logger):
    """One that goes its own way to its handlers."""

    def isEnabledFor(self, level: int) -> bool:
        return True

    def handle(self, record: logging.LogRecord) -> None:
        self.callHandlers(record)


def through_own_logger(text: str) -> None:
    own = OwnLogger("own")
    own.parent = logger
    own.info(text)


WAYS: dict[str, Callable[[str], None]] = {
    "info": lambda text: logger.info(text),
    "log": lambda text: logger.log(35, "%s", text),
    "adapter": lambda text: logging.LoggerAdapter(logger, {}).warning(text),
    "by another name": functools.partial(logger.error),
    "logger of its own": through_own_logger,
    "handle": lambda text: logger.handle(
        logging.LogRecord("tests.announcements", logging.INFO, "", 0, text, None, None)
    ),
}


@pytest.fixture
def say_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], Callable[[str], None]]]:
    """Return what writes code into a folder, and imports its function ``say``.

    Such a module is younger than the process, which keeps no graphs on disk while it is there.
    """
    name = "tests_announcements_module"

    def make(folder: str, code: str) -> Callable[[str], None]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(str(tmp_path / folder))
        return importlib.import_module(name).say  # type: ignore[no-any-return]

    yield make
    sys.modules.pop(name, None)


def step(module: nn.Module, rows: int) -> None:
    module(torch.randn(rows, 3)).sum().backward()


@pytest.mark.parametrize("way", WAYS)
def test_what_a_forward_logs_is_logged_at_each_call(way: str, shown: list[str]) -> None:
    wrapped = ORTModule(Talking(WAYS[way]))
    for rows in (4, 5, 5):
        step(wrapped, rows)
    assert shown == ["rows 4", "rows 5", "rows 5"]


def test_what_a_forward_logs_once_leaves_the_graph_whole(
    shown: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Once(nn.Module):
        told = False

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.told:
                logger.warning("once")
                print("once")
                self.told = True
            return self.linear(x).relu()

    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    wrapped = ORTModule(Once())
    for rows in (4, 5, 5):
        step(wrapped, rows)
    assert shown == ["once"]
    assert [record.fallback for record in wrapped.report().captures] == [""]


def test_code_in_a_folder_of_a_packages_name_is_the_users_own(
    say_of: Callable[[str, str], Callable[[str], None]], capsys: pytest.CaptureFixture[str]
) -> None:
    wrapped = ORTModule(Talking(say_of("rich", "def say(text):\n    print(text)\n")))
    for rows in (4, 4):
        step(wrapped, rows)
    assert capsys.readouterr().out == "rows 4\nrows 4\n"


def test_what_an_installed_package_logs_leaves_the_graph_whole(
    say_of: Callable[[str, str], Callable[[str], None]],
) -> None:
    say = say_of(
        "site-packages",
        "import logging\n\n\ndef say(text):\n"
        "    logging.getLogger('package_that_logs').error('of the package')\n",
    )
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("package_that_logs").addHandler(handler)
    wrapped = ORTModule(Talking(say))
    step(wrapped, 4)
    logging.getLogger("package_that_logs").removeHandler(handler)
    assert [record.fallback for record in wrapped.report().captures] == [""]


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_what_a_forward_writes_to_a_stream_comes_at_each_call(
    stream: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wrapped = ORTModule(Talking(lambda text: print(text, file=getattr(sys, stream))))
    for rows in (4, 5, 5):
        step(wrapped, rows)
    assert getattr(capsys.readouterr(), stream[3:]) == "rows 4\nrows 5\nrows 5\n"


def test_what_is_not_shown_leaves_the_graph_whole_until_it_is(shown: list[str]) -> None:
    wrapped = ORTModule(Talking(lambda text: logger.debug(text)))
    step(wrapped, 4)
    step(wrapped, 5)
    assert not any(record.fallback for record in wrapped.report().captures)
    logger.setLevel(logging.DEBUG)
    step(wrapped, 6)
    logger.handlers[0].setLevel(logging.INFO)
    step(wrapped, 7)
    logger.handlers[0].setLevel(logging.NOTSET)
    step(wrapped, 8)
    logging.disable(logging.DEBUG)
    try:
        step(wrapped, 9)
    finally:
        logging.disable(logging.NOTSET)
    assert shown == ["rows 6", "rows 8"]


def test_warnings_are_shown_once_and_leave_the_graph_whole(
    capsys: pytest.CaptureFixture[str],
) -> None:
    wrapped = ORTModule(Talking(lambda text: warnings.warn("look out", stacklevel=1)))
    with pytest.warns(UserWarning, match="look out"):
        step(wrapped, 4)
    assert [record.fallback for record in wrapped.report().captures] == [""]
    assert capsys.readouterr().err == ""


def test_thresholds_are_those_by_which_loggers_decide(shown: list[str]) -> None:
    other = logging.getLogger("tests.announcements.inner")
    handler = logging.NullHandler(logging.WARNING)
    threshold = LogThreshold.about(other)
    assert threshold is LogThreshold.about(other)

    def levels_shown() -> list[int]:
        handlers = [*other.handlers, *(logger.handlers if other.propagate else [])]
        taking = handlers or [logging.lastResort]
        return [
            level
            for level in range(1, 60)
            if other.isEnabledFor(level) and any(level >= h.level for h in taking if h is not None)
        ]

    def is_as_decided() -> bool:
        return levels_shown() == list(range(threshold.level, 60))

    assert is_as_decided() and threshold.level == logging.INFO
    other.setLevel(logging.ERROR)
    assert is_as_decided()
    other.setLevel(logging.DEBUG)
    other.addHandler(handler)
    assert is_as_decided()
    other.propagate = False
    assert is_as_decided() and threshold.level == logging.WARNING
    other.removeHandler(handler)
    assert is_as_decided()
    other.disabled = True
    assert levels_shown() == [] and threshold.level > 60
    other.disabled, other.propagate = False, True


def test_thresholds_are_found_by_another_process() -> None:
    known = LogThreshold.about(logger)
    places = places_of([(known, "level")])
    assert places == [["logging", "", "tests.announcements", "level"]]
    assert variables_at(places) == [(known, "level")]
    with pytest.raises(NotStorableError, match="no logger"):
        variables_at([["logging", "", "nobody.asked.for.it", "level"]])
    root = LogThreshold.about(logging.getLogger())
    assert variables_at(places_of([(root, "level")])) == [(root, "level")]


def test_a_graph_by_itself_is_not_refused_for_what_it_logs(shown: list[str]) -> None:
    captured = capture(Talking(lambda text: logger.info(text)), (torch.randn(4, 3),))
    assert captured.graph_module is not None and shown


def test_a_graph_by_itself_is_refused_for_what_it_prints() -> None:
    with pytest.raises(CaptureError, match="prints"):
        capture(Talking(print), (torch.randn(4, 3),))

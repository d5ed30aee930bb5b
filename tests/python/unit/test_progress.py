# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
import logging

import pytest

from ortrain import progress


def test_listener_sees_begin_and_end():
    events = []
    with progress.listen(lambda *event: events.append(event)), progress.stage("plan") as timing:
        pass
    assert [(name, state) for name, _, state in events] == [("plan", "begin"), ("plan", "end")]
    assert events[0][1] == 0.0
    assert events[1][1] == timing.seconds > 0.0


def test_stage_is_logged_at_info(caplog):
    with caplog.at_level(logging.INFO, logger="ortrain"), progress.stage("capture"):
        assert "capture begins" in caplog.text  # before it took its time
        pass
    assert "capture done in" in caplog.text


def test_failure_is_told_and_passes_through(caplog):
    states = []
    with (
        caplog.at_level(logging.INFO, logger="ortrain"),
        progress.listen(lambda name, seconds, state: states.append(state)),
        pytest.raises(ValueError, match="no"),
        progress.stage("convert"),
    ):
        raise ValueError("no")
    assert states == ["begin", "failed"]
    assert "convert failed in" in caplog.text


def test_stages_nest_and_listeners_leave():
    outer, inner = [], []
    with progress.listen(lambda name, *_: outer.append(name)):
        with progress.stage("capture"), progress.listen(lambda name, *_: inner.append(name)):
            with progress.stage("export"):
                pass
        with progress.stage("plan"):
            pass
    with progress.stage("unheard"):
        pass
    assert outer == ["capture", "export", "export", "capture", "plan", "plan"]
    assert inner == ["export", "export"]


def test_equal_listeners_are_told_apart():
    class Same:
        def __init__(self):
            self.names = []

        def __eq__(self, other):
            return True

        __hash__ = None

        def __call__(self, name, seconds, state):
            self.names.append(name)

    first, second = Same(), Same()
    with progress.listen(first):
        with progress.listen(second):
            pass
        with progress.stage("plan"):
            pass
    assert (first.names, second.names) == (["plan", "plan"], [])

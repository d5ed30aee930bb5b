# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ortrain
from ortrain import logs

PACKAGE = Path(ortrain.__file__).parent


@pytest.fixture(autouse=True)
def restored():
    """Leave loggers and the engine's sink as they were."""
    names = ("ortrain", "ortrain.passes", "ortrain.plan")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    logs.configure("")
    assert levels == {name: logging.getLogger(name).level for name in names}


@pytest.mark.parametrize("name", ["ortrain", "ortrain.cache"])
def test_rank_stands_in_every_line(name, caplog, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with caplog.at_level(logging.INFO, logger=name):
        logs.get_logger(name).info("%d %% done", 50)
    assert caplog.messages == ["[rank 1] 50 % done"]
    assert caplog.records[0].rank == 1


def test_records_of_other_processes_keep_their_rank(caplog, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    sent = {"name": "ortrain", "msg": "[rank 1] here", "rank": 1, "levelno": logging.INFO}
    record = logging.makeLogRecord(sent)
    with caplog.at_level(logging.INFO, logger="ortrain"):
        logs.get_logger("ortrain").handle(record)
    assert caplog.messages == ["[rank 1] here"]


def test_one_process_has_no_rank(caplog, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    for size in ("1", "", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        assert logs.rank() is None and logs.is_main_process()
    with caplog.at_level(logging.INFO, logger="ortrain"):
        logs.get_logger("ortrain").info("alone")
    assert caplog.messages == ["alone"]


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
    ],
)
def test_rank_is_that_of_any_launcher(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert logs.rank() == ortrain.distributed.world_rank() == 1
    assert not logs.is_main_process()


def test_rank_of_torch_distributed_counts_first(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert logs.rank() == 3
    assert not logs.is_main_process()


def test_the_package_logs_through_loggers_that_carry_the_rank():
    direct = re.compile(r"""logging\.getLogger\(f?["']ortrain""")
    sources = [path for path in PACKAGE.rglob("*.py") if path.name != "logs.py"]
    assert len(sources) > 50
    assert [str(p) for p in sources if direct.search(p.read_text(encoding="utf-8"))] == []


def test_a_logger_gets_one_filter():
    for _ in range(3):
        logger = logs.get_logger("ortrain")
    assert sum(isinstance(known, logs.RankFilter) for known in logger.filters) == 1


def test_info_goes_to_stderr_and_ends(capsys):
    logs.configure("info")
    logger = logs.get_logger("ortrain.cache")
    logger.info("seen")
    logger.debug("too much")
    logs.configure("")
    logger.info("no longer")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("INFO ortrain.cache: seen\n")
    assert "too much" not in captured.err


def test_json_lines_hold_rank_and_exception(capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "2")
    logs.configure("json,debug")
    logger = logs.get_logger("ortrain")
    logger.debug("%s", 'with "quotes"\nand lines')
    try:
        raise ValueError("mine")
    except ValueError:
        logger.exception("failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first["message"] == 'with "quotes"\nand lines'
    assert (first["level"], first["logger"], first["rank"]) == ("DEBUG", "ortrain", 2)
    assert first["process"] == os.getpid()
    assert "ValueError: mine" in second["exception"]


def test_unknown_words_are_warned_of(capsys):
    logs.configure("info,verbose")
    line = capsys.readouterr().err
    assert "'verbose' is none of info, debug, json, all, dispatch" in line


def test_categories_of_the_engine_become_loggers(capsys, monkeypatch):
    from ortrain import _core

    monkeypatch.setenv("ORTRAIN_LOG", "passes")
    logs.configure()
    graph = _core.Graph.parse("graph g (float32[4] x) => (y) {\n  a = Tanh(x)\n  y = Exp(a)\n}")
    graph.run_passes("fuse")
    lines = capsys.readouterr().err.splitlines()
    assert any("DEBUG ortrain.passes: fuse/fuse_elementwise: 2 -> 1 nodes" in x for x in lines)
    assert not any("ortrain.plan" in line for line in lines)


def test_the_variable_works_from_the_start_and_silence_is_the_default():
    code = "import ortrain.progress as p\nwith p.stage('plan'): pass"
    for words, expected in (("", ""), ("info", "plan done in")):
        environment = {**os.environ, "ORTRAIN_LOG": words}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout == ""
        assert (expected in done.stderr) if expected else done.stderr == ""

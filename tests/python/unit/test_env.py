# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
import importlib
import json
import os
from types import SimpleNamespace

import pytest
import torch

from ortrain import env, errors


@pytest.fixture
def with_core(monkeypatch):
    """Replace the compiled core by given attributes, or by a failing import."""
    real = importlib.import_module

    def install(core):
        def import_module(name, *args):
            if name != "ortrain._core":
                return real(name, *args)
            if core is None:
                raise ImportError("libhwy.so.1: cannot open shared object file")
            return core

        monkeypatch.setattr(env.importlib, "import_module", import_module)

    return install


CORE = SimpleNamespace(
    __file__="/x/_core.so",
    build_info=lambda: {"compiler": "gcc 12.2.0", "build": "Release"},
    simd_target=lambda: "AVX2",
    gemm_backend=lambda: "onednn 3.2.0",
    flags=lambda: [("ORTRAIN_STRICT", "0", "raise where a fallback would run")],
)


def test_json_describes_this_process(capsys):
    assert env.main(["--json"]) == 0
    info = json.loads(capsys.readouterr().out)
    assert info["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert info["machine"]["cores"] == os.cpu_count()
    assert info["machine"]["memory_bytes"]["total"] > 0
    assert info["torch"]["threads"] == torch.get_num_threads()
    assert info["core"].keys() in ({"error"}, {"file", "build_info", "simd_target", "gemm_backend"})


def test_text_shows_the_core(with_core, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("ORTRAIN_STRICT", raising=False)
    with_core(CORE)
    env.main([])
    text = capsys.readouterr().out
    for part in ("gcc 12.2.0", "AVX2", "onednn 3.2.0", "raise where a fallback would run"):
        assert part in text
    assert "OMP_NUM_THREADS" in text


def test_a_set_flag_shows_its_value(with_core, monkeypatch):
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    monkeypatch.setenv("ORTRAIN_UNKNOWN", "x")
    with_core(CORE)
    flags = {flag["name"]: flag for flag in env.collect()["flags"]}
    assert flags["ORTRAIN_STRICT"]["value"] == "1"
    assert flags["ORTRAIN_STRICT"]["default"] == "0"
    assert flags["ORTRAIN_UNKNOWN"]["help"] is None


def test_a_missing_core_is_one_clear_line(with_core, capsys):
    with_core(None)
    env.main([])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("core ")]
    assert len(lines) == 1
    assert "not available: libhwy.so.1" in lines[0]
    assert "make build" in lines[0]


def test_an_older_core_without_the_functions(with_core):
    with_core(SimpleNamespace(__file__="/x/_core.so"))
    assert env.collect()["core"] == {
        "file": "/x/_core.so",
        "build_info": None,
        "simd_target": None,
        "gemm_backend": None,
    }


def test_every_error_of_the_engine_has_one_base() -> None:
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.OrtrainError)
    assert issubclass(errors.ShapeError, ValueError)
    assert issubclass(errors.FileError, OSError)

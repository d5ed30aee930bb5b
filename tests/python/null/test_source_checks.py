# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The checks of tools/ pass on this tree, and each of them catches a planted offence."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import check_layers  # noqa: E402
import check_limited_api  # noqa: E402
import check_sizes  # noqa: E402
import check_sources  # noqa: E402

SPDX = "".join(f"# {line}\n" for line in check_sources.SPDX)


@pytest.fixture(scope="module")
def files():
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    return check_sizes.tracked_files(ROOT)


def test_layers():
    assert check_layers.cpp_errors(ROOT) + check_layers.python_errors(ROOT) == []


def test_sizes(files):
    assert check_sizes.size_errors(ROOT, files) == []


def test_sources(files):
    assert check_sources.source_errors(ROOT, files) == []


def test_limited_api(capsys):
    assert check_limited_api.main() == 0, capsys.readouterr().err


def test_names_outside_of_the_limited_api_are_found():
    text = """
#include <Python.h>
#if PY_VERSION_HEX < 0x030C0000
#ifdef ANY
PyThreadState_EnterTracing(state);
#endif
int before = PyTuple_GET_SIZE(tuple);
#else
int after = PyTuple_GET_SIZE(tuple);  // PyTuple_GET_SIZE
#endif
state->c_profilefunc = nullptr;
PyTuple_GetItem(tuple, 0);
auto size = dlsym(nullptr, "PyTuple_GET_SIZE");
call("//", PyTuple_GET_SIZE(tuple));
"""
    found = check_limited_api.errors_of(text, check_limited_api.outside_names())
    assert found == [
        (9, "PyTuple_GET_SIZE"),
        (11, "c_profilefunc"),
        (14, "PyTuple_GET_SIZE"),
    ]


def test_ruff():
    subprocess.run([sys.executable, "-m", "ruff", "check", "--quiet", "."], cwd=ROOT, check=True)


def plant(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return Path(name)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ortrain/ir/a.h", '#include "ortrain/runtime/b.h"\n'),
        ("ortrain/passes/a.cpp", '#include "ortrain/runtime/b.h"\n'),
        ("ortrain/runtime/a.cpp", '#include "ortrain/cpu/b.h"\n'),
        ("ortrain/ops/softmax/softmax.cpp", '#include "ortrain/runtime/b.h"\n'),
        ("ortrain/ops/softmax/softmax_cpu.cpp", "#include <hwy/highway.h>\n"),
        ("ortrain/cpu/gemm.cpp", '#include "dnnl.hpp"\n'),
        ("ortrain/unknown/a.cpp", "\n"),
    ],
)
def test_layers_catch_a_forbidden_include(tmp_path, name, text):
    plant(tmp_path, name, text)
    errors = check_layers.cpp_errors(tmp_path)
    assert len(errors) == 1
    assert name in errors[0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ortrain/ops/softmax/softmax_cpu.cpp", '#include "ortrain/cpu/simd/map.h"\n'),
        ("ortrain/ops/softmax/softmax_cases.cpp", '#include "ortrain/testing/case.h"\n'),
        ("ortrain/cpu/simd/map.cpp", "#include <hwy/highway.h>\n"),
        ("ortrain/ir/onnx_import.cpp", '#include "onnx/onnx-ml.pb.h"\n'),
    ],
)
def test_layers_let_a_right_include_pass(tmp_path, name, text):
    plant(tmp_path, name, text)
    assert check_layers.cpp_errors(tmp_path) == []


def test_layers_follow_the_headers_of_a_rule(tmp_path):
    plant(tmp_path, "ortrain/ops/softmax/rows.h", '#include "ortrain/cpu/threads.h"\n')
    plant(
        tmp_path, "ortrain/ops/softmax/softmax_cpu.cpp", '#include "ortrain/ops/softmax/rows.h"\n'
    )
    assert check_layers.cpp_errors(tmp_path) == []
    plant(tmp_path, "ortrain/ops/softmax/softmax.cpp", '#include "ortrain/ops/softmax/rows.h"\n')
    assert len(check_layers.cpp_errors(tmp_path)) == 1


def test_layers_catch_a_forbidden_import(tmp_path):
    plant(tmp_path, "ortrain/.keep", "")
    plant(tmp_path, "python/ortrain/capture/a.py", "from ortrain.module import ORTModule\n")
    plant(tmp_path, "python/ortrain/module.py", "from ortrain.capture import capture\n")
    errors = check_layers.python_errors(tmp_path)
    assert len(errors) == 1
    assert "capture may not import ortrain.module" in errors[0]


def test_sizes_catch_a_long_file(tmp_path):
    long_file = plant(tmp_path, "a.py", "\n" * 801)
    long_test = plant(tmp_path, "tests/test_a.py", "\n" * 1200)
    errors = check_sizes.size_errors(tmp_path, [long_file, long_test])
    assert errors == ["a.py: 801 lines, the limit is 800"]


@pytest.mark.parametrize(
    ("name", "line", "what"),
    [
        ("python/ortrain/a.py", "import pickle", "pickle"),
        ("python/ortrain/a.py", "torch.load(p, weights_only=False)", "weights_only"),
        ("python/ortrain/a.py", "x = eval(text)", "eval"),
        ("python/ortrain/a.py", "except Exception: pass", "swallowed"),
        ("python/ortrain/a.py", "# TO" + "DO later", "note to self"),
        ("cmake/a.cmake", "add_compile_options(-march=native)", "-march"),
        ("ortrain/ir/a.h", "std::cout << 1;", "printing"),
        ("ortrain/ir/a.h", 'getenv("HOME")', "getenv"),
        ("ortrain/ir/a.h", "f(bytes_of<T>(rows * columns));", "nobody checks"),
        ("ortrain/ir/a.h", "f(ByteCount::of(size, rows(), columns * 2));", "nobody checks"),
        ("ortrain/gpu/a.h", "n = static_cast<int>(e.head_dim.constant());", "fewer bits"),
        ("ortrain/ops/pool/a.h", "f(static_cast<int32_t>(tap.index));", "fewer bits"),
        ("ortrain/ir/shape_utils.h", "", "says nothing"),
    ],
)
def test_sources_catch(tmp_path, name, line, what):
    head = SPDX.replace("#", "//") if name.endswith(".h") else SPDX
    errors = check_sources.source_errors(tmp_path, [plant(tmp_path, name, f"{head}{line}\n")])
    assert len(errors) == 1
    assert what in errors[0]


def test_sources_want_spdx_lines(tmp_path):
    bare = plant(tmp_path, "a.py", "x = 1\n")
    with_shebang = plant(tmp_path, "b.sh", f"#!/bin/sh\n{SPDX}\n")
    errors = check_sources.source_errors(tmp_path, [bare, with_shebang])
    assert errors == ["a.py: the two SPDX lines are missing"]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What tools/check_wheel.py refuses, and what it lets pass."""

import importlib.machinery
import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import check_wheel  # noqa: E402

# As readelf -W prints them.
DYNAMIC = """
 0x0000000000000001 (NEEDED)             Shared library: [libgomp.so.1]
 0x0000000000000001 (NEEDED)             Shared library: [{name}]
 0x000000000000001d (RUNPATH)            Library runpath: [$ORIGIN]
"""
VERSIONS = "  0x0010:   Name: {version}  Flags: none  Version: 2\n"
CONTENT = [
    "ortrain/_core.abi3.so",
    "ortrain/__init__.py",
    "ortrain/include/ortrain/extension/abi.h",
    "ortrain-0.1.0.dist-info/licenses/THIRD_PARTY.md",
]


class Distribution(importlib.metadata.Distribution):
    """A package that is installed nowhere."""

    def __init__(self, name: str, *requires: str):
        lines = [f"Name: {name}", *(f"Requires-Dist: {r}" for r in requires)]
        self._text = "\n".join(["Metadata-Version: 2.1", *lines, ""])

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path):
        return Path(path)


def installed(*distributions: Distribution) -> dict[str, importlib.metadata.Distribution]:
    return {d.metadata["Name"]: d for d in distributions}


def test_tags_and_size(tmp_path):
    good = tmp_path / "ortrain-0.1.0-cp312-abi3-linux_x86_64.whl"
    good.write_bytes(b"")
    assert check_wheel.name_errors(good) == []
    other = tmp_path / "ortrain-0.1.0-cp311-cp311-linux_x86_64.whl"
    other.touch()
    assert check_wheel.name_errors(other) == [
        "the tags are cp311-cp311-linux_x86_64, expected cp312-abi3-linux_x86_64"
    ]
    with good.open("wb") as file:
        file.truncate(60_000_000)
    (error,) = check_wheel.name_errors(good)
    assert "has 60000000 bytes" in error


def test_content():
    assert check_wheel.content_errors(CONTENT) == []
    development = "ortrain/_core.cpython-311-x86_64-linux-gnu.so"
    assert check_wheel.content_errors([*CONTENT, development]) == [
        f"{development} does not belong into a wheel"
    ]
    (error,) = check_wheel.content_errors(CONTENT[1:])
    assert "_core" in error


@pytest.mark.parametrize(
    "name", ["libhwy.so.1", "libcublasLt.so.13", "libcuda.so.1", "libcudart.so.13", "libdnnl.so.3"]
)
def test_foreign_libraries(name):
    text = DYNAMIC.format(name=name)
    assert check_wheel.needed_errors("_core.abi3.so", text) == [f"_core.abi3.so needs {name}"]


def test_libraries_of_the_system_and_of_the_plugin():
    assert check_wheel.needed_errors("_core.abi3.so", DYNAMIC.format(name="libc.so.6")) == []
    plugin = DYNAMIC.format(name="libdnnl.so.3")
    assert check_wheel.needed_errors("libortrain_onednn.so", plugin) == []


@pytest.mark.parametrize("version", ["GLIBC_2.34", "GLIBC_2.2.5", "GLIBCXX_3.4.29", "GOMP_4.5"])
def test_versions_that_the_system_has(version):
    assert check_wheel.version_errors("a.so", VERSIONS.format(version=version)) == []


@pytest.mark.parametrize("version", ["GLIBC_2.38", "GLIBCXX_3.4.30", "CXXABI_1.3.14"])
def test_versions_of_later_systems(version):
    (error,) = check_wheel.version_errors("a.so", VERSIONS.format(version=version))
    assert error.startswith(f"a.so needs {version}, expected ")


def test_device_code():
    line = "  [{}] {}   PROGBITS  00000000000a4000 0a4000 0021d8 00   A  0   0  8\n"
    assert check_wheel.has_device_code(line.format(17, ".nv_fatbin"))
    assert not check_wheel.has_device_code(line.format(17, ".nvFatBinSegment"))
    assert not check_wheel.has_device_code(line.format(17, ".rodata"))


def test_dependencies_follow_extras_and_markers():
    found = check_wheel.dependencies(
        installed(
            Distribution(
                "torch", "kit[blas]; platform_system == 'Linux'", "pytest; extra == 'dev'"
            ),
            Distribution("kit", "blas; extra == 'blas'", "fft; extra == 'fft'"),
            Distribution("blas"),
            Distribution("fft"),
            Distribution("numpy"),
            Distribution("onnx", "backport; python_version < '3.13'", "protobuf>=4"),
            Distribution("backport"),
            Distribution("protobuf"),
            Distribution("pytest"),
        ),
        "3.13.0",
    )
    assert found == {"torch", "kit", "blas", "numpy", "onnx", "protobuf"}


def test_an_environment_with_more_is_refused(tmp_path):
    for name in ("torch", "numpy", "nanobind", "pip"):
        folder = tmp_path / f"{name}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    assert check_wheel.environment_errors(Path("python"), "3.12.1", [str(tmp_path)]) == [
        "python: onnx is not installed",
        "python has more than torch, numpy, onnx and their needs: nanobind",
    ]


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs binutils")
def test_the_extension_needs_the_system_alone():
    (extension,) = (
        path
        for suffix in importlib.machinery.EXTENSION_SUFFIXES
        for path in (ROOT / "python/ortrain").glob(f"_core{suffix}")
    )
    assert check_wheel.needed_errors("_core", check_wheel.readelf("-d", extension)) == []


def test_the_search_for_a_python_says_what_is_missing(tmp_path):
    command = ["sh", str(ROOT / "tools/find_wheel_python.sh")]
    done = subprocess.run([*command, "no-python"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "PYTHON312=no-python not found.\n")
    old = tmp_path / "python"
    old.write_text("#!/bin/sh\necho 'is CPython 3.11.2, needed is CPython 3.12 or later'\n")
    old.chmod(0o755)
    done = subprocess.run([*command, str(old)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is CPython 3.11.2, needed is CPython 3.12 or later" in done.stderr


def test_the_tools_of_the_wheel_are_pinned():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    pins = re.search(r"^WHEEL_PINS := (.+)$", makefile, re.M).group(1).split()
    lock = (ROOT / "requirements/dev.lock").read_text()
    assert pins
    for name in pins:
        assert re.search(rf"^{name}==", lock, re.M), name

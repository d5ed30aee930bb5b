# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What tools/check_wheel.py finds in libraries that are compiled with, and without, each protection."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
import check_wheel  # noqa: E402

SOURCE = """
#include <cstring>
extern "C" int sum(const char* from, unsigned long size) {
  char local[16];
  std::memcpy(local, from, size);
  int total = 0;
  for (char c : local) total += c;
  return total;
}
#ifdef WITH_TEXTREL
asm(".text\\n.quad sum");
#endif
"""
PROTECTIONS = [
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    "-Wl,-z,relro,-z,now,-z,noexecstack",
    "-Wl,-rpath,$ORIGIN:$ORIGIN/../../..",
]


def errors_of(folder: Path, *flags: str) -> list[str]:
    """Compile a library with the protections, and flags that take some back; return what is found."""
    (folder / "a.cpp").write_text(SOURCE)
    command = ["c++", "-shared", "-fPIC", "-O1", *PROTECTIONS, *flags, "a.cpp", "-o", "a.so"]
    subprocess.run(command, cwd=folder, check=True)
    listed = [check_wheel.readelf(o, folder / "a.so") for o in ("-l", "-d", "--dyn-syms")]
    return check_wheel.hardening_errors("a.so", *listed)


def test_a_protected_library_passes(tmp_path):
    assert errors_of(tmp_path) == []


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["-fno-stack-protector"], "canaries"),
        (["-U_FORTIFY_SOURCE"], "checked calls"),
        (["-Wl,-z,lazy"], "BIND_NOW"),
        (["-Wl,-z,norelro"], "RELRO"),
        (["-Wl,-z,execstack"], "stack is executable"),
        (["-Wl,-rpath,/opt/lib"], "'/opt/lib'"),
        (["-Wl,-rpath,lib"], "'lib'"),
        (["-DWITH_TEXTREL", "-Wl,-z,notext"], "TEXTREL"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_library_without_one_is_named(tmp_path, flags, reason):
    (error,) = errors_of(tmp_path, *flags)
    assert error.startswith("a.so: ") and reason in error


@pytest.mark.parametrize("name", ["_core.*.so", "libortrain_onednn.so"])
def test_libraries_of_this_build_are_protected(name):
    found = list((ROOT / "python/ortrain").glob(name))
    if not found:
        pytest.skip("it is not built here")
    for path in found:
        listed = [check_wheel.readelf(o, path) for o in ("-l", "-d", "--dyn-syms")]
        errors = check_wheel.hardening_errors(path.name, *listed)
        # A development build's plugin knows where oneDNN was found.
        assert [e for e in errors if "looks for libraries" not in e] == []

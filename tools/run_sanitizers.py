# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the C++ tests, the quick Python tests and bad inputs under AddressSanitizer and UBSan.

Needs ``cmake --preset sanitize`` and its build, which ``make asan`` makes. First, bugs planted in a
C++ test and in a library of operators must be found: otherwise nothing else would be, either.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from run_tests import ROOT, cpp_tests, extension_environment, run

BUILD = ROOT / "build-sanitize"
PACKAGE = BUILD / "python" / "ortrain"
PLANTED = {
    "Sanitizer.DISABLED_ReadsPastTheEnd": "heap-buffer-overflow",
    "Sanitizer.DISABLED_OverflowsAnInt": "signed integer overflow",
}


def _library(name: str) -> str:
    found = subprocess.run(
        ["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return found.stdout.strip()


def environment() -> dict[str, str]:
    """Return the environment in which Python loads the extension that has the sanitizers."""
    return {
        **os.environ,
        **extension_environment(PACKAGE),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "LD_PRELOAD": f"{_library('libasan.so')} {_library('libstdc++.so')}",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONMALLOC": "malloc",
    }


def planted_bugs_are_found() -> bool:
    """Tell whether each bug on purpose ends its process with the right report."""
    found = True
    for name, report in PLANTED.items():
        command = [str(BUILD / "ortrain_tests"), "--gtest_also_run_disabled_tests"]
        done = subprocess.run(
            [*command, f"--gtest_filter={name}"], capture_output=True, text=True, check=False
        )
        ok = done.returncode != 0 and report in done.stderr
        print(f"planted bug {name}: {'found' if ok else 'NOT FOUND'}")
        found &= ok
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "planted_bug.so"
        compiler = ["c++", "-std=c++20", "-O1", "-g", "-shared", "-fPIC", "-fsanitize=address"]
        include = f"-I{PACKAGE / 'include'}"
        source = str(ROOT / "tools" / "planted_bug.cpp")
        subprocess.run([*compiler, include, source, "-o", str(library)], check=True)
        text = (
            "import torch; from ortrain import _core, extension\n"
            f"extension.load_library({str(library)!r})\n"
            "graph = _core.Graph.parse('graph g (float32[n] x) => (y) {"
            "\\n  y = planted::ReadsPastTheEnd (x)\\n}\\n')\n"
            "_core.Run(_core.Session(graph)).forward([torch.ones(1024)])\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", text],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    ok = done.returncode != 0 and "heap-buffer-overflow" in done.stderr
    print(f"planted bug in a library of operators: {'found' if ok else 'NOT FOUND'}")
    if not ok:
        print(done.stderr[-2000:])
    return found and ok


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--bad-inputs", type=int, default=100_000, help="how many")
    parser.add_argument("--only", choices=["planted", "cpp", "python", "bad-inputs"])
    options = parser.parse_args()

    def wanted(part: str) -> bool:
        return options.only in (None, part)

    if wanted("planted") and not planted_bugs_are_found():
        return 1
    failed = 0
    if wanted("cpp"):
        # A test asks for more memory than there is, and expects an error for it.
        commands = cpp_tests(options.jobs, BUILD, ["ASAN_OPTIONS=allocator_may_return_null=1"])
        failed += run("C++ tests, sanitized", commands)[1]
    settings = [f"{name}={value}" for name, value in environment().items()]
    if wanted("python"):
        report = BUILD / "pytest.xml"
        command = ["env", *settings, sys.executable, "-m", "pytest", f"--junitxml={report}"]
        failed += run("Python tests, sanitized", {report: [*command, "-m", "not slow"]})[1]
    if wanted("bad-inputs"):
        command = ["env", *settings, sys.executable, "-m", "conformance.bad_inputs"]
        done = subprocess.run([*command, f"--count={options.bad_inputs}"], cwd=ROOT, check=False)
        failed += done.returncode != 0
    print("sanitizers:", "no reports" if failed == 0 else f"{failed} failed")
    return int(failed != 0)


if __name__ == "__main__":
    raise SystemExit(main())

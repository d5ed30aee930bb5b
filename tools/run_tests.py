# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the C++ tests (ctest) and the Python tests (pytest), then print one line that counts both."""

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"


def run(name: str, command: list[str], report: Path) -> tuple[int, int, int]:
    """Run one runner and return (passed, failed, skipped) from the JUnit report it wrote."""
    report.unlink(missing_ok=True)
    print(f"== {name}", flush=True)
    started = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    failed = sum(any(c.find(tag) is not None for tag in ("failure", "error")) for c in cases)
    skipped = sum(c.find("skipped") is not None for c in cases)
    if status != 0 and failed == 0:  # it died before, or without, saying which test failed
        failed = 1
    passed = len(cases) - sum(
        any(c.find(tag) is not None for tag in ("failure", "error", "skipped")) for c in cases
    )
    seconds = time.monotonic() - started
    print(f"{name}: {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s")
    return passed, failed, skipped


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="leave out tests marked slow")
    args = parser.parse_args()

    results = []
    if (BUILD / "CTestTestfile.cmake").exists():
        report = BUILD / "ctest.xml"
        command = ["ctest", "--test-dir", str(BUILD), "--output-on-failure", "--quiet"]
        command += ["--parallel", str(args.jobs), "--output-junit", str(report)]
        results.append(run("C++ tests", command, report))
    else:
        print("C++ tests: not built, run 'make build'", file=sys.stderr)
        results.append((0, 1, 0))

    report = BUILD / "pytest.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}"]
    results.append(run("Python tests", command + ["-m", "not slow"] * args.quick, report))

    passed, failed, skipped = (sum(column) for column in zip(*results, strict=True))
    if skipped:
        print(f"{skipped} skipped")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or passed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())

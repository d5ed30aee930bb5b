# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run C++ tests with several threads under ThreadSanitizer.

Needs ``cmake --preset tsan`` and its build by clang, which ``make tsan`` makes. LLVM's OpenMP tells the
sanitizer through libarcher.so what its barriers order; without it each parallel region would be a race.
There is no simulated GPU: it switches stacks, which the sanitizer does not know.
First, a race planted in a C++ test must be found.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path

from run_tests import ROOT, cpp_tests, run

BUILD = ROOT / "build-tsan"
PLANTED = "Sanitizer.DISABLED_RacesForAnInt"
# Of what is left out each test has one thread, or those of kernels that the other cases run too, or it
# bounds memory, of which the sanitizer takes most. Storage formats: Highway's emulated target, which is
# there with clang alone and which no x86-64 runs, knows no infinite float16.
FILTER = "-*OpExtents*:*OpGradients*:*StandardForm*:*StorageFormats*:*refusal_is_cheap*"


def settings() -> list[str]:
    """Return environment variables of the tests, ``NAME=value``."""
    return [
        f"OMP_TOOL_LIBRARIES={archer()}",
        "OMP_NUM_THREADS=4",
        "TSAN_OPTIONS=ignore_noninstrumented_modules=1:second_deadlock_stack=1",
    ]


def archer() -> Path:
    """Return the library beside the OpenMP runtime that the tests load."""
    command = ["ldd", str(BUILD / "ortrain_tests")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    runtimes = [Path(line.split()[2]).resolve() for line in lines if "libomp" in line]
    for runtime in runtimes:
        found = [
            *runtime.parent.glob("libarcher.so"),
            *runtime.parent.glob("llvm-*/lib/libarcher.so"),
        ]
        if found:
            return found[-1]
    raise SystemExit(f"no libarcher.so beside {runtimes or 'an OpenMP runtime of LLVM'}")


def planted_race_is_found() -> bool:
    command = ["env", *settings(), str(BUILD / "ortrain_tests")]
    done = subprocess.run(
        [*command, "--gtest_also_run_disabled_tests", f"--gtest_filter={PLANTED}"],
        capture_output=True,
        text=True,
        check=False,
    )
    found = done.returncode != 0 and "data race" in done.stderr
    print(f"planted race: {'found' if found else 'NOT FOUND'}")
    if not found:
        print(done.stderr[-2000:])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--filter", default=FILTER, help="of GoogleTest")
    options = parser.parse_args()
    if not planted_race_is_found():
        return 1
    commands = cpp_tests(options.jobs, BUILD, settings())
    for command in commands.values():
        command.append(f"--gtest_filter={options.filter}")
    failed = run("C++ tests, ThreadSanitizer", commands)[1]
    print("ThreadSanitizer:", "no reports" if failed == 0 else f"{failed} failed")
    return int(failed != 0)


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run the C++ tests (GoogleTest) and the Python tests (pytest), then print one line that counts both."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from check_sizes import tracked_files
from coverage_map import CoverageMap

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
TESTS = ROOT / "tests" / "python"
MAP = BUILD / "test-map.npz"
# Hashes of all files when tests last passed, texts of some, and tests that failed since.
CHECKED = BUILD / "checked.json"
# How long tests chosen by what changed take, one after another.
_SECONDS = 60.0
# Files that no test but those in tests/python/null reads.
_TEXTS = (".md", "LICENSE", "NOTICE", ".gitignore", ".clang-format")


def run(name: str, commands: dict[Path, list[str]]) -> tuple[int, int, int]:
    """Run the commands of one runner at the same time.

    Args:
        name: For the summary line.
        commands: From the JUnit report that a command writes to the command.

    Returns:
        Numbers of (passed, failed, skipped) tests. A command that dies, without a report or with one
        that shows no failure, counts as one failed test.
    """
    print(f"== {name}", flush=True)
    started = time.monotonic()
    for report in commands:
        report.unlink(missing_ok=True)
    processes = [subprocess.Popen(command, cwd=ROOT) for command in commands.values()]
    statuses = [process.wait() for process in processes]
    passed = failed = skipped = 0
    for report, status in zip(commands, statuses, strict=True):
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        bad = sum(map(has_failed, cases))
        left_out = sum(c.find("skipped") is not None for c in cases)
        if bad == 0 and (status != 0 or not report.exists()):
            print(f"{name}: {' '.join(commands[report])} ended with status {status}")
            failed += 1
        passed += len(cases) - bad - left_out
        failed += bad
        skipped += left_out
    seconds = time.monotonic() - started
    print(f"{name}: {passed} passed, {failed} failed, {skipped} skipped in {seconds:.0f} s")
    return passed, failed, skipped


def has_failed(case: ElementTree.Element) -> bool:
    return case.find("failure") is not None or case.find("error") is not None


def python_name(case: ElementTree.Element) -> str:
    """Return the name for pytest of a test in a JUnit report."""
    return f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"


def extension_environment(package: Path) -> dict[str, str]:
    """Return what makes Python load the extension that lies in another folder than the package."""
    (core,) = package.glob("_core*.so")
    paths = [ROOT / "tools" / "extension_site", ROOT / "python", ROOT]
    return {"ORTRAIN_CORE": str(core), "PYTHONPATH": os.pathsep.join(map(str, paths))}


def cpp_tests(
    jobs: int, build: Path = BUILD, settings: Sequence[str] = ()
) -> dict[Path, list[str]]:
    """Return one command per shard: thousands of tests are too many for a process each.

    Args:
        jobs: Number of shards.
        build: Where the tests were built.
        settings: More environment variables, ``NAME=value``.
    """
    commands = {}
    for shard in range(jobs):
        report = build / f"gtest-{shard}.xml"
        commands[report] = [
            "env",
            f"GTEST_TOTAL_SHARDS={jobs}",
            f"GTEST_SHARD_INDEX={shard}",
            "OMP_WAIT_POLICY=passive",  # shards share the cores
            *settings,
            str(build / "ortrain_tests"),
            "--gtest_brief=1",
            f"--gtest_output=xml:{report}",
        ]
    races = build / "ortrain_race_tests"  # of builds with the simulator
    if races.exists():
        report = build / "gtest-races.xml"
        commands[report] = [str(races), "--gtest_brief=1", f"--gtest_output=xml:{report}"]
    return commands


def worker_options(jobs: int) -> list[str]:
    """Return options of pytest for so many worker processes."""
    return [f"--numprocesses={jobs}", "--dist=loadgroup", "--no-loadscope-reorder"]


def python_tests(
    jobs: int,
    *,
    quick: bool = False,
    everything: bool = False,
    draw: str | None = None,
    always: Sequence[str] = (),
    tests: str = str(TESTS),
) -> dict[Path, list[str]]:
    """Return one command; tests/python/conftest.py says which tests share a worker, and which run in a draw.

    Args:
        jobs: Number of workers.
        quick: Without tests marked slow.
        everything: Those that are left out as a rule, too.
        draw: Says which of the costly tests run.
        always: Files and names that no draw leaves out.
        tests: What to run of.
    """
    report = BUILD / "pytest.xml"
    command = [sys.executable, "-m", "pytest", f"--junitxml={report}", tests]
    if jobs > 1:
        command = ["env", "OMP_WAIT_POLICY=passive", *command]  # workers share the cores
        command += worker_options(jobs)
    command += ["-m", "not slow"] if quick else []
    command += ["--everything"] if everything else []
    command += [f"--draw={draw}", "--always=" + "\n".join(always)] if draw else []
    return {report: command}


def commit() -> str:
    """Return the beginning of the commit's name; "none" of a tree that git does not know."""
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "none"


def changed_tests() -> list[str]:
    """Return the files of Python tests that the commit does not hold as they are."""
    command = ["git", "status", "--porcelain", "-z", "--untracked-files=all", "--", str(TESTS)]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [e[3:] for e in found.stdout.split("\0") if is_test(e) and e.endswith(".py")]


def hashes() -> dict[str, str]:
    """Return a hash of each file that belongs to the project."""
    return {
        str(file): hashlib.sha256((ROOT / file).read_bytes()).hexdigest()
        for file in tracked_files(ROOT)
    }


@dataclasses.dataclass
class Checked:
    """What is known of earlier runs here.

    Attributes:
        files: Hashes of files when all tests that they need last passed.
        texts: Texts then of files that differed from the map's.
        failed: Tests that failed at last.
    """

    files: dict[str, str]
    texts: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)

    @staticmethod
    def load() -> Checked | None:
        """Return what was saved here; None where tests have not passed, or the file is of another version."""
        try:
            return Checked(**json.loads(CHECKED.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def save(self) -> None:
        CHECKED.write_text(json.dumps(dataclasses.asdict(self)))


def changed_files(now: dict[str, str], checked: Checked) -> dict[str, str | None] | None:
    """Return the text of each file that changed since tests last passed, None for one that is gone.

    Returns:
        None where a file is no text.
    """
    changed: dict[str, str | None] = dict.fromkeys(checked.files.keys() - now.keys())
    for file, value in now.items():
        if checked.files.get(file) != value:
            try:
                changed[file] = (ROOT / file).read_text("utf-8")
            except UnicodeDecodeError:
                return None
    return changed


def is_test(file: str) -> bool:
    name = Path(file).name
    return name.endswith("_test.cpp") or (name.startswith("test_") and name.endswith(".py"))


def tests_in(file: str) -> list[str]:
    """Return what runs the tests of a file."""
    if file.endswith(".py"):
        return [file]
    text = (ROOT / file).read_text("utf-8")
    suites = set(re.findall(r"^\s*(?:TYPED_)?TEST(?:_[FP])?\(\s*(\w+)", text, re.M))
    return [f"{a}{s}{b}.*" for s in sorted(suites) for a in ("", "*/") for b in ("", "/*")]


@dataclasses.dataclass
class Chosen:
    """Tests, filters of GoogleTest and names for pytest; the files that some more would be needed for."""

    tests: list[str]
    unfinished: set[str]


def tests_for(
    changed: dict[str, str | None],
    now: dict[str, str],
    checked: Checked,
    known: CoverageMap | None,
) -> Chosen | None:
    """Return tests for what changed; None: nobody can tell."""
    sources = {f: t for f, t in changed.items() if not is_test(f) and not f.endswith(_TEXTS)}
    if known is not None and len({t.endswith("*") for t in known.tests}) < 2:
        known = None  # of one language
    own = {f for f in changed if is_test(f) and f in now}
    unfinished: set[str] = set()
    chosen: list[str] = []
    if sources:
        if known is None:
            return None
        # The map does not know what these run.
        own |= {f for f, v in now.items() if is_test(f) and known.test_files.get(f) != v}
        texts = {f: [t, checked.texts.get(f, known.texts.get(f))] for f, t in sources.items()}
        choice = known.choose(texts, _SECONDS)
        if choice is None:
            return None
        unfinished = set(sources) if choice.left_out else set()
        chosen = choice.tests
        left = f", {choice.left_out} left to 'make test'" if choice.left_out else ""
        print(f"{', '.join(sources)}: {len(chosen)} tests or groups{left}")
    null = str((TESTS / "null").relative_to(ROOT))
    tests = [null, *(t for f in sorted(own) for t in tests_in(f))]
    for test in dict.fromkeys([*checked.failed, *chosen]):
        file = test.partition("::")[0]
        # What is run whole may have no test of that name any more.
        if test.endswith("*") or (file in now and file not in own):
            tests.append(test)
    return Chosen(tests, unfinished)


def failed_tests(commands: list[tuple[str, dict[Path, list[str]]]]) -> list[str]:
    """Return the names of the tests that failed, as tests_for gives them."""
    names = []
    for _, reports in commands:
        for report in reports:
            cases = ElementTree.parse(report).iter("testcase") if report.exists() else ()
            for case in cases:
                if has_failed(case):
                    python = report.name == "pytest.xml"
                    cpp_filter = f"{case.get('classname')}.{case.get('name')}*"
                    names.append(python_name(case) if python else cpp_filter)
    return names


def commands_for(tests: list[str], jobs: int) -> list[tuple[str, dict[Path, list[str]]]]:
    """Return the commands of both runners for some tests, slow ones left out."""
    filters = [t for t in tests if t.endswith("*")]
    names = [t for t in tests if not t.endswith("*")]
    commands = []
    if filters:
        flags = BUILD / "chosen.flags"
        flags.write_text(f"--gtest_filter={':'.join(filters)}\n")
        cpp = cpp_tests(jobs)
        commands.append(
            ("C++ tests", {r: [*c, f"--gtest_flagfile={flags}"] for r, c in cpp.items()})
        )
    chosen = BUILD / "chosen.txt"
    chosen.write_text("\n".join(names) + "\n")
    python = python_tests(jobs, quick=True, tests=f"@{chosen}")
    return [*commands, ("Python tests", python)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--everything", action="store_true", help="long tests and all cases too")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="tests for what changed; all that are not slow where nobody can tell",
    )
    parser.add_argument(
        "--draw", help="a text that says which of the costly Python tests run; else the commit does"
    )
    parser.add_argument("--started", type=float, help="when building began, seconds since 1970")
    args = parser.parse_args()

    testing = time.time()
    now = hashes()
    checked = Checked.load()
    known = CoverageMap.find(MAP)
    chosen = draw = None
    if args.quick and checked is not None:
        changed = changed_files(now, checked)
        chosen = tests_for(changed, now, checked, known) if changed is not None else None
    if chosen is not None:
        commands = commands_for(chosen.tests, args.jobs)
    else:
        draw = None if args.everything or args.quick else args.draw or commit()
        always: list[str] = []
        if draw:
            always = [*changed_tests(), *(checked.failed if checked is not None else ())]
            print(f"of costly Python tests those of the draw {draw}: make test DRAW={draw}")
        python = python_tests(
            args.jobs, quick=args.quick, everything=args.everything, draw=draw, always=always
        )
        commands = [("C++ tests", cpp_tests(args.jobs)), ("Python tests", python)]
    results = [run(*each) for each in commands]

    passed, failed, skipped = (sum(column) for column in zip(*results, strict=True))
    if skipped:
        print(f"{skipped} skipped")
    built = f"building {(testing - args.started) / 60:.1f} min, " if args.started else ""
    print(f"{built}testing {(time.time() - testing) / 60:.1f} min")
    print(f"{passed} passed, {failed} failed")
    if failed or passed == 0:
        if checked is not None:
            checked.failed = sorted({*checked.failed, *failed_tests(commands)})
            checked.save()
        return 1
    # What was written while the compiler worked may not be what was tested.
    since = args.started or testing
    unsure = {f for f in now if (ROOT / f).stat().st_mtime >= int(since)}
    if chosen is not None:
        unsure |= chosen.unfinished
    elif draw and checked is not None:  # tests of what changed may not have been drawn
        unsure |= {f for f, v in now.items() if checked.files.get(f) != v and not is_test(f)}
    before = checked.files if checked is not None else {}
    files = {f: v for f, v in now.items() if f not in unsure}
    files |= {f: before[f] for f in unsure if f in before}
    texts = {}
    for file in known.texts if known is not None else ():
        if file in unsure:
            texts |= {file: checked.texts[file]} if checked and file in checked.texts else {}
        elif file in now and (text := (ROOT / file).read_text("utf-8")) != known.texts[file]:
            texts[file] = text
    Checked(files, texts).save()
    return 0


if __name__ == "__main__":
    sys.exit(main())

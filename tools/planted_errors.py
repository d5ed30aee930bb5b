# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Plant small errors in a copy of the tree, one at a time, and see which of them the tests find.

An error is a sign, a bound, an index or a guard, drawn with a seed from lines of functions that tests run, as many
from each layer. Tests are chosen by the map of ``make coverage``; what they do not find is planted together, before
everything is run, with ``--survivors``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

from coverage_map import CoverageMap
from rich.console import Console
from rich.table import Table
from run_tests import MAP, ROOT, worker_options

# Patterns of files, relative to the root; a file is of the first layer that names it.
LAYERS = {
    "base": "ortrain/base/*.*",
    "ir": "ortrain/ir/*.*",
    "autodiff": "ortrain/autodiff/*.*",
    "passes": "ortrain/passes/*.*",
    "plan": "ortrain/plan/*.*",
    "runtime": "ortrain/runtime/*.*",
    "training": "ortrain/training/*.*",
    "cpu": "ortrain/cpu/**/*.*",
    "gpu": "ortrain/gpu/*.*",
    "kernels, CPU": "ortrain/ops/*/*_cpu.cpp",
    "rules of operators": "ortrain/ops/*/*.cpp",
    "kernels, GPU": "ortrain/ops/*/*.cu",
    "extensions": "ortrain/extension/*.*",
    "C interface": "ortrain/capi/*.*",
    "bindings": "python/src/*.*",
    "capture": "python/ortrain/capture/**/*.py",
    "module": "python/ortrain/*.py",
    "trainer": "python/ortrain/trainer/*.py",
    "optimizers, mixed precision": "python/ortrain/[ao][mp][pt]*/*.py",
    "Hugging Face, distributed, tools": "python/ortrain/[hdt]*/*.py",
}
_SOURCES = {".cpp", ".h", ".cu", ".cuh", ".py"}
_TESTS = re.compile(r"_test\.|_cases\.|_test_")
# Kind, what is looked for, what stands in its place.
_CPP = [
    ("sign", re.compile(r"(?<=[\w)\]] )\+(?= [\w(])"), "-"),
    ("sign", re.compile(r"(?<=[\w)\]] )-(?= [\w(])"), "+"),
    ("sign", re.compile(r"(?<=[\w)\]] )\+=(?= )"), "-="),
    ("bound", re.compile(r"(?<=[\w)\]] )<(?= [\w(])"), "<="),
    ("bound", re.compile(r"(?<=[\w)\]] )<=(?= [\w(])"), "<"),
    ("bound", re.compile(r"(?<=[\w)\]] )>(?= [\w(])"), ">="),
    ("bound", re.compile(r"(?<=[\w)\]] )>=(?= [\w(])"), ">"),
    ("bound", re.compile(r"(?<=[\w)\]] )==(?= [\w(])"), "!="),
    ("index", re.compile(r"(?<=\w\[)(\w+)(?=\])"), r"\1 + 1"),
    ("index", re.compile(r"(?<=\w\[)0(?=\])"), "1"),
    (
        "guard",
        re.compile(r"(?<=^)(\s*)if \((.*)\) (?=return|throw|continue|\{$)"),
        r"\1if (false && (\2)) ",
    ),
]
_PYTHON = [
    *(rule for rule in _CPP if rule[0] not in ("guard",)),
    ("bound", re.compile(r"(?<=[\w)\]] )is not(?= None)"), "is"),
    ("guard", re.compile(r"^(\s*)if (.*):$"), r"\1if False and (\2):"),
]


@dataclasses.dataclass(frozen=True)
class Error:
    """One line that is changed; lines count from 1."""

    layer: str
    kind: str
    file: str
    line: int
    before: str
    after: str

    def plant(self, root: Path) -> None:
        self._replace(root, self.before, self.after)

    def remove(self, root: Path) -> None:
        self._replace(root, self.after, self.before)

    def _replace(self, root: Path, old: str, new: str) -> None:
        path = root / self.file
        lines = path.read_text("utf-8").split("\n")
        if lines[self.line - 1] != old:
            raise ValueError(f"{self.file}:{self.line} reads {lines[self.line - 1]!r}, not {old!r}")
        lines[self.line - 1] = new
        path.write_text("\n".join(lines), "utf-8")


def errors_in(layer: str, file: str, text: str, lines: set[int]) -> list[Error]:
    """Return what can be planted in some lines of a file."""
    found = []
    quoted = False  # in a text over several lines
    for number, line in enumerate(text.split("\n"), 1):
        marks = line.count('"""')
        code = not quoted and marks == 0
        quoted ^= marks % 2 == 1
        comment = line.lstrip().startswith(("//", "#", "*", '"', "'", "template", "assert"))
        if not code or comment or number not in lines:
            continue
        for kind, pattern, instead in _PYTHON if file.endswith(".py") else _CPP:
            for match in pattern.finditer(line):
                ahead = line[: match.start()]
                if ahead.count('"') % 2 or "//" in ahead or "  # " in ahead:
                    continue
                after = ahead + match.expand(instead) + line[match.end() :]
                found.append(Error(layer, kind, file, number, line, after))
    return found


def files_of(layer: str) -> list[Path]:
    """Return the files of a layer, sorted."""
    names = list(LAYERS)
    earlier = {p for name in names[: names.index(layer)] for p in ROOT.glob(LAYERS[name])}
    return sorted(set(ROOT.glob(LAYERS[layer])) - earlier)


def draw(known: CoverageMap, seed: int, layer: str) -> list[Error]:
    """Return errors in one layer in the order in which they are to be planted: each kind in its turn."""
    generator = random.Random(f"{seed} {layer}")
    kinds: dict[str, list[Error]] = {kind: [] for kind in ("sign", "bound", "index", "guard")}
    for path in files_of(layer):
        file = str(path.relative_to(ROOT))
        if path.suffix not in _SOURCES or _TESTS.search(path.name) or file not in known.texts:
            continue
        text = path.read_text("utf-8")
        if text != known.texts[file]:
            raise SystemExit(f"{file} changed after 'make coverage'")
        lines = {
            line
            for f in known.functions
            if f.file == file
            for line in range(f.first + 1, f.last + 1)
        }
        for error in errors_in(layer, file, text, lines):
            kinds[error.kind].append(error)
    for errors in kinds.values():
        generator.shuffle(errors)
    order = list(kinds)
    generator.shuffle(order)
    longest = max(map(len, kinds.values()))
    return [kinds[k][i] for i in range(longest) for k in order if i < len(kinds[k])]


class Copy:
    """A clone of the tree with an environment and a build of its own, in which errors are planted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # An editable install comes before PYTHONPATH: the interpreter must be the copy's.
        self._python = str(folder / ".venv" / "bin" / "python")
        self.environment = {
            **{k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "VENV")},
            "PYTHONPATH": str(folder / "python"),
            "OMP_WAIT_POLICY": "passive",
        }
        if not folder.exists():
            subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder)], check=True)
        subprocess.run(["make", "build"], cwd=folder, env=self.environment, check=True)

    def builds(self) -> bool:
        command = ["cmake", "--build", "build", "-j", str(os.cpu_count())]
        return subprocess.run(command, cwd=self.folder, stdout=subprocess.DEVNULL).returncode == 0

    def _passes(self, command: list[str], seconds: float) -> bool:
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            return False  # which is how a loop without an end is found
        return done.returncode == 0

    def finds(self, tests: list[str], seconds: float) -> str:
        """Return which runner fails in some tests, the quick ones first; "" where none does."""
        filters = ":".join(t for t in tests if t.endswith("*"))
        if filters:
            flags = self.folder / "build" / "chosen.flags"
            flags.write_text(f"--gtest_filter={filters}\n")
            program = str(self.folder / "build" / "ortrain_tests")
            command = [program, "--gtest_fail_fast", f"--gtest_flagfile={flags}"]
            if not self._passes(command, seconds):
                return "C++"
        names = [t for t in tests if not t.endswith("*")]
        if names:
            chosen = self.folder / "build" / "chosen.txt"
            chosen.write_text("\n".join(names) + "\n")
            command = [self._python, "-m", "pytest", "-x", "-q", f"@{chosen}"]
            command += worker_options(os.cpu_count() or 1)
            if not self._passes(command, seconds):
                return "Python"
        return ""


def judge(copy: Copy, known: CoverageMap, error: Error, seconds: float) -> str | None:
    """Return which runner finds an error, "" for none, None where it does not compile."""
    error.plant(copy.folder)
    try:
        if not error.file.endswith(".py") and not copy.builds():
            return None
        text = (copy.folder / error.file).read_text("utf-8")
        choice = known.choose({error.file: [text]}, seconds)
        return copy.finds(choice.tests, 8 * seconds) if choice else ""
    finally:
        error.remove(copy.folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="for the copy, kept for the next time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--each", type=int, default=2, help="errors per layer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of tests per error")
    parser.add_argument("--record", type=Path, help="a JSON file of results, which goes on")
    parser.add_argument(
        "--survivors", action="store_true", help="leave those that nothing found in the copy"
    )
    options = parser.parse_args()
    console = Console()
    known = CoverageMap.load(MAP)
    record = options.record or options.folder.with_suffix(".json")
    results = json.loads(record.read_text()) if record.exists() else []
    copy = Copy(options.folder.resolve())
    if options.survivors:
        for result in results:
            if result["found"] == "":
                Error(**result["error"]).plant(copy.folder)
        return 0
    for layer in LAYERS:
        done = sum(r["error"]["layer"] == layer and r["found"] is not None for r in results)
        tried = {(r["error"]["file"], r["error"]["line"], r["error"]["after"]) for r in results}
        for error in draw(known, options.seed, layer):
            if done == options.each:
                break
            if (error.file, error.line, error.after) in tried:
                continue
            started = time.monotonic()
            found = judge(copy, known, error, options.seconds)
            taken = time.monotonic() - started
            done += found is not None
            results.append({"error": dataclasses.asdict(error), "found": found, "seconds": taken})
            record.write_text(json.dumps(results, indent=1))
            console.print(
                f"{layer}: {error.kind}, {error.file}:{error.line}: {found!r} in {taken:.0f} s",
                markup=False,
            )
    table = Table("layer", "kind", "place", "planted", "found by")
    for result in results:
        if result["found"] is not None:
            error = Error(**result["error"])
            place = f"{error.file}:{error.line}"
            table.add_row(
                error.layer, error.kind, place, error.after.strip(), result["found"] or "none"
            )
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

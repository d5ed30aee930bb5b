# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which test runs which function: made by tools/run_coverage.py, asked by tools/run_tests.py.

The map lies in the build folder. It holds the text of each source as it was, so that lines that changed since are
those of functions then.
"""

from __future__ import annotations

import ast
import bisect
import dataclasses
import difflib
import json
import struct
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

# Tags of GCC's gcov-io.h: a function, and how often its arcs were taken. Lengths are in bytes since GCC 12.
_FUNCTION, _ARCS = 0x01000000, 0x01A10000


@dataclasses.dataclass(frozen=True, order=True)
class Function:
    """Lines of a file, counted from 1, both ends included."""

    file: str
    first: int
    last: int


def _records(data: bytes, start: int) -> Iterator[tuple[int, int, int]]:
    """Give the tag, the place and the length of each record of a gcov file; negative: so many bytes of zeros."""
    while start + 8 <= len(data):
        tag, length = struct.unpack_from("<Ii", data, start)
        if tag == 0:
            return
        yield tag, start + 8, length
        start += 8 + max(length, 0)


def _text(data: bytes, place: int) -> tuple[str, int]:
    (length,) = struct.unpack_from("<I", data, place)
    return data[place + 4 : place + 4 + length].rstrip(b"\0").decode(), place + 4 + length


def read_notes(path: Path, root: Path) -> dict[tuple[int, int, int], Function]:
    """Return the functions of a .gcno file by what identifies them in .gcda files; those below root alone."""
    data = path.read_bytes()
    _, place = _text(data, 16)
    functions = {}
    for tag, at, _ in _records(data, place + 4):
        if tag != _FUNCTION:
            continue
        key = struct.unpack_from("<III", data, at)
        _, at = _text(data, at + 12)
        source, at = _text(data, at + 4)
        first, _, last = struct.unpack_from("<III", data, at)
        # Relative where the compiler was given a relative path.
        file = Path(source)
        if file.is_absolute() and file.is_relative_to(root):
            functions[key] = Function(str(file.relative_to(root)), first, last)
    return functions


def read_counters(path: Path) -> tuple[bytes, dict[tuple[int, int, int], np.ndarray]]:
    """Return the head of a .gcda file and the counters of each function."""
    data = path.read_bytes()
    counters = {}
    key = (0, 0, 0)
    for tag, at, length in _records(data, 16):
        if tag == _FUNCTION and length >= 12:
            key = struct.unpack_from("<III", data, at)
        elif tag == _ARCS:
            count = abs(length) // 8
            counters[key] = (
                np.zeros(count, "<i8") if length < 0 else np.frombuffer(data, "<i8", count, at)
            )
    return data[:16], counters


def write_counters(
    path: Path, head: bytes, counters: dict[tuple[int, int, int], np.ndarray]
) -> None:
    """Write what read_counters returns."""
    parts = [head, struct.pack("<IiII", 0xA1000000, 8, 1, 1)]
    for key, values in counters.items():
        parts.append(struct.pack("<IiIII", _FUNCTION, 12, *key))
        parts.append(struct.pack("<Ii", _ARCS, values.nbytes) + values.tobytes())
    path.write_bytes(b"".join(parts))


def functions_of_python(file: str, text: str) -> list[Function]:
    """Return the functions of a module, decorators included."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.append(Function(file, first, node.end_lineno or first))
    return sorted(found)


def innermost(functions: list[Function], line: int) -> Function | None:
    """Return the last of some sorted functions that begins at or before a line and holds it."""
    last = bisect.bisect_right([f.first for f in functions], line)
    return next((f for f in reversed(functions[:last]) if f.last >= line), None)


def changed_lines(before: str, after: str) -> list[tuple[int, int]]:
    """Return the ranges of lines of ``before`` that differ; where lines were put in, those on both sides."""
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    return [
        (first + 1, last) if last > first else (max(first, 1), first + 1)
        for tag, first, last, _, _ in matcher.get_opcodes()
        if tag != "equal"
    ]


def outside_of_functions(text: str) -> list[str]:
    """Return the lines of a Python module that belong to no function and mean something to others."""
    inside = {n for f in functions_of_python("", text) for n in range(f.first, f.last + 1)}
    lines = (
        line.strip() for number, line in enumerate(text.splitlines(), 1) if number not in inside
    )
    # What a function imports shows where it is used.
    return [line for line in lines if line and not line.startswith(("#", "import ", "from "))]


@dataclasses.dataclass
class Choice:
    """Tests that run what changed.

    Attributes:
        tests: Names: filters of GoogleTest, node ids of pytest.
        left_out: How many more would.
        seconds: How long they take, one after another.
    """

    tests: list[str]
    left_out: int
    seconds: float


class CoverageMap:
    """Tests in rows, functions in columns."""

    def __init__(
        self,
        tests: list[str],
        seconds: list[float],
        functions: list[Function],
        ran: np.ndarray,
        texts: dict[str, str],
        slow: Iterable[str] = (),
        test_files: dict[str, str] | None = None,
    ) -> None:
        """Make a map.

        Args:
            tests: Names.
            seconds: How long each takes.
            functions: What was run by any test.
            ran: [tests, functions], which.
            texts: Of the files of the functions.
            slow: Tests that are never chosen.
            test_files: Hashes of the files that hold tests.
        """
        self.tests, self.functions, self.ran, self.texts = tests, functions, ran, texts
        self.seconds = np.asarray(seconds, np.float64)
        self.slow = frozenset(slow)
        self.test_files = test_files or {}

    def save(self, path: Path) -> None:
        np.savez_compressed(
            path,
            tests=np.array(json.dumps(self.tests)),
            seconds=self.seconds,
            functions=np.array(json.dumps([dataclasses.astuple(f) for f in self.functions])),
            ran=np.packbits(self.ran, axis=1),
            texts=np.array(json.dumps(self.texts)),
            slow=np.array(json.dumps(sorted(self.slow))),
            test_files=np.array(json.dumps(self.test_files)),
        )

    @staticmethod
    def load(path: Path) -> CoverageMap:
        with np.load(path) as data:
            functions = [Function(*f) for f in json.loads(str(data["functions"]))]
            ran = np.unpackbits(data["ran"], axis=1, count=len(functions)).astype(bool)
            return CoverageMap(
                json.loads(str(data["tests"])),
                list(data["seconds"]),
                functions,
                ran,
                json.loads(str(data["texts"])),
                json.loads(str(data["slow"])),
                json.loads(str(data["test_files"])),
            )

    @staticmethod
    def find(path: Path) -> CoverageMap | None:
        """Return the map of a file; None where there is none, or one of another version."""
        try:
            return CoverageMap.load(path)
        except (OSError, KeyError, ValueError, zipfile.BadZipFile):
            return None

    def _changed_columns(self, file: str, text: str) -> set[int] | None:
        """Return the functions of a file that mean something else in another text of it; None: who knows."""
        before = self.texts[file]
        own = {f: i for i, f in enumerate(self.functions) if f.file == file}
        places = functions_of_python(file, before) if file.endswith(".py") else sorted(own)
        hit = {
            innermost(places, line)
            for first, last in changed_lines(before, text)
            for line in range(first, last + 1)
        }
        if file.endswith(".py"):
            try:
                if outside_of_functions(before) != outside_of_functions(text):
                    return None
            except SyntaxError:
                return None
            hit.discard(None)
        elif None in hit:
            # What a header says outside of functions means something to all that include it.
            if not file.endswith((".cpp", ".cu")) or file.endswith("_cases.cpp"):
                return None
            return set(own.values())
        if any(f not in own for f in hit):  # no test runs it
            return None
        return {own[f] for f in hit if f}

    def choose(self, changed: dict[str, list[str | None]], seconds: float) -> Choice | None:
        """Return tests that run the functions that changed, the most telling first.

        Args:
            changed: Texts of each file that are to be compared with that of the map: what it is now, what it
                was when tests passed; None where it is gone.
            seconds: How long the tests may take, one after another; at least one runs each function.

        Returns:
            None where the map cannot tell: a file that it does not know, or code that no test runs.
        """
        columns: set[int] = set()
        for file, texts in changed.items():
            for text in texts:
                found = self._changed_columns(file, text or "") if file in self.texts else None
                if found is None:
                    return None
                columns |= found
        if not columns:
            return Choice([], 0, 0.0)
        quick = np.array([t not in self.slow for t in self.tests])
        rows = np.flatnonzero(self.ran[:, sorted(columns)].any(axis=1) & quick)
        if not self.ran[:, sorted(columns)][quick].any(axis=0).all():
            return None
        # Who runs little else tells most of what changed.
        share = self.ran[:, sorted(columns)].sum(axis=1) / np.maximum(self.ran.sum(axis=1), 1)
        rows = sorted(rows, key=lambda row: (-share[row], self.seconds[row]))
        left = set(columns)
        chosen, total = [], 0.0
        for needed in (True, False):
            for row in rows:
                if row in chosen:
                    continue
                new = left & set(np.flatnonzero(self.ran[row])) if needed else set()
                if needed and not new or not needed and total + self.seconds[row] > seconds:
                    continue
                left -= new
                chosen.append(row)
                total += self.seconds[row]
        return Choice([self.tests[r] for r in chosen], len(rows) - len(chosen), total)


def bits(rows: Iterable[set[Function]], functions: list[Function]) -> np.ndarray:
    """Return a row of booleans per set."""
    index = {f: i for i, f in enumerate(functions)}
    rows = list(rows)
    ran = np.zeros((len(rows), len(functions)), bool)
    for number, row in enumerate(rows):
        ran[number, [index[f] for f in row]] = True
    return ran

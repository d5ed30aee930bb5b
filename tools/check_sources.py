# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fail on a source file without its two SPDX lines, and on what the project does not allow.

Not allowed: unpickling, unsafe torch.load, eval and exec, compiler flags that tie the build to one
machine or change arithmetic, printing from the library, catch-all handlers that hide an error,
products inside of what checks them, extents cast to fewer bits (narrow_checked in
ortrain/base/narrow.h), notes to self, file names that say nothing.
"""

import re
import sys
from pathlib import Path

from check_sizes import ROOT, tracked_files

SPDX = ("SPDX-FileCopyrightText: Ortrain contributors", "SPDX-License-Identifier: Apache-2.0")
CODE = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".cmake", ".sh"}
THIS = "tools/check_sources.py"
LIBRARY = r"^(ortrain|python/ortrain)/"

# (what, where, pattern); a line that matches is an error.
RULES = [
    (
        "pickle",
        r"^(?!tests/).*\.pyi?$",
        r"^\s*(import|from)\s+(pickle|cPickle|dill|marshal|shelve)\b",
    ),
    ("torch.load without weights_only", r"^(?!tests/).*\.py$", r"weights_only\s*=\s*False"),
    ("eval or exec", r"^python/.*\.py$", r"(?<![\w.])(?<!def )(eval|exec)\("),
    ("a swallowed exception", r"\.py$", r"^\s*except(\s+(Base)?Exception)?\s*:\s*pass\b"),
    ("a swallowed exception", r"\.(h|cpp)$", r"catch\s*\(\.\.\.\)\s*\{\s*\}"),
    ("a note to self", r".", r"\b(TO" + r"DO|FIX" + r"ME|XXX|HACK)\b"),
    ("-march or -ffast-math", r"(\.cmake|CMakeLists\.txt)$", r"^[^#]*(-march=|-ffast-math|-mavx)"),
    ("printing from the library", r"^ortrain/.*\.(h|cpp)$", r"\bstd::(cout|cerr)\b|\bprintf\("),
    (
        "a product of extents that nobody checks",
        r"^ortrain/.*(?<!_test)\.(h|cpp|cu|cuh)$",
        r"(bytes_of<[^(]*>|ByteCount::of|count_elements|scratch<[^(]*>)\([^;]*[\w)] \* [\w(]",
    ),
    (
        "an extent in fewer bits that nobody checks",
        r"^ortrain/(cpu|gpu|onednn|ops)/.*(?<!_test)\.(h|cpp|cu|cuh)$",
        r"static_cast<(int|int32_t|unsigned|uint32_t)>\([^;]*?"
        r"(\bconstant\(\)|\bnumel\(\)|num_elements\(|\bdims\[|\bextents?\[|"
        r"(\.|->)(count|index|divisor)\))",
    ),
    ("a bare getenv", r"^ortrain/(?!base/).*\.(h|cpp)$", r"\bgetenv\("),
]
NAMES = re.compile(r"(^|_)(utils?|helpers?|misc|new|fast|optimized)(_|\.)|^common\.|_v\d+\.")


def source_errors(root: Path, files: list[Path]) -> list[str]:
    """Return one line per offence. Paths are relative to root."""
    errors = []
    for path in files:
        name = path.as_posix()
        if path.suffix not in CODE and path.name != "CMakeLists.txt":
            continue
        if (
            re.search(LIBRARY, name)
            and NAMES.search(path.name)
            and not name.startswith("ortrain/base")
        ):
            errors.append(f"{name}: the file name says nothing")
        lines = (root / path).read_text(encoding="utf-8").splitlines()
        head = lines[1:3] if lines and lines[0].startswith("#!") else lines[:2]
        marked = len(head) == 2 and all(s in line for s, line in zip(SPDX, head, strict=True))
        if lines and not marked:
            errors.append(f"{name}: the two SPDX lines are missing")
        if name == THIS:
            continue
        for number, line in enumerate(lines, 1):
            for what, where, pattern in RULES:
                if re.search(where, name) and re.search(pattern, line):
                    errors.append(f"{name}:{number}: {what}")
    return errors


def main() -> int:
    errors = source_errors(ROOT, tracked_files(ROOT))
    print("\n".join(errors), end="\n" if errors else "", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

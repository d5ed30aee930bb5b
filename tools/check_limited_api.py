# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fail where a source of the Python bindings leaves the limited API, of which wheels are made.

Python's headers keep what is outside of it in `Include/cpython` and `Include/internal`. Lines that only Python
before 3.12 compiles, behind a check of PY_VERSION_HEX, may use it. A name in quotes is no use: what a process looks
up while it runs may be missing.
"""

import re
import sys
import sysconfig
from pathlib import Path

from check_sizes import ROOT

_NAME = re.compile(r"\b_?Py[A-Z]\w+\b|\bc_profile\w+\b")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"')
_MACRO = re.compile(r"#\s*define\s+(_?Py[A-Z]\w+)")
_CONDITION = re.compile(r"#\s*(if|ifdef|ifndef|elif|else|endif)\b(.*)")
_BEFORE_312 = re.compile(r"PY_VERSION_HEX\s*<\s*0x030C0000")


def outside_names() -> frozenset[str]:
    """Return the names that this Python's headers have outside of the limited API only."""
    include = Path(sysconfig.get_path("include"))
    inside = "".join(map(_text, include.glob("*.h")))
    outside = "".join(_text(p) for f in ("cpython", "internal") for p in (include / f).glob("*.h"))
    # Macros of the limited API may expand to others that are outside of it.
    names = set(_NAME.findall(outside)) - set(_NAME.findall(inside))
    return frozenset(names | (set(_MACRO.findall(outside)) - set(_MACRO.findall(inside))))


def _text(header: Path) -> str:
    return header.read_text(encoding="utf-8", errors="replace")


def errors_of(text: str, outside: frozenset[str]) -> list[tuple[int, str]]:
    """Return line and name of each use of a name in `outside` that Python 3.12 would compile."""
    errors = []
    blocks: list[bool] = []  # whether the branch of each open condition is for Python before 3.12
    for number, line in enumerate(text.splitlines(), 1):
        directive = _CONDITION.match(line.strip())
        if directive is None:
            if not any(blocks):
                code = _QUOTED.sub("", line).partition("//")[0]
                errors += [(number, n) for n in _NAME.findall(code) if n in outside]
        elif directive[1] == "endif":
            blocks.pop()
        elif directive[1] in ("elif", "else"):
            blocks[-1] = False
        else:
            blocks.append(bool(_BEFORE_312.search(directive[2])))
    return errors


def main() -> int:
    outside = outside_names()
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {name} is not in Python's limited API"
        for path in sorted((ROOT / "python" / "src").glob("*"))
        for number, name in errors_of(path.read_text(encoding="utf-8"), outside)
    ]
    print("\n".join(lines), end="\n" if lines else "", file=sys.stderr)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())

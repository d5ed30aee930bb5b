# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fail when a source file grows past 800 lines, or a test past 1200."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".pyi", ".cmake", ".sh"}


def limit_of(path: Path) -> int:
    is_test = path.stem.endswith(("_test", "_cases")) or "tests" in path.parts
    return 1200 if is_test else 800


def size_errors(root: Path, files: list[Path]) -> list[str]:
    """Return one line per file that is too long. Paths are relative to root."""
    errors = []
    for path in files:
        if path.suffix not in SUFFIXES:
            continue
        lines = len((root / path).read_text(encoding="utf-8").splitlines())
        if lines > limit_of(path):
            errors.append(f"{path}: {lines} lines, the limit is {limit_of(path)}")
    return errors


def tracked_files(root: Path) -> list[Path]:
    """Return what git tracks or would track, as paths relative to root."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [Path(name) for name in names.split("\0") if name and (root / name).is_file()]


def main() -> int:
    errors = size_errors(ROOT, tracked_files(ROOT))
    print("\n".join(errors), end="\n" if errors else "", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of whole training steps: Ortrain beside what a PyTorch user could pick."""

import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def _is_built(package: Path) -> bool:
    return any((package / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES)


# From the root of the repository `ortrain` is the C++ folder; the package lies in python/. Where it
# has not been built, an installed one is taken.
PACKAGES: tuple[str, ...] = (str(ROOT / "python"),) if _is_built(ROOT / "python/ortrain") else ()
for _path in PACKAGES:
    if _path not in sys.path:
        sys.path.insert(0, _path)


def package_path(before: str | None) -> str:
    """Return PYTHONPATH for a process that finds the same packages.

    Args:
      before: Its value so far.
    """
    return os.pathsep.join(part for part in (*PACKAGES, before) if part)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Running a script of the user's inside of this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["run_script"]


def run_script(script: Path, arguments: Sequence[str] = ()) -> int:
    """Run a script as ``python script.py arguments`` would, and come back when it has ended.

    Args:
      script: An existing file.
      arguments: What follows it in ``sys.argv``.

    Returns:
      Its exit status; what it raises, SystemExit aside, is raised here.
    """
    saved = sys.argv, sys.path[0]
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.resolve().parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        if ended.code is None:
            return 0
        return ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.argv, sys.path[0] = saved
    return 0

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The generated pages are those that the registries give."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_pages_are_current() -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "tools/gen_docs.py", "--check"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr

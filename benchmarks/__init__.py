# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of whole training steps: Ortrain beside what a PyTorch user could pick."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# From the root of the repository `ortrain` is the C++ folder; the package lies in python/.
if str(ROOT / "python") not in sys.path:
    sys.path.insert(0, str(ROOT / "python"))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Subprocesses that a test starts find the package of this tree, as the test itself does."""

import os
from pathlib import Path

PACKAGES = str(Path(__file__).resolve().parents[2] / "python")

os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (PACKAGES, os.environ.get("PYTHONPATH")) if part
)

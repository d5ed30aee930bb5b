# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Subprocesses that a test starts find the package of this tree, as the test itself does.

No test reads or writes the graph cache of the user who runs it.
"""

import os
from pathlib import Path

PACKAGES = str(Path(__file__).resolve().parents[2] / "python")

os.environ["PYTHONPATH"] = os.pathsep.join(
    part for part in (PACKAGES, os.environ.get("PYTHONPATH")) if part
)
os.environ["ORTRAIN_CACHE_DIR"] = "off"

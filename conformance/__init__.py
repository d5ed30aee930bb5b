# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Suites that others wrote, run against the engine: ``make conformance`` or ``python -m conformance``."""

import os

# What would gain nothing on the engine is to be right there too.
os.environ.setdefault("ORTRAIN_PIECES", "all")

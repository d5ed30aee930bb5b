# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Suites that others wrote, run against the engine: ``make conformance`` or ``python -m conformance``."""

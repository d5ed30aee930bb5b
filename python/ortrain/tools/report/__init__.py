# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What ORTModules did, as one HTML page without anything to fetch: ``ortrain report``."""

from ortrain.tools.report.html_page import page

__all__ = ["page"]

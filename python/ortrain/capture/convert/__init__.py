# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conversion of a captured ATen graph into nodes of a graph builder."""

from ortrain.capture.convert.convert import Converted, Outside, convert
from ortrain.capture.convert.registry import conversion, converts, targets

__all__ = ["Converted", "Outside", "conversion", "convert", "converts", "targets"]

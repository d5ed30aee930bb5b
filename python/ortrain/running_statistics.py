# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Statistics of batch normalizations in ONNX models, which training does not move."""

from __future__ import annotations

import warnings
from typing import Any


def warn_of_kept_statistics(graph: Any) -> None:
    """Warn where a graph of an ONNX model normalizes by batches: what stands in the file is what evaluation uses."""
    layers = graph.batch_normalizations_in_training()
    if layers:
        others = f" and {len(layers) - 1} others" if len(layers) > 1 else ""
        warnings.warn(
            f"the running statistics of '{layers[0]}'{others} stay what they are in the ONNX model: training does not "
            "update them, and evaluation and exports use them",
            RuntimeWarning,
            stacklevel=3,
        )

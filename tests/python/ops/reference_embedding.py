# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Embedding tables as NumPy reads and adds them up."""

from __future__ import annotations

import numpy as np

from tests.python.ops.registry import reference


@reference("ortrain::Embedding")
def embedding(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    return [np.asarray(inputs[0])[inputs[1]]]


@reference("ortrain::EmbeddingGrad")
def embedding_grad(inputs: list[np.ndarray], attrs: dict) -> list[np.ndarray]:
    dy, indices, shape = inputs[:3]
    table = inputs[3].astype(np.float64) if len(inputs) > 3 else np.zeros(tuple(shape))
    kept = indices != attrs.get("padding_idx", -1)
    np.add.at(table, indices[kept], dy[kept].astype(np.float64))
    return [table]

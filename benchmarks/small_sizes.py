# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Sizes that configurations of small models of transformers have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# Of encoders that cut images into patches.
OF_PATCHES = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "patch_size": 16,
    "num_labels": 4,
}


def text_sizes(vocabulary: int = 97, width: int = 16, heads: int = 2) -> dict[str, Any]:
    """Return what configurations of small encoders of text have in common."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "intermediate_size": 2 * width,
    }


def speech_sizes(
    width: int, heads: int, channels: int, kernels: Sequence[int], strides: Sequence[int]
) -> dict[str, Any]:
    """Return what configurations of small encoders of sound have in common."""
    return {
        "hidden_size": width,
        "num_attention_heads": heads,
        "intermediate_size": 2 * width,
        "conv_dim": (channels,) * len(kernels),
        "conv_kernel": tuple(kernels),
        "conv_stride": tuple(strides),
        "num_conv_pos_embeddings": 4 * heads,
        "num_conv_pos_embedding_groups": heads,
    }

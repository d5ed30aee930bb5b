# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether a mask is causal, which PyTorch's transformer layers ask of its values to choose a kernel.

Where the mask is given to attention as well, the answer changes no result: without the hint the mask is read, with it
the values that it has been found to have are known. A trace, which has no values, may take "no" for an answer.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn
from torch.nn.modules import transformer

# What of a layer hands mask and hint on to attention, as PyTorch wrote it.
_LAYERS: dict[type[nn.Module], tuple[str, ...]] = {
    nn.TransformerEncoderLayer: ("forward", "_sa_block"),
    nn.TransformerDecoderLayer: ("forward", "_sa_block", "_mha_block"),
}
_ATTENTIONS = ("self_attn", "multihead_attn")


@contextlib.contextmanager
def causal_hints_left_out() -> Iterator[None]:
    """Answer that a mask without values is not known to be causal, where that changes no result."""
    original: Callable[..., bool] = transformer._detect_is_causal_mask
    thread = threading.get_ident()

    def detect(mask: Any, is_causal: bool | None = None, size: Any = None) -> bool:
        stack = sys._getframe(1).f_locals.get("self")
        traced = threading.get_ident() == thread
        # With the hint a mask that is trained would get no gradient.
        asks = traced and mask is not None and is_causal is None and not mask.requires_grad
        if asks and _reads_masks(stack):
            return False
        return original(mask, is_causal, size)

    with mock.patch.object(transformer, "_detect_is_causal_mask", detect):
        yield


def _reads_masks(stack: Any) -> bool:
    """Tell whether all layers of an encoder or decoder are PyTorch's own, down to attention."""
    if not isinstance(stack, (nn.TransformerEncoder, nn.TransformerDecoder)):
        return False
    return all(map(_is_pytorchs, stack.layers))


def _is_pytorchs(layer: nn.Module) -> bool:
    base = next((kind for kind in _LAYERS if isinstance(layer, kind)), None)
    if base is None:
        return False
    own = vars(layer)
    if any(
        name in own or getattr(type(layer), name) is not getattr(base, name)
        for name in _LAYERS[base]
    ):
        return False
    attentions = [m for n in _ATTENTIONS if (m := layer._modules.get(n)) is not None]
    return bool(attentions) and all(
        type(m) is nn.MultiheadAttention and "forward" not in vars(m) for m in attentions
    )

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Scaled dot product attention."""

from __future__ import annotations

import math

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.activation import drop, safe_softmax, softmax
from ortrain.capture.convert.emitter import Emitter, Tensor, broadcast_shapes
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size, product, same
from ortrain.random_numbers import DropoutSource


def _with_heads(e: Emitter, x: Tensor, lead: tuple[Size, ...]) -> Value:
    """Bring x to [batch, heads, rows, columns]; ``lead`` are its broadcast leading sizes."""
    if x.rank == 4:
        return e.expand(x, (*lead[:1], *x.shape[1:]))
    if x.rank < 4:
        return e.unsqueeze(x, range(4 - x.rank))
    wide = Tensor(e.expand(x, (*lead, *x.shape[-2:])), x.dtype, (*lead, *x.shape[-2:]))
    return e.reshape(wide, (product(lead[:-1]), lead[-1], *x.shape[-2:]))


def _mask(e: Emitter, mask: Tensor, rank: int, lead: tuple[Size, ...]) -> Value:
    """Bring a mask to a rank that broadcasts against [batch, heads, rows, columns]."""
    if rank == 3 and mask.rank == 3:
        return e.unsqueeze(mask, [0])
    if rank > 4 and mask.rank > 2:
        return _with_heads(e, mask, lead)
    return mask.value


@converts("aten.scaled_dot_product_attention.default")
def scaled_dot_product_attention(
    e: Emitter,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Value:
    depth = query.shape[-1]
    if scale is None:
        if not isinstance(depth, int):
            raise e.unsupported(f"a head size {depth} that varies")
        scale = 1.0 / math.sqrt(depth) if depth else 1.0
    rank = query.rank
    tensors = (query, key, value)
    lead = broadcast_shapes(*(t.shape[:-2] for t in tensors))
    if rank == 4 and not enable_gqa:
        # Heads that broadcast are spelled out; fewer key heads are meant for grouped attention only.
        tensors = tuple(
            t if same(t.shape[1], lead[1]) else _spread_heads(e, t, lead) for t in tensors
        )  # type: ignore[assignment]
    q, k, v = (_with_heads(e, t, lead) for t in tensors)
    mask = None if attn_mask is None else _mask(e, attn_mask, rank, lead)
    draws = dropout_p > 0
    if draws and e.dropout is DropoutSource.PYTORCH:
        if enable_gqa:
            key, value = (_repeat_heads(e, t, query.shape[-3]) for t in (key, value))
        operands = (query, key, value)
        return _with_drawn_mask(e, operands, attn_mask, dropout_p, is_causal, float(scale))
    out, _ = e.nodes(
        "Attention",
        2,
        q,
        k,
        v,
        mask,
        e.seed() if draws else None,
        scale=float(scale),
        is_causal=int(is_causal),
        dropout=float(dropout_p),
        stream=e.stream() if draws else 0,
        domain="ortrain",
    )
    if rank < 4:
        return e.squeeze(out, range(4 - rank))
    if rank == 4:
        return out
    inner = (product(lead[:-1]), lead[-1], query.shape[-2], value.shape[-1])
    return e.reshape(out, (*lead, *inner[2:]), inner)


def _with_drawn_mask(
    e: Emitter,
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float,
) -> Value:
    """Add the steps of attention, as PyTorch takes them where the weights drop out."""
    query, key, value = tensors
    lead = broadcast_shapes(*(t.shape[:-2] for t in tensors))
    dtype, rows, columns = query.dtype, query.shape[-2], key.shape[-2]
    # Each operand gets a root of the scale, so that their product stays small.
    root = e.scalar(math.sqrt(abs(scale)), dtype)
    signed = root if scale >= 0 else e.scalar(-math.sqrt(-scale), dtype)
    swapped = [*range(key.rank - 2), key.rank - 1, key.rank - 2]
    turned = e.node("Transpose", key, perm=swapped)
    scores = e.node("MatMul", e.node("Mul", query, signed), e.node("Mul", turned, root))
    shape = (*lead, rows, columns)
    hidden = e.scalar(float("-inf"), dtype)
    if is_causal:
        ones = e.full((rows, columns), True, torch.bool)
        below = e.node("Trilu", ones, upper=0)
        scores = e.where(below, scores, hidden)
    elif mask is not None and mask.dtype is torch.bool:
        scores = e.where(mask, scores, hidden)
    elif mask is not None:
        scores = e.node("Add", scores, mask)
    masks = is_causal or mask is not None
    weights = (safe_softmax if masks else softmax)(e, Tensor(scores, dtype, shape), -1)
    return e.node("MatMul", drop(e, Tensor(weights, dtype, shape), dropout), value)


def _repeat_heads(e: Emitter, x: Tensor, heads: Size) -> Tensor:
    """Give each key head to as many query heads, side by side, as grouped attention does."""
    held = x.shape[-3]
    if not isinstance(heads, int) or not isinstance(held, int):
        raise e.unsupported("grouped heads whose number varies")
    apart = e.unsqueeze(x, [x.rank - 2])
    wide = e.expand(apart, (*x.shape[:-2], heads // held, *x.shape[-2:]))
    shape = (*x.shape[:-3], heads, *x.shape[-2:])
    return Tensor(e.reshape(wide, shape), x.dtype, shape)


def _spread_heads(e: Emitter, x: Tensor, lead: tuple[Size, ...]) -> Tensor:
    shape = (x.shape[0], lead[1], *x.shape[2:])
    return Tensor(e.expand(x, shape), x.dtype, shape)

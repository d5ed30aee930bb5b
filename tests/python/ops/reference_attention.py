# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Attention with the whole matrix of scores, in float64."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from tests.python.ops.registry import reference


def philox_halves(seed: int, stream: int, rows: int, keys: int) -> np.ndarray:
    """Return a half of a Philox 4x32-7 word per key; each row begins with a block of eight."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    block = np.arange(rows * ((keys + 7) // 8), dtype=np.uint64)
    c = [block & low, block >> shift]
    c += [np.full_like(block, stream & 0xFFFFFFFF), np.full_like(block, stream >> 32)]
    key = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(7):
        p0, p1 = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (p1 >> shift) ^ c[1] ^ np.uint64(key[0]),
            p1 & low,
            (p0 >> shift) ^ c[3] ^ np.uint64(key[1]),
            p0 & low,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    halves = [half for word in c for half in (word & np.uint64(0xFFFF), word >> np.uint64(16))]
    return np.stack(halves, axis=1).reshape(rows, -1)[:, :keys]


@dataclasses.dataclass
class Heads:
    """Operands as [batch, heads, rows, dim], keys and values repeated for grouped heads."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    factors: torch.Tensor  # of dropout
    groups: int
    packed: bool
    scale: float

    def split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return split(x, heads) if self.packed else x


def split(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.reshape(x.shape[0], x.shape[1], heads, x.shape[2] // heads).transpose(1, 2)


def merge(x: torch.Tensor, packed: bool) -> torch.Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1) if packed else x


def prepare(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: object,
    seed: object,
    offsets: object,
    attrs: dict,
) -> Heads:
    heads = attrs.get("q_num_heads", 0)
    packed = q.dim() == 3
    if packed:
        kv_heads = attrs.get("kv_num_heads", 0) or heads
        q, k, v = split(q, heads), split(k, kv_heads), split(v, kv_heads)
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scale = attrs.get("scale", 1 / math.sqrt(q.shape[-1]))
    scores = q @ k.transpose(-1, -2) * scale
    if attrs.get("is_causal", 0):
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if offsets is not None:  # sequences after one another, which do not see each other
        row = torch.arange(scores.shape[-1])
        sequence = torch.bucketize(row, offsets, right=True)
        inside = row < offsets[-1]
        same = (sequence[:, None] == sequence) & inside[:, None] & inside
        scores = scores.masked_fill(~same, -math.inf)
    factors = torch.ones_like(scores)
    ratio = attrs.get("dropout", 0.0)
    if ratio > 0:
        rows, keys = scores[..., 0].numel(), scores.shape[-1]
        halves = philox_halves(int(seed), attrs.get("stream", 0), rows, keys)
        threshold = math.floor(ratio * 2**16 + 0.5)
        keep = halves >= threshold
        factor = 2**16 / (2**16 - threshold) if threshold < 2**16 else 0.0
        kept = torch.from_numpy(keep.reshape(tuple(scores.shape)))
        if offsets is not None:  # keys count from the first one of their sequence
            begin = offsets[(sequence - 1).clamp(0, max(len(offsets) - 2, 0))]
            own = (row[None] - begin[:, None]).clamp(0).expand_as(kept)
            kept = kept.gather(-1, own)
        factors = kept.double() * factor
    return Heads(q, k, v, scores, factors, groups, packed, scale)


def tensors(inputs: list[np.ndarray | None], count: int) -> list[torch.Tensor | None]:
    given = []
    for x in inputs:
        t = None if x is None else torch.from_numpy(np.array(x))
        given.append(t.double() if t is not None and t.is_floating_point() else t)
    return given + [None] * (count - len(given))


@reference("ortrain::Attention")
def attention(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    q, k, v, mask, seed, offsets = tensors(inputs, 6)
    h = prepare(q, k, v, mask, seed, offsets, attrs)
    dead = (h.scores == -math.inf).all(-1, keepdim=True)
    p = torch.softmax(h.scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    logsumexp = torch.logsumexp(h.scores, -1).masked_fill(dead.squeeze(-1), math.inf)
    out = merge(p * h.factors @ h.v, h.packed)
    if offsets is not None and offsets[-1] > 0:
        out[:, int(offsets[-1]) :] = out[:, :1]
    return [out.numpy(), logsumexp.numpy()]


@reference("ortrain::AttentionGrad")
def attention_grad(inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray | None]:
    dout, q, k, v, out, logsumexp, mask, seed, offsets = tensors(inputs, 9)
    h = prepare(q, k, v, mask, seed, offsets, attrs)
    dout, out = h.split(dout, h.q.shape[1]), h.split(out, h.q.shape[1])
    p = torch.exp(h.scores - logsumexp.unsqueeze(-1))
    dp = dout @ h.v.transpose(-1, -2) * h.factors
    ds = p * (dp - (dout * out).sum(-1, keepdim=True))
    dq = ds @ h.k * h.scale

    def shared(x: torch.Tensor) -> torch.Tensor:
        return merge(x.unflatten(1, (-1, h.groups)).sum(2) if h.groups > 1 else x, h.packed)

    dk = shared(ds.transpose(-1, -2) @ h.q * h.scale)
    dv = shared((p * h.factors).transpose(-1, -2) @ dout)
    grads = [merge(dq, h.packed).numpy(), dk.numpy(), dv.numpy()]
    if mask is not None and mask.dtype != torch.bool:
        grads.append(ds.sum_to_size(mask.shape).numpy() if mask.dim() else ds.sum().numpy())
    return grads

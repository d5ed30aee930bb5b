# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""LSTM, GRU and RNN: layers and directions composed of one-layer nodes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.activation import drop
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.registry import converts


def _layers(
    op: str,
    attributes: Mapping[str, str],
    e: Emitter,
    x: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Value, ...]:
    """Add a node ``op`` per layer and direction; returns y and the final states, stacked."""
    states = [hx] if isinstance(hx, Tensor) else hx
    directions = 2 if bidirectional else 1
    per_direction = 4 if has_biases else 2
    count = num_layers * directions
    if len(params) != count * per_direction:
        raise e.unsupported("projections (proj_size)")
    unbatched = x.rank == 2
    value = e.unsqueeze(x, [0 if batch_first else 1]) if unbatched else x.value
    if batch_first:
        value = e.node("Transpose", value, perm=[1, 0, 2])
    leading = (1, *x.shape[:1]) if unbatched else x.shape[:2]
    steps = leading[::-1] if batch_first or unbatched else leading
    starts = [e.unsqueeze(s, [1]) if unbatched else s.value for s in states]
    split = [
        e.nodes("Split", count, s, e.ints(*[1] * count), axis=0) if count > 1 else (s,)
        for s in starts
    ]
    first = [[e.squeeze(part, [0]) for part in parts] for parts in split]
    final: list[list[Value]] = [[] for _ in states]
    for level in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = level * directions + direction
            weights = params[i * per_direction : (i + 1) * per_direction]
            y, *ends = e.nodes(
                op,
                1 + len(states),
                value,
                *(f[i] for f in first),
                *weights,
                hidden_size=_hidden_size(e, weights),
                reverse=direction,
                domain="ortrain",
                **attributes,
            )
            outputs.append(y)
            for collected, end in zip(final, ends, strict=True):
                collected.append(e.unsqueeze(end, [0]))
        value = outputs[0] if directions == 1 else e.node("Concat", *outputs, axis=2)
        if dropout > 0 and train and level < num_layers - 1:
            shape = (*steps, directions * _hidden_size(e, weights))
            value = drop(e, Tensor(value, x.dtype, shape), float(dropout))
    stacked = [parts[0] if count == 1 else e.node("Concat", *parts, axis=0) for parts in final]
    if batch_first:
        value = e.node("Transpose", value, perm=[1, 0, 2])
    if unbatched:
        value = e.squeeze(value, [0 if batch_first else 1])
        stacked = [e.squeeze(s, [1]) for s in stacked]
    return value, *stacked


def _hidden_size(e: Emitter, weights: Sequence[Tensor]) -> int:
    size = weights[1].shape[-1]
    if not isinstance(size, int):
        raise e.unsupported("a hidden size that varies")
    return size


converts("aten.lstm.input")(functools.partial(_layers, "LSTM", {}))
converts("aten.gru.input")(functools.partial(_layers, "GRU", {}))
converts("aten.rnn_tanh.input")(functools.partial(_layers, "RNN", {"activation": "tanh"}))
converts("aten.rnn_relu.input")(functools.partial(_layers, "RNN", {"activation": "relu"}))


@converts("aten.lstm.data", "aten.gru.data", "aten.rnn_tanh.data", "aten.rnn_relu.data")
def packed(e: Emitter, *_: torch.Tensor) -> Value:
    raise e.unsupported("packed sequences")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Recurrent layers: torch.nn.LSTM, GRU and RNN; saved values and gradients by torch's autograd."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.registry import reference

LAYERS = {"LSTM": torch.nn.LSTM, "GRU": torch.nn.GRU, "RNN": torch.nn.RNN}


def tensors(inputs: list[np.ndarray | None], count: int) -> list[torch.Tensor | None]:
    given = [None if x is None else torch.from_numpy(np.array(x)) for x in inputs]
    return given + [None] * (count - len(given))


def run_module(name: str, attrs: dict, x, states, w_ih, w_hh, b_ih, b_hh) -> list[torch.Tensor]:
    """Return y and the last states of torch's module with these weights."""
    options = {"nonlinearity": attrs.get("activation", "tanh")} if name == "RNN" else {}
    hidden = w_hh.shape[1]
    module = LAYERS[name](x.shape[2], hidden, dtype=x.dtype, **options)
    zeros = torch.zeros(w_hh.shape[0], dtype=x.dtype)
    weights = {
        "weight_ih_l0": w_ih,
        "weight_hh_l0": w_hh,
        "bias_ih_l0": zeros if b_ih is None else b_ih,
        "bias_hh_l0": zeros if b_hh is None else b_hh,
    }
    if attrs.get("reverse", 0):
        x = x.flip(0)
    start = tuple(s[None] for s in states)
    y, last = torch.func.functional_call(
        module, weights, (x, start if name == "LSTM" else start[0])
    )
    if attrs.get("reverse", 0):
        y = y.flip(0)
    return [y, *[s[0] for s in (last if name == "LSTM" else (last,))]]


def step(name: str, attrs: dict, x, states, w_ih, w_hh, b_ih, b_hh):
    """Return the next states and the values that the engine saves for its backward."""
    from_x = x @ w_ih.T + (0 if b_ih is None else b_ih)
    from_h = states[0] @ w_hh.T + (0 if b_hh is None else b_hh)
    if name == "LSTM":
        i, f, g, o = (from_x + from_h).chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * states[1] + i * g
        return [o * c.tanh(), c], [torch.cat([i, f, g, o], -1), c]
    if name == "GRU":
        (xr, xz, xn), (hr, hz, hn) = from_x.chunk(3, -1), from_h.chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        n = (xn + r * hn).tanh()
        return [(1 - z) * n + z * states[0]], [torch.cat([r, z, n, hn], -1)]
    total = from_x + from_h
    return [total.relu() if attrs.get("activation") == "relu" else total.tanh()], []


def run_steps(name: str, attrs: dict, x, states, *weights):
    """Return y, the last states and the saved sequences, one step after the other."""
    order = range(x.shape[0])
    y, saved = {}, {}
    for t in reversed(order) if attrs.get("reverse", 0) else order:
        states, kept = step(name, attrs, x[t], states, *weights)
        y[t], saved[t] = states[0], kept
    blocks = {"LSTM": [4, 1], "GRU": [4], "RNN": []}[name]
    empty = [states[0].new_zeros(0, x.shape[1], b * states[0].shape[1]) for b in [1, *blocks]]
    if not y:
        return empty[0], states, empty[1:]
    sequences = [torch.stack([saved[t][i] for t in order]) for i in range(len(blocks))]
    return torch.stack([y[t] for t in order]), states, sequences


def forward(name: str, inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    count = 2 if name == "LSTM" else 1
    x, *rest = tensors(inputs, 5 + count)
    states, weights = rest[:count], rest[count:]
    y, last, saved = run_steps(name, attrs, x, states, *weights)
    if x.numel():
        y, *last = run_module(name, attrs, x, states, *weights)
    return [t.numpy() for t in (y, *last, *saved)]


def backward(name: str, inputs: list[np.ndarray | None], attrs: dict) -> list[np.ndarray]:
    """Walk the steps backwards over the saved values, each by the derivative of its formula."""
    count = 2 if name == "LSTM" else 1
    blocks = {"LSTM": 2, "GRU": 1, "RNN": 0}[name]
    values = tensors(inputs, 2 * count + 5 + blocks)
    dy, d_last = values[0], list(values[1 : 1 + count])
    x, *rest = values[1 + count :]
    states, (w_ih, w_hh, y, *saved) = rest[:count], rest[count:]
    d_states = [
        torch.zeros_like(s) if d is None else d for s, d in zip(states, d_last, strict=True)
    ]
    dx = torch.zeros_like(x)
    dw_ih, dw_hh = torch.zeros_like(w_ih), torch.zeros_like(w_hh)
    db_ih, db_hh = torch.zeros_like(w_ih[:, 0]), torch.zeros_like(w_ih[:, 0])
    order = list(range(x.shape[0]))
    if attrs.get("reverse", 0):
        order.reverse()
    for k in reversed(range(len(order))):
        t = order[k]
        h = states[0] if k == 0 else y[order[k - 1]]
        d_h = d_states[0] + (0 if dy is None else dy[t])
        if name == "LSTM":
            i, f, g, o = saved[0][t].chunk(4, -1)
            before = states[1] if k == 0 else saved[1][order[k - 1]]
            squashed = saved[1][t].tanh()
            d_c = d_states[1] + d_h * o * (1 - squashed**2)
            d_from_x = torch.cat(
                [
                    d_c * g * i * (1 - i),
                    d_c * before * f * (1 - f),
                    d_c * i * (1 - g**2),
                    d_h * squashed * o * (1 - o),
                ],
                -1,
            )
            d_from_h, d_states = d_from_x, [d_from_x @ w_hh, d_c * f]
        elif name == "GRU":
            r, z, n, m = saved[0][t].chunk(4, -1)
            d_n = d_h * (1 - z) * (1 - n**2)
            d_r, d_z = d_n * m * r * (1 - r), d_h * (h - n) * z * (1 - z)
            d_from_x = torch.cat([d_r, d_z, d_n], -1)
            d_from_h = torch.cat([d_r, d_z, d_n * r], -1)
            d_states = [d_from_h @ w_hh + d_h * z]
        else:
            relu = attrs.get("activation") == "relu"
            d_from_x = d_h * ((y[t] > 0).to(y.dtype) if relu else 1 - y[t] ** 2)
            d_from_h, d_states = d_from_x, [d_from_x @ w_hh]
        dx[t] = d_from_x @ w_ih
        dw_ih, dw_hh = dw_ih + d_from_x.T @ x[t], dw_hh + d_from_h.T @ h
        db_ih, db_hh = db_ih + d_from_x.sum(0), db_hh + d_from_h.sum(0)
    biases = [db_ih, db_hh] if name == "GRU" else [db_ih]
    return [t.numpy() for t in (dx, *d_states, dw_ih, dw_hh, *biases)]


def add_layer(name: str) -> None:
    reference(f"ortrain::{name}")(lambda inputs, attrs: forward(name, inputs, attrs))
    reference(f"ortrain::{name}Grad")(lambda inputs, attrs: backward(name, inputs, attrs))


for layer in LAYERS:
    add_layer(layer)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One step of a recurrent layer, as PyTorch computes it on the CPU, without its writes to what it has computed.

With the writes only a trace of the whole program takes a cell apart. The formulas stand in the documentation of
`torch.nn.LSTMCell`, `GRUCell` and `RNNCell`; the order of the sums is that of PyTorch's kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear


def _products(
    x: Tensor,
    h: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return linear(x, w_ih, b_ih), linear(h, w_hh, b_hh)


def _lstm_cell(
    x: Tensor, states: Sequence[Tensor], *weights: Any, **biases: Any
) -> tuple[Tensor, Tensor]:
    h, c = states
    of_x, of_h = _products(x, h, *weights, **biases)
    gates = (of_h + of_x).chunk(4, 1)
    given, kept, shown = (gates[i].sigmoid() for i in (0, 1, 3))
    c = kept * c + given * gates[2].tanh()
    return shown * c.tanh(), c


def _gru_cell(x: Tensor, h: Tensor, *weights: Any, **biases: Any) -> Tensor:
    of_x, of_h = (part.chunk(3, 1) for part in _products(x, h, *weights, **biases))
    reset, kept = (of_h[i] + of_x[i] for i in (0, 1))
    found = (of_x[2] + of_h[2] * reset.sigmoid()).tanh()
    return (h - found) * kept.sigmoid() + found


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(x: Tensor, h: Tensor, *weights: Any, **biases: Any) -> Tensor:
        of_x, of_h = _products(x, h, *weights, **biases)
        return activation(of_h + of_x)

    return cell


CELLS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.lstm_cell.default: _lstm_cell,
    torch.ops.aten.gru_cell.default: _gru_cell,
    torch.ops.aten.rnn_tanh_cell.default: _rnn_cell(torch.tanh),
    torch.ops.aten.rnn_relu_cell.default: _rnn_cell(torch.relu),
}

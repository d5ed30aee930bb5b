# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's recurrent layers, kept whole in a trace.

As in `torch_internals`, a release of PyTorch that moves one of these names is met here. Checked
against 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ortrain.capture.errors import CaptureError
from ortrain.capture.size_internals import size_hint

_RECURRENT = tuple(
    getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
)
# Kernels of these operators in PyTorch, while others stand in for them.
written_out: dict[Any, Callable[..., Any]] = {}


def has_onednn() -> bool:
    """Tell whether PyTorch may compute by oneDNN; ``torch.backends.mkldnn.enabled`` takes longer."""
    return torch._C._get_mkldnn_enabled()


def is_recurrent(op: Any) -> bool:
    """Tell whether an operator is all layers of an LSTM, GRU or RNN over padded sequences."""
    return op in _RECURRENT


@contextlib.contextmanager
def recurrent_layers_whole(as_called: bool = False) -> Iterator[None]:
    """Keep LSTMs, GRUs and RNNs one node of any length while tracing; PyTorch would write them out.

    Args:
      as_called: While a module's own code is traced: results have the dtypes that autocast gives
        them, and gradients may pass but not be taken inside of the trace (CaptureError).
        Otherwise they have the dtype of x.
    """
    from torch._decomp import decomposition_table

    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    with contextlib.ExitStack() as stack:
        for op in _RECURRENT:
            # Calls find their kernel by this cache.
            op._dispatch_cache.clear()
            stack.callback(op._dispatch_cache.clear)
            if composite in op.py_kernels:
                written_out[op] = op.py_kernels[composite]
                stack.callback(written_out.pop, op)
            # Fake tensors with symbolic sizes go by the table, others by the kernel.
            for held, key in ((decomposition_table, op), (op.py_kernels, composite)):
                original = held.get(key)
                if callable(original):
                    held[key] = _without_steps(op, original, as_called)
                    stack.callback(held.__setitem__, key, original)
        yield


def _without_steps(op: Any, original: Callable[..., Any], as_called: bool) -> Callable[..., Any]:
    """Return a kernel that gives fake results of recurrent layers and traces none of their steps."""
    onednn = has_onednn()
    thread = threading.get_ident()

    def kernel(x: Any, hx: Any, params: Any, *flags: Any) -> Any:
        operands = pytree.tree_leaves((x, hx, params))
        if threading.get_ident() != thread or detect_fake_mode(operands) is None:
            return original(x, hx, params, *flags)
        *_, bidirectional, batch_first = flags
        by_batch = batch_first and x.dim() == 3
        if as_called and size_hint(x.shape[1 if by_batch else 0]) == 0:
            raise CaptureError("a recurrent layer over a sequence of length 0")
        states = [hx] if isinstance(hx, torch.Tensor) else hx
        dtypes = [x.dtype] * (1 + len(states))
        if as_called and torch.is_inference_mode_enabled():
            # No kernel is told there whether autocast is on.
            raise CaptureError("a recurrent layer under torch.inference_mode")
        if as_called and torch.is_autocast_enabled(x.device.type):
            dtypes = [r.dtype for r in _one_step(op, onednn, x, hx, params, *flags)]
        lead = [x.shape[1], x.shape[0]] if by_batch else x.shape[:-1]
        width = states[0].shape[-1] * (2 if bidirectional else 1)
        y = x.new_empty((*lead, width), dtype=dtypes[0])
        ends = [s.new_empty(s.shape, dtype=d) for s, d in zip(states, dtypes[1:], strict=True)]
        # In memory a batch stands inside of a step; whether views alias depends on it.
        results = [y.transpose(0, 1) if by_batch else y, *ends]
        if as_called and torch.is_grad_enabled():
            wanting = [o for o in operands if o.requires_grad]
            results = [_after(r, wanting) for r in results] if wanting else results
        return tuple(results)

    return kernel


def _one_step(op: Any, onednn: bool, x: Any, hx: Any, params: Any, *flags: Any) -> Any:
    """Run recurrent layers of fake tensors over one step of one row of zeros, without dropout.

    Which library computes them, and so what autocast does, is known to PyTorch's dispatch alone.
    """

    def zeros(like: Any, *rows: int) -> torch.Tensor:
        sizes = [*rows, *map(size_hint, like.shape[len(rows) :])]
        return torch.zeros(sizes, dtype=like.dtype, device=like.device)

    has_biases, num_layers, _, *others = flags
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(torch._C._set_mkldnn_enabled, has_onednn())
        torch._C._set_mkldnn_enabled(onednn)  # an export turns it off
        states = pytree.tree_map(lambda s: zeros(s, size_hint(s.shape[0]), 1), hx)
        weights = [zeros(p) for p in params]
        return op(zeros(x, 1, 1), states, weights, has_biases, num_layers, 0.0, *others)


def _after(result: torch.Tensor, operands: list[torch.Tensor]) -> torch.Tensor:
    """Return a fake result that requires a gradient as one computed from the operands does."""

    def refuse(_: torch.Tensor) -> None:
        raise CaptureError("its forward takes gradients through a recurrent layer")

    linked = (result + sum(o.sum() for o in operands)).to(result.dtype)
    linked.register_hook(refuse)
    return linked

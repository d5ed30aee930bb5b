# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conditions on a draw of ``torch.rand`` that hold, or do not, whatever is drawn.

Models with LayerDrop draw a number for each layer and ask whether it is below their rate, which is 0 by default.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental import proxy_tensor

from ortrain.capture.torch_internals import replaced

_READS = frozenset({"aten.is_nonzero.default", "aten.item.default"})
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "aten.lt.Scalar": operator.lt,
    "aten.le.Scalar": operator.le,
    "aten.gt.Scalar": operator.gt,
    "aten.ge.Scalar": operator.ge,
}
# Others round draws, so that 1 is one of them on some devices.
_TYPES = (torch.float32, torch.float64)
# A bound nearer to 0 may be 0 in the type of the draw.
_LEAST_BOUND = 2.0**-20
_DRAWS = frozenset({"aten.rand.default", "aten.rand.generator", "aten.rand_like.default"})


def draws_compared() -> contextlib.AbstractContextManager[None]:
    """Let a trace answer whether a draw of [0, 1) is below or above a number, where no draw could be otherwise."""
    original = proxy_tensor.proxy_call
    thread = threading.get_ident()

    def call(mode: Any, op: Any, is_above: bool, args: Any, kwargs: Any) -> Any:
        if is_above and str(op) in _READS and threading.get_ident() == thread:
            answer = _answer(mode.tracer, args[0])
            if answer is not None:
                return answer
        return original(mode, op, is_above, args, kwargs)

    return replaced([(proxy_tensor, "proxy_call", call)])


def _answer(tracer: Any, tensor: torch.Tensor) -> bool | None:
    proxy = tracer.tensor_tracker.get(tensor)
    node = getattr(getattr(proxy, "proxy", None), "node", None)
    compare = None if node is None else _COMPARISONS.get(str(node.target))
    if compare is None or node.users:  # which may write to it
        return None
    draw, bound = node.args
    if not isinstance(draw, fx.Node) or str(draw.target) not in _DRAWS:
        return None
    if any(str(user.target) not in _COMPARISONS for user in draw.users):
        return None
    value = draw.meta["val"]
    # Of none, or of several, PyTorch refuses to tell; a size that may be another is no 1.
    if value.dtype not in _TYPES or any(type(n) is not int or n != 1 for n in value.shape):
        return None
    if type(bound) not in (int, float):
        return None
    return _of_all_draws(compare, bound)


def _of_all_draws(compare: Callable[[Any, Any], bool], bound: float) -> bool | None:
    """Return what a comparison with a bound gives for all numbers of [0, 1); None where it depends on them."""
    if -_LEAST_BOUND < bound < 0:
        return None
    least = compare(0.0, bound)
    # Of the numbers below 1 the largest is another for each type, and none lies between it and 1.
    most = compare(1.0, bound) if bound != 1 else compare(0.0, 1)
    return least if least == most else None

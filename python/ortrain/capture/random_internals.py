# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does not say of its operators that draw random numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch.fx import node as fx_node

# What stands in a functional graph for an operator that fills its first argument.
_FILLS = {
    "aten::bernoulli.Tensor": "bernoulli_.Tensor",
    "aten::bernoulli.p": "bernoulli_.float",
    "aten::cauchy": "cauchy_.default",
    "aten::exponential": "exponential_.default",
    "aten::geometric": "geometric_.default",
    "aten::log_normal": "log_normal_.default",
    "aten::normal_functional": "normal_.default",
    "aten::random": "random_.default",
    "aten::random.from": "random_.from",
    "aten::random.to": "random_.to",
    "aten::uniform": "uniform_.default",
}


def _rrelu_with_noise(
    x: torch.Tensor, noise: torch.Tensor, *args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ops.aten.rrelu_with_noise.default(x, noise, *args), noise


def writing_form(op: Any) -> Callable[..., Any] | None:
    """Return what PyTorch runs, on tensors of one's own, where a functional operator draws; or None.

    Which numbers it draws depends on the layout of what it fills, and the functional one fills a
    copy of another layout. That of rrelu has a gradient by what its noise was before.
    """
    name = op.name() if isinstance(op, torch._ops.OpOverload) else ""
    if name == "aten::rrelu_with_noise_functional":
        return _rrelu_with_noise
    if name not in _FILLS:
        return None
    name = _FILLS[name]
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload)


@contextlib.contextmanager
def dead_draws_kept(functions: Collection[Any]) -> Iterator[None]:
    """Let traces keep what draws random numbers, and some operators, though nobody reads them.

    Args:
      functions: The operators; it may grow meanwhile.
    """
    with torch._inductor.config.patch(fallback_random=True):  # which traces drop nodes by
        try:
            yield
        finally:
            fx_node._side_effectful_functions.difference_update(functions)


def keep_dead(operator: Any) -> None:
    """Let traces keep an operator though nobody reads it, inside of ``dead_draws_kept``."""
    fx_node._side_effectful_functions.add(operator)


def is_made_like(op: Any) -> bool:
    """Tell whether an operator only takes the kind of its argument, so that no gradient reaches it."""
    return isinstance(op, torch._ops.OpOverload) and op.name().partition(".")[0].endswith("_like")

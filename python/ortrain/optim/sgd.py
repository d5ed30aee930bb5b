# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Stochastic gradient descent."""

from __future__ import annotations

from typing import Any

import torch

from ortrain.optim.multi_tensor import MultiTensorOptimizer, init_buffer


class FusedSGD(MultiTensorOptimizer, torch.optim.SGD):
    """torch.optim.SGD in one pass over memory, with the clipping of the gradients in it.

    Options and ``state_dict`` are those of torch.optim.SGD and load in both directions; which
    kernel PyTorch would take (``foreach``, ``fused``) is kept in the groups and has no effect.
    16-bit parameters are computed in float32.

    Args:
        params: Parameters, named parameters or groups of them.
        lr: Learning rate, a number or a tensor of one element.
        momentum: Decay of the momentum buffer; 0 keeps none.
        dampening: Share of the gradient that does not enter the buffer after the first step.
        weight_decay: L2 penalty.
        nesterov: Nesterov's momentum; needs a momentum and no dampening.
        maximize: Ascend instead of descend.
        max_grad_norm: Clip the norm of all gradients to this; None does not.
    """

    _kind = "sgd"
    _init_state = staticmethod(init_buffer)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | torch.Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        self._set_max_grad_norm(max_grad_norm)
        super().__init__(
            params,
            lr,
            momentum,
            dampening,
            weight_decay,
            nesterov,
            maximize=maximize,
            foreach=foreach,
            differentiable=differentiable,
            fused=fused,
        )

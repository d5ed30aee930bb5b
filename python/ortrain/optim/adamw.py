# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""AdamW."""

from __future__ import annotations

from typing import Any

import torch

from ortrain.optim.multi_tensor import MultiTensorOptimizer, init_moments


class FusedAdamW(MultiTensorOptimizer, torch.optim.AdamW):
    """torch.optim.AdamW in one pass over memory, with the clipping of the gradients in it.

    Options and ``state_dict`` are those of torch.optim.AdamW and load in both directions; which
    kernel PyTorch would take (``foreach``, ``fused``) is kept in the groups and has no effect.
    16-bit parameters are computed in float32.

    Args:
        params: Parameters, named parameters or groups of them.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the divisor.
        weight_decay: Decoupled weight decay.
        amsgrad: Divide by the largest average of squares so far.
        maximize: Ascend instead of descend.
        max_grad_norm: Clip the norm of all gradients to this; None does not.

    Example:
        ``optimizer = FusedAdamW(model.parameters(), lr=1e-4, max_grad_norm=1.0)``
    """

    _kind = "adamw"
    _init_state = staticmethod(init_moments)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        self._set_max_grad_norm(max_grad_norm)
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

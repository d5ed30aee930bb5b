# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""LAMB."""

from __future__ import annotations

import math
from typing import Any

import torch

from ortrain.optim.multi_tensor import MultiTensorOptimizer, check_adam_numbers, init_moments


class FusedLAMB(MultiTensorOptimizer):
    """LAMB (You et al. 2020, algorithm 2): Adam's update, scaled per tensor to the tensor's norm.

    With u = m / (sqrt(v) + eps) + weight_decay * p, a step is p -= lr * ratio * u, where ratio is
    |p| / |u| between ``ratio_min`` and ``ratio_max``, or 1 where a norm is zero. The state is that
    of AdamW: step, exp_avg, exp_avg_sq. 16-bit parameters are computed in float32.

    Args:
        params: Parameters, named parameters or groups of them.
        lr: Learning rate, a number or a tensor of one element.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the divisor.
        weight_decay: Weight decay, inside the update.
        ratio_min: Lower bound of the ratio.
        ratio_max: Upper bound of the ratio.
        bias_correction: Correct the averages for their start at zero.
        maximize: Ascend instead of descend.
        max_grad_norm: Clip the norm of all gradients to this; None does not.
    """

    _kind = "lamb"
    _init_state = staticmethod(init_moments)

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        *,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        bias_correction: bool = True,
        maximize: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        check_adam_numbers(lr, betas, eps, weight_decay)
        if not ratio_min <= ratio_max:
            raise ValueError(f"ratio_min {ratio_min} is greater than ratio_max {ratio_max}")
        self._set_max_grad_norm(max_grad_norm)
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "bias_correction": bias_correction,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("maximize", False)

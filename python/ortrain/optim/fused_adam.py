# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Adam with the three ways of decaying weights that are in use."""

from __future__ import annotations

import enum
from typing import Any

from ortrain.optim.multi_tensor import MultiTensorOptimizer, check_adam_numbers, init_moments


class AdamWMode(enum.IntEnum):
    """How weights decay: torch.optim.Adam's penalty, Hugging Face's former AdamW, torch's AdamW."""

    ADAM_L2_REGULARIZATION = 0
    ADAMW_TRANSFORMERS = 1
    ADAMW_TORCH = 2


class FusedAdam(MultiTensorOptimizer):
    """Adam in one pass over memory.

    The state is that of torch.optim.Adam: step, exp_avg, exp_avg_sq. 16-bit parameters are computed
    in float32.

    Args:
        params: Parameters, named parameters or groups of them.
        lr: Learning rate.
        betas: Decay of the averages of the gradient and of its square.
        eps: Added to the divisor.
        adam_w_mode: How weights decay.
        weight_decay: How much.
        bias_correction: Correct the averages for their start at zero.
        set_grad_none: What ``zero_grad`` does where nothing else is said.
        max_grad_norm: Clip the norm of all gradients to this; None does not.
    """

    _kind = "adam"
    _set_grad_none = True  # of optimizers that were pickled without it
    _init_state = staticmethod(init_moments)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        adam_w_mode: int = AdamWMode.ADAMW_TRANSFORMERS,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        set_grad_none: bool = True,
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        check_adam_numbers(lr, betas, eps, weight_decay)
        self._set_max_grad_norm(max_grad_norm)
        self._set_grad_none = set_grad_none
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "adam_w_mode": int(AdamWMode(adam_w_mode)),
            "bias_correction": bias_correction,
            "maximize": False,
        }
        super().__init__(params, defaults)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or fill them with zeros."""
        super().zero_grad(self._set_grad_none if set_to_none is None else set_to_none)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_set_grad_none": self._set_grad_none}

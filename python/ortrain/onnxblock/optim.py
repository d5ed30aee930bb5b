# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of training blocks."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import onnx

from ortrain import optim
from ortrain.onnxblock.base_model import present
from ortrain.onnxblock.training_blocks import Parameters, write_for_parameters

# The AdamW of ONNX Runtime's training models, Hugging Face's former one: weights decay after the update.
_AFTER = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE


@dataclasses.dataclass(frozen=True, slots=True)
class ClipGradNorm:
    """Clips the norm of all gradients together.

    Args:
      max_norm: The norm.
    """

    max_norm: float


class _Optimizer:
    config: Any
    max_norm: float | None = None

    def __call__(self, parameters: Parameters) -> str:
        """Put the optimizer's model of parameters, as ``TrainingBlock.parameters`` gives them, in the place of the base.

        Returns:
          The name of its first output.
        """
        accessor = present()
        with tempfile.TemporaryDirectory() as folder:
            write_for_parameters(parameters, Path(folder), self.config, max_grad_norm=self.max_norm)
            accessor.model.CopyFrom(onnx.load(f"{folder}/optimizer_model.onnx"))
        return accessor.graph.output[0].name


class AdamW(_Optimizer):
    """AdamW.

    Args:
      bias_correction: Correct the averages for their start at zero.
      betas: Decays of the averages.
      eps: Added to the divisor.
      weight_decay: Weight decay.
      clip_grad: Clips gradients; None does not.
    """

    def __init__(
        self,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        clip_grad: ClipGradNorm | None = None,
    ) -> None:
        self.config = optim.AdamConfig(
            alpha=betas[0],
            beta=betas[1],
            epsilon=eps,
            lambda_coef=weight_decay,
            do_bias_correction=bias_correction,
            weight_decay_mode=_AFTER,
            max_norm_clip=0.0 if clip_grad is None else clip_grad.max_norm,
        )


class SGD(_Optimizer):
    """Gradient descent.

    Args:
      clip_grad: Clips gradients; None does not.
    """

    def __init__(self, clip_grad: ClipGradNorm | None = None) -> None:
        self.config = optim.SGDConfig()
        self.max_norm = 0.0 if clip_grad is None else clip_grad.max_norm

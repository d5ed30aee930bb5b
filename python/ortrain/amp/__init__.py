# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Loss scaling for mixed precision."""

from ortrain.amp.grad_scaler import GradScaler, TorchGradScaler
from ortrain.amp.loss_scaler import DynamicLossScaler, LossScaler

__all__ = ["DynamicLossScaler", "GradScaler", "LossScaler", "TorchGradScaler"]

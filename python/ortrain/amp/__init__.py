# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: what is computed in 16 bits, and loss scaling."""

from ortrain.amp.grad_scaler import GradScaler, TorchGradScaler
from ortrain.amp.loss_scaler import DynamicLossScaler, LossScaler
from ortrain.amp.mixed_precision import MixedPrecision

__all__ = ["DynamicLossScaler", "GradScaler", "LossScaler", "MixedPrecision", "TorchGradScaler"]

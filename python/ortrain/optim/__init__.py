# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Multi-tensor optimizers: drop-in classes of torch.optim for parameters on the CPU."""

from ortrain.optim.adamw import FusedAdamW
from ortrain.optim.lamb import FusedLAMB
from ortrain.optim.sgd import FusedSGD

__all__ = ["FusedAdamW", "FusedLAMB", "FusedSGD"]

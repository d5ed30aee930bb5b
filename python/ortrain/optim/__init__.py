# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Multi-tensor optimizers: drop-in classes of torch.optim for parameters on the CPU.

`GraphOptimizer` is the base of optimizers with an update rule of one's own.
"""

from ortrain.optim.adamw import FusedAdamW
from ortrain.optim.graph_optimizer import Expression, GraphOptimizer, RuleBuilder
from ortrain.optim.lamb import FusedLAMB
from ortrain.optim.sgd import FusedSGD

__all__ = ["Expression", "FusedAdamW", "FusedLAMB", "FusedSGD", "GraphOptimizer", "RuleBuilder"]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers: drop-in classes of torch.optim for parameters on the CPU, and those of ORTTrainer.

`GraphOptimizer` is the base of optimizers with an update rule of one's own.
"""

from ortrain.optim import lr_scheduler
from ortrain.optim.adamw import FusedAdamW
from ortrain.optim.config import (
    AdagradConfig,
    AdamConfig,
    LambConfig,
    SGDConfig,
    _OptimizerConfig,
)
from ortrain.optim.fp16_optimizer import FP16_Optimizer
from ortrain.optim.fused_adam import AdamWMode, FusedAdam
from ortrain.optim.graph_optimizer import Expression, GraphOptimizer, RuleBuilder
from ortrain.optim.lamb import FusedLAMB
from ortrain.optim.lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)
from ortrain.optim.sgd import FusedSGD

__all__ = [
    "AdagradConfig",
    "AdamConfig",
    "AdamWMode",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "Expression",
    "FP16_Optimizer",
    "FusedAdam",
    "FusedAdamW",
    "FusedLAMB",
    "FusedSGD",
    "GraphOptimizer",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "RuleBuilder",
    "SGDConfig",
    "_LRScheduler",
    "_OptimizerConfig",
    "lr_scheduler",
]

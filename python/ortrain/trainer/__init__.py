# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Training with model, loss and optimizer in one graph."""

from ortrain.trainer.model_description import ModelDescription
from ortrain.trainer.options import ORTTrainerOptions
from ortrain.trainer.orttrainer import ORTTrainer
from ortrain.trainer.train_step_info import TrainStepInfo

__all__ = ["ModelDescription", "ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]

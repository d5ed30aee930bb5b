# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer under the name of the module that it had in 2020."""

from ortrain.trainer import ModelDescription, ORTTrainer, ORTTrainerOptions, TrainStepInfo

__all__ = ["ModelDescription", "ORTTrainer", "ORTTrainerOptions", "TrainStepInfo"]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainerOptions under the name of the module that it had in 2020."""

from ortrain.trainer import ORTTrainerOptions

__all__ = ["ORTTrainerOptions"]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch does on some processors alone."""

from __future__ import annotations

import torch
from torch import nn


def runs_lstm_in_16_bits() -> bool:
    """Tell whether PyTorch runs an LSTM on float32 tensors under autocast; without AVX-512 it raises."""
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(3, 4)(torch.zeros(2, 1, 3))
    except RuntimeError as error:
        if "primitive descriptor" not in str(error):
            raise
        return False
    return True

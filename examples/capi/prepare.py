# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Write what the programs train: an untrained model as an ONNX file, and digits as plain numbers.

digits.bin holds, as little-endian int32, the number of images and of pixels, then the images as
float32 and their labels as int64.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from ortrain.onnx_export import export_module

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
with open(folder / "digits.bin", "wb") as file:
    file.write(np.array(images.shape, dtype="<i4").tobytes())
    file.write((images[order] / 16).astype("<f4").tobytes())
    file.write(labels[order].astype("<i8").tobytes())
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
export_module(model, folder / "digits.onnx", (torch.zeros(2, 64),))

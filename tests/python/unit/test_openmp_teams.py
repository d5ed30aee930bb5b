# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Products and convolutions are right whatever number of threads OpenMP grants."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The expected values come from double precision: PyTorch's own convolution crashes at some limits.
PROGRAM = """
import copy, torch
from torch import nn
from torch.nn import functional as F
from ortrain import ORTModule

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(192, 256)
        self.second = nn.Linear(256, 144)
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        image = F.gelu(self.second(F.gelu(self.first(x)))).reshape(-1, 3, 12, 12)
        return self.deep(F.gelu(self.conv(image)))

def gradients(model, x):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]

torch.manual_seed(0)
plain = Net()
model = ORTModule(copy.deepcopy(plain))
x = torch.randn(192, 192)
torch.backends.mkldnn.enabled = False
expected = gradients(plain.double(), x.double())
for threads in THREADS:
    if threads:
        torch.set_num_threads(threads)
    for _ in range(2):
        for e, a in zip(expected, gradients(model, x), strict=True):
            difference = (a - e).abs().max() / e.abs().max()
            assert difference < 1e-4, (threads, tuple(e.shape), difference)
print("right")
"""

ENVIRONMENTS = [
    {"OMP_DYNAMIC": "true", "OMP_NUM_THREADS": "4"},
    {"OMP_THREAD_LIMIT": "1", "OMP_NUM_THREADS": "4"},
    {"OMP_THREAD_LIMIT": "2", "OMP_NUM_THREADS": "4"},
    {"OMP_MAX_ACTIVE_LEVELS": "0", "OMP_NUM_THREADS": "4"},
    {"OMP_THREAD_LIMIT": "3", "OMP_NUM_THREADS": "2", "OMP_DYNAMIC": "true"},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "environment", ENVIRONMENTS, ids=lambda e: ",".join(map("=".join, e.items()))
)
@pytest.mark.parametrize("threads", ["[0]", "[4, 1, 3]"])
def test_results_are_right_by_any_team(environment: dict[str, str], threads: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("THREADS", threads)],
        env={**os.environ, "OMP_WAIT_POLICY": "passive", **environment},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == "right"

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A model that no single graph holds: torch.compile cuts it into pieces, the engine runs them."""

import torch
from sklearn.datasets import load_digits
from torch import nn


class EarlyExit(nn.Module):
    """Leaves out its second half where the first one is sure of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128))
        self.second = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128))
        self.exits = nn.ModuleList(nn.Linear(128, 10) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        early = self.exits[0](hidden)
        if early.softmax(-1).amax(-1).min() > 0.5:
            return early
        return early + self.exits[1](self.second(hidden))


images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]

torch.manual_seed(0)
model = EarlyExit()
compiled = torch.compile(model, backend="ortrain")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(20):
    for batch in train.split(100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
model.eval()
accuracy = (compiled(x[test]).argmax(-1) == y[test]).float().mean()
print(f"loss {loss:.3f}, test accuracy {accuracy:.3f}")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Train two digit classifiers: one wrapped whole, one with only its encoder wrapped."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ortrain import ORTModule

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]


def encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.1))


models = {
    "whole module": ORTModule(nn.Sequential(encoder(), nn.Linear(128, 10))),
    "encoder only": nn.Sequential(ORTModule(encoder()), nn.Linear(128, 10)),
}
for name, model in models.items():
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(20):
        for batch in train.split(100):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step()
    accuracy = (model.eval()(x[test]).argmax(-1) == y[test]).float().mean()
    print(f"{name}: loss {loss:.3f}, test accuracy {accuracy:.3f}")

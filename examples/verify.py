# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Steps held against PyTorch while a model trains: right ones pass, a planted error is named.

The error is a gradient rule that is close: GELU's by way of the logistic function, which is another
function's.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

from ortrain import ORTModule, VerificationError, extension

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:1400], order[1400:]


class Classifier(nn.Module):
    """Two blocks, of which only the second has GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.BatchNorm1d(64))
        self.second = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        self.head = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor, digits: torch.Tensor) -> tuple[torch.Tensor, ...]:
        scores = self.head(self.second(self.first(images)))
        return nn.functional.cross_entropy(scores, digits), scores


def trained(epochs: int) -> ORTModule:
    """Train a model whose calls 1, 2, 4, 8, ... run in PyTorch too."""
    torch.manual_seed(0)
    model = ORTModule(Classifier(), verify="sampled")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for batch in train.split(100):
            optimizer.zero_grad()
            model(x[batch], y[batch])[0].backward()
            optimizer.step()
    return model


model = trained(epochs=10)
with torch.no_grad():
    _, scores = model.eval()(x[test], y[test])
print(f"test accuracy {(scores.argmax(-1) == y[test]).float().mean():.3f}")
print(model.report())


@extension.register_gradient("Gelu", replace=True)
def gradient_of_another_function(g):
    """Differentiate x sigmoid(1.702 x), which looks like GELU."""
    x = g.input(0)
    s = g.op("Sigmoid", 1.702 * x)
    return (s + 1.702 * x * s * (1.0 - s)) * g.output_grad(0)


try:
    trained(epochs=1)
except VerificationError as error:
    print(f"found in step {error.step}, layer {error.layer}: {error.what}")
    print(error)

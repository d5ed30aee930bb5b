# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with ORTTrainer: model, loss and optimizer as one graph.

    python examples/getting_started/train.py

Trains a small network by stochastic gradient descent on the 1797 digits that come with scikit-learn,
and writes it as an ONNX file.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, optim


class NeuralNet(nn.Module):
    """Two layers over the 64 grey values of a digit."""

    def __init__(self, input_size: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(input_size, hidden_size)
        self.relu = nn.ReLU()
        self.fc2 = nn.Linear(hidden_size, num_classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Return scores [batch, classes] of images [batch, pixels]."""
        return self.fc2(self.relu(self.fc1(image)))


def accuracy(trainer: ORTTrainer, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the share of images that are recognized."""
    scores = trainer.eval_step(images, labels, fetches=["scores"])
    return (scores.argmax(1) == labels).float().mean().item()


def main() -> None:
    """Train, evaluate, export."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--output", type=Path, default=Path("digits.onnx"))
    arguments = parser.parse_args()

    torch.manual_seed(1)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images))
    train_images, test_images = images[order[:1500]], images[order[1500:]]
    train_labels, test_labels = labels[order[:1500]], labels[order[1500:]]

    model_desc = {
        "inputs": [("image", ["batch", 64]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("scores", ["batch", 10])],
    }
    trainer = ORTTrainer(
        NeuralNet(64, 100, 10),
        model_desc,
        optim.SGDConfig(lr=arguments.lr),
        loss_fn=nn.CrossEntropyLoss(),
        options=ORTTrainerOptions({"device": {"id": "cpu"}}),
    )
    for epoch in range(1, arguments.epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(train_images)).split(arguments.batch_size):
            loss, _ = trainer.train_step(train_images[rows], train_labels[rows])
            total += loss.item() * len(rows)
        share = accuracy(trainer, test_images, test_labels)
        print(f"epoch {epoch:3}: loss {total / len(train_images):.4f}, test accuracy {share:.4f}")
    trainer.save_as_onnx(arguments.output, include_loss=False)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A loop of Hugging Face's accelerate that trains an ORTModule; nothing in it knows of Ortrain.

python examples/accelerate_digits.py
accelerate launch --cpu --num_processes 2 examples/accelerate_digits.py
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ortrain import ORTModule


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    arguments = parser.parse_args()
    accelerator = Accelerator(cpu=True, mixed_precision=arguments.mixed_precision)
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    train_set = TensorDataset(images[~test], labels[~test])
    loader = DataLoader(train_set, batch_size=32, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[test], labels[test]), batch_size=90)

    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
    model = ORTModule(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader, test_loader = accelerator.prepare(
        model, optimizer, loader, test_loader
    )
    for epoch in range(arguments.epochs):
        model.train()
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        right = count = 0
        with torch.no_grad():
            for x, y in test_loader:
                predicted, expected = accelerator.gather_for_metrics((model(x).argmax(-1), y))
                right += int((predicted == expected).sum())
                count += len(expected)
        accelerator.print(f"epoch {epoch + 1}: test accuracy {right / count:.4f}")
    accelerator.print(accelerator.unwrap_model(model).report())
    accelerator.end_training()


if __name__ == "__main__":
    main()

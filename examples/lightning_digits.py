# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A LightningModule that trains an ORTModule in its training_step."""

import argparse
import logging
import warnings

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ortrain import ORTModule


class Digits(lightning.LightningModule):
    """Tells handwritten digits, [batch, 64] pixels from 0 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.net = ORTModule(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 10))
        )

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(-1) == y).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--precision", choices=["32-true", "bf16-mixed"], default="32-true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    test = torch.arange(len(labels)) % 5 == 0
    model = Digits()
    trainer = lightning.Trainer(
        max_epochs=arguments.epochs,
        accelerator="cpu",
        precision=arguments.precision,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(TensorDataset(images[~test], labels[~test]), batch_size=32, shuffle=True),
        DataLoader(TensorDataset(images[test], labels[test]), batch_size=90),
    )
    print(f"test accuracy {float(trainer.callback_metrics['accuracy']):.4f}")
    print(model.net.report())


if __name__ == "__main__":
    main()

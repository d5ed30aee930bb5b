# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What it is worth to own the step: ORTTrainer against ORTModule and PyTorch with fused optimizers.

    python -m benchmarks.native_step                     # GPT-2 and BERT-base 4x128, small network
    python -m benchmarks.native_step --only mlp --turns 9

The three sides take turns in one process, step by step; ratios are of medians.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from ortrain import ORTModule, ORTTrainer, ORTTrainerOptions, optim

Step = Callable[[], Any]
Sides = dict[str, Step]

LR, DECAY = 1e-4, 0.01
# Steps of the small network that are timed together.
_TOGETHER = 200


class Mlp(nn.Module):
    """Eight layers of 32, as in benchmarks.overhead: all overhead."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(8):
            layers += [nn.Linear(32, 32), nn.ReLU()]
        self.layers = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the mean squared error."""
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


def _mlp() -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, Any]]:
    batch = {"x": torch.randn(8, 32), "labels": torch.randn(8, 32)}
    return Mlp(), batch, {"x": ["b", 32], "labels": ["b", 32]}


def _transformer(name: str, batch: int, length: int) -> Any:
    import transformers

    if name == "gpt2":
        config = transformers.GPT2Config(use_cache=False)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = transformers.BertForMaskedLM(config)
    ids = torch.randint(0, config.vocab_size, (batch, length))
    shape = ["b", "s"]
    return model, {"input_ids": ids, "labels": ids.clone()}, {"input_ids": shape, "labels": shape}


def make_sides(
    model: nn.Module, batch: dict[str, torch.Tensor], shapes: dict[str, Any]
) -> tuple[Sides, ORTTrainer]:
    """Return one step per side, each with a copy of the model of its own."""
    trainer = ORTTrainer(
        copy.deepcopy(model),
        {"inputs": list(shapes.items()), "outputs": [("loss", [], True)]},
        optim.AdamConfig(lr=LR, lambda_coef=DECAY),
        options=ORTTrainerOptions({"utils": {"grad_norm_clip": False}}),
    )
    module = ORTModule(copy.deepcopy(model))
    fused = optim.FusedAdamW(module.parameters(), lr=LR, weight_decay=DECAY)
    eager = copy.deepcopy(model)
    theirs = torch.optim.AdamW(eager.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def around(wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = wrapped(**batch)["loss"]
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def native() -> torch.Tensor:
        loss: torch.Tensor = trainer.train_step(**batch)
        return loss

    sides = {
        "ORTTrainer": native,
        "ORTModule + FusedAdamW": around(module, fused),
        "PyTorch, fused AdamW": around(eager, theirs),
    }
    return sides, trainer


def measure(name: str, turns: int) -> dict[str, Any]:
    """Time the sides in turn; return medians in seconds, losses, and memory of the first two."""
    torch.manual_seed(0)
    together = _TOGETHER if name == "mlp" else 1
    made = _mlp() if name == "mlp" else _transformer(name, 4, 128)
    sides, trainer = make_sides(*made)
    times: dict[str, list[float]] = {side: [] for side in sides}
    losses: dict[str, float] = {}
    names = list(sides)
    for turn in range(turns + 2):
        # Who comes behind whom changes: a side leaves caches and clocks behind.
        for side in (names[turn % 3 :] + names[: turn % 3])[:: 1 if turn % 2 else -1]:
            step = sides[side]
            start = time.perf_counter()
            for _ in range(together):
                loss = step()
            losses[side] = loss.item()
            if turn >= 2:
                times[side].append((time.perf_counter() - start) / together)
    return {
        "seconds": {side: statistics.median(values) for side, values in times.items()},
        "losses": losses,
        "plan": trainer.engine.memory_plan,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.native_step")
    parser.add_argument("--only", default="gpt2,bert,mlp", help="of gpt2, bert, mlp")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    table = Table("model", "side", "step", "of ORTModule's", "loss")
    results = {}
    console = Console()
    for name in arguments.only.split(","):
        with console.status(name):
            results[name] = result = measure(name, arguments.turns)
        base = result["seconds"]["ORTModule + FusedAdamW"]
        for side, seconds in result["seconds"].items():
            unit = f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.0f} ms"
            loss = f"{result['losses'][side]:.5f}"
            table.add_row(name, side, unit, f"{seconds / base:.3f}", loss)
        table.add_section()
    console.print(table)
    for name, result in results.items():
        plan = result["plan"]
        console.print(f"{name}: the step plans {plan['total_bytes'] / 2**20:.0f} MiB")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

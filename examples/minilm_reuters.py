# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a pretrained MiniLM (22.7 M parameters) on Reuters R8: PyTorch and Ortrain side by side.

Both sides start from the same weights and see the same batches, one step of each in turn:
first with dropout off, where the losses must agree, then with dropout on. Run it with 'make demo'.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers
from reuters_r8 import Batch, load_data, load_model, test_batches, training_batches
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ortrain import ORTModule, progress

BATCH_SIZE = 16
LEARNING_RATE = 1e-4
# Largest difference of a loss at dropout 0 that rounding explains over the compared steps.
LOSS_TOLERANCE = 1e-3

console = Console()


@dataclass
class Side:
    """One of the two ways to train, and what was measured of it."""

    name: str
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: float = float("nan")

    def step(self, batch: Batch, seed: int) -> None:
        """Train on one batch."""
        torch.manual_seed(seed)
        started = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def evaluate(self, batches: list[Batch]) -> None:
        """Measure the accuracy on test batches."""
        self.model.eval()
        right = 0
        with torch.no_grad():
            for batch in batches:
                logits = self.model(**batch).logits
                right += int((logits.argmax(-1) == batch["labels"]).sum())
        self.model.train()
        self.accuracy = right / sum(len(batch["labels"]) for batch in batches)

    def step_time(self) -> float:
        """Return the median seconds of a step; the first prepares and is left out."""
        return statistics.median(self.seconds[1:] or self.seconds)


def make_side(name: str, dropout: bool, steps: int) -> Side:
    """Make a model and what trains it; the learning rate falls linearly to zero over the steps."""
    model = load_model(dropout).train()
    wrapped = ORTModule(model) if name == "Ortrain" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    return Side(name, wrapped, optimizer, decay)


def train(title: str, sides: list[Side], batches: list[Batch], seed: int) -> None:
    """Train all sides on the same batches, one step of each in turn, under a progress bar."""
    columns = [
        TextColumn("  {task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=console.is_terminal) as bar:
        task = bar.add_task(title, total=len(batches), note="")
        for number, batch in enumerate(batches):
            # The order alternates, so that neither side always finds the caches warm.
            for side in sides if number % 2 == 0 else reversed(sides):
                side.step(batch, seed=seed + number)
            note = "  ".join(f"{s.name} {s.losses[-1]:.4f}" for s in sides)
            bar.update(task, advance=1, note=f"loss: {note}")
            if not console.is_terminal and (number + 1) % 10 == 0:
                console.print(f"  {title}: step {number + 1} of {len(batches)}, loss: {note}")


class StageLines:
    """Prints a line for each stage of the first step; counts those that come later."""

    def __init__(self) -> None:
        self.first_step = True
        self.later: list[float] = []
        self._depth = 0

    def __call__(self, stage: str, seconds: float, state: progress.State) -> None:
        if state == "begin":
            self._depth += 1
            return
        self._depth -= 1
        if self.first_step:
            mark = "[green]✓[/]" if state == "end" else "[red]✗[/]"
            console.print(f"  {mark} {'  ' * self._depth}{stage:<10} {seconds:7.2f} s")
        elif self._depth == 0:
            self.later.append(seconds)


def compare_losses(batches: list[Batch], lines: StageLines) -> tuple[list[Side], float]:
    """Train with dropout off; return both sides and the largest difference of a loss."""
    console.print("\n[bold]1. The same training, dropout off[/]\n  First step of Ortrain:")
    eager, ours = (make_side(name, False, len(batches)) for name in ("PyTorch", "Ortrain"))
    ours.step(batches[0], seed=0)
    lines.first_step = False
    eager.step(batches[0], seed=0)
    train("dropout off", [eager, ours], batches[1:], seed=1)
    table = Table(title="Loss at the same steps, dropout off", title_justify="left")
    for column in ("step", "PyTorch", "Ortrain", "difference"):
        table.add_column(column, justify="right")
    count = len(batches)
    for step in sorted({1, 2, count // 4, count // 2, count} - {0}):
        a, b = eager.losses[step - 1], ours.losses[step - 1]
        table.add_row(str(step), f"{a:.6f}", f"{b:.6f}", f"{abs(a - b):.1e}")
    console.print(table)
    worst = max(abs(a - b) for a, b in zip(eager.losses, ours.losses, strict=True))
    return [eager, ours], worst


def status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def report_memory(name: str) -> None:
    """Print as JSON by how much a step at full size raises the peak of this process.

    A small step first captures the model and fills the state of the optimizer, so that what comes
    on top is what the activations of a full step need.
    """
    side = make_side(name, dropout=True, steps=100)

    def batch(rows: int, columns: int) -> Batch:
        ids = torch.randint(1000, 20000, (rows, columns))
        labels = torch.arange(rows) % 8
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    for seed in range(2):
        side.step(batch(2, 8), seed)
    before = status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # sets VmHWM to VmRSS
    for seed in range(3):
        side.step(batch(BATCH_SIZE, 128), seed)
    result = {"measured": status_bytes("VmHWM") - before}
    if isinstance(side.model, ORTModule):
        result["planned"] = side.model.memory_plan().arena_bytes
    print(json.dumps(result))


def measure_memory(name: str) -> dict[str, int]:
    """Run report_memory in a process of its own; empty where the system does not allow it."""
    command = [sys.executable, __file__, "--report-memory", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        console.print(f"  [yellow]memory of {name} was not measured:[/] {done.stderr[-400:]}")
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def mebibytes(result: dict[str, int], key: str) -> str:
    return f"{result[key] / 2**20:.0f} MiB" if key in result else "-"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="steps with dropout on, each side")
    parser.add_argument("--epochs", type=int, default=0, help="whole epochs instead of steps")
    parser.add_argument("--seed", type=int, default=0, help="of the order of texts and the dropout")
    parser.add_argument("--report-memory", choices=["PyTorch", "Ortrain"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.steps < 2 or arguments.epochs < 0:
        parser.error("--steps must be at least 2, --epochs at least 0")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if arguments.report_memory:
        report_memory(arguments.report_memory)
        return 0

    console.print("[bold]MiniLM on Reuters R8, PyTorch and Ortrain side by side[/]")
    with console.status("reading the data"):
        training, test, topics = load_data()
    steps = arguments.epochs * -(-len(training) // BATCH_SIZE) or arguments.steps
    compared = min(20, steps)
    sample = len(test) if arguments.epochs else 500
    console.print(
        f"  {len(training)} texts of {len(topics)} topics, {torch.get_num_threads()} threads, "
        f"batches of {BATCH_SIZE}, {compared} steps with dropout off, {steps} with dropout on"
    )

    lines = StageLines()
    stream = training_batches(training, BATCH_SIZE, seed=arguments.seed)
    with progress.listen(lines):
        plain, worst = compare_losses([next(stream) for _ in range(compared)], lines)
        console.print("\n[bold]2. Dropout on[/]")
        sides = [make_side(name, True, steps) for name in ("PyTorch", "Ortrain")]
        stream = training_batches(training, BATCH_SIZE, seed=arguments.seed)
        batches = [next(stream) for _ in range(steps)]
        train("dropout on", sides, batches, seed=1_000_003 * arguments.seed)
        with console.status("scoring the test texts"):
            for side in sides:
                side.evaluate(test_batches(test, 32, sample))
    with console.status("measuring memory, each side in a process of its own"):
        memory = [measure_memory(side.name) for side in sides]

    eager, ours = sides
    report = ours.model.report()
    table = Table(title="Result", title_justify="left")
    for column in ("", "PyTorch", "Ortrain"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("loss, last dropout-off step", *(f"{s.losses[-1]:.6f}" for s in plain))
    tail = [statistics.mean(s.losses[-10:]) for s in sides]
    table.add_row("loss, last 10 steps, dropout on", *(f"{loss:.4f}" for loss in tail))
    table.add_row(f"accuracy on {sample} test texts", *(f"{s.accuracy:.3f}" for s in sides))
    table.add_row("median step", *(f"{s.step_time() * 1e3:.0f} ms" for s in sides))
    table.add_row("memory of a full step, planned", "-", mebibytes(memory[1], "planned"))
    table.add_row("memory of a full step, measured", *(mebibytes(m, "measured") for m in memory))
    share = f"{report.native_share:.1%} ({report.native_nodes} of {report.total_nodes})"
    table.add_row("nodes run natively", "-", share)
    console.print()
    console.print(table)
    console.print(
        f"  Speed: {eager.step_time() / ours.step_time():.2f} x PyTorch "
        f"(medians of {steps - 1} steps, one of each in turn). "
        f"{len(lines.later)} stages ran after the first step, {sum(lines.later):.2f} s in all."
    )
    if not worst <= LOSS_TOLERANCE:
        console.print(f"  [red]With dropout off the losses differ by {worst:.1e}.[/]")
        return 1
    console.print(f"  With dropout off the losses differ by at most {worst:.1e}.")
    return 0


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())

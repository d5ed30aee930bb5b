# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""``ortrain``: what can be done without writing a program.

Examples:
  ortrain artifacts model.onnx --loss cross_entropy --optimizer adamw -o dir/
  ortrain env --json
  ortrain explain train.py --epochs 1
  ortrain report train.py -o report.html --epochs 1
  ortrain bench train.py --timed 20
  ortrain migrate train.py
"""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ortrain.env import main as describe_installation
from ortrain.tools.script_commands import add_script_commands

app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)


class LossName(str, enum.Enum):
    """Losses by name."""

    CROSS_ENTROPY = "cross_entropy"
    MSE = "mse"
    L1 = "l1"
    BCE_WITH_LOGITS = "bce_with_logits"


class OptimizerName(str, enum.Enum):
    """Optimizers by name."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"
    LAMB = "lamb"
    ADAGRAD = "adagrad"


@app.callback()
def _main() -> None:
    """Train PyTorch models faster, and see what happens."""


@app.command("env")
def environment(
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Describe this installation; paste it into a bug report."""
    raise typer.Exit(describe_installation(["--json"] if as_json else []))


add_script_commands(app)


@app.command()
def artifacts(
    model: Annotated[Path, typer.Argument(help="The ONNX model.")],
    loss: Annotated[
        LossName | None, typer.Option(help="Added; without it the first output.")
    ] = None,
    optimizer: Annotated[OptimizerName, typer.Option()] = OptimizerName.ADAMW,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    weight_decay: Annotated[float, typer.Option()] = 0.01,
    momentum: Annotated[float, typer.Option(help="Of sgd.")] = 0.0,
    max_grad_norm: Annotated[float, typer.Option(help="0 does not clip.")] = 1.0,
    train: Annotated[list[str] | None, typer.Option(help="Only these initializers.")] = None,
    freeze: Annotated[list[str] | None, typer.Option(help="Not these.")] = None,
    output_name: Annotated[str | None, typer.Option(help="The output that the loss takes.")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder.")] = Path("artifacts"),
) -> None:
    """Write training, evaluation and optimizer models and a checkpoint."""
    # Here, so that `ortrain env` works where the engine cannot be loaded.
    from ortrain import optim
    from ortrain.artifacts import LossType, generate_artifacts
    from ortrain.errors import OrtrainError

    losses = {
        LossName.CROSS_ENTROPY: LossType.CrossEntropyLoss,
        LossName.MSE: LossType.MSELoss,
        LossName.L1: LossType.L1Loss,
        LossName.BCE_WITH_LOGITS: LossType.BCEWithLogitsLoss,
    }
    if optimizer is OptimizerName.SGD:
        config = optim.SGDConfig(lr=lr, momentum=momentum, weight_decay=weight_decay)
    elif optimizer is OptimizerName.ADAGRAD:
        config = optim.AdagradConfig(lr=lr, weight_decay=weight_decay)
    elif optimizer is OptimizerName.LAMB:
        config = optim.LambConfig(lr=lr, lambda_coef=weight_decay, do_bias_correction=True)
    else:
        mode = optim.AdamConfig.DecayMode
        plain = optimizer is OptimizerName.ADAM
        config = optim.AdamConfig(
            lr=lr,
            lambda_coef=weight_decay,
            weight_decay_mode=mode.L2_PENALTY if plain else mode.BEFORE_WEIGHT_UPDATE,
        )
    console = Console(markup=False)
    try:
        generate_artifacts(
            model,
            requires_grad=train,
            frozen_params=freeze,
            loss=losses[loss] if loss is not None else None,
            optimizer=config,
            artifact_directory=output,
            loss_input_names=[output_name] if output_name else None,
            max_grad_norm=max_grad_norm,
        )
    except (OrtrainError, ValueError) as error:
        console.print(str(error), style="red", highlight=False)
        raise typer.Exit(1) from error
    console.print(f"wrote training, eval and optimizer models and a checkpoint to {output}")


@app.command()
def migrate(
    programs: Annotated[
        list[Path], typer.Argument(exists=True, dir_okay=False, help="Python files.")
    ],
) -> None:
    """Print what a program of onnxruntime.training, or of Optimum's trainer, has to change.

    Nothing is run and nothing written. The status is 1 where something has no counterpart here.
    """
    from ortrain.tools.migrate import changes

    missing = False
    for program in programs:
        try:
            found = changes(program.read_text(encoding="utf-8"), str(program))
        except (SyntaxError, UnicodeDecodeError, ValueError, OSError) as error:
            typer.echo(f"{program}: {error}", err=True)
            raise typer.Exit(2) from error
        except (RecursionError, MemoryError) as error:  # Python's parser has limits
            typer.echo(f"{program}: nested too deeply for Python's parser", err=True)
            raise typer.Exit(2) from error
        for change in found:
            missing |= not change.ours
            typer.echo(f"{program}:{change.line}: {change}")
    raise typer.Exit(int(missing))


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()

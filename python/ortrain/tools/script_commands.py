# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The commands of ``ortrain`` that run a script of the user's: explain, report, bench.

Options that are not the command's go to the script, in their order; all behind a ``--`` do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from ortrain.tools.findings import ModuleFindings

__all__ = ["add_script_commands"]

# The exit status of what SIGINT ended, as shells give it.
_INTERRUPTED = 130
_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True}
_Script = Annotated[
    Path,
    typer.Argument(
        exists=True,
        dir_okay=False,
        metavar="SCRIPT [ARGUMENTS]...",
        help="What `python script.py arguments` would run; options of this command that the "
        "script has as well go behind a --.",
    ),
]


def add_script_commands(app: typer.Typer) -> None:
    """Add the commands to an application."""
    for name, command in (("explain", explain), ("report", report), ("bench", bench)):
        app.command(name, context_settings=_SETTINGS)(command)


def explain(context: typer.Context, script: _Script) -> None:
    """Run a script, then say what every ORTModule in it did, and what it did not.

    Ctrl-C or an error ends the script, and it is told of until then. Of several processes the first
    one tells.
    """
    from ortrain.tools.explain import text

    status, modules = _run(script, context.args, timed=False)
    for module in modules:
        typer.echo("\n" + text(module))
    raise typer.Exit(status)


def report(
    context: typer.Context,
    script: _Script,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.")] = Path(
        "ortrain-report.html"
    ),
) -> None:
    """Run a script, then write one HTML page on every ORTModule in it: graphs, memory, times.

    Ctrl-C or an error ends the script, and the page is written on it until then. Of several processes
    the first one writes.
    """
    from ortrain import logs
    from ortrain.tools.report import page

    if not output.resolve().parent.is_dir():
        raise typer.BadParameter(f"there is no folder {output.resolve().parent}", param_hint="-o")
    status, modules = _run(script, context.args, timed=True)
    if not modules:
        raise typer.Exit(status)
    rank = logs.rank()
    of = script.name if rank is None else f"{script.name}, process {rank}"
    output.write_text(page(modules, f"{of}: what Ortrain did"), encoding="utf-8")
    typer.echo(f"wrote {output} ({output.stat().st_size / 2**20:.1f} MiB)")
    raise typer.Exit(status)


def bench(
    context: typer.Context,
    script: _Script,
    timed: Annotated[int, typer.Option(min=1, help="Steps that are timed, of each side.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Steps before them.")] = 3,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write all times to this file.")
    ] = None,
) -> None:
    """Time the steps of a script on Ortrain and in plain PyTorch, turn by turn."""
    from ortrain.tools.bench import BenchError, compare

    try:
        result = compare(script, context.args, timed=timed, warmup=warmup)
    except BenchError as error:
        typer.echo(f"{script}: {error}", err=True)
        raise typer.Exit(1) from error
    typer.echo(str(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result.as_dict(), indent=2), encoding="utf-8")


def _run(script: Path, arguments: list[str], *, timed: bool) -> tuple[int, list[ModuleFindings]]:
    """Run a script; returns its exit status and what its ORTModules have to say.

    An error that ends it is printed, with status 1. Processes other than the first have nothing to
    say.
    """
    import traceback
    from contextlib import ExitStack

    from ortrain import logs, made_modules
    from ortrain.profile import profile
    from ortrain.tools.findings import findings_of
    from ortrain.tools.script import run_script

    with ExitStack() as stack:
        made: list[Any] = stack.enter_context(made_modules.collect())
        if timed:
            stack.enter_context(profile())
        try:
            status = run_script(script, arguments)
        except KeyboardInterrupt:
            typer.echo("interrupted; this is what there was until then", err=True)
            status = _INTERRUPTED
        except Exception:
            typer.echo(traceback.format_exc(), err=True)
            status = 1
    if not logs.is_main_process():
        return status, []
    if not made:
        typer.echo(
            f"{script} made no ORTModule, which is what is told of here: wrap the model, "
            "model = ortrain.ORTModule(model). Graphs of ORTTrainer are not shown.",
            err=True,
        )
        raise typer.Exit(status or 1)
    return status, [findings_of(module) for module in made]

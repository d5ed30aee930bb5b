# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run everything that is to be run on a GPU: ``make gpu-all``.

Without a GPU, or without a build of ortrain for it, every line is printed as not run, with the
reason, and the exit status is 0. With one, results go to ``benchmarks/results/<gpu>.json``; lines
that were measured before stay there until they are measured again, so that several commands of some
minutes fill one file. The exit status is 1 where a line failed or a check does not hold; a speed
below its aim is a result. ``--rehearse`` runs the code of every line at tiny sizes on the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_all import (
    conformance_suites,
    doors,
    kernels,
    memory,
    op_cases,
    smoke,
    speed,
    training,
)
from benchmarks.gpu_all.line import Line, Run, is_fault, not_run, outcome, result_of
from benchmarks.gpu_all.record import (
    RecordError,
    describe_machine,
    file_name,
    load,
    merge,
    print_list,
    print_results,
    save,
    stamp,
)
from benchmarks.peers import PEERS
from benchmarks.table import make_console

RESULTS = Path(__file__).resolve().parent.parent / "results"
LINES: tuple[Line, ...] = (
    *smoke.LINES,
    *op_cases.LINES,
    *training.LINES,
    *conformance_suites.LINES,
    *doors.LINES,
    *speed.LINES,
    *memory.LINES,
    *kernels.LINES,
)
GROUPS = tuple(dict.fromkeys(line.group for line in LINES))


def reason_not_to_run(device: str) -> str:
    """Return why nothing can be measured on a device; empty where it can."""
    import torch

    from ortrain import devices

    place = torch.device(device)
    if place.type != "cuda":
        return f"'{device}' is no GPU"
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} sees no GPU"
    if (place.index or 0) >= torch.cuda.device_count():
        return f"PyTorch sees {torch.cuda.device_count()} GPUs, '{device}' is none of them"
    if not devices.is_supported(place):
        return "this build of ortrain has no GPU provider; make wheel-gpu builds one"
    return ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_all", description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the lines with their aims")
    parser.add_argument("--only", default="", help="keys of lines, by commas")
    parser.add_argument("--group", default="", help=f"of {', '.join(GROUPS)}, by commas")
    parser.add_argument("--remaining", action="store_true", help="lines without a result so far")
    parser.add_argument("--minutes", type=float, help="begin no line that may take longer")
    parser.add_argument("--seconds", type=float, help="the most that a line may take")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--peers", help="sides, by commas; eager,compile,ortrain")
    parser.add_argument("--rounds", type=int, help="turns of each side; 5")
    parser.add_argument("--profile", action="store_true", help="kernels of a step in speed lines")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--output", type=Path, help="folder for the results")
    return parser


def _chosen(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Line]:
    keys = [key for key in options.only.split(",") if key]
    groups = [group for group in options.group.split(",") if group]
    if unknown := set(keys) - {line.key for line in LINES}:
        parser.error(f"unknown line {', '.join(sorted(unknown))}; --list names them")
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    return [
        line
        for line in LINES
        if (not keys or line.key in keys) and (not groups or line.group in groups)
    ]


def _peers(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, ...]:
    default = "eager,ortrain" if options.rehearse else "eager,compile,ortrain"
    peers = tuple((options.peers or default).split(","))
    if unknown := set(peers) - set(PEERS):
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if speed.OURS not in peers:
        parser.error(f"--peers needs {speed.OURS}")
    return peers


def check_arguments(arguments: list[str]) -> None:
    """End the program, as ``main`` would, where a command line is wrong."""
    _checked(_parser(), arguments)


def _checked(
    parser: argparse.ArgumentParser, arguments: list[str] | None
) -> tuple[argparse.Namespace, list[Line], tuple[str, ...]]:
    """Return the options, the lines that they choose, and the sides."""
    options = parser.parse_args(arguments)
    lines = _chosen(parser, options)
    peers = _peers(parser, options)
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be positive")
    return options, lines, peers


def _run_of(options: argparse.Namespace, peers: tuple[str, ...], deadline: float, say: Any) -> Run:
    from ortrain import _core

    if options.rehearse:
        device, rounds = "cpu", 1
        provider = "simulator" if _core.gpu_platform() == "simulator" else "cpu"
    else:
        device, rounds = options.device, 5
        provider = device if ":" in device else f"{device}:0"
    rounds = options.rounds or rounds
    return Run(device, provider, options.rehearse, peers, rounds, deadline, say, options.profile)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = _parser()
    options, lines, peers = _checked(parser, arguments)
    console = make_console()
    if options.list:
        print_list(lines, console)
        return 0
    why = "" if options.rehearse else reason_not_to_run(options.device)
    machine = describe_machine("cpu" if options.rehearse or why else options.device)
    folder = options.output or (None if options.rehearse or why else RESULTS)
    path = folder / file_name(machine, rehearsal=options.rehearse) if folder else None
    try:
        kept = load(path, rehearsal=options.rehearse) if path else {}
    except RecordError as error:
        parser.error(str(error))
    if options.remaining:
        judged = ("reached", "missed", "rehearsed")
        done = {key for key, result in kept.items() if result["status"] in judged}
        lines = [line for line in lines if line.key not in done]
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "benchmarks.gpu_all", *words])
    end = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    made: dict[str, dict[str, Any]] = {}

    def keep(line: Line, begin: float, figures: dict[str, Any]) -> None:
        """Write what there is of a line that goes on: it may be ended."""
        assert path is not None
        figures = {"unfinished": "the line did not end", **figures}
        so_far = result_of(line, figures, time.monotonic() - begin, rehearsal=options.rehearse)
        lines_so_far = {**made, line.key: stamp(so_far, machine, command)}
        save(path, machine, merge(kept, lines_so_far), rehearsal=options.rehearse)

    for line in lines:
        begin = time.monotonic()
        seconds = min(line.seconds, options.seconds or line.seconds)
        if why:
            result = not_run(line, why)
        elif end is not None and begin + seconds > end:
            result = not_run(
                line, f"it may take {seconds:.0f} s, {max(0.0, end - begin):.0f} s were left"
            )
        else:
            with console.status(line.title) as status:
                run = _run_of(options, peers, begin + seconds, status.update)
                if path:
                    run = dataclasses.replace(run, partial=functools.partial(keep, line, begin))
                result = outcome(line, run)
            taken = result["seconds"]
            console.print(f"{line.key}: {result['status']}, {taken:.0f} s", highlight=False)
        made[line.key] = stamp(result, machine, command)
        if path and not why:
            save(path, machine, merge(kept, made), rehearsal=options.rehearse)
    if path and why:
        save(path, machine, merge(kept, made), rehearsal=options.rehearse)
    print_results(made, console, rehearsal=options.rehearse)
    if path:
        console.print(str(path), highlight=False)
    return int(any(is_fault(result) for result in made.values()))


if __name__ == "__main__":
    sys.exit(main())

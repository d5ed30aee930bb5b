# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Command-line options that several benchmarks share."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.compare import Settings
from benchmarks.peers import PEERS
from benchmarks.workloads import MODELS, Workload


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``settings_of`` reads."""
    parser.add_argument("--peers", default=",".join(PEERS), help="sides, separated by commas")
    parser.add_argument("--threads", type=int, help="threads of each side; PyTorch's choice")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32", help="bf16: autocast")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side")
    parser.add_argument(
        "--cold-compile", action="store_true", help="torch.compile and Ortrain find empty caches"
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the options ask for."""
    return Settings(
        peers=tuple(arguments.peers.split(",")),
        threads=arguments.threads,
        dtype=arguments.dtype,
        rounds=arguments.rounds,
        cold_compile=arguments.cold_compile,
    )


def add_dense_workload(parser: argparse.ArgumentParser, model: str, batch: int, seq: int) -> None:
    """Add the options that ``dense_workload_of`` reads, and ``--threads`` and ``--json``."""
    parser.add_argument("--model", choices=MODELS, default=model)
    parser.add_argument("--batch", type=int, default=batch)
    parser.add_argument("--seq", type=int, default=seq)
    parser.add_argument("--peers", default="eager,ortrain", help="sides, separated by commas")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path)


def dense_workload_of(
    parser: argparse.ArgumentParser, options: argparse.Namespace
) -> tuple[Workload, list[str]]:
    """Return the workload and the names of the sides; ends the program where they are wrong."""
    peers = options.peers.split(",")
    if unknown := set(peers) - set(PEERS):
        parser.error(f"unknown peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    try:
        return Workload(options.model, options.batch, options.seq), peers
    except ValueError as error:
        parser.error(str(error))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The file of results of one GPU, which several commands fill, and the tables of a terminal."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.gpu_all.line import Line
from benchmarks.table import add_columns
from benchmarks.train_step import write_json
from ortrain import env

_COLOURS = {
    "reached": "green",
    "missed": "red",
    "incomplete": "yellow",
    "failed": "red",
    "rehearsed": "yellow",
}


class RecordError(ValueError):
    """A file of results does not fit what is to be added."""


def describe_machine(device: str) -> dict[str, Any]:
    """Return GPU, driver-side versions and the installation, for the head of the file."""
    import torch

    environment = env.collect()
    environment["core"].pop("file", None)  # where this copy lies; results are published
    gpu: dict[str, Any] | None = None
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        gpu = {
            "name": properties.name,
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
    return {"gpu": gpu, "environment": environment}


def file_name(machine: Mapping[str, Any], *, rehearsal: bool) -> str:
    """Return the name of the file: the GPU's; results of rehearsals are told apart by theirs."""
    if rehearsal:
        return "rehearsal.json"
    name = machine["gpu"]["name"] if machine["gpu"] else "no gpu"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json"


def stamp(result: dict[str, Any], machine: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Return a result with when, by what command and with which versions it was made."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return result | {
        "date": now.isoformat(timespec="seconds"),
        "command": command,
        "versions": machine["environment"]["versions"],
    }


def load(path: Path, *, rehearsal: bool) -> dict[str, dict[str, Any]]:
    """Return the results of a file by key; none where there is no file.

    Raises:
      RecordError: It is no such file, or one of rehearsals where measurements are to be added, or
        the other way round.
    """
    if not path.exists():
        return {}
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        lines, kind = document["lines"], document["rehearsal"]
    except (ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} holds no results of this program") from error
    if kind != rehearsal:
        words = ("measurements", "a rehearsal")
        raise RecordError(f"{path} holds {words[kind]}, expected {words[rehearsal]}")
    return lines


def merge(
    kept: Mapping[str, dict[str, Any]], made: Mapping[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return kept results with new ones in their place; a line that was not run replaces none."""
    merged = dict(kept)
    for key, result in made.items():
        if result["status"] != "not run" or key not in merged:
            merged[key] = result
    return merged


def save(
    path: Path,
    machine: Mapping[str, Any],
    lines: Mapping[str, dict[str, Any]],
    *,
    rehearsal: bool,
) -> None:
    """Write the file, replacing what was there at once."""
    write_json(path, {"rehearsal": rehearsal, **machine, "lines": dict(lines)})


def print_list(lines: Sequence[Line], console: Console) -> None:
    """Print what there is to run, and what it should come to."""
    table = Table(title="What is run on a machine with a GPU")
    add_columns(table, "line", "group", "what", "aims", "at most")
    for column in table.columns[1:4]:
        column.justify, column.no_wrap = "left", False
    for line in lines:
        aims = "; ".join(map(str, line.aims))
        table.add_row(line.key, line.group, line.title, aims, f"{line.seconds:.0f} s")
    console.print(table)


def print_results(
    lines: Mapping[str, dict[str, Any]], console: Console, *, rehearsal: bool
) -> None:
    """Print each line with its status, and its figures beside the aims."""
    title = "Rehearsal without a GPU: no figure means anything" if rehearsal else "Results"
    table = Table(title=title)
    add_columns(table, "line", "status", "figures (aims)")
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "left", False
    for key, result in lines.items():
        colour = _COLOURS.get(result["status"], "dim")
        cells = [_aim_cell(aim) for aim in result["aims"]]
        aimed_at = {aim["figure"] for aim in result["aims"]}
        cells += [
            escape(f"{name} {value:.4g}")
            for name, value in result["figures"].items()
            if isinstance(value, (int, float)) and name not in aimed_at
        ]
        if result.get("error"):
            cells.insert(0, escape(result["error"]))
        table.add_row(key, f"[{colour}]{result['status']}[/]", "; ".join(cells))
    console.print(table, highlight=False)


def _aim_cell(aim: Mapping[str, Any]) -> str:
    if aim["value"] is None:
        return escape(f"({aim['aim']})")
    text = escape(f"{aim['value']:.3g} ({aim['aim']})")
    if aim["reached"] is None:
        return text
    return f"[{'green' if aim['reached'] else 'red'}]{text}[/]"

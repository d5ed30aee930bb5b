# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Time the training step of one model: ``python -m benchmarks.train_step --model gpt2``.

A step is forward, loss, backward, clipping of the gradient norm, AdamW and zero_grad. Each side
runs in a process of its own; they take turns.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.compare import compare
from benchmarks.options import add_settings, settings_of
from benchmarks.table import make_console, print_sides
from benchmarks.workloads import MODELS, Workload
from ortrain import env


def write_json(path: Path, document: dict[str, Any]) -> None:
    """Write a document, replacing what was there at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 1 if a side failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.train_step", description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128, help="tokens, or the image size")
    parser.add_argument("--density", type=float, default=1.0, help="share that is not padding")
    parser.add_argument("--label-rate", type=float, default=1.0, help="share of labelled tokens")
    parser.add_argument("--set", default="{}", help="JSON entries of the model's configuration")
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    add_settings(parser)
    options = parser.parse_args(arguments)
    try:
        workload = Workload(
            options.model,
            options.batch,
            options.seq,
            options.density,
            options.label_rate,
            json.loads(options.set),
        )
        settings = settings_of(options)
    except ValueError as error:
        parser.error(str(error))
    console = make_console()
    with console.status("") as status:
        result = compare(workload, settings, status.update)
    print_sides(result, console)
    if options.json:
        write_json(options.json, {"environment": env.collect(), **result})
    return 1 if any("error" in side for side in result["sides"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The process of one way: runs programs one after another and writes down what each has seen.

Its standard output is a line per program, when it begins and when it ends, so that the caller knows
which one a crash or a time limit hit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import nn

from conformance.silent.observed import Run
from conformance.silent.program import MODULES, Wrap, plain, programs, run

# "again" is PyTorch alone once more: what differs there is no program.
WAYS = ("eager", "compile", "ortrain", "again")


def _wrap_of(way: str) -> Wrap:
    if way == "ortrain":
        from ortrain import ORTModule

        return ORTModule
    if way == "compile":
        import torch._inductor.config

        # Draws as PyTorch has them, which torch.compile promises with this option alone.
        torch._inductor.config.fallback_random = True
        return torch.compile  # type: ignore[return-value]
    return plain


def _how(modules: list[nn.Module]) -> tuple[str, str]:
    """Return how ORTModules ran, and why where it is not natively."""
    ways, reasons = set(), []
    for module in modules:
        captures = [record for record in module.report().captures if not record.first_call]
        if not captures:
            ways.add("in PyTorch")
        for record in captures:
            if not record.fallback:
                ways.add("native")
                reasons += [f"nodes in PyTorch: {escape}" for escape in record.escapes]
                continue
            ways.add("in pieces" if record.pieces else "in PyTorch")
            reasons.append(record.fallback)
    order = ("native", "in pieces", "in PyTorch")
    return ", ".join(way for way in order if way in ways), "; ".join(dict.fromkeys(reasons))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.silent.worker", description=__doc__
    )
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--module", action="append", help="with programs; default: all here")
    parser.add_argument("--device", default="cpu", help="where tensors and modules are")
    parser.add_argument("names", nargs="+", help="of programs, whole")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device != "cpu":  # where programs make what names no device
        torch.set_default_device(options.device)
        torch.backends.cudnn.allow_tf32 = False
    wrap = _wrap_of(options.way)
    known = {p.name: p for p in programs(modules=options.module or MODULES)}
    for name in options.names:
        print(f"begin {name}", flush=True)
        if options.way == "compile":
            torch._dynamo.reset()
        session, error = run(known[name], wrap)
        said = "" if error is None else f"{type(error).__name__}: {error}"
        how, why = _how(session.wrapped) if options.way == "ortrain" else ("", "")
        made = Run(session.seen, said, how, why)
        torch.save(made, options.folder / f"{name}.{options.way}")
        print(f"end {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

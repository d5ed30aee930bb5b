# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Export small models to ONNX, check the files, and run them in ONNX Runtime.

``python -m ortrain.tools.export_matrix`` takes every model of ``ortrain.testing.models``; each file
must pass ONNX's full check and give PyTorch's outputs at the sizes it was captured for and at
others. Needs the package onnxruntime.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from rich.console import Console
from rich.table import Table

from ortrain.capture.signature import CallSignature, flatten_outputs
from ortrain.capture.use_cache import without_cache
from ortrain.onnx_export import export_module
from ortrain.testing.models import CASES, ModelCase

TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True, slots=True)
class Exported:
    """What became of one model.

    Attributes:
      name: Of the model.
      differences: Largest difference of an output from PyTorch's, relative where numbers exceed 1,
        at each of two sizes.
      operators: Number of nodes in the file.
      error: Why there is no file, or none that works; empty otherwise.
    """

    name: str
    differences: tuple[float, ...] = ()
    operators: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether the file is right."""
        return not self.error and max(self.differences, default=1.0) <= TOLERANCE


def export(case: ModelCase, folder: Path) -> Exported:
    """Export a model and compare the file with it."""
    import onnxruntime

    module = case.build().eval()
    path = folder / f"{case.name}.onnx"
    try:
        export_module(module, path, (), case.batch(*case.sample, 0))
        model = onnx.load(path)
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:
        return Exported(case.name, error=f"{type(error).__name__}: {error}")
    names = {t.name for t in model.graph.initializer}
    missing = sorted(n for n, _ in module.named_parameters() if n not in names)
    differences = []
    for seed, (batch, length) in enumerate((case.sample, case.other)):
        differences.append(_difference(module, session, case.batch(batch, length, seed)))
    error = f"parameters under other names: {', '.join(missing)}" if missing else ""
    return Exported(case.name, tuple(differences), len(model.graph.node), error)


def _difference(module: torch.nn.Module, session: Any, batch: dict[str, Any]) -> float:
    call = CallSignature(module.forward).flatten((), batch)
    given = dict(zip(call.names, call.tensors, strict=True))
    with torch.no_grad(), without_cache(module):
        expected, _ = flatten_outputs(module(**batch))
    wanted = {i.name for i in session.get_inputs()}
    actual = session.run(None, {n: t.numpy() for n, t in given.items() if n in wanted})
    worst = 0.0
    for ours, theirs in zip(actual, expected, strict=True):
        tensor = torch.from_numpy(ours).double()
        if tensor.shape != theirs.shape:
            return float("inf")
        distance = (tensor - theirs.double()).abs() / theirs.double().abs().clamp(min=1.0)
        worst = max(worst, float(distance.max()) if distance.numel() else 0.0)
    return worst


def main(argv: Sequence[str] | None = None) -> int:
    """Export the models; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m ortrain.tools.export_matrix")
    parser.add_argument("--model", action="append", choices=sorted(CASES), help="only these")
    arguments = parser.parse_args(argv)
    console = Console(markup=False)
    if importlib.util.find_spec("onnxruntime") is None:
        console.print("the package onnxruntime is needed: pip install onnxruntime", style="red")
        return 2
    table = Table("model", "nodes", "difference", "at other sizes", "")
    rows = []
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model in arguments.model or CASES:
            case = CASES[model]
            if case.needs and importlib.util.find_spec(case.needs) is None:
                console.print(f"{model} is left out: it needs {case.needs}")
                continue
            with console.status(model):
                row = export(case, Path(name))
            rows.append(row)
            figures = [f"{d:.1e}" for d in row.differences] or ["", ""]
            verdict = "ok" if row.ok else row.error.splitlines()[0] if row.error else "differs"
            table.add_row(row.name, str(row.operators), *figures, verdict)
    console.print(table)
    right = sum(row.ok for row in rows)
    console.print(f"{right} of {len(rows)} models are right in ONNX Runtime at two sizes.")
    return 0 if right == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())

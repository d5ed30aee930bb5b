# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Capture the small models on fake CUDA tensors: whole, natively, with the casts of CUDA's autocast.

Needs a CUDA build of PyTorch, an ortrain that is installed or built beside it, and no GPU: nothing
is computed. What asks the driver, or reads a value, cannot be tried so and is listed as such.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import sys
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ortrain import _core
from ortrain.capture import signature
from ortrain.capture.convert import convert
from ortrain.capture.export import capture
from ortrain.capture.prepare import _has_place
from ortrain.testing.models import CASES, ModelCase

# What shows that a fake tensor is no match for the real one.
_NEEDS_A_DEVICE = (
    "NVIDIA driver",
    "depends on the values",
    "data-dependent",
    "is not installed",
    "_local_scalar_dense",
)


def _class_of(value: Any, *more: Any) -> Any:
    """Return the type of a value, with fake tensors as what they stand for."""
    return torch.Tensor if builtins.type(value) is FakeTensor else builtins.type(value, *more)


@contextlib.contextmanager
def device_said_to_be_there() -> Iterator[None]:
    """Let autocast believe in a device."""
    with (
        mock.patch.object(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        mock.patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True),
        mock.patch.object(signature, "type", _class_of, create=True),
    ):
        yield


def check(case: ModelCase, dtype: torch.dtype | None) -> str:
    """Capture one model; returns why nodes are not native, "" if all are.

    Raises:
      Exception: Whatever keeps it from being captured whole.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, torch.device("cuda"):
        module = case.build()
    given = case.batch(*case.sample, 0)
    with mode:
        batch = {k: v.to("cuda") if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        captured = capture(module, (), batch, known=_has_place)
    builder = _core.GraphBuilder(case.name)
    converted = convert(captured, builder)
    return ", ".join(sorted({call.key for call in converted.escaped_calls}))


def main() -> int:
    """Run the command line; the status is 1 where a model is not captured whole and natively."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(CASES), help="names, by commas")
    options = parser.parse_args()
    if torch.version.cuda is None:
        parser.error("this PyTorch has no CUDA build")
    warnings.simplefilter("ignore")
    failed = 0
    for name in options.models.split(","):
        for dtype in (None, torch.bfloat16, torch.float16):
            try:
                with device_said_to_be_there():
                    found = check(CASES[name], dtype)
                failed += bool(found)
                result = f"not native: {found}" if found else "whole and native"
            except Exception as error:
                text = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
                untried = any(part in text for part in _NEEDS_A_DEVICE)
                failed += not untried
                result = ("cannot be tried: " if untried else "FAILED: ") + text[:160]
            print(f"{name} {str(dtype or torch.float32)[6:]}: {result}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

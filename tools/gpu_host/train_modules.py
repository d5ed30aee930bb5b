# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Train modules through PyTorch on a device whose kernels do nothing, so that what the host does there is seen.

    python train_modules.py [NAME ...]

Run by tools/check_gpu_host.py with a PyTorch for CUDA above tools/gpu_host: small models in float32 and under both types of
autocast, and the programs of users of benchmarks.gpu_all, their side of the engine alone. Those that need what is not there (a
driver, as PyTorch's own matrix products; values; a package) are named, and judged no further. Prints a line of JSON per
program: {"name", "wrong", "not there", "left"}, the last the bytes of the device that are in use afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_all.programs import PROGRAMS, Wrap, alone
from ortrain import ORTModule
from ortrain.capture.signature import flatten_outputs
from ortrain.optim import FusedAdamW
from ortrain.testing.models import CASES
from tools.check_gpu_host import MODELS

TYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = 8
# Captures that PyTorch's own allocations would disturb where each is one of the runtime's.
NEED_CACHING = ("captured_by_a_graph_of_cuda",)
DRIVER = ("CUBLAS", "cuBLAS", "cudnn", "CUDNN", "libcuda.so", "cusolver", "NCCL", "cufft")


def bytes_in_use() -> int:
    """Return the bytes of blocks alive on the device."""
    gc.collect()
    count = ctypes.CDLL("libcudart.so.13").ortrain_stand_in_bytes_in_use
    count.restype = ctypes.c_size_t
    return int(count())


def train_case(name: str, dtype: torch.dtype | None) -> None:
    """Train a model of ortrain.testing at two sizes by turns, longer than recordings need."""
    case = CASES[name]
    module = case.build().cuda()
    model = ORTModule(module)
    optimizer = FusedAdamW(module.parameters(), lr=1e-3, max_grad_norm=1.0)
    for size, length in (case.sample, case.other) * 2:
        given = {
            key: value.cuda() if isinstance(value, torch.Tensor) else value
            for key, value in case.batch(size, length, 0).items()
        }
        for _ in range(STEPS):
            with torch.autocast("cuda", dtype=dtype) if dtype else contextlib.nullcontext():
                loss = flatten_outputs(model(**given))[0][0]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(**given)
    report = model.report()
    reasons = [each.fallback for each in report.captures if each.fallback]
    assert not reasons, reasons
    assert report.native_share == 1.0, report.native_share


def is_caching() -> bool:
    """Tell whether PyTorch keeps memory that is freed, so that addresses come again and steps are recorded."""
    return "PYTORCH_NO_CUDA_MEMORY_CACHING" not in os.environ


def programs() -> dict[str, Callable[[], Any]]:
    """Return what can be run, by name."""
    made: dict[str, Callable[[], Any]] = {
        f"{model}-{name}": functools.partial(train_case, model, dtype)
        for model in MODELS
        for name, dtype in TYPES.items()
    }
    for name, body in PROGRAMS.items():
        if name not in alone() and (name not in NEED_CACHING or is_caching()):
            made[name] = functools.partial(body, Wrap(ORTModule), "cuda:0")
    return made


def main() -> int:
    """Run those that are named, or all."""
    everything = programs()
    for name in sys.argv[1:] or everything:
        torch.manual_seed(0)
        wrong = missing = ""
        try:
            everything[name]()
        except Exception as error:  # whatever a program raises is a result
            text = "".join(traceback.format_exception(error))
            last = text.strip().splitlines()[-1][:400]
            values_or_package = isinstance(error, (ImportError, ZeroDivisionError))
            if values_or_package or any(word in last for word in DRIVER):
                missing = last
            else:
                wrong = last
                print(text, file=sys.stderr)
        line = {"name": name, "wrong": wrong, "not there": missing, "left": bytes_in_use()}
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

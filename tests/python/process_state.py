# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch and Python keep for the whole process, which no test may leave changed for those after it."""

from __future__ import annotations

import contextvars
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config
import torch._functorch.config
import torch._inductor.config
import torch.fx.experimental._config
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._config_module import _UNSET_SENTINEL

_CONFIGS = (
    torch._dynamo.config,
    torch._functorch.config,
    torch._inductor.config,
    torch.fx.experimental._config,
)


def process_state() -> dict[str, Any]:
    """Return what can be compared afterwards."""
    state: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "mha fast path": torch.backends.mha.get_fastpath_enabled(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "functions' modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "saved tensors": torch._C._autograd._saved_tensors_hooks_is_enabled(),
        "fake tensors": FakeTensor.__new__,
        "frames": torch._C._dynamo.eval_frame.get_eval_frame_callback(),
        "collections of garbage": gc.isenabled(),
        "profile": (sys.getprofile(), sys.gettrace()),
        "subnormals": torch.full((1,), 1e-40).mul(0.5).item(),
    }
    state |= {f"torch.Tensor.{name}": method for name, method in vars(torch.Tensor).items()}
    for config in _CONFIGS:
        state |= dict(_overrides(config))
    return state


def _overrides(config: Any) -> Iterator[tuple[str, Any]]:
    for name, entry in config._config.items():
        override = entry.user_override  # of this thread from 2.12 on
        if isinstance(override, contextvars.ContextVar):
            override = override.get()
        # What is put back may be set to what it was by default, not unset.
        values = (override, entry.env_value_default, entry.default)
        value = next((v for v in values if v is not _UNSET_SENTINEL), None)
        yield f"{config.__name__}.{name}", value


def changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Return what differs."""
    names = [n for n in before if n not in after or after[n] != before[n]]
    return ", ".join(f"{n}: {before[n]} to {after.get(n)}" for n in names)

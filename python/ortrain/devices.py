# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which provider runs a graph, by where its tensors are."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from ortrain import _core

CPU = torch.device("cpu")


def common_device(named: Iterable[tuple[str, torch.Tensor]]) -> torch.device:
    """Return the device of all tensors; single values on the CPU go with any.

    Args:
      named: What to call each tensor in errors, and the tensor.

    Raises:
      DeviceError: They are on different devices, or on one that nothing here runs.
    """
    found, first = CPU, ""
    for name, tensor in named:
        device = tensor.device
        if device.type == "cpu" and (tensor.dim() == 0 or not first):
            if tensor.dim() > 0:
                first = name
            continue
        if device.type != "cpu" and not is_supported(device):
            raise _core.DeviceError(f"{name} is on device '{device}', expected {_expected()}")
        if first and device != found:
            raise _core.DeviceError(
                f"{name} is on device '{device}', {first} on '{found}'; they must be on the same"
            )
        found, first = device, name
    return found


def is_supported(device: torch.device) -> bool:
    """Tell whether this build has a provider for a device."""
    if device.type == "cpu":
        return True
    return device.type == "cuda" and _core.gpu_platform() in ("cuda", "hip")


def provider_of(device: torch.device) -> str:
    """Return what `_core.Session` calls the provider for tensors on a device."""
    if device.type == "cpu":
        return "simulator" if is_simulated() else "cpu"
    return f"cuda:{device.index or 0}"


def rounds_to_tf32() -> bool:
    """Tell whether PyTorch lets products of float32 on GPUs round their factors to TF32."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # PyTorch 2.9 and later
    return precision == "tf32" if precision is not None else matmul.allow_tf32


def convolutions_round_to_tf32() -> bool:
    """Tell the same of convolutions, for which PyTorch has a switch of its own."""
    cudnn = torch.backends.cudnn
    precision = getattr(getattr(cudnn, "conv", None), "fp32_precision", None)
    return precision == "tf32" if precision is not None else cudnn.allow_tf32


def follow_tf32(device: torch.device) -> None:
    """Let plans that are made from now on round as PyTorch's own products do."""
    if device.type == "cuda":
        _core.set_allow_tf32(rounds_to_tf32(), convolutions_round_to_tf32())


def is_simulated() -> bool:
    """Tell whether the GPU provider, simulated, runs what is on the CPU."""
    return (
        os.environ.get("ORTRAIN_GPU_SIMULATOR", "0") == "1" and _core.gpu_platform() == "simulator"
    )


def _expected() -> str:
    if _core.gpu_platform() in ("cuda", "hip"):
        return "'cpu' or 'cuda'"
    return "'cpu'; this build of ortrain has no GPU provider"

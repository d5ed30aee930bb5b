# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a step take, by PyTorch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST = 60


def kernel_times(step: Callable[[], Any], device: str, most: int = MOST) -> dict[str, Any]:
    """Do one step and return its kernels.

    Args:
      step: What is profiled.
      device: PyTorch's name of where it runs. On the CPU, PyTorch's operators are told.
      most: Kernels with less time than so many others are left out.

    Returns:
      "total us", of all; "kernels", longest first, with name, "us" of all launches and their
      "count".
    """
    on_host = torch.device(device).type == "cpu"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not on_host:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step()
        if not on_host:
            torch.cuda.synchronize(device)
    rows = [
        {
            "kernel": event.key[:160],
            "us": event.self_cpu_time_total if on_host else event.self_device_time_total,
            "count": event.count,
        }
        for event in profile.key_averages()
        if (event.device_type == torch.autograd.DeviceType.CPU) == on_host
    ]
    rows.sort(key=lambda row: -row["us"])
    return {"total us": sum(row["us"] for row in rows), "kernels": rows[:most]}

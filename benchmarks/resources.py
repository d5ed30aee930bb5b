# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a process used: CPU time with its children, resident memory, page faults. Linux's /proc."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def cpu_seconds() -> float:
    """Return the CPU time of this process, its children and theirs, the dead ones included.

    Compilers run in child processes, some of which outlive the compilation.
    """
    ticks = 0
    waiting = [os.getpid()]
    while waiting:
        process = Path("/proc") / str(waiting.pop())
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            children = [(task / "children").read_text() for task in (process / "task").iterdir()]
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since; its parent counts it
        ticks += sum(map(int, fields[11:15]))
        waiting += [int(child) for text in children for child in text.split()]
    return ticks / os.sysconf("SC_CLK_TCK")


def page_faults() -> int:
    """Return the page faults of this process that needed no disk."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def resident_bytes() -> int:
    """Return the memory of this process that is in RAM now."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the largest ``resident_bytes`` since the start or ``reset_peak``."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Let ``peak_bytes`` start again from the present."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_of(device: str) -> int:
    """Return the largest memory in use: PyTorch's allocator's on a device, resident on the CPU."""
    if device == "cpu":
        return peak_bytes()
    import torch

    return torch.cuda.max_memory_allocated(device)


def reset_peak_of(device: str) -> None:
    """Let ``peak_of`` start again from the present."""
    if device == "cpu":
        return reset_peak()
    import torch

    return torch.cuda.reset_peak_memory_stats(device)


def memory_of(device: str) -> int:
    """Return the bytes of memory of a device, or of the machine for the CPU."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import torch

    return torch.cuda.mem_get_info(device)[1]


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"/proc/self/status has no {key}")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Describe this installation: ``python -m ortrain.env [--json]``. Paste it into a bug report."""

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

__all__ = ["collect", "main"]

_PACKAGES = ("torch", "onnx", "numpy", "transformers", "accelerate", "deepspeed")
# Not ours, but they change speed, threads or what is loaded.
_FOREIGN_VARIABLES = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "MKL_NUM_THREADS",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "CUDA_VISIBLE_DEVICES",
    "MALLOC_CONF",
)


def collect() -> dict[str, Any]:
    """Return what describes this installation, ready for JSON.

    Returns:
        A dict with "versions", "core", "machine", "torch" and "flags". Where the compiled core
        cannot be loaded, "core" holds "error" alone and "flags" lists environment variables only.
    """
    core, error = _load_core()
    return {
        "versions": _versions(),
        "core": _describe_core(core) if core else {"error": error},
        "machine": _machine(),
        "torch": _torch(),
        "flags": _flags(core),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "ortrain": _version("ortrain") or "source tree, not installed"
    }
    versions |= {package: _version(package) for package in _PACKAGES}
    versions["python"] = platform.python_version()
    return versions


def _load_core() -> tuple[Any, str | None]:
    try:
        return importlib.import_module("ortrain._core"), None
    except ImportError as error:
        return None, f"{error}. Build it with 'make build', or install the wheel."


def _describe_core(core: Any) -> dict[str, Any]:
    described = {"file": getattr(core, "__file__", None)}
    for key in ("build_info", "simd_target", "gemm_backend"):
        function = getattr(core, key, None)
        described[key] = function() if function else None
    return described


def _cpu() -> dict[str, str]:
    """Return name, family and model number; the latter tell processors of one name apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    name = found.get("model name") or platform.processor() or platform.machine() or "unknown"
    numbers = [found[key] for key in ("cpu family", "model") if key in found]
    return {"cpu": name, "cpu_family_model": " ".join(numbers)}


def _memory_bytes() -> dict[str, int | None]:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {"total": None, "available": None}
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if len(line.split()) > 1}
    return {
        "total": kib["MemTotal"] * 1024 if "MemTotal" in kib else None,
        "available": kib["MemAvailable"] * 1024 if "MemAvailable" in kib else None,
    }


def _machine() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.platform(),
        **_cpu(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": _memory_bytes(),
    }


def _torch() -> dict[str, Any]:
    try:
        import torch
    except (ImportError, OSError) as error:
        return {"error": str(error)}
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _flags(core: Any) -> list[dict[str, Any]]:
    """Return every flag the core knows, then other variables that are set."""
    flags = []
    list_flags = getattr(core, "flags", None)
    for name, default, text in list_flags() if list_flags else ():
        value = os.environ.get(name)
        flags.append({"name": name, "value": value, "default": default, "help": text})
    known = {flag["name"] for flag in flags}
    for name in sorted(os.environ):
        if name not in known and (name.startswith("ORTRAIN_") or name in _FOREIGN_VARIABLES):
            flags.append({"name": name, "value": os.environ[name], "default": None, "help": None})
    return flags


def _gib(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"


def _text(info: dict[str, Any]) -> str:
    """Lay the collected facts out in lines of 'name  value'."""
    rows: list[tuple[str, str]] = [
        (name, version or "not installed") for name, version in info["versions"].items()
    ]
    core = info["core"]
    if "error" in core:
        rows.append(("core", f"not available: {core['error']}"))
    else:
        build = core["build_info"]
        if isinstance(build, dict):
            build = ", ".join(f"{key} {value}" for key, value in build.items())
        rows += [
            ("core", str(build or core["file"])),
            ("SIMD target", str(core["simd_target"])),
            ("matrix library", str(core["gemm_backend"])),
        ]
    machine, torch = info["machine"], info["torch"]
    memory = machine["memory_bytes"]
    rows += [
        ("system", machine["system"]),
        ("CPU", machine["cpu"]),
        ("cores", f"{machine['usable_cores']} usable of {machine['cores']}"),
        ("memory", f"{_gib(memory['available'])} available of {_gib(memory['total'])}"),
    ]
    if "error" in torch:
        rows.append(("PyTorch", f"cannot be imported: {torch['error']}"))
    else:
        rows += [
            ("threads", f"{torch['threads']} (PyTorch's, shared)"),
            ("GPU", ", ".join(torch["gpus"]) or "none visible"),
        ]
    for flag in info["flags"]:
        if flag["value"] is not None:
            rows.append((flag["name"], flag["value"]))
        elif flag["help"] is not None:
            rows.append((flag["name"], f"not set (default {flag['default']!r}): {flag['help']}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the description. Returns the exit status, 0."""
    parser = argparse.ArgumentParser(prog="python -m ortrain.env", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    options = parser.parse_args(arguments)
    info = collect()
    print(json.dumps(info, indent=2) if options.json else _text(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())

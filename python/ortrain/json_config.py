# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Options of the former ORTModule from a JSON file, as far as they mean something here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ortrain import logs
from ortrain.debug_options import DebugOptions, LogLevel
from ortrain.errors import FileError
from ortrain.module import ORTModule

_log = logs.get_logger("ortrain")
_PATH = "ORTMODULE_JSON_CONFIG_PATH"
_DEBUG_OPTIONS = "DebugOptions"
_DEBUG_KEYS: dict[str, type] = {
    "LogLevel": str,
    "SaveONNX": bool,
    "ONNXPrefix": str,
    "SaveONNXPath": str,
}
# Of each other key the type of its value, and what is here in its place.
_WITHOUT_EFFECT: dict[str, tuple[type, str]] = {
    "PropagateCastOps": (dict, "casts stand where autocast puts them"),
    "UseExternalGPUAllocator": (bool, "memory on GPUs comes from PyTorch's allocator"),
    "EnableCustomAutogradFunction": (bool, "autograd functions run in any case"),
    "AllowLayerNormModPrecision": (bool, "types are those that PyTorch computes in"),
    "EnableGradAccOptimization": (bool, "gradients are added where they are kept"),
    "RunSymbolicShapeInference": (bool, "shapes are inferred with symbols"),
    "UseStaticShape": (bool, "each shape has a plan of its own"),
    "SkipCheck": (list, "checks are not skipped, and take microseconds"),
    "UseMemoryEfficientGradient": (bool, "gradients are given up as they are used"),
    "FallbackPolicy": (list, "set ORTRAIN_STRICT=1 to have errors in the place of fallbacks"),
}


def load_from_json(ortmodule: ORTModule, path: str | Path | None = None) -> None:
    """Give a module the options of a JSON file.

    ``{"DebugOptions": {"LogLevel": "INFO", "SaveONNX": true, "ONNXPrefix": "net", "SaveONNXPath": "/tmp"}}`` is what
    ``DebugOptions`` takes. Of the other keys of the former ORTModule the log says that they have no effect, and why.
    Nothing is taken of a file with an error in it.

    Args:
      ortmodule: What gets them.
      path: The file; the variable ORTMODULE_JSON_CONFIG_PATH comes before it.

    Raises:
      TypeError: ``ortmodule`` is none.
      ValueError: There is no path, or the file has an unknown key or level, or a value of another type.
      FileError: The file cannot be read, or is no JSON.
    """
    if not isinstance(ortmodule, ORTModule):
        raise TypeError(f"ortmodule is of type {type(ortmodule).__name__}, expected an ORTModule")
    given = os.environ.get(_PATH) or path
    if given is None:
        raise ValueError(f"path is not given, nor is the variable {_PATH} set")
    options = _read(Path(given))
    debug: DebugOptions | None = None
    for key, value in options.items():
        if key == _DEBUG_OPTIONS:
            debug = _debug_options(value)
        elif key not in _WITHOUT_EFFECT:
            known = ", ".join(sorted([_DEBUG_OPTIONS, *_WITHOUT_EFFECT]))
            raise ValueError(f"unknown key '{key}'; there are {known}")
        else:
            _check(key, value, _WITHOUT_EFFECT[key][0])
    for key in options:
        if key != _DEBUG_OPTIONS:
            _log.warning("'%s' in %s has no effect: %s", key, given, _WITHOUT_EFFECT[key][1])
    if debug is not None:
        ortmodule._ortrain_debug(debug)


def _read(path: Path) -> dict[str, Any]:
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: {error}") from error
    if not isinstance(options, dict):
        raise ValueError(f"{path} holds a {type(options).__name__}, expected an object")
    return options


def _debug_options(given: Any) -> DebugOptions:
    _check(_DEBUG_OPTIONS, given, dict)
    for key, value in given.items():
        if key not in _DEBUG_KEYS:
            raise ValueError(
                f"unknown key '{_DEBUG_OPTIONS}.{key}'; there are {', '.join(_DEBUG_KEYS)}"
            )
        _check(f"{_DEBUG_OPTIONS}.{key}", value, _DEBUG_KEYS[key])
    level = given.get("LogLevel", LogLevel.WARNING.name)
    if level not in LogLevel.__members__:
        levels = ", ".join(LogLevel.__members__)
        raise ValueError(f"'{_DEBUG_OPTIONS}.LogLevel' is '{level}'; there are {levels}")
    return DebugOptions(
        LogLevel[level],
        given.get("SaveONNX", False),
        given.get("ONNXPrefix", ""),
        given.get("SaveONNXPath", ""),
    )


def _check(key: str, value: Any, kind: type) -> None:
    if type(value) is not kind:
        raise ValueError(f"'{key}' is {value!r}, expected a {kind.__name__}")

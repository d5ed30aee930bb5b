# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Options and variables that the ORTModule of ``onnxruntime.training`` had, as far as they mean something here."""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path

from ortrain import logs
from ortrain.errors import FileError

_log = logs.get_logger("ortrain")
_PREFIX = "ORTMODULE_"
_LOG_LEVEL = "ORTMODULE_LOG_LEVEL"
_SAVE_PATH = "ORTMODULE_SAVE_ONNX_PATH"
# What is asked for by each of the others here.
_INSTEAD = {
    "ORTMODULE_CACHE_DIR": "set ORTRAIN_CACHE_DIR",
    "ORTMODULE_FALLBACK_POLICY": "set ORTRAIN_STRICT=1 to have errors in the place of fallbacks",
    "ORTMODULE_SKIPCHECK_POLICY": "checks are not skipped, and take microseconds",
    "ORTMODULE_DETERMINISTIC_COMPUTE": "steps are deterministic in any case",
    "ORTMODULE_MEMORY_OPT_CONFIG": "give ORTModule max_memory",
    "ORTMODULE_MEMORY_OPT_LEVEL": "give ORTModule max_memory",
    "ORTMODULE_MEMORY_OPT_PROBE_RECOMPUTE_LEVEL": "give ORTModule max_memory",
    "ORTMODULE_ENABLE_CUSTOM_AUTOGRAD": "autograd functions run in any case",
    "ORTMODULE_PRINT_MEMORY_STATS": "ask ORTModule.memory_plan()",
}
_told: set[str] = set()


class LogLevel(enum.IntEnum):
    """How much is said."""

    VERBOSE = 0
    INFO = 1
    WARNING = 2
    ERROR = 3
    FATAL = 4


@dataclasses.dataclass(frozen=True, slots=True)
class SaveOnnxOptions:
    """Whether graphs are written as they are captured, under which prefix, and where."""

    save: bool
    name_prefix: str
    path: Path


class DebugOptions:
    """What ORTModule says and writes.

    Args:
      log_level: VERBOSE and INFO send the package's lines to stderr (as ORTRAIN_LOG=debug and =info do), ERROR and FATAL
        leave out warnings of its logger. The variable ORTMODULE_LOG_LEVEL comes before it.
      save_onnx: Write each graph when it is captured, as ``ORTModule.save_graphs`` does.
      onnx_prefix: How the names of the files begin.
      save_path: The folder; empty for the present one. The variable ORTMODULE_SAVE_ONNX_PATH comes before it.

    Raises:
      TypeError: An argument has another type.
      ValueError: ``save_onnx`` is set and ``onnx_prefix`` is empty, or the variable names no level.
      FileError: Nothing can be written to the folder.
    """

    def __init__(
        self,
        log_level: LogLevel = LogLevel.WARNING,
        save_onnx: bool = False,
        onnx_prefix: str = "",
        save_path: str | Path = "",
    ) -> None:
        if not isinstance(log_level, LogLevel):
            raise TypeError(f"log_level is {log_level!r}, expected a LogLevel")
        if not isinstance(onnx_prefix, str):
            raise TypeError(f"onnx_prefix is {onnx_prefix!r}, expected a string")
        named = os.environ.get(_LOG_LEVEL)
        if named is not None and named not in LogLevel.__members__:
            raise ValueError(
                f"{_LOG_LEVEL} is '{named}'; there are {', '.join(LogLevel.__members__)}"
            )
        self.log_level = log_level if named is None else LogLevel[named]
        self.save_onnx = save_onnx
        self.onnx_prefix = onnx_prefix
        folder = Path(os.environ.get(_SAVE_PATH) or save_path or Path.cwd())
        if save_onnx:
            if not onnx_prefix:
                raise ValueError("onnx_prefix must be given where save_onnx is set")
            if not os.access(folder, os.W_OK):
                raise FileError(f"save_path: nothing can be written to '{folder}'")
        self.save_onnx_models = SaveOnnxOptions(save_onnx, onnx_prefix, folder)

    def apply(self) -> None:
        """Let the package's loggers say as much."""
        if self.log_level is LogLevel.WARNING:
            return
        if self.log_level <= LogLevel.INFO:
            logs.configure("debug" if self.log_level is LogLevel.VERBOSE else "info")
        else:
            logs.get_logger("ortrain").setLevel(int(self.log_level) * 10 + 10)


def tell_of_variables() -> None:
    """Warn, once for each, of variables for the former ORTModule that mean nothing here."""
    for name in sorted(os.environ):
        if (
            not name.startswith(_PREFIX)
            or name in _told
            or name in (_LOG_LEVEL, _SAVE_PATH, "ORTMODULE_JSON_CONFIG_PATH")
        ):
            continue
        _told.add(name)
        _log.warning("%s has no effect: %s", name, _INSTEAD.get(name, "there is nothing like it"))

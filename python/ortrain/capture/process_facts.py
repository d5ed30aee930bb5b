# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which functions of the standard library and of PyTorch tell something that no guard compares.

A module of the standard library is taken for one that does, unless it is known to compute from its arguments alone.
"""

from __future__ import annotations

import datetime
import pathlib
import re
import sys
import types
from typing import Any

# These compute from their arguments, aside from the names that `_BUT` has.
_PURE = frozenset(
    [
        "__future__",
        "_abc",
        "_ast",
        "_bisect",
        "_collections",
        "_collections_abc",
        "_contextvars",
        "_decimal",
        "_functools",
        "_heapq",
        "_json",
        "_operator",
        "_random",
        "_sre",
        "_statistics",
        "_string",
        "_struct",
        "_weakref",
        "_weakrefset",
        "abc",
        "array",
        "ast",
        "base64",
        "binascii",
        "bisect",
        "builtins",
        "bz2",
        "calendar",
        "cmath",
        "collections",
        "colorsys",
        "contextlib",
        "contextvars",
        "copy",
        "copyreg",
        "dataclasses",
        "datetime",
        "difflib",
        "enum",
        "fnmatch",
        "fractions",
        "functools",
        "gzip",
        "hashlib",
        "heapq",
        "html",
        "itertools",
        "json",
        "keyword",
        "lzma",
        "math",
        "numbers",
        "operator",
        "pickle",
        "platform",
        "pprint",
        "random",
        "re",
        "reprlib",
        "statistics",
        "string",
        "struct",
        "textwrap",
        "token",
        "tokenize",
        "traceback",
        "types",
        "typing",
        "unicodedata",
        "weakref",
        "zlib",
    ]
)
_BUT = {
    "builtins": {"open", "input", "globals", "eval", "exec", "__import__", "compile"},
    "datetime": {"now", "utcnow", "today"},
    "calendar": {"firstweekday", "setfirstweekday"},
    "random": {"getstate", "SystemRandom", "_inst"},
    "traceback": {"extract_stack", "format_stack", "print_stack", "walk_stack", "extract_tb"},
    "weakref": {"getweakrefcount", "getweakrefs", "finalize"},
    "_weakref": {"getweakrefcount", "getweakrefs"},
}
# Of these nothing else does.
_ONLY = {
    "_thread": {"allocate_lock", "RLock", "lock", "_local"},
    "_warnings": {"warn", "warn_explicit"},
    "inspect": {
        *(
            "Parameter",
            "Signature",
            "getfullargspec",
            "isabstract",
            "isbuiltin",
            "isclass",
            "isfunction",
        ),
        *("isgenerator", "ismethod", "ismodule", "isroutine", "signature", "unwrap"),
    },
    "io": {"BytesIO", "StringIO"},
    "_io": {"BytesIO", "StringIO"},
    "logging": {
        *("CRITICAL", "DEBUG", "ERROR", "INFO", "NOTSET", "WARN", "WARNING", "getLogger"),
        *("critical", "debug", "error", "exception", "info", "log", "warn", "warning"),
    },
    "os": {"PathLike", "altsep", "fspath", "linesep", "name", "path", "pathsep", "sep"},
    "posix": {"fspath"},
    "posixpath": {
        *("basename", "commonpath", "commonprefix", "dirname", "isabs", "join", "normpath", "sep"),
        *("split", "splitext", "splitroot"),
    },
    "sys": {
        *(
            "byteorder",
            "float_info",
            "hexversion",
            "implementation",
            "intern",
            "maxsize",
            "maxunicode",
        ),
        *("platform", "version", "version_info"),
    },
    "threading": {"Lock", "RLock", "local"},
    "warnings": {"catch_warnings", "filterwarnings", "simplefilter", "warn", "warn_explicit"},
}
_OF_TORCH = {
    "torch": {"initial_seed", "set_autocast_cache_enabled"},
    "torch.random": {"get_rng_state", "initial_seed"},
    "torch.cuda": {
        *("current_stream", "max_memory_allocated", "max_memory_reserved", "mem_get_info"),
        *("memory_allocated", "memory_reserved", "memory_stats", "utilization"),
    },
    "torch._tensor_str": {"PRINT_OPTS"},
    "torch.utils.checkpoint": {"_enable_checkpoint_early_stop"},
    "torch.utils.deterministic": {"fill_uninitialized_memory"},
}
# In these a name like `get_...` or `..._enabled` asks for a setting,
_SETTINGS = re.compile(
    r"torch(\.(_C(\..*)?|autograd(\..*)?|__future__|_tensor_str|multiprocessing|utils\.checkpoint))?"
)
_ASKING = re.compile(r"_?(get|is|are|has)_.*|.*_(is_)?enabled")
# unless it asks about its argument, or a graph is known by the answer.
_ANSWERED = frozenset(
    [
        *("is_complex", "is_conj", "is_distributed", "is_floating_point", "is_inference"),
        *("is_nonzero", "is_same_size", "is_signed", "is_storage", "is_tensor"),
        *("_get_tracing_state", "is_vulkan_available"),
        *("_has_torch_function", "_has_torch_function_unary", "_has_torch_function_variadic"),
        *("get_device", "get_device_module", "is_grad_enabled", "is_inference_mode_enabled"),
        *("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype"),
        *("get_autocast_cpu_dtype", "get_autocast_gpu_dtype", "get_default_dtype"),
        *("get_float32_matmul_precision", "get_deterministic_debug_mode"),
        *("are_deterministic_algorithms_enabled", "is_deterministic_algorithms_warn_only_enabled"),
    ]
)
_OF_NUMPY = {"geterr", "geterrcall", "get_printoptions", "getbufsize"}
_CONSTANT_OF_BACKENDS = {"is_available", "is_built"}
# Methods of objects that these classes make.
_OF_LOGGERS = {
    *("critical", "debug", "error", "exception", "info", "log", "name", "warn", "warning"),
    *("warning_once", "warning_advice", "info_once", "debug_once"),
}
_FILES = {
    *(
        "absolute",
        "cwd",
        "exists",
        "expanduser",
        "glob",
        "home",
        "is_dir",
        "is_file",
        "is_symlink",
        "iterdir",
    ),
    *("open", "owner", "read_bytes", "read_text", "resolve", "rglob", "samefile", "stat", "walk"),
}
_WORDS = {
    "time": "a clock",
    "datetime": "a clock",
    "os": "files, or facts of the process",
    "posix": "files, or facts of the process",
    "genericpath": "files",
    "posixpath": "files",
    "pathlib": "files",
    "io": "files",
    "_io": "files",
}


def fact_named(owner: Any, name: str) -> str:
    """Return what the attribute of a module, a class or an object may tell; "" for nothing, or for what is compared.

    Args:
      owner: A module, or an object of the standard library.
      name: The attribute.
    """
    if isinstance(owner, types.ModuleType):
        return _of_module(owner.__name__, name)
    if type(owner).__module__.partition(".")[0] == "logging":
        return "" if name in _OF_LOGGERS else "logging"
    if isinstance(owner, pathlib.PurePath) or any(
        owner is cls for cls in (pathlib.Path, pathlib.PosixPath)
    ):
        return "files" if name in _FILES else ""
    if isinstance(owner, type) and issubclass(owner, datetime.date):
        return "a clock" if name in _BUT["datetime"] else ""
    return ""


def fact_of(function: Any) -> str:
    """Return what a function or a class may tell that is called, or a module that is handed on; "" for nothing."""
    if isinstance(function, types.ModuleType):
        name = function.__name__
        root = name.partition(".")[0]
        tells = root in sys.stdlib_module_names and root not in _PURE
        return _WORDS.get(name, f"module {name}") if tells else ""
    if isinstance(function, types.MethodType):
        return fact_of(function.__func__) or fact_named(function.__self__, function.__name__)
    if isinstance(function, types.BuiltinFunctionType) and isinstance(function.__self__, type):
        return fact_named(function.__self__, function.__name__)
    if not isinstance(function, (type, types.FunctionType, types.BuiltinFunctionType)):
        return ""
    if isinstance(function, type) and issubclass(function, (pathlib.PurePath, BaseException)):
        return ""
    return _of_module(function.__module__ or "", function.__name__)


def _of_module(module: str, name: str) -> str:
    if module.startswith("torch"):
        return _of_torch(module, name)
    if module.partition(".")[0] == "numpy":
        return f"numpy.{name}" if name in _OF_NUMPY else ""
    root = module.partition(".")[0]
    if root not in sys.stdlib_module_names or name.startswith("__"):
        return ""
    if module in _BUT or name == "open":
        tells = name == "open" or name in _BUT[module]
    elif module in _ONLY:
        tells = name not in _ONLY[module]
    else:
        tells = root not in _PURE
    return _WORDS.get(module, f"{module}.{name}") if tells else ""


def _of_torch(module: str, name: str) -> str:
    if module.startswith("torch.backends."):
        tells = name not in _CONSTANT_OF_BACKENDS
    else:
        asks = _SETTINGS.fullmatch(module) and _ASKING.fullmatch(name) and name not in _ANSWERED
        tells = bool(asks) or name in _OF_TORCH.get(module, ())
    return f"{module}.{name}" if tells else ""

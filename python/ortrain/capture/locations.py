# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which layer and which line of the user's code a node, or an error, comes from."""

from __future__ import annotations

import linecache
import os
import traceback

import torch

from ortrain.capture.size_internals import DataDependentError

# The module's own name inside of the one that is exported.
PREFIX = "m"
_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_OWN_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep


def module_path(node: torch.fx.Node) -> str:
    """Return the qualified name of the layer whose forward made ``node``; empty for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    if path == PREFIX or not path.startswith(PREFIX + "."):
        return ""
    return path[len(PREFIX) + 1 :]


def node_source(node: torch.fx.Node) -> str:
    """Return ``file:line: code`` of the user's line that made ``node``, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    lines = trace.strip().splitlines()
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i].strip()
        if line.startswith('File "'):
            file, number, _ = ([*line.split(", "), "", ""])[:3]
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            return f"{file[6:-1]}:{number.removeprefix('line ')}: {code}"
    return ""


def own_name(target: str) -> str:
    """Return the name that a tensor has in the module itself."""
    return target.removeprefix(PREFIX + ".")


def error_source(error: BaseException) -> str:
    """Return the deepest line of an exception that is neither PyTorch's nor ours."""
    seen: BaseException | None = error
    while seen is not None:
        for frame, line in reversed(list(traceback.walk_tb(seen.__traceback__))):
            file = frame.f_code.co_filename
            if file.startswith(("<", _TORCH_ROOT, _OWN_ROOT)) or f"{os.sep}contextlib.py" in file:
                continue
            return f"{file}:{line}: {linecache.getline(file, line).strip()}"
        seen = seen.__cause__ or seen.__context__
    return ""


def reason_of(error: BaseException) -> str:
    """Return the kind of an exception and the first paragraph of its text, in one line."""
    if isinstance(error, DataDependentError):
        return "what it does depends on the values of a tensor"
    text = str(error).strip()
    head = text.split("\n\n")[0].replace("\n", " ") if text else ""
    return f"{type(error).__name__}: {head}" if head else type(error).__name__

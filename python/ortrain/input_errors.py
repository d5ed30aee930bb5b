# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Typed errors for arguments that neither a graph nor PyTorch takes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.dtypes import TORCH_DTYPE
from ortrain.capture.error_handlers import origin_of
from ortrain.capture.signature import FlatCall
from ortrain.capture.source_files import TORCH_ROOT, real_path
from ortrain.devices import common_device, is_supported
from ortrain.entry import Entry
from ortrain.fallback import is_strict

_is_on_cpu = operator.attrgetter("is_cpu")


def unsupported_device(call: FlatCall, module: nn.Module) -> str:
    """Say which argument is on a device that nothing here runs; empty for none.

    Raises:
      DeviceError: One is, and parameters of the module are on another, or the user wants no call to run in PyTorch.
    """
    if all(map(_is_on_cpu, call.tensors)):
        return ""
    for name, tensor in zip(call.names, call.tensors, strict=True):
        if not tensor.is_cpu and not is_supported(tensor.device):
            if is_strict() or any(p.device != tensor.device for p in module.parameters()):
                common_device([(f"argument '{name}'", tensor)])
            return (
                f"argument '{name}' is on device '{tensor.device}', which this build does not run"
            )
    return ""


def is_raised_by_code(error: BaseException) -> bool:
    """Tell whether code that is not PyTorch's has raised an error, which says what it has to say.

    By ``raise``, or by what Python itself refuses. The few operators of PyTorch that raise a ValueError pass as that.
    """
    origin = origin_of(error)
    if origin is None:
        return False
    code, is_raise = origin
    is_python = is_raise or type(error) is ValueError
    return is_python and not real_path(code.co_filename).startswith(TORCH_ROOT)


def input_error(
    name: str, refusal: Exception, call: FlatCall, entries: Iterable[Entry]
) -> Exception:
    """Return a typed error for arguments that PyTorch refuses, naming the one at fault.

    Args:
      name: The module's class.
      refusal: What PyTorch raised.
      call: The arguments.
      entries: Graphs of other calls, which tell what the module takes.
    """
    given = ", ".join(
        f"'{name}' {str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        for name, t in zip(call.names, call.tensors, strict=True)
    )
    text = f"{name}.forward cannot take {given}: {refusal}"
    for entry in entries:
        if entry.captured.input_names != call.names:
            continue
        for argument, tensor, described in _user_inputs(entry, call):
            expected = str(TORCH_DTYPE[described["dtype"]]).removeprefix("torch.")
            actual = str(tensor.dtype).removeprefix("torch.")
            if actual != expected:
                return _core.DTypeError(
                    f"argument '{argument}' is {actual}, expected {expected}; {text}"
                )
            if tensor.dim() != len(described["shape"]):
                return _core.ShapeError(
                    f"argument '{argument}' has rank {tensor.dim()} {list(tensor.shape)}, "
                    f"expected rank {len(described['shape'])}; {text}"
                )
    if isinstance(refusal, IndexError):
        return IndexError(text)
    if isinstance(refusal, TypeError):
        return _core.DTypeError(text)
    return _core.ShapeError(text)


def _user_inputs(entry: Entry, call: FlatCall) -> Iterator[tuple[str, torch.Tensor, Any]]:
    described = [i for i in entry.captured.graph.inputs if i["role"] != "gradient"]
    for (kind, where), description in zip(entry.tensors, described, strict=True):
        if kind == "user":
            yield call.names[where], call.tensors[where], description

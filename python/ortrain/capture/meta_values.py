# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Values of a trace with numbers in the place of symbols: those of its sample."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ortrain.capture.errors import CaptureError


def number_of(value: Any) -> Any:
    """Return the number that a symbol stands for in the sample, None where nobody knows; what is no symbol as it is."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    return value


def kind_of(value: Any) -> Any:
    """Return the dtype and the shape of a tensor, the number behind anything else."""
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(map(number_of, value.shape))
    return number_of(value)


def described(value: Any) -> Any:
    """Return what tells an operand from others: of a tensor its dtype, shape and strides."""
    if isinstance(value, torch.Tensor):
        strides = tuple(map(number_of, value.stride())) if value.layout is torch.strided else ()
        return (*kind_of(value), strides)
    return repr(number_of(value))


class Call:
    """One operator of a program with what it is given.

    Attributes:
      operands: Nodes and constants, flat.
      values: The same, with the values of the trace.
      key: Tells it from calls for which the operator may do something else.
    """

    def __init__(self, node: fx.Node) -> None:
        self.operands, self._tree = pytree.tree_flatten((node.args, node.kwargs))
        self.values = [o.meta.get("val") if isinstance(o, fx.Node) else o for o in self.operands]
        self._operator = node.target

    @property
    def key(self) -> tuple[Any, ...]:
        return (self._operator, *map(described, self.values))

    def run(self) -> tuple[list[Any], list[Any]] | None:
        """Run it on tensors without contents, of the sample's sizes; return operands and results, flat.

        Returns:
          None for an operator that has no such kernel, or needs values.

        Raises:
          CaptureError: The sizes of an operand depend on values.
        """
        given = [on_meta(value) for value in self.values]
        args, kwargs = pytree.tree_unflatten(given, self._tree)
        with contextlib.suppress(Exception):
            return given, pytree.tree_leaves(self._operator(*args, **kwargs))
        return None


def on_meta(value: Any) -> Any:
    """Return a tensor without contents like ``value``; devices become that of such tensors."""
    if isinstance(value, torch.Tensor):
        sizes, strides = (list(map(number_of, each)) for each in (value.shape, value.stride()))
        if None in sizes:
            shape = ", ".join(map(str, value.shape))
            raise CaptureError(f"the shape [{shape}] of a tensor depends on values")
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")
    if isinstance(value, torch.device):
        return torch.device("meta")
    return number_of(value)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The part of the graph builder that a conversion uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

Attribute = int | float | str | Sequence[int] | Sequence[float]


class Value(Protocol):
  """Handle of one value of the graph being built.

  ``dtype`` is a code of ONNX's TensorProto; a str in ``shape`` is a symbolic expression.
  """

  @property
  def name(self) -> str: ...
  @property
  def dtype(self) -> int: ...
  @property
  def rank(self) -> int: ...
  @property
  def shape(self) -> Sequence[int | str]: ...


class GraphBuilder(Protocol):
  """Builds a graph node by node; each node's shapes are inferred as it is added."""

  def input(self, name: str, dtype: int, shape: Sequence[int | str], role: str) -> Value:
    """Add an input; role is user, parameter, buffer or seed, a str dim names a symbol."""
    ...

  def constant(self, array: torch.Tensor, name: str = "") -> Value:
    """Add a constant."""
    ...

  def node(
    self,
    op: str,
    inputs: Sequence[Value | None],
    attrs: Mapping[str, Attribute],
    outputs: int = 1,
    name: str = "",
    domain: str = "",
  ) -> Any:
    """Add a node; returns its output, or a tuple of them where ``outputs`` is above 1."""
    ...

  def set_checkpoint(self, number: int) -> None:
    """Put the nodes added from now on into a checkpoint, from 1; 0 for none."""
    ...

  def output(self, value: Value, name: str, role: str, target: str = "") -> None:
    """Add an output; role is user, buffer_update (target: buffer), input_update or token."""
    ...

  def finish(self) -> Any:
    """Verify and return the graph."""
    ...

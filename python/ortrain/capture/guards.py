# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Conditions on input sizes under which a captured graph holds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence

import torch

from ortrain.capture import torch_internals as internals
from ortrain.capture.errors import CaptureError

Sizes = Sequence[Sequence[int]]

_SIZE = re.compile(r"L\['(\w+)'\]\.size\(\)\[(\d+)\]")
_STRIDE = re.compile(r"L\['(\w+)'\]\.stride\(\)\[(\d+)\]")
_OFFSET = re.compile(r"L\['(\w+)'\]\.storage_offset\(\)")


def _dense_stride(sizes: Sequence[int], axis: int) -> int:
  stride = 1
  for size in sizes[axis + 1 :]:
    stride *= size
  return stride


@dataclasses.dataclass(frozen=True, slots=True)
class Guards:
  """A predicate of the sizes of the user inputs.

  Attributes:
    text: The conditions, readable; ``x.size()[0]`` is dimension 0 of input x.
  """

  text: tuple[str, ...]
  _predicate: Callable[[Sizes], bool]

  def holds(self, sizes: Sizes) -> bool:
    """Tell whether the captured graph is right for inputs of these sizes (one list per input)."""
    return bool(self._predicate(sizes))


def compile_guards(
  conditions: Sequence[str], names: Sequence[str], static: Sequence[tuple[int, int, int]]
) -> Guards:
  """Compile the conditions of an export.

  Args:
    conditions: Python expressions over ``L['name'].size()[axis]``.
    names: Names of the user inputs, in the order in which sizes will be given.
    static: (input, axis, size) of each dimension that the graph fixes.

  Raises:
    CaptureError: A condition reads something else than sizes of inputs.
  """
  index = {name: i for i, name in enumerate(names)}
  parts: dict[str, str] = {}
  for i, axis, size in static:
    parts[f"{names[i]}.size()[{axis}] == {size}"] = f"S[{i}][{axis}] == {size}"
  for condition in conditions:
    code = _SIZE.sub(lambda m: f"S[{index[m[1]]}][{m[2]}]", condition)
    # The engine hands dense tensors on, so strides are functions of sizes.
    code = _STRIDE.sub(lambda m: f"dense_stride(S[{index[m[1]]}], {m[2]})", code)
    code = _OFFSET.sub("0", code)
    if "L[" in code:
      raise CaptureError(f"the captured graph depends on the condition {condition}")
    parts[re.sub(r"L\['(\w+)'\]", r"\1", condition)] = code
  body = " and ".join(f"({code})" for code in dict.fromkeys(parts.values())) or "True"
  namespace = {**internals.GUARD_NAMESPACE, "dense_stride": _dense_stride}
  predicate = eval(compile(f"lambda S: {body}", "<ortrain guards>", "eval"), namespace)
  return Guards(tuple(parts), predicate)


def sizes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Size]:
  """Return the sizes that ``Guards.holds`` takes."""
  return [tensor.shape for tensor in tensors]

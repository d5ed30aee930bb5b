# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What conversions use to add nodes: values with PyTorch's dtypes and sizes, and helpers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from ortrain.capture.builder import Attribute, GraphBuilder, Value
from ortrain.capture.convert.sizes import Size, SizeValues, as_size, product, same
from ortrain.capture.dtypes import LOW_PRECISION, TORCH_DTYPE, category, onnx_code, promote
from ortrain.capture.errors import UnsupportedOperatorError
from ortrain.capture.escapes import EscapedCall, Layout
from ortrain.random_numbers import DropoutSource

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of the captured graph: its value here, its dtype and sizes there."""

    value: Value
    dtype: torch.dtype
    shape: tuple[Size, ...]
    layout: Layout | None = None  # in PyTorch's memory, where it is not row by row

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def axis(self, dim: int) -> int:
        """Return ``dim`` as a non-negative axis."""
        return dim + max(self.rank, 1) if dim < 0 else dim

    def axes(self, dims: int | Sequence[int] | None) -> list[int]:
        """Return ``dims`` as sorted non-negative axes; None and the empty list mean all."""
        if isinstance(dims, int):
            dims = [dims]
        if not dims:
            return list(range(self.rank))
        return sorted(self.axis(d) for d in dims) if self.rank else []


# What an operand of an elementwise operator may be.
Operand = Tensor | Value | bool | int | float | sympy.Expr
NUMBERS = (bool, int, float, sympy.Basic)


class Emitter:
    """Adds nodes to a builder on behalf of one node of the captured graph at a time."""

    def __init__(
        self, builder: GraphBuilder, dropout: DropoutSource = DropoutSource.ENGINE
    ) -> None:
        self.builder = builder
        self.dropout = dropout
        # What runs in PyTorch, and the token of the latest of it that may draw random numbers.
        self.escaped_calls: list[EscapedCall] = []
        self.token: Value | None = None
        self.sizes = SizeValues(self)
        self.target = ""
        self.path = ""
        self.source = ""
        self.used_results: frozenset[int] = frozenset()
        # What the current operator gives in PyTorch: a tensor without contents, or several.
        self.traced: Any = None
        self._names: dict[str, int] = {}
        self._streams = 0
        self._seed: Value | None = None
        self._constants: dict[tuple[Any, ...], Value] = {}
        # What was made by repeating, by name: what it was made of, and its sizes in as many axes.
        self._repeated: dict[str, tuple[Value, tuple[Size, ...]]] = {}

    # Nodes

    def node(self, op: str, *inputs: Any, domain: str = "", **attrs: Attribute) -> Value:
        """Add a node with one output; inputs are tensors, values, or None for one left out."""
        return self._add(op, inputs, attrs, 1, domain)

    def nodes(
        self, op: str, outputs: int, *inputs: Any, domain: str = "", **attrs: Attribute
    ) -> tuple[Value, ...]:
        """Add a node with several outputs; a tuple also where ``outputs`` is 1."""
        result = self._add(op, inputs, attrs, outputs, domain)
        return (result,) if outputs == 1 else tuple(result)

    def _add(
        self, op: str, inputs: Sequence[Any], attrs: dict[str, Attribute], outputs: int, domain: str
    ) -> Any:
        values = [v.value if isinstance(v, Tensor) else v for v in inputs]
        while values and values[-1] is None:
            values.pop()
        return self.builder.node(op, values, attrs, outputs, self._name(op), domain)

    def _name(self, op: str) -> str:
        base = f"{self.path}/{op}" if self.path else op
        count = self._names[base] = self._names.get(base, 0) + 1
        return base if count == 1 else f"{base}_{count - 1}"

    def unsupported(self, reason: str) -> UnsupportedOperatorError:
        """Return the error for a form of the current operator that has no conversion."""
        return UnsupportedOperatorError(
            self.target, reason, module=self.path or "forward", source=self.source
        )

    def require_finite(self, *numbers: Any) -> None:
        """Leave parameters that are infinite, NaN, or known at the call alone, to PyTorch's kernel, which checks them."""
        if not all(isinstance(n, (int, float)) and math.isfinite(n) for n in numbers):
            raise self.unsupported(f"parameters {', '.join(map(str, numbers))}")

    def uses_result(self, index: int) -> bool:
        """Tell whether result ``index`` of the current operator is used; others may be None."""
        return index in self.used_results

    # Randomness

    def seed(self) -> Value:
        """Return the graph's seed, an int64 scalar input."""
        if self._seed is None:
            self._seed = self.builder.input("seed", onnx_code(torch.int64), [], "seed")
        return self._seed

    @property
    def has_seed(self) -> bool:
        """Whether a node of the graph draws random numbers of the engine."""
        return self._seed is not None

    def stream(self) -> int:
        """Return a number that no other random node of the graph has."""
        self._streams += 1
        return self._streams - 1

    # Constants and sizes

    def constant(self, tensor: torch.Tensor) -> Value:
        """Add a constant; equal small ones are added once."""
        if tensor.numel() > 64:
            return self.builder.constant(tensor)
        # repr keeps apart nan, -0.0 and 0.0, which compare otherwise.
        key = (tensor.dtype, tuple(tensor.shape), repr(tensor.tolist()))
        held = self._constants.get(key)
        if held is None:
            held = self._constants[key] = self.builder.constant(tensor)
        return held

    def ints(self, *values: int) -> Value:
        """Return a constant int64 vector."""
        return self.constant(torch.tensor(values, dtype=torch.int64))

    def scalar(self, number: Any, dtype: torch.dtype) -> Value:
        """Return a number, or an expression of sizes, as a rank-0 value of ``dtype``."""
        if isinstance(number, sympy.Basic):
            return self.cast(self.sizes.value(number), dtype)
        return self.constant(torch.tensor(number, dtype=dtype))

    def size(self, size: Size) -> Value:
        """Return a size as an int64 scalar."""
        return self.cast(self.sizes.value(size), torch.int64)

    def vector(self, sizes: Sequence[Size]) -> Value:
        """Return sizes as an int64 vector."""
        if all(isinstance(s, int) for s in sizes):
            return self.ints(*sizes)
        parts: list[Value] = []
        run: list[int] = []
        for size in sizes:
            if isinstance(size, int):
                run.append(size)
                continue
            if run:
                parts.append(self.ints(*run))
                run = []
            parts.append(self.node("Unsqueeze", self.size(size), self.ints(0)))
        if run:
            parts.append(self.ints(*run))
        return parts[0] if len(parts) == 1 else self.node("Concat", *parts, axis=0)

    # Dtypes

    def cast(self, x: Tensor | Value, dtype: torch.dtype) -> Value:
        """Return ``x`` in ``dtype``."""
        value = x.value if isinstance(x, Tensor) else x
        code = onnx_code(dtype)
        return value if value.dtype == code else self.node("Cast", value, to=code)

    def dtype_of(self, operand: Operand) -> torch.dtype:
        """Return the dtype of an operand; a Python number has the default dtype of its kind."""
        if isinstance(operand, Tensor):
            return operand.dtype
        if isinstance(operand, bool):
            return torch.bool
        if isinstance(operand, int):
            return torch.int64
        if isinstance(operand, float):
            return torch.get_default_dtype()
        if isinstance(operand, sympy.Basic):
            return torch.int64 if operand.is_integer else torch.get_default_dtype()
        return TORCH_DTYPE[operand.dtype]

    def common_dtype(self, *operands: Operand) -> torch.dtype:
        """Return the dtype that PyTorch promotes the operands to."""
        return promote(
            (self.dtype_of(o), -1 if isinstance(o, NUMBERS) else o.rank) for o in operands
        )

    def operands(self, *operands: Operand, dtype: torch.dtype | None = None) -> list[Value]:
        """Return the operands as values of one dtype, by default the promoted one."""
        dtype = dtype or self.common_dtype(*operands)
        return [
            self.scalar(o, dtype) if isinstance(o, NUMBERS) else self.cast(o, dtype)
            for o in operands
        ]

    def arithmetic(self, op: str, *operands: Operand, dtype: torch.dtype | None = None) -> Value:
        """Add an elementwise node over promoted operands.

        PyTorch multiplies a low precision tensor by a Python number in float32, without rounding
        the number first; where rounding would change it, the node is computed in float32 here too.
        For sums it does round.
        """
        dtype = dtype or self.common_dtype(*operands)
        if (
            dtype in LOW_PRECISION
            and op not in ("Add", "Sub")
            and any(self._rounds(o, dtype) for o in operands)
        ):
            wide = self.operands(*operands, dtype=torch.float32)
            return self.cast(self.node(op, *wide), dtype)
        return self.node(op, *self.operands(*operands, dtype=dtype))

    @staticmethod
    def _rounds(operand: Operand, dtype: torch.dtype) -> bool:
        if isinstance(operand, bool) or not isinstance(operand, (int, float)):
            return isinstance(operand, sympy.Basic)
        rounded = torch.tensor(operand, dtype=dtype).double().item()
        return rounded != operand and operand == operand

    def floating(self, x: Tensor) -> Value:
        """Return ``x``, integers and bools as the default float."""
        return x.value if category(x.dtype) >= 2 else self.cast(x, torch.get_default_dtype())

    # Shapes

    def reshape(
        self, x: Tensor | Value, target: Sequence[Size], source: Sequence[Size] | None = None
    ) -> Value:
        """Reshape to ``target``; ``source`` (the sizes of x) lets symbolic sizes be copied.

        A symbolic size that stands at the same place in both becomes 0, one other becomes -1, so
        that most shapes are constants. Further ones are computed.
        """
        if isinstance(x, Tensor):
            source = x.shape
        if source is not None and len(source) == len(target) and all(map(same, source, target)):
            return x.value if isinstance(x, Tensor) else x
        source = source or ()
        shape: list[int] = []
        unknown = 0
        for i, size in enumerate(target):
            if isinstance(size, int):
                shape.append(size)
            elif i < len(source) and same(source[i], size):
                shape.append(0)
            else:
                shape.append(-1)
                unknown += 1
        # A literal 0 in the shape would mean "copy", and -1 cannot be solved beside a size of 0.
        if unknown <= 1 and not any(isinstance(s, int) and s == 0 for s in target):
            return self.node("Reshape", x, self.ints(*shape))
        return self.node("Reshape", x, self.vector(target), allowzero=1)

    def transpose(self, x: Tensor | Value, order: Sequence[int]) -> Value:
        """Permute the axes."""
        if list(order) == list(range(len(order))):
            return x.value if isinstance(x, Tensor) else x
        return self.node("Transpose", x, perm=list(order))

    def squeeze(self, x: Tensor | Value, axes: Sequence[int]) -> Value:
        """Remove axes of size 1."""
        if not axes:
            return x.value if isinstance(x, Tensor) else x
        return self.node("Squeeze", x, self.ints(*axes))

    def unsqueeze(self, x: Tensor | Value, axes: Sequence[int]) -> Value:
        """Insert axes of size 1, counted in the result."""
        if not axes:
            return x.value if isinstance(x, Tensor) else x
        return self.node("Unsqueeze", x, self.ints(*axes))

    def expand(self, x: Tensor | Value, target: Sequence[Size]) -> Value:
        """Broadcast to ``target``."""
        if isinstance(x, Tensor) and x.rank == len(target) and all(map(same, x.shape, target)):
            return x.value
        value = x.value if isinstance(x, Tensor) else x
        if not target and value.rank == 0:
            return value
        made = self.node("Expand", x, self.vector(target))
        if isinstance(x, Tensor):
            self.note_repeated(made, x, len(target))
        return made

    def note_repeated(self, made: Value, x: Tensor, rank: int) -> None:
        """Remember that a value is ``x`` along every axis of it that is not of size 1 there."""
        self._repeated[made.name] = (x.value, ((1,) * (rank - x.rank) + x.shape))

    def varies_along(self, x: Tensor, axis: int) -> Value | None:
        """Return the vector that a tensor holds along an axis, where it is the same along all others."""
        source, shape = self._repeated.get(x.value.name, (x.value, x.shape))
        if any(not same(size, 1) for k, size in enumerate(shape) if k != axis):
            return None
        if not same(shape[axis], x.shape[axis]):
            return None
        return self.reshape(source, [-1])

    def slice(self, x: Tensor | Value, axis: int, start: Size, end: Size, step: int = 1) -> Value:
        """Take a range of one axis, with the meaning of Python's slices."""
        vectors = [self.vector([v]) for v in (start, end, axis, step)]
        return self.node("Slice", x, *vectors)

    def full(self, shape: Sequence[Size], number: Any, dtype: torch.dtype) -> Value:
        """Return a tensor of one number."""
        return self.expand(self.scalar(number, dtype), shape)

    def reduce(
        self, op: str, x: Tensor | Value, axes: Sequence[int] | None, keepdim: bool = False
    ) -> Value:
        """Reduce over axes; None stands for all of them."""
        value = x.value if isinstance(x, Tensor) else x
        if value.rank == 0 or (axes is not None and not axes):
            return value
        if axes is None or len(axes) == value.rank:
            axes = range(value.rank)
        return self.node(op, value, self.ints(*axes), keepdims=int(keepdim))

    def numel(self, x: Tensor, axes: Sequence[int] | None = None) -> Size:
        """Return the number of elements along axes, by default along all."""
        return product([x.shape[a] for a in (range(x.rank) if axes is None else axes)])

    def where(self, condition: Tensor | Value, x: Value, y: Value) -> Value:
        """Choose between two values of one dtype."""
        return self.node("Where", condition, x, y)


def broadcast_shapes(*shapes: Sequence[Size]) -> tuple[Size, ...]:
    """Return the sizes that shapes broadcast to; a size of 1 gives way to any other."""
    rank = max(map(len, shapes))
    result: list[Size] = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, start=rank - len(shape)):
            if not (isinstance(size, int) and size == 1) and not (
                isinstance(size, sympy.Expr) and isinstance(result[i], int) and result[i] != 1
            ):
                result[i] = as_size(size)
    return tuple(result)

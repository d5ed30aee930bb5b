# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Argument forms of ATen operators, a few per overload, for the tests of the conversions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

inf, nan = float("inf"), float("nan")
f32, f64, i32, i64 = torch.float32, torch.float64, torch.int32, torch.int64
bf16, f16, b8, u8 = torch.bfloat16, torch.float16, torch.bool, torch.uint8

_generator = torch.Generator().manual_seed(7)


@dataclasses.dataclass(frozen=True)
class OperatorCase:
    """One call of an operator; ``results`` picks among several results."""

    target: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[int, ...] | None = None
    gradient: bool = True
    tolerance: float | None = None


CASES: list[OperatorCase] = []

# PyTorch 2.11 has no gradients of some operators.
_SINCE_2_12 = torch.__version__ >= (2, 12)


def case(
    targets: str,
    *args: Any,
    results: tuple[int, ...] | None = None,
    gradient: bool = True,
    tolerance: float | None = None,
    **kwargs: Any,
) -> None:
    """Add a case for each of the targets, separated by spaces, without ``aten.``."""
    for target in targets.split():
        full = target if target.count(".") == 2 else f"aten.{target}"
        CASES.append(OperatorCase(full, args, kwargs, results, gradient, tolerance))


def f(*shape: int, dtype: torch.dtype = f32, grad: bool = True, scale: float = 1.0) -> torch.Tensor:
    """Normal floats."""
    return (torch.randn(shape, generator=_generator) * scale).to(dtype).requires_grad_(grad)


def p(*shape: int, low: float = 0.2, high: float = 0.8, dtype: torch.dtype = f32) -> torch.Tensor:
    """Floats between two bounds."""
    x = torch.rand(shape, generator=_generator) * (high - low) + low
    return x.to(dtype).requires_grad_()


def i(*shape: int, low: int = -5, high: int = 6, dtype: torch.dtype = i64) -> torch.Tensor:
    """Integers."""
    return torch.randint(low, high, shape, generator=_generator).to(dtype)


def b(*shape: int) -> torch.Tensor:
    """Bools."""
    return torch.rand(shape, generator=_generator) < 0.5


def t(*values: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Given values."""
    return torch.tensor(values[0] if len(values) == 1 else list(values), dtype=dtype)


# Sums, products, quotients, with promotion

for _op in ("add", "sub"):
    case(f"{_op}.Tensor", f(2, 3), f(3))
    case(f"{_op}.Tensor", f(2, 1), f(3), alpha=2.5)
    case(f"{_op}.Tensor", i(4), f(4))
    case(f"{_op}.Tensor", i(4), i(4, dtype=i32), alpha=3)
    case(f"{_op}.Tensor", f(4), 2)
    case(f"{_op}.Tensor", i(4), 1.5)
    case(f"{_op}.Tensor", i(4), 2, alpha=3)
    case(f"{_op}.Tensor", f(3, dtype=bf16), 0.1)
    case(f"{_op}.Tensor", f(3, dtype=bf16), f(3, dtype=bf16), alpha=0.3, tolerance=1e-2)
    case(f"{_op}.Tensor", f(3), f(dtype=f64))
    case(f"{_op}.Tensor", f(0, 3), f(3))
    case(f"{_op}.Scalar", f(3), 2.5, 2)
case("add.Tensor", b(4), b(4))
case("add.Tensor", b(4), 1)
case("rsub.Scalar", f(3), 1.0, 2)
case("rsub.Scalar", f(3), 1)
case("rsub.Tensor", f(3), f(3), alpha=2)
case("mul.Tensor multiply.Tensor", f(2, 3), f(3))
case("mul.Tensor", f(2, 3), 0.125)
case("mul.Tensor", f(9, dtype=bf16), 0.1)
case("mul.Tensor", f(9, dtype=f16), 3.3)
case("mul.Tensor", f(9, dtype=bf16), t(0.1))
case("mul.Tensor", b(5), b(5))
case("mul.Tensor", i(5), True)
case("mul.Tensor", i(5, dtype=i32), f(5, dtype=f16))
case("mul.Scalar", f(3), 2)
case("div.Tensor true_divide.Tensor divide.Tensor", f(2, 3), p(3))
case("div.Tensor", i(5), i(5, low=1))
case("div.Tensor", f(5), 3)
case("div.Tensor", f(5, dtype=bf16), 3.3)
case("div.Scalar", i(5), 2)
case("div.Scalar", f(5), 3)
for _mode in (None, "floor", "trunc"):
    case("div.Tensor_mode", f(9), p(9), rounding_mode=_mode)
    case("div.Tensor_mode", i(9), t([-3, -2, -1, 1, 2, 3, 4, -4, 5]), rounding_mode=_mode)
    case("div.Scalar_mode", f(9), -0.7, rounding_mode=_mode)
    case("div.Tensor_mode divide.Tensor_mode", i(9), 2, rounding_mode=_mode)
case("floor_divide.default floor_divide.Scalar", i(9), 2)
case("floor_divide.default", i(9), t([-3, -2, -1, 1, 2, 3, 4, -4, 5]))
case("floor_divide.default", f(9, grad=False), 0.3)
for _op in ("remainder", "fmod"):
    case(f"{_op}.Tensor", i(9), t([-3, -2, -1, 1, 2, 3, 4, -4, 5]))
    case(f"{_op}.Tensor", f(9, scale=3), t([-3.0, -2, -1, 1, 2, 3, 4, -4, 5]))
    case(f"{_op}.Scalar", f(9, scale=3), 1.25)
    case(f"{_op}.Scalar", i(9), -3)
case("remainder.Scalar_Tensor", 7, t([-3, 2, 5]))
for _exponent in (0, 1, 2, 3, -1, 0.5, 2.0, -0.5):
    case("pow.Tensor_Scalar", p(5), _exponent)
case("pow.Tensor_Scalar", i(5), 2)
case("pow.Tensor_Scalar", i(5), 2.0)
case("pow.Tensor_Scalar", i(5), 0)
case("pow.Tensor_Scalar", f(5, dtype=bf16), 2)
case("pow.Scalar", 2, f(5))
case("pow.Scalar", 2.5, i(5))
case("pow.Tensor_Tensor", p(5), f(5))
case("pow.Tensor_Tensor", p(5), i(5))
case("square.default", f(5))
case("addcmul.default", f(2, 3), f(3), f(2, 1), value=0.5)
case("addcmul.default", f(2, 3), f(3), f(2, 1))
case("addcdiv.default", f(2, 3), f(3), p(2, 1), value=2)
case("addcdiv.default", f(2, 3), f(3), p(2, 1))
case("lerp.Scalar", f(3), f(3), 0.3)
case("lerp.Tensor", f(3), f(3), p(3))
case("maximum.default max.other minimum.default min.other", f(2, 3), f(3))
case("maximum.default minimum.default", i(4), f(4))
case("maximum.default minimum.default", b(4), b(4))
case("maximum.default minimum.default", t(1.0, 2.0).requires_grad_(), t(1.0, 3.0).requires_grad_())
case("clamp.default clip.default", f(9), -0.5, 0.5)
case("clamp.default", f(9), None, 0.5)
case("clamp.default", i(9), -2, 3)
case("clamp.default", i(9), -1.5, None)
case("clamp.default", t(-1.0, 0.0, 1.0).requires_grad_(), -1, 1)
case("clamp.Tensor clip.Tensor", f(9), f(1), p(9, low=1, high=2))
case("clamp.Tensor", f(2, 3), None, f(3))
case("clamp_min.default", f(9), 0.1)
case("clamp_max.default", f(9), 0.1)
case("clamp_min.Tensor clamp_max.Tensor", f(9), f(9))
case("__lshift__.Scalar bitwise_left_shift.Tensor_Scalar", i(5, low=0), 3)
case("__rshift__.Scalar bitwise_right_shift.Tensor_Scalar", i(5), 1)
case("exp2.default", f(5))

# Functions of one tensor

for _op in [
    "exp",
    "tanh",
    "sigmoid",
    "erf",
    "sin",
    "cos",
    "atan",
    "sinh",
    "cosh",
    "asinh",
    "expm1",
]:
    case(f"{_op}.default", f(2, 4))
    case(f"{_op}.default", i(4, low=-2, high=3))
for _op in [
    "log",
    "sqrt",
    "rsqrt",
    "reciprocal",
    "tan",
    "asin",
    "acos",
    "atanh",
    "log1p",
    "special_erf",
    "special_expit",
]:
    case(f"{_op}.default", p(7))
    case(f"{_op}.default", p(7, dtype=f64))
case("rsqrt.default", t(1, 4, 9))
case("acosh.default", p(5, low=1.2, high=3))
case("neg.default negative.default abs.default absolute.default sign.default sgn.default", f(5))
case("neg.default abs.default sign.default", i(5))
case("sign.default", b(3))
case(
    "floor.default ceil.default round.default trunc.default fix.default frac.default",
    f(17, scale=4),
)
case("floor.default ceil.default round.default trunc.default", i(3))
case("round.default", t(0.5, 1.5, 2.5, -0.5))
case("round.decimals", f(5, scale=100), decimals=1)
case("round.decimals", f(5, scale=1000), decimals=-2)
case("round.decimals", f(5), decimals=0)
case("isnan.default isinf.default isfinite.default", t(1.0, nan, inf, -inf))
case("isnan.default isinf.default isfinite.default", i(3))
case("nan_to_num.default", t(1.0, nan, inf, -inf))
case("nan_to_num.default", t(1.0, nan, inf, -inf), 2.0, 3.0, -4.0)
case("nan_to_num.default", i(3))
case("logit.default", p(5))
case("logit.default", p(5, low=0, high=1), 0.1)
case("_to_copy.default", f(3), dtype=f64)
case("_to_copy.default", f(5, scale=3), dtype=i64)
case("_to_copy.default", t(0.0, -0.5, nan), dtype=b8)
case("_to_copy.default", i(3), dtype=bf16)
case("_to_copy.default", b(3), dtype=f32)
case("_to_copy.default", f(3))
case("to.dtype", f(3), f64)
case("to.dtype_layout", f(3), dtype=f64)
case("to.device", f(3), torch.device("cpu"), f64)
case("to.prim_dtype", f(3), f64)
case("to.other type_as.default", f(3), f(2, dtype=f64))
case(
    "clone.default contiguous.default alias.default alias_copy.default lift_fresh_copy.default"
    " lift_fresh.default positive.default resolve_conj.default resolve_neg.default",
    f(3),
)
case("detach.default", f(3))
case("detach_copy.default", f(3), gradient=False)
case("detach.default", i(3))

# Logic

for _op in ("eq", "ne", "lt", "le", "gt", "ge"):
    case(f"{_op}.Tensor", i(9, low=0, high=3), i(9, low=0, high=3))
    case(f"{_op}.Tensor", f(9), f(1))
    case(f"{_op}.Tensor", i(9), f(9))
    case(f"{_op}.Tensor", b(9), b(9))
    case(f"{_op}.Scalar", i(9), 1)
    case(f"{_op}.Scalar", i(9), 0.5)
    case(f"{_op}.Scalar", f(9), 0)
    case(f"{_op}.Scalar", b(9), True)
case("not_equal.Tensor", i(4), i(4))
case("not_equal.Scalar", i(4), 1)
case("logical_and.default logical_or.default logical_xor.default", b(5), b(5))
case("logical_and.default logical_or.default logical_xor.default", i(5, low=0, high=2), f(5))
for _op in ("and", "or", "xor"):
    for _name in (f"bitwise_{_op}", f"__{_op}__"):
        case(f"{_name}.Tensor", b(5), b(5, 5))
        case(f"{_name}.Tensor", i(5), i(5))
        case(f"{_name}.Scalar", i(5), 3)
        case(f"{_name}.Scalar", b(5), True)
        case(f"{_name}.Tensor", b(5), i(5))
case("logical_not.default", f(3))
case("logical_not.default bitwise_not.default", b(3))
case("bitwise_not.default", i(3))
case("where.self", b(2, 3), f(3), f(2, 1))
case("where.self", b(3), i(3), f(3))
case("where.ScalarOther", b(3), f(3), -3.4028234663852886e38)
case("where.ScalarSelf", b(3), 2, i(3))
case("where.Scalar", b(3), 1.0, 0.0)
case("masked_fill.Scalar", f(2, 3), b(3), -inf)
case("masked_fill.Scalar", i(2, 3), b(2, 1), 4)
case("masked_fill.Tensor", f(2, 3), b(2, 3), t(1.5))

# Tensors from nothing

case("zeros.default ones.default", [2, 3])
case("zeros.default ones.default", [], dtype=i64)
case("ones.default", [0, 3], dtype=b8)
case("full.default", [2], 1.5)
case("full.default", [2], 7)
case("full.default", [2], True)
case("full.default", [2], 7, dtype=f64)
case("scalar_tensor.default", 3)
case("scalar_tensor.default", 3, dtype=i64)
case("new_zeros.default new_ones.default", f(2), [3, 1])
case("new_zeros.default new_ones.default", f(2), [], dtype=b8)
case("new_full.default", i(2), [2, 2], 3)
case("zeros_like.default ones_like.default zero.default", f(2, 3), gradient=False)
case("zeros_like.default ones_like.default", i(2), dtype=f64)
case("full_like.default", i(2, 3), 3)
case("full_like.default", f(2, 3), 3, dtype=i64)
case("fill.Scalar", f(2, 3), 4)
case("fill.Tensor", f(2, 3), f())
case("copy.default", f(2, 3), f(3), gradient=False)
case("copy.default", i(2, 3), f(2, 3, scale=4))
case("arange.default", 5)
case("arange.default", 5, dtype=f32)
case("arange.default", 2.5)
case("arange.start", 2, 7)
case("arange.start", 0.5, 3)
case("arange.start_step", 0, 10, 3)
case("arange.start_step", 5, 0, -2, dtype=f32)
case("arange.start_step", 0, 1, 0.1)
case("arange.start_step", 0, 1, 0.1, dtype=f64)
case("linspace.default", 0, 1, 7)
case("linspace.default", -1, 2, 1, dtype=f64)
case("eye.default", 3)
case("eye.m", 2, 4, dtype=i64)
case("tril.default triu.default", f(3, 4))
case("tril.default triu.default", f(2, 3, 3), 1)
case("tril.default triu.default", b(3, 3), -1)
case("tril_indices.default triu_indices.default", 3, 4, 1)
case("one_hot.default", i(2, 3, low=0, high=4), 5)
case("histc.default", p(20, low=-0.5, high=4), 4, 0, 3, gradient=False)
case("empty_like.default zeros_like.default", i(0, 3))

# Shapes

for _op in ("view", "reshape", "_unsafe_view", "view_copy"):
    case(f"{_op}.default", f(2, 3, 4), [6, 4])
    case(f"{_op}.default", f(2, 3, 4), [2, -1])
case("reshape.default", f(), [1, 1])
case("reshape.default", f(0, 3), [3, 0])
case("reshape.default", f(2, 3), [-1])
case("_reshape_copy.default", f(4), [2, 2])
case("view_as.default reshape_as.default", f(4), f(2, 2, grad=False))
case("flatten.using_ints", f(2, 3, 4), 1)
case("flatten.using_ints", f(2, 3, 4), 0, -2)
case("flatten.using_ints", f())
case("unflatten.int", f(2, 6), 1, [2, -1])
case("unsqueeze.default unsqueeze_copy.default", f(2, 3), 1)
case("unsqueeze.default", f(2, 3), -1)
case("squeeze.default squeeze_copy.default", f(1, 2, 1))
case("squeeze.dim squeeze_copy.dim", f(1, 2, 1), -1)
case("squeeze.dim", f(2, 3), 1)
case("squeeze.dim", f(), 0)
case("squeeze.dims", f(1, 2, 1), [0, -1])
case("transpose.int swapaxes.default transpose_copy.int", f(2, 3, 4), 0, -1)
case("transpose.int", f(), 0, -1)
case("t.default t_copy.default numpy_T.default", f(2, 3))
case("t.default", f(3))
case("mT.default mH.default adjoint.default", f(2, 3, 4))
case("permute.default permute_copy.default", f(2, 3, 4), [2, 0, -2])
case("movedim.intlist moveaxis.intlist", f(2, 3, 4), [0, 1], [-1, 0])
case("movedim.int moveaxis.int", f(2, 3, 4), 0, 2)
case("expand.default expand_copy.default", f(1, 3), [2, 4, -1])
case("expand.default", f(), [2, 2])
case("expand_as.default", f(3), f(2, 3, grad=False))
case("broadcast_to.default", f(3), [2, 3])
case("cat.default concat.default", [f(2, 3), f(1, 3)])
case("cat.default", [f(2, 3), i(2, 1)], -1)
case("cat.default", [f(2, 3), f(0)], 0)
case("cat.default", [f(2, 3)], 1)
case("stack.default", [f(2, 3), f(2, 3)], 1)
case("stack.default", [f(2), f(2)], -1)
case("stack.default", [f(2)])
case("split.Tensor split_copy.Tensor", f(5, 3), 2)
case("split.Tensor", f(3, 5), 3, -1)
case("split.Tensor", f(3), 5)
case("split_with_sizes.default split.sizes split_with_sizes_copy.default", f(5, 3), [1, 4])
case("split_with_sizes.default", f(5, 3), [3], 1)
case("chunk.default", f(7), 3)
case("chunk.default", f(2, 4), 2, -1)
case("unbind.int unbind_copy.int", f(3, 2))
case("unbind.int", f(2, 1), 1)
case("repeat.default", f(2, 3), [2, 1, 3])
case("tile.default", f(2, 3), [2])
case("repeat_interleave.self_int", f(2, 3), 2)
case("repeat_interleave.self_int", f(2, 3), 2, 1)
case("flip.default", f(2, 3, 4), [0, -1])
case("flip.default", f(3), [])
case("roll.default", f(3, 5), [2], [1])
case("roll.default", f(3, 5), [-1, 7], [0, 1])
case("roll.default", f(3, 5), [4])
case("pad.default constant_pad_nd.default", f(2, 3), [1, 2])
case("pad.default", f(2, 3), [1, 0, -1, 2], "constant", 0.5)
case("constant_pad_nd.default", i(2, 3), [0, 1], -100)
case("pad.default", f(1, 2, 5), [2, 1], "reflect")
case("pad.default", f(1, 2, 5), [2, 1], "replicate")
case("pad.default", f(1, 2, 5), [2, 1], "circular")
case("reflection_pad1d.default replication_pad1d.default", f(1, 2, 5), [2, 1])
case("reflection_pad2d.default replication_pad2d.default", f(1, 2, 5, 4), [2, 1, 1, 3])
case("reflection_pad3d.default replication_pad3d.default", f(1, 2, 3, 5, 4), [2, 1, 1, 3, 1, 1])
case("diff.default", f(2, 5))
case("diff.default", i(5), 2)
case("diff.default", f(3, 4), 1, 0, f(1, 4), f(2, 4))
case("diff.default", b(5))
case("pixel_shuffle.default", f(2, 8, 3, 2), 2)

# Indexing

case("slice.Tensor slice_copy.Tensor", f(5, 3), 0, 1, 4)
case("slice.Tensor", f(5, 3), 1, -2)
case("slice.Tensor", f(5, 3), 0, 0, 2**63 - 1)
case("slice.Tensor", f(5, 3), 0, 1, 100, 2)
case("slice.Tensor", f(5, 3), 0, 4, 2)
case("narrow.default", f(5, 3), 0, 1, 3)
case("narrow_copy.default", f(5, 3), 0, 1, 3, gradient=_SINCE_2_12)
case("narrow.default", f(5, 3), 0, -2, 2)
case("select.int select_copy.int", f(5, 3), 1, -1)
case("select.int", f(3), 0, 1)
case("index_select.default", f(5, 3), 1, t(2, 0, 2))
case("index_select.default", f(5, 3), 0, t(2))
case("gather.default", f(3, 4), 1, i(3, 2, low=0, high=4))
case("gather.default", f(3, 4), 0, i(2, 4, low=0, high=3))
case("gather.default", f(), 0, t(0, 0))
case("take.default", f(3, 4), t([0, 11, 5]))
for _op in ("index.Tensor", "_unsafe_index.Tensor"):
    case(_op, f(4, 5, 6), [t([[0, 1], [2, -1]])])
    case(_op, f(4, 5, 6), [None, t(0, 3)])
    case(_op, f(4, 5, 6), [t([[0], [1]]), t(0, 3, 2)])
    case(_op, f(4, 5, 6), [None, t(0, 3), t(1, 2)])
    case(_op, f(4, 5, 6), [t(0, 3), None, t(1, 2)])
    case(_op, f(4, 5, 6), [t([[1, 2]]), t(0), t([[0], [3]])])
case("index.Tensor", f(4, 5), [t([1, 2], dtype=i32)])
for _accumulate in (False, True):
    case("index_put.default", f(4, 5), [t(0, 2)], f(2, 5), _accumulate)
    case("index_put.default", f(4, 5), [t(0, 2), t(1, 1)], f(2), _accumulate)
    case("index_put.default", f(4, 5, 6), [None, t(0, 2), t(1, -1)], f(2), _accumulate)
    case("index_put.default", f(4, 5, 6), [t(0, 2), None, t(1, 1)], f(2, 5), _accumulate)
    case("index_put.default", f(4, 5), [b(4, 5)], f(), _accumulate)
    case(
        "index_put.default _unsafe_index_put.default",
        f(4, 5),
        [None, t(3, 0)],
        f(4, 1),
        _accumulate,
    )
case("index_put.default", f(4, 5), [b(4)], f(1, 5))
case("index_put.default", f(5), [t(1, 1, 3)], f(3), True)
case("slice_scatter.default", f(5, 3), f(2, 3), 0, 1, 3)
case("slice_scatter.default", f(5, 3), f(5, 1), 1, -1)
case("slice_scatter.default", f(5, 3), f(2, 3), 0, 1, 5, 2)
case("slice_scatter.default", f(3, 5), f(3, 3), 1, 0, 5, 2)
case("slice_scatter.default", f(5), f(5))
case("select_scatter.default", f(5, 3), f(5), 1, 2)
case("select_scatter.default", f(5, 3), f(3), 0, -1)
_rows = t([[0, 1, 2], [2, 0, 1]])
case("scatter.src", f(4, 5), 0, _rows, f(2, 3))
case("scatter.src", f(4, 5), 0, _rows, f(3, 4), gradient=False)
case("scatter.src", f(), 0, t(0), f())
case("scatter.value", f(4, 5), 1, _rows, 2.5)
case("scatter_add.default", f(4, 5), 0, _rows, f(2, 3))
case("scatter_add.default", f(4, 5), 1, t([[0, 0], [1, 1]]), f(2, 2))
case("scatter.reduce", f(4, 5), 0, _rows, f(2, 3), reduce="add", gradient=False)
case("scatter.value_reduce", f(4, 5), 0, _rows, 2.0, reduce="multiply", gradient=False)
for _reduce in ("sum", "prod", "amax", "amin"):
    case("scatter_reduce.two", f(4, 5), 0, _rows, f(2, 3), _reduce)
case("index_add.default", f(4, 5), 0, t(1, 1, 3), f(3, 5))
case("index_add.default", f(4, 5), -1, t(1, 4), f(4, 2), alpha=0.5)
case("index_copy.default", f(4, 5), 1, t(1, 4), f(4, 2))
case("index_fill.int_Scalar", f(4, 5), 1, t(1, 4), 2)
case("index_fill.int_Tensor", f(4, 5), 0, t(2), f())
case("diagonal.default diagonal_copy.default", f(3, 4))
case("diagonal.default", f(2, 3, 4), 1, -1, 0)
case("diagonal.default", f(4, 3), -2)
case("unfold.default unfold_copy.default", f(2, 7, 3), 1, 3, 2)
case("topk.default", f(3, 7), 2)
case("topk.default", f(3, 7), 3, 0, False)
case("sort.default", f(3, 7), 0)
case("sort.default", f(7), -1, True)
case("sort.default", b(3), results=(0,))
case("sort.stable", i(9, low=0, high=3), stable=True)
case("argsort.default", f(3, 7), 1, True)
case("argsort.stable", i(9, low=0, high=3), stable=True)
case("embedding.default", f(7, 4), i(2, 3, low=0, high=7))
case("embedding.default", f(7, 4), i(2, 3, low=0, high=7, dtype=i32), 2)
case("bucketize.Tensor", f(5, 2, grad=False), t(-1.0, 0.0, 1.0))
case("bucketize.Tensor", t(0, 1, 2), t(0, 1), right=True, out_int32=True)
case("searchsorted.Tensor", t(-1.0, 0.0, 1.0), f(5, 2, grad=False))

# Reductions

case("sum.default", f(2, 3))
case("sum.default", b(2, 3))
case("sum.default", i(4, dtype=i32))
case("sum.default", f(2, 3), dtype=f64)
case("sum.dim_IntList", f(2, 3, 4), [0, -1])
case("sum.dim_IntList", f(2, 3, 4), [1], True)
case("sum.dim_IntList", f(2, 3), [])
case("sum.dim_IntList", f(2, 3), None, True)
case("sum.dim_IntList", f(0, 3), [0])
case("sum.dim_IntList", f(), [-1])
case("sum.dim_IntList", b(2, 3), [1], dtype=f32)
case("mean.default", f(2, 3))
case("mean.default", i(4), dtype=f32)
case("mean.dim", f(2, 3, 4), [-1], True)
case("mean.dim", f(2, 3, 4), [0, 1])
case("prod.default", f(2, 3))
case("prod.default", i(4))
case("prod.dim_int", f(2, 3), 1, True)
case("amax.default amin.default", f(2, 3))
case("amax.default amin.default", f(2, 3), [1], True)
case("amax.default", t([[1.0, 1.0], [0.0, 2.0]]).requires_grad_(), [1])
case("amax.default amin.default", b(2, 3), [0])
case("max.default min.default", f(2, 3))
case("max.default min.default", t(2.0, 2.0, 1.0).requires_grad_())
case("max.dim min.dim", f(2, 3), 1)
case("max.dim min.dim", f(2, 3), 0, True)
case("max.dim", t([[2.0, 2.0, 1.0]]).requires_grad_(), 1, results=(0,))
case("max.dim min.dim", b(2, 3), 1, results=(0,))
case("aminmax.default", f(2, 3), dim=1, gradient=_SINCE_2_12)
case("aminmax.default", f(2, 3), gradient=_SINCE_2_12)
case("argmax.default argmin.default", f(2, 3))
case("argmax.default argmin.default", f(2, 3), 1, True)
case("argmax.default", f(2, 3), None, True)
case("any.default all.default", b(2, 3))
case("_is_any_true.default _is_all_true.default", b(2, 3))
case("any.dim all.dim", i(2, 3, low=0, high=2), 1)
case("any.dim all.dim", b(2, 3), -1, True)
case("any.dims all.dims", b(2, 3, 4), [0, 2])
case("any.default all.default", i(4, dtype=u8, low=0, high=2))
case("count_nonzero.default", i(5, low=0, high=2))
case("count_nonzero.dim_IntList", f(2, 3), [1])
case("cumsum.default", f(2, 3), 1)
case("cumsum.default", b(2, 3), -1)
case("cumsum.default", f(4, grad=False), 0, dtype=i32)
case("cumsum.default", f(), 0)
case("logsumexp.default", f(2, 3), [1])
case("logsumexp.default", f(2, 3), [0, 1], True)
case("logsumexp.default", t([[-inf, -inf], [0.0, 1.0]]), [1])
for _op in ("var", "std"):
    case(f"{_op}.correction", f(2, 5), [1], correction=0, keepdim=True)
    case(f"{_op}.correction", f(2, 5))
    case(f"{_op}.correction", f(2, 5), [0, 1], correction=2)
    case(f"{_op}.default", f(2, 5))
    case(f"{_op}.default", f(2, 5), False)
    case(f"{_op}.dim", f(2, 5), [1], False, True)
    case(f"{_op}_mean.correction", f(2, 5), [1], correction=1)
    case(f"{_op}_mean.default", f(2, 5), False)
    case(f"{_op}_mean.dim", f(2, 5), [0])
case("std.correction", torch.ones(3, 4).requires_grad_(), [1])
for _p in (2, 1, 0, 3, inf, -inf, 0.5):
    case("linalg_vector_norm.default", f(2, 3), _p, [1])
case("linalg_vector_norm.default", torch.zeros(3).requires_grad_())
case("linalg_vector_norm.default", f(2, 3), 2, None, True, dtype=f64)
case("norm.ScalarOpt_dim", f(2, 3), None, [1], True)
case("norm.ScalarOpt_dim_dtype", f(2, 3), 2, [1], False, dtype=f64)
case("norm.Scalar", f(2, 3))

# Activations

_ACTIVATIONS = (
    "relu relu6 sinc hardtanh leaky_relu gelu silu mish hardswish hardsigmoid elu selu celu softplus"
    " log_sigmoid hardshrink softshrink"
)
for _op in _ACTIVATIONS.split():
    case(f"{_op}.default", f(2, 17, scale=3))
    case(f"{_op}.default", f(9, scale=3, dtype=f64))
case("hardtanh.default", f(9), -0.3, 0.4)
case("leaky_relu.default", f(9), 0.2)
case("gelu.default", f(9), approximate="tanh")
case("elu.default", f(9), 0.7)
case("elu.default", f(9), 0.7, 2.0, 1.5)
case("celu.default", f(9), 0.7)
case("celu.default", f(9), -1.5)
case("cosine_similarity.default", f(3, 4), f(3, 4))
case("cosine_similarity.default", f(3, 4), f(3, 4), 0, 10.0)
case("softplus.default", f(9, scale=20))
case("softplus.default", f(9, scale=20, dtype=f64))
case("softplus.default", f(9), 2.0, 1.0)
case("threshold.default", f(9), 0.1, -2)
case("hardshrink.default softshrink.default", f(9), 0.3)
case("prelu.default", f(2, 3, 4), f(3))
case("prelu.default _prelu_kernel.default", f(2, 3), f(1))
case("glu.default", f(3, 4))
case("glu.default", f(4, 3), 0)
case("softmax.int log_softmax.int", f(2, 3), -1)
case("softmax.int log_softmax.int", f(2, 3), 0, f64)
case("softmax.int log_softmax.int", f(), 0)
case("_softmax.default _log_softmax.default", f(2, 3), 1, False)
case("_safe_softmax.default", t([[-inf, -inf], [0.0, -inf]]), -1)
case("native_dropout.default", f(3), 0.0, True)
case("native_dropout.default", f(3), 0.3, False, results=(0,))
case("native_dropout.default", f(3), 1.0, True)
case("dropout.default", f(3), 0.3, False)
case("dropout.default", f(3), 0.0, True)
case("dropout.default", f(3), 1.0, True)

# Products

case("linear.default", f(2, 5, 3), f(4, 3), f(4))
case("linear.default", f(2, 5, 3), f(4, 3), f(1))
case("linear.default", f(2, 5, 3), f(4, 3), f())
case("linear.default", f(3), f(4, 3))
case("linear.default", f(2, 3), f(3))
case("linear.default", f(0, 3), f(4, 3), f(4))
case("matmul.default mm.default", f(2, 3), f(3, 4))
case("matmul.default", f(2, 1, 2, 3), f(5, 3, 4))
case("matmul.default mv.default", f(2, 3), f(3))
case("matmul.default dot.default vdot.default inner.default", f(3), f(3))
case("bmm.default", f(2, 3, 4), f(2, 4, 5))
case("outer.default ger.default", f(2), f(3))
case("addmm.default", f(4), f(2, 3), f(3, 4))
case("addmm.default", f(2, 4), f(2, 3), f(3, 4), beta=0.5, alpha=2)
case("addmm.default", t([nan]), f(2, 3), f(3, 4), beta=0)
case("addmm.default", i(4), i(2, 3), i(3, 4), beta=2)
case("baddbmm.default", f(2, 1, 5), f(2, 3, 4), f(2, 4, 5), beta=0.5, alpha=2)
case("addmv.default", f(2), f(2, 3), f(3))
case("addbmm.default", f(3, 5), f(2, 3, 4), f(2, 4, 5), beta=2)

# Convolution, pooling

case("conv1d.default", f(2, 4, 9), f(6, 2, 3), f(6), [2], [1], [2], 2)
case("conv1d.default", f(4, 9), f(6, 4, 3))
case("conv2d.default", f(2, 4, 9, 8), f(6, 4, 3, 2), None, [2, 1], [1, 0])
case("conv2d.default", f(4, 9, 8), f(6, 4, 3, 2), f(6))
case("conv3d.default", f(1, 2, 4, 5, 4), f(3, 2, 2, 3, 2), f(3))
case("conv1d.padding", f(2, 4, 9), f(6, 4, 4), f(6), [1], "same", [1])
case("conv2d.padding", f(2, 4, 9, 8), f(6, 4, 3, 2), None, [1], "same", [2])
case("conv2d.padding", f(2, 4, 9, 8), f(6, 4, 3, 2), None, [2], "valid")
case("conv3d.padding", f(1, 2, 4, 5, 4), f(3, 2, 2, 3, 2), f(3), [1], "same")
case("convolution.default", f(2, 4, 9), f(6, 4, 3), f(6), [1], [1], [1], False, [0], 1)
case("convolution.default", f(2, 4, 9), f(4, 3, 3), f(6), [2], [1], [1], True, [1], 2)
case("conv_transpose1d.default", f(2, 4, 9), f(4, 3, 3), f(3), [2], [1], [1])
case("conv_transpose2d.input", f(2, 4, 5, 4), f(4, 3, 3, 2), None, [2])
case("conv_transpose2d.input", f(4, 5, 4), f(4, 3, 3, 2), None, [2])
case("conv_transpose3d.input", f(1, 2, 3, 3, 3), f(2, 2, 2, 2, 2))
case("max_pool1d.default avg_pool1d.default", f(2, 3, 9), [3], [2], [1])
case("max_pool2d.default avg_pool2d.default", f(2, 3, 9, 8), [3, 2], [2, 1], [1, 0])
case("max_pool2d.default avg_pool2d.default", f(3, 9, 8), [3])
case("max_pool3d.default avg_pool3d.default", f(1, 2, 4, 4, 5), [2])
case("max_pool2d.default", f(2, 3, 9, 8), [3], [2], [1], [2], True)
case("max_pool2d_with_indices.default", f(2, 3, 9, 8), [3], [2], [1])
case("max_pool2d_with_indices.default", f(3, 9, 8), [2])
case("max_pool3d_with_indices.default", f(1, 2, 4, 4, 5), [2])
case("max_pool1d_with_indices.default", f(2, 3, 9), [3])
case("avg_pool2d.default", f(2, 3, 9, 8), [3], [2], [1], False, False)
case("avg_pool2d.default", f(2, 3, 9, 8), [3], [2], [1], True)
case("avg_pool2d.default", f(2, 3, 9, 8), [3], [2], [1], False, True, 5)
case("adaptive_avg_pool1d.default", f(2, 3, 7), [1])
case("adaptive_avg_pool1d.default", f(2, 3, 7), [3])
case("adaptive_avg_pool2d.default _adaptive_avg_pool2d.default", f(2, 3, 8, 6), [1, 1])
case("adaptive_avg_pool2d.default", f(2, 3, 8, 6), [4, 2])
case("adaptive_avg_pool2d.default", f(3, 7, 5), [3, 5])
case("adaptive_avg_pool2d.default", f(3, 7, 5), [1, 1])
case("adaptive_avg_pool3d.default _adaptive_avg_pool3d.default", f(1, 2, 4, 4, 5), [2, 2, 1])
case("adaptive_max_pool1d.default", f(2, 3, 6), [3])
case("adaptive_max_pool2d.default", f(2, 3, 8, 6), [4, 2])
case("adaptive_max_pool3d.default", f(1, 2, 4, 4, 6), [2, 2, 1])
case("upsample_nearest1d.vec", f(2, 3, 5), [8], None)
case("upsample_nearest2d.vec", f(2, 3, 5, 4), None, [2.0, 2.0])
case("upsample_nearest2d.vec", f(2, 3, 5, 4), None, [1.5, 2.3])
case("upsample_nearest2d.vec", f(2, 3, 5, 4), None, [1.1, 2.1])
case("upsample_nearest3d.vec", f(1, 2, 3, 2, 2), [4, 4, 4], None)
case("upsample_nearest1d.default", f(2, 3, 5), [8])
case("upsample_nearest2d.default", f(2, 3, 5, 4), [10, 7])
case("upsample_nearest3d.default", f(1, 2, 3, 2, 2), [4, 4, 4])

# Normalization

case("layer_norm.default", f(2, 5), [5], f(5), f(5))
case("layer_norm.default", f(2, 3, 4), [3, 4], f(3, 4), None, 1e-3)
case("layer_norm.default", f(2, 5), [5])
case("layer_norm.default", f(2, 5, dtype=f64), [5], f(5, dtype=f64), f(5, dtype=f64))
case("native_layer_norm.default", f(2, 5), [5], f(5), f(5), 1e-5, results=(0, 1, 2))
case("native_layer_norm.default", f(2, 5, dtype=f64), [5], None, None, 1e-5)
case("rms_norm.default", f(2, 5), [5], f(5))
case("rms_norm.default", f(2, 5), [5], None, 1e-2)
case("rms_norm.default", f(2, 3, 4), [3, 4], f(3, 4), 1e-6)
case("group_norm.default", f(2, 6, 4), 3, f(6), f(6))
case("group_norm.default", f(2, 6), 2)
case("native_group_norm.default", f(2, 6, 4), f(6), f(6), 2, 6, 4, 3, 1e-5, results=(0,))
_stats = (f(3, grad=False), p(3).detach())
case(
    "_native_batch_norm_legit_functional.default", f(4, 3, 5), f(3), f(3), *_stats, True, 0.1, 1e-5
)
case("_native_batch_norm_legit_functional.default", f(4, 3), None, None, *_stats, True, 0.3, 1e-5)
case(
    "_native_batch_norm_legit_functional.default",
    *(f(4, 3, 5), f(3), f(3), *_stats, False, 0.1, 1e-5),
    results=(0, 3, 4),
)
case("_native_batch_norm_legit.no_stats", f(4, 3, 5), f(3), f(3), True, 0.1, 1e-5)
case(
    "_native_batch_norm_legit_no_training.default",
    *(f(4, 3, 5), f(3), f(3), *_stats, 0.1, 1e-5),
    results=(0,),
)
case("batch_norm.default", f(4, 3, 5, 2), f(3), f(3), *_stats, False, 0.1, 1e-5, False)
case("batch_norm.default", f(4, 3), None, None, *_stats, False, 0.1, 1e-5, False)
case("batch_norm.default", f(4, 3, 5), f(3), f(3), None, None, True, 0.1, 1e-5, False)

# Attention

_sdpa = "scaled_dot_product_attention.default"
case(_sdpa, f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8))
case(_sdpa, f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 6), scale=0.3)
case(_sdpa, f(2, 4, 5, 8), f(2, 4, 5, 8), f(2, 4, 5, 8), is_causal=True)
case(_sdpa, f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8), b(2, 1, 5, 7))
case(_sdpa, f(2, 4, 5, 8), f(2, 4, 7, 8), f(2, 4, 7, 8), f(5, 7))
case(_sdpa, f(2, 4, 5, 8), f(2, 2, 7, 8), f(2, 2, 7, 8), enable_gqa=True)
case(_sdpa, f(2, 4, 5, 8), f(1, 4, 7, 8), f(1, 1, 7, 8))
case(_sdpa, f(3, 5, 8), f(3, 7, 8), f(3, 7, 8), b(3, 5, 7))
case(_sdpa, f(5, 8), f(7, 8), f(7, 8), f(5, 7))
case(_sdpa, f(2, 3, 4, 5, 8), f(2, 3, 4, 7, 8), f(2, 3, 4, 7, 8), b(2, 1, 1, 5, 7))

# Losses

_labels = t(1, 0, -100, 3, 2)
_weight = p(4).detach()
for _reduction in (0, 1, 2):
    case("cross_entropy_loss.default", f(5, 4), _labels, None, _reduction)
    case("cross_entropy_loss.default", f(5, 4), _labels, _weight, _reduction, -100, 0.1)
    case("cross_entropy_loss.default", f(5, 4), p(5, 4), _weight, _reduction, -100, 0.1)
    case("nll_loss_nd.default nll_loss.default", f(5, 4), _labels, _weight, _reduction)
    case(
        "nll_loss_nd.default nll_loss2d.default",
        f(2, 4, 3, 1),
        i(2, 3, 1, low=0, high=4),
        None,
        _reduction,
    )
    for _op in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
        case(f"{_op}.default", f(2, 3), f(2, 3), _reduction)
    case("binary_cross_entropy_with_logits.default", f(2, 3), p(2, 3), None, None, _reduction)
    case(
        "binary_cross_entropy_with_logits.default",
        f(2, 3),
        p(2, 3),
        p(3).detach(),
        p(3).detach(),
        _reduction,
    )
    case("binary_cross_entropy.default", p(2, 3), p(2, 3), p(2, 3).detach(), _reduction)
    case("kl_div.default", f(2, 3), p(2, 3), _reduction)
    case("kl_div.default", f(2, 3), f(2, 3), _reduction, log_target=True)
case("cross_entropy_loss.default", f(2, 4, 3), i(2, 3, low=0, high=4), None, 1, 2)
case("cross_entropy_loss.default", f(4), t(2))
case("cross_entropy_loss.default", f(4), t(2), None, 0)
case("cross_entropy_loss.default", f(4), p(4))
case("cross_entropy_loss.default", f(2, 4, 3), p(2, 4, 3), _weight)
case("nll_loss_nd.default", f(4), t(2))
case("nll_loss_forward.default", f(5, 4), _labels, _weight, 1, -100, gradient=False)
case(
    "nll_loss2d_forward.default",
    f(2, 4, 3, 1),
    i(2, 3, 1, low=0, high=4),
    None,
    2,
    1,
    gradient=False,
)
case("smooth_l1_loss.default", f(2, 3), f(2, 3), 1, 0.3)
case("smooth_l1_loss.default", f(2, 3), f(2, 3), 1, 0.0)
case("huber_loss.default", f(2, 3), f(2, 3), 1, 0.3)
case("mse_loss.default", f(2, 3), f(1, 3), 1, gradient=False)
case("binary_cross_entropy.default", t(0.0, 1.0, 0.5), t(0.0, 1.0, 1.0))
case("kl_div.default", f(3), t(0.0, 0.5, 0.5))

# Recurrent layers


def _recurrent(gates: int, layers: int, directions: int, bias: bool) -> list[torch.Tensor]:
    size, hidden = 3, 4
    weights = []
    for layer in range(layers):
        width = size if layer == 0 else hidden * directions
        for _ in range(directions):
            weights += [f(gates * hidden, width), f(gates * hidden, hidden)]
            weights += [f(gates * hidden), f(gates * hidden)] if bias else []
    return weights


for _layers, _directions, _bias, _first in (
    (1, 1, True, False),
    (2, 2, True, True),
    (2, 1, False, False),
):
    _x = f(2, 5, 3) if _first else f(5, 2, 3)
    _h = [f(_layers * _directions, 2, 4) for _ in range(2)]
    _tail = (_bias, _layers, 0.0, True, _directions == 2, _first)
    case("lstm.input", _x, _h, _recurrent(4, _layers, _directions, _bias), *_tail)
    case("gru.input", _x, _h[0], _recurrent(3, _layers, _directions, _bias), *_tail)
    for _name in ("rnn_tanh.input", "rnn_relu.input"):
        case(_name, _x, _h[0], _recurrent(1, _layers, _directions, _bias), *_tail)


# Grids

for _align in (False, True):
    for _padding in (0, 1, 2):
        for _mode in (0, 1, 2):
            _grid = f(2, 3, 2, 2, grad=_mode != 1, scale=0.7)
            case("grid_sampler_2d.default", f(2, 3, 4, 5), _grid, _mode, _padding, _align)
        for _mode in (0, 1):
            _grid = f(1, 2, 3, 2, 3, grad=_mode != 1, scale=0.7)
            case("grid_sampler_3d.default", f(1, 2, 3, 4, 2), _grid, _mode, _padding, _align)
case("grid_sampler_2d.default", f(1, 1, 1, 1), f(1, 2, 2, 2), 0, 2, True)
case("grid_sampler_2d.default", f(1, 2, 3, 3, dtype=f64), f(1, 2, 2, 2, dtype=f64), 2, 0, False)

# Scatters that start from nothing, and means

_index = t([[0, 1, 1], [2, 0, 2]])
for _reduce in ("sum", "prod", "amax", "amin", "mean"):
    for _self in (False, True):
        case(
            "scatter_reduce.two",
            f(4, 3),
            0,
            _index,
            f(2, 3),
            reduce=_reduce,
            include_self=_self,
        )
case("scatter_reduce.two", i(4), 0, t([1, 1]), i(2), reduce="amax", include_self=False)
case("scatter_reduce.two", f(), 0, t([0]), f(1), reduce="mean", include_self=False)
case("unsafe_split.Tensor", f(5, 2), 2)
case("unsafe_split_with_sizes.default", f(5, 2), [2, 3])

# Fake quantization

case("fake_quantize_per_tensor_affine.default", f(3, 40), 0.1, 3, -8, 7)
case("fake_quantize_per_tensor_affine.default", f(3, 40, dtype=f64), 0.25, 0, 0, 255)
case("fake_quantize_per_tensor_affine.tensor_qparams", f(5, 7), t([0.05]), t([1], dtype=i32), -8, 7)
for _axis in (0, 1, 2):
    case(
        "fake_quantize_per_channel_affine.default",
        f(3, 3, 3),
        t([0.1, 0.2, 0.05]),
        t([0, 2, -1], dtype=i32),
        _axis,
        -8,
        7,
    )

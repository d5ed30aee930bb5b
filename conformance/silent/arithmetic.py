# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Numbers: integers that overflow, casts that round, NaN, signs of zero, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from conformance.silent.program import Session, program


class Compute(nn.Module):
    """Applies a function, and adds a parameter times zero so that something can learn."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Return what the function returns, and the parameter twice."""
        return self.function(*inputs), self.scale * 2


def _show(s: Session, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    model = s.wrap(Compute(function))
    for _ in range(3):
        s.train(model, *inputs)


def _may_refuse(s: Session, function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    model = s.wrap(Compute(function))
    for _ in range(3):
        with s.may_raise("call"):
            s.call(model, *inputs)


@program("pytorch#197895", 2026)
def floor_division_of_floats(s: Session) -> None:
    """1.0 // 0.1 is 9: the quotient before rounding lies below 10."""
    a = torch.tensor([1.0, 0.5, 6.0, 1.0, -1.0, 7.0])
    b = torch.tensor([0.1, 0.1, 0.2, 1 / 3, 0.1, -0.1])

    def divide(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a // b, torch.div(a, b, rounding_mode="floor"), torch.floor_divide(a, b)]

    _show(s, divide, a, b)
    _show(s, divide, a.double(), b.double())


@program("pytorch#186164", 2026)
def floor_division_of_integers(s: Session) -> None:
    """Integer division and remainders of negative numbers by a tensor and by a number."""
    a, b = torch.arange(-7, 8), torch.tensor(3)
    _show(s, lambda a, b: [a // b, a // -b, a % b, a % -b, a // 3, torch.fmod(a, b)], a, b)


@program("pytorch#183901", 2026)
def products_beyond_32_bits(s: Session) -> None:
    """Products of int64 beyond 2^31, of a range that forward makes."""
    _show(s, lambda b: torch.arange(9) * b, torch.tensor([1_500_000_000]))


@program()
def integers_that_wrap(s: Session) -> None:
    """Sums, products, negation and shifts of small integers wrap around; sums widen."""
    a = torch.tensor([120, 127, -128, 5], dtype=torch.int8)
    b = torch.tensor([10, 200, 255, 3], dtype=torch.uint8)

    def compute(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        return [a + a, a * a, -a, a.abs(), b + b, b * b, -b, b - 4, a + b, a.sum(), b.sum(), b << 1]

    _show(s, compute, a, b)


@program("pytorch#113016", 2023)
def uint8_then_widened(s: Session) -> None:
    """uint8 sums wrap before they are widened, also behind a negation."""
    b = torch.tensor([200, 255, 100, 3], dtype=torch.uint8)
    _show(s, lambda b: [(b + b).neg().to(torch.int32), (b * 2).float() / 2, (b - 5).long()], b)


@program("pytorch#143555", 2024)
def shifts_by_the_width(s: Session) -> None:
    """Shifts by as many bits as a number has, and more."""
    a, by = torch.tensor([1000, -1000, 1]), torch.tensor([64, 64, 70])
    _show(
        s, lambda a, by: [torch.bitwise_right_shift(a, by), torch.bitwise_left_shift(a, by)], a, by
    )


@program("pytorch#198071", 2026)
def clamp_bounds_beyond_the_dtype(s: Session) -> None:
    """int8 clamped to [-1000, 1000], and to at most 300."""
    a = torch.tensor([-128, -3, 0, 5, 127], dtype=torch.int8)
    _may_refuse(s, lambda a: a.clamp(-1000, 1000), a)
    _may_refuse(s, lambda a: a.clamp(max=300), a)


@program("pytorch#195675", 2026)
def clamp_bounds_beyond_float(s: Session) -> None:
    """float32 clamped by bounds beyond its range."""
    _may_refuse(s, lambda x: x.clamp(-3.4e39, 3.4e39), s.values(4))
    _may_refuse(s, lambda x: x.clamp_min(-3.4e39), s.values(4))


@program("pytorch#174172", 2026)
def sign_of_negative_zero(s: Session) -> None:
    """copysign with -0.0, and which results are negative zeros."""
    x = torch.tensor([1.5, -1.5, 0.0, -0.0])

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.copysign(x, -0.0)
        return [y, torch.signbit(y), torch.signbit(-x), torch.signbit(x * -1.0), 1 / x]

    _show(s, compute, x)


@program("pytorch#183083", 2026)
def remainder_by_a_rounded_number(s: Session) -> None:
    """remainder and fmod of float16 and bfloat16 by a Python number, which is rounded first."""
    x = torch.tensor([-4.0, -1.5, 0.0, 0.1, 1.0, 3.140625, 8.0])
    _show(s, lambda x: [x.remainder(3.14), x.fmod(3.14)], x.half())
    _show(s, lambda x: [x.remainder(1.7), x.fmod(1.7)], (x * 2.125).bfloat16())


@program("pytorch#181568", 2026)
def cast_rounds_before_the_sum(s: Session) -> None:
    """A product is cast to bfloat16 before a float32 bias is added; the product is exact."""
    x, w = torch.arange(12.0).reshape(3, 4) * 17, torch.arange(8.0).reshape(4, 2) * 33 + 1
    b = s.values(2)
    _show(s, lambda x, w, b: (x @ w).to(torch.bfloat16) + b, x, w, b)


@program("pytorch#176565", 2026)
def cast_there_and_back(s: Session) -> None:
    """float32 to bfloat16 or float16 and back is no identity."""
    x = s.values(4, 4)

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.bfloat16().float(), x.half().float() - x, (x * 100).int().float(), x.long()]

    _show(s, compute, x)


@program("pytorch#182225", 2026)
def rotary_embedding_in_bfloat16(s: Session) -> None:
    """Rotary embedding of queries and keys in bfloat16, broadcast over heads."""

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((-b, a), -1)

    def apply(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return q * cos + rotate(q) * sin, k * cos + rotate(k) * sin

    shapes = ((1, 2, 7, 16), (1, 1, 7, 16), (1, 7, 16), (1, 7, 16))
    _show(s, apply, *(s.values(*shape, dtype=torch.bfloat16) for shape in shapes))


@program("pytorch#150993", 2025)
def mixed_dtypes_are_refused(s: Session) -> None:
    """A float16 matrix by a float32 one, which PyTorch refuses."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        weights = (x @ x.transpose(-1, -2)).softmax(-1).to(torch.float16)
        return weights @ x

    _may_refuse(s, attend, s.values(2, 3, 4))


@program()
def nan_and_infinity(s: Session) -> None:
    """NaN goes through max, min, clamp, sort, argmax, comparisons and nan_to_num as in PyTorch."""
    x = torch.tensor([1.0, float("nan"), -float("inf"), float("inf"), 0.0])

    def compute(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x.clamp(-1, 1),
            x.relu(),
            torch.maximum(x, x.flip(0)),
            torch.fmin(x, x.flip(0)),
            x.max(),
            x.argmax(),
            x.amin(),
            x.sort().values,
            x.sort().indices,
            x.nan_to_num(nan=3.0, posinf=4.0),
            x.isnan() | x.isinf(),
            x != x,
            torch.where(x > 0, x, 2.0),
            x.nansum(),
            x.softmax(0),
            x[2:].logsumexp(0),
            x.sign(),
            torch.nn.functional.hardtanh(x),
        ]

    _show(s, compute, x)


@program()
def gradients_at_ties_and_kinks(s: Session) -> None:
    """Gradients where the derivative is a convention: ties of max, sqrt and norm at zero, abs."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.zero = nn.Parameter(torch.zeros(3))
            self.ties = nn.Parameter(torch.tensor([1.0, 2.0, 2.0, 2.0]))

        def forward(self) -> tuple[torch.Tensor, ...]:
            zero, ties = self.zero, self.ties
            return (
                zero.abs(), zero.relu(), zero.norm(), zero.sign(), zero.clamp(0, 1),
                ties.max(), ties.amax(), ties.median(), torch.maximum(ties, ties.flip(0)),
                ties.max(0).values, ties.prod() * zero.sum(), zero.prod(), ties.sort().values,
            )  # fmt: skip

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model)


@program()
def numbers_of_python(s: Session) -> None:
    """Numbers of Python among integers and half floats promote as PyTorch has it."""
    ids, half = torch.arange(4), torch.arange(4.0).half() / 3

    def compute(ids: torch.Tensor, half: torch.Tensor) -> list[torch.Tensor]:
        return [
            ids * 0.5, ids / 2, ids + True, half * 2**20, half + torch.tensor(1e-4),
            ids.float() * 10**10, half * ids, (ids > 1) * 3, (ids > 1).sum(), ids.mean(dtype=half.dtype),
            ids**2, 2**ids, half**2, ids.cumsum(0) // 2, half.sum(), torch.tensor(7) / half.float(),
        ]  # fmt: skip

    _show(s, compute, ids, half)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""How results of one operator are compared."""

from __future__ import annotations

import pytest
import torch

from ortrain.testing.single_op import compare

_TERMS = torch.tensor([3e7, 1.5, -3e7, 0.7, 1e7, -1e7])
_EXACT = _TERMS.double().sum()


def _sum_in_order(order: list[int]) -> torch.Tensor:
    total = torch.zeros(())
    for place in order:
        total = total + _TERMS[place]
    return total


def test_another_order_of_a_sum_that_cancels_is_right() -> None:
    forward, other = _sum_in_order([0, 1, 2, 3, 4, 5]), _sum_in_order([4, 3, 0, 5, 1, 2])
    assert not torch.allclose(forward, other)
    compare([other], [forward], lambda: [_EXACT])


@pytest.mark.parametrize("error", [-5.0, 5.0, float("nan"), float("inf")])
def test_what_is_further_off_than_pytorch_is_wrong(error: float) -> None:
    expected = _sum_in_order([0, 1, 2, 3, 4, 5])
    with pytest.raises(AssertionError, match="not close"):
        compare([_EXACT.float() + error], [expected], lambda: [_EXACT])


def test_other_dtypes_and_shapes_are_wrong() -> None:
    expected = torch.ones(2)
    for got in (torch.ones(2, dtype=torch.float64), torch.ones(1, 2)):
        with pytest.raises(AssertionError):
            compare([got], [expected], lambda: [expected.double()])
    with pytest.raises(AssertionError, match="0 tensors, PyTorch has 1"):
        compare([], [expected], lambda: [expected.double()])


def test_f64_is_held_to_its_tolerance() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        compare([x + 1e-3], [x + 1e-2], lambda: [x])

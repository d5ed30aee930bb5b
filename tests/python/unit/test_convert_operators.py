# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Each ATen overload, in several argument forms: the converted graph against eager PyTorch."""

import pytest
import torch
from operator_cases import CASES, OperatorCase

from ortrain.capture.convert import targets
from ortrain.testing.single_op import check_operator, check_operator_on_engine

_IDS = [f"{c.target.removeprefix('aten.')}-{n}" for n, c in enumerate(CASES)]


@pytest.mark.parametrize("case", CASES, ids=_IDS)
def test_operator_equals_eager(case: OperatorCase) -> None:
    check_operator(case.target, case.args, case.kwargs, case.results, case.gradient, case.tolerance)


@pytest.mark.parametrize("case", CASES, ids=_IDS)
def test_operator_on_the_engine_equals_eager(case: OperatorCase) -> None:
    pytest.importorskip("ortrain._core")
    check_operator_on_engine(
        case.target, case.args, case.kwargs, case.results, case.gradient, case.tolerance
    )


# Conversions that the table cannot call: they refuse, or need sizes or draws.
_WITHOUT_CASE = {
    "aten._grouped_mm.default",
    "aten._local_scalar_dense.default",
    "aten.empty.memory_format",
    "aten.empty_permuted.default",
    "aten.gru.data",
    "aten.index_put_.default",
    "aten.item.default",
    "aten.lstm.data",
    "aten.masked_scatter.default",
    "aten.masked_select.default",
    "aten.new_empty.default",
    "aten.nonzero.default",
    "aten.rnn_relu.data",
    "aten.rnn_tanh.data",
    "aten.sym_size.int",
    "transformers.grouped_mm_fallback.default",
}


def test_every_conversion_has_a_case() -> None:
    covered = {case.target for case in CASES}
    assert sorted(set(targets()) - covered - _WITHOUT_CASE) == []


def test_no_case_without_conversion() -> None:
    assert sorted({case.target for case in CASES} - set(targets())) == []


def test_table_is_large() -> None:
    assert len(CASES) > 700
    assert torch.get_default_dtype() is torch.float32

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Exported models in ONNX Runtime."""

from __future__ import annotations

import pytest

from ortrain.testing.models import CASES
from ortrain.tools import export_matrix

pytest.importorskip("onnxruntime")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", CASES)
def test_model_is_right_in_onnx_runtime(name, tmp_path):
    case = CASES[name]
    if case.needs:
        pytest.importorskip(case.needs)
    row = export_matrix.export(case, tmp_path)
    assert row.error == ""
    assert max(row.differences) <= export_matrix.TOLERANCE


def test_table_is_printed(capsys):
    assert export_matrix.main(["--model", "mlp"]) == 0
    assert "1 of 1 models are right" in capsys.readouterr().out

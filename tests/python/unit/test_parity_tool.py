# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The parity tool: its table, its status, its honesty about failures."""

import json

import pytest
import torch

from ortrain.testing.models import CASES
from ortrain.tools import parity


def test_json_row_of_a_model_in_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert parity.main(["--model", "mlp", "--json", "--reference"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["model"] == "mlp" and row["ok"]
    assert [(s["batch"], s["length"]) for s in row["shapes"]] == [(4, 1), (7, 1)]


def test_failure_sets_the_status_and_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> torch.nn.Module:
        raise ValueError("no such weights")

    case = parity.dataclasses.replace(CASES["mlp"], build=broken)
    monkeypatch.setitem(parity.CASES, "mlp", case)
    assert parity.main(["--model", "mlp", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert not row["ok"] and row["reason"] == "ValueError: no such weights"


def test_nothing_to_do_is_a_usage_error() -> None:
    with pytest.raises(SystemExit):
        parity.main([])

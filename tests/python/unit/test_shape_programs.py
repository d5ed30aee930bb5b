# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random modules that change shapes and write to views: some that were wrong once, and that mistakes are found."""

from __future__ import annotations

import pytest

from conformance.shape_programs import ShapeProgram, difference
from ortrain.capture import export


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", [1, 35, 174, 251, 2001, 2002, 2003])
def test_programs_are_pytorchs(seed: int) -> None:
    assert difference(seed) == ""


@pytest.mark.filterwarnings("ignore")
def test_a_mistake_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name, *_ in ShapeProgram(1).steps]
    assert "squeeze_" in names
    monkeypatch.setattr(export, "take_for_views", lambda program: None)
    assert "(3, 3, 2), item 0: PyTorch" in difference(1)

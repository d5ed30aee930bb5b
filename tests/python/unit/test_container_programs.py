# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random forwards over containers whose iterators and views live on, as ``python -m conformance.container_programs``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conformance.container_programs import differs


# The second was wrong while iterators went through copies behind a cut.
@pytest.mark.parametrize("seed", [7, 1043, 1100, 1101])
@pytest.mark.filterwarnings("ignore:.* runs in .*:RuntimeWarning")
def test_containers_as_in_python(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_PIECES", "all")
    assert not differs(seed, tmp_path)
    torch._dynamo.reset()

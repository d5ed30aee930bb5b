# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Packages installed into a folder of its own (``pip install --target``) are packages, the user's code beside them is not."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.source_files import is_installed

PACKAGE = """
import itertools

TOKENS = itertools.count()


def scale(x):
    return x * 2 if TOKENS is not None else x
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "brought_along").mkdir()
    (tmp_path / "brought_along" / "__init__.py").write_text(PACKAGE)
    (tmp_path / "brought_alone.py").write_text(PACKAGE)
    (tmp_path / "own_code.py").write_text(PACKAGE)
    information = tmp_path / "brought-1.0.dist-info"
    information.mkdir()
    (information / "RECORD").write_text(
        "brought_along/__init__.py,sha256=x,1\nbrought_alone.py,,\n../../bin/brought,,\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("brought_along", "brought_alone", "own_code"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_what_a_distribution_brought_is_installed(folder: Path) -> None:
    assert is_installed(str(folder / "brought_along" / "__init__.py"))
    assert is_installed(str(folder / "brought_along" / "deep" / "part.py"))
    assert is_installed(str(folder / "brought_alone.py"))
    assert not is_installed(str(folder / "own_code.py"))
    assert not is_installed(str(folder / "brought_along_too.py"))


def test_a_folder_that_is_on_no_path_is_the_users(tmp_path: Path) -> None:
    (tmp_path / "a-1.dist-info").mkdir()
    (tmp_path / "a-1.dist-info" / "RECORD").write_text("a.py,,\n")
    assert not is_installed(str(tmp_path / "a.py"))


@pytest.mark.parametrize(("name", "is_graph"), [("brought_along", True), ("own_code", False)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_iterators_of_packages_are_nobodys_state(folder: Path, name: str, is_graph: bool) -> None:
    package: ModuleType = importlib.import_module(name)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return package.scale(self.layer(x))

    ours = ORTModule(Scaled())
    x = torch.ones(1, 2)
    torch.testing.assert_close(ours(x), ours.module(x))
    assert (not any(record.fallback for record in ours.report().captures)) == is_graph

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Code of notebooks, terminals, packages of one's own and modules that Python does not know of."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ortrain import ORTModule

CELLS = """
import torch
from torch import nn
from ortrain import ORTModule
SCALE = 1.0
TABLE = {'scale': 1.0}
class Config:
    scale = 1.0
class Model(nn.Module):
    factor = 1.0
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x) * SCALE * Config.scale * TABLE['scale'] * self.factor
torch.manual_seed(0)
model = Model()
wrapped = ORTModule(model)
x = torch.randn(4, 3)
def same():
    assert torch.allclose(wrapped(x), model(x), rtol=1e-5, atol=1e-6)
same()
SCALE = 2.0; same()
Config.scale = 3.0; same()
TABLE['scale'] = 5.0; same()
Model.factor = 7.0; same()
print('followed')
"""
CELL_BY_CELL = """
import sys, types
main = types.ModuleType('__main__')
sys.modules['__main__'] = main
exec(compile(sys.argv[1], '/tmp/ipykernel_7/123.py', 'exec'), main.__dict__)
"""


@pytest.mark.parametrize("way", ["text", "notebook"])
def test_variables_of_code_in_no_file_are_followed(way: str) -> None:
    """Without `__file__`, `__main__` is the user's own all the same."""
    arguments = ["-c", CELLS] if way == "text" else ["-c", CELL_BY_CELL, CELLS]
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip().endswith("followed"), done.stderr


MODULE = """
from torch import nn
SCALE = 1.0
class Config:
    scale = 1.0
class Model(nn.Module):
    factor = 1.0
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x) * SCALE * Config.scale * self.factor
"""


def test_a_module_that_python_does_not_know_of_is_followed(tmp_path: Path) -> None:
    """One that was executed, as plug-ins are, and put into no table."""
    file = tmp_path / "unlisted.py"
    file.write_text(MODULE)
    spec = importlib.util.spec_from_file_location("unlisted", file)
    assert spec is not None and spec.loader is not None
    unlisted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unlisted)
    model = unlisted.Model()
    wrapped = ORTModule(model)
    x = torch.randn(4, 3)
    torch.testing.assert_close(wrapped(x), model(x))
    for change in (
        lambda: setattr(unlisted, "SCALE", 2.0),
        lambda: setattr(unlisted.Config, "scale", 3.0),
        lambda: setattr(unlisted.Model, "factor", 5.0),
    ):
        change()
        torch.testing.assert_close(wrapped(x), model(x))


@pytest.mark.parametrize(
    "expression",
    [
        "package.part.SCALE",
        "package.part.Config.scale",
        "vars(package.part)['SCALE']",
        "getattr(package.part, self.name)",
        "self.inside()",
    ],
)
def test_a_module_inside_of_a_package_is_followed(
    expression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a chain of attributes, by its table, and imported in a function beside a global of its name."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("SCALE = 1.0\nclass Config:\n    scale = 1.0\n")
    (tmp_path / "uses_package.py").write_text(
        "from torch import nn\nimport package.part\n"
        "class Model(nn.Module):\n"
        "    name = 'SCALE'\n"
        "    def __init__(self):\n        super().__init__()\n        self.layer = nn.Linear(3, 2)\n"
        "    def inside(self):\n        import package.part\n        return package.part.SCALE\n"
        f"    def forward(self, x):\n        return self.layer(x) * {expression}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("uses_package", "package", "package.part")
    try:
        import uses_package

        part = sys.modules["package.part"]
        model = uses_package.Model()
        wrapped = ORTModule(model)
        x = torch.randn(4, 3)
        for value in (1.0, 2.0, 3.0):
            part.SCALE = part.Config.scale = value
            torch.testing.assert_close(wrapped(x), model(x))
    finally:
        for name in names:
            sys.modules.pop(name, None)


class Slotted(nn.Module):
    """Holds a number in a slot."""

    __slots__ = ("scale",)
    __factor__ = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale twice."""
        return self.layer(x) * self.scale * self.__factor__


def test_slots_and_special_names_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute may lie in no table, and be called as Python's own are."""
    model = Slotted()
    wrapped = ORTModule(model)
    x = torch.randn(4, 3)
    torch.testing.assert_close(wrapped(x), model(x))
    monkeypatch.setattr(Slotted, "__factor__", 2.0)
    torch.testing.assert_close(wrapped(x), model(x))
    model.scale = 3.0
    torch.testing.assert_close(wrapped(x), model(x))

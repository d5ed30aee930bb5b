# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Classes that come to hide what they inherit, and what functions import for themselves, between calls."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule


class Net(nn.Module):
    def __init__(self, function: Callable[[Any, torch.Tensor], torch.Tensor], held: Any) -> None:
        super().__init__()
        self.function, self.held = function, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.held, x)


def derived() -> type:
    class Above:
        kind = 1.0

        def method(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.kind

        @property
        def shown(self) -> float:
            return 2.0

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x * 3

        def __getitem__(self, key: str) -> float:
            return 4.0

        @staticmethod
        def static(x: torch.Tensor) -> torch.Tensor:
            return x * 5

    class Between(Above):
        pass

    class Below(Between):
        pass

    return Below


CASES: dict[str, tuple[Callable[[Any, Any], Any], str, Any]] = {
    "method": (lambda held, x: held.method(x), "method", lambda self, x: x * 9),
    "number": (lambda held, x: held.method(x), "kind", 9.0),
    "property": (lambda held, x: x * held.shown, "shown", 9.0),
    "call": (lambda held, x: held(x), "__call__", lambda self, x: x * 9),
    "item": (lambda held, x: x * held["a"], "__getitem__", lambda self, key: 9.0),
    "static": (lambda held, x: type(held).static(x), "static", staticmethod(lambda x: x * 9)),
}


@pytest.mark.parametrize("below", [0, 1], ids=["last", "middle"])
@pytest.mark.parametrize("name", CASES)
def test_a_class_comes_to_hide_what_it_inherits(name: str, below: int) -> None:
    function, attribute, value = CASES[name]
    cls = derived()
    plain = Net(function, cls())
    ours, x = ORTModule(copy.copy(plain)), torch.tensor([-1.5, 0.5, 2.0])
    before = plain(x)
    torch.testing.assert_close(ours(x), before)
    setattr(cls.__mro__[below], attribute, value)
    assert not torch.equal(plain(x), before)
    torch.testing.assert_close(ours(x), plain(x))
    assert [record.fallback for record in ours.report().captures] == ["", ""]


def test_a_layer_comes_to_hide_what_it_inherits() -> None:
    class Base(nn.Module):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    class Below(Base):
        unread = 0

    ours, x = ORTModule(Below()), torch.ones(2)
    torch.testing.assert_close(ours(x), x)
    Below.unread = 1  # not read
    ours(x)
    assert len(ours.report().captures) == 1
    Below.factor = 9.0
    torch.testing.assert_close(ours(x), 9 * x)


IMPORTS = {
    "from a module": ("from .deep import CONSTANT", "CONSTANT"),
    "a module": ("from . import deep", "deep.CONSTANT"),
    "from a package": ("from own_toolbox.deep import CONSTANT as c", "c"),
    "a package": ("import own_toolbox.deep", "own_toolbox.deep.CONSTANT"),
}


@pytest.mark.parametrize("form", IMPORTS)
def test_imports_in_functions_of_a_package_of_the_users(
    form: str, imported_package: Callable[..., types.ModuleType]
) -> None:
    statement, expression = IMPORTS[form]
    reader = f"def scaled(x):\n    {statement}\n    return x * {expression}\n"
    sources = {"": "", "deep": "CONSTANT = 2.0\n", "reader": reader}
    own_toolbox = imported_package("own_toolbox", sources, installed=False)
    run = own_toolbox.reader.scaled
    ours, x = ORTModule(Net(lambda held, x: run(x), None)), torch.ones(2)
    torch.testing.assert_close(ours(x), 2 * x)
    own_toolbox.deep.CONSTANT = 5.0
    torch.testing.assert_close(ours(x), 5 * x)


def test_classes_of_packages_that_the_users_code_holds(
    imported_package: Callable[..., types.ModuleType],
) -> None:
    source = "class Base:\n    kind = 1.0\n\n\nclass Settings(Base):\n    pass\n"
    package = imported_package("installed_settings", {"": source})
    settings = package.Settings()

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = {"a": package.Settings()}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.settings["a"].kind + settings.kind

    ours, x = ORTModule(Holding()), torch.ones(2)
    for cls, value in ((package.Base, 3.0), (package.Settings, 5.0)):
        ours(x)
        cls.kind = value
        torch.testing.assert_close(ours(x), 2 * value * x)

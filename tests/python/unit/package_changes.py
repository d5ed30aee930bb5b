# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a module that calls a function of an installed package gives before and after something there has changed."""

import copy
import itertools
from collections.abc import Callable

import torch
from torch import nn

from ortrain import ORTModule

_numbers = itertools.count()


def box_of(source: str) -> tuple[str, dict[str, str]]:
    """Return a name that no package had before, as Dynamo knows modules by their names, and its file."""
    return f"installed_box{next(_numbers)}", {"": source}


class Net(nn.Module):
    """Calls a function of a package."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x) * 1.5


def values() -> torch.Tensor:
    return torch.tensor([-1.5, 0.5, 2.0])


def assert_followed(plain: Net, change: Callable[[], None]) -> None:
    """See that the graph of a module is another one, and right, once something has changed."""
    ours, x = ORTModule(copy.copy(plain)), values()
    before = plain(x)
    for _ in range(3):
        torch.testing.assert_close(ours(x), before)
    graphs = len(ours.report().captures)
    change()
    assert not torch.equal(plain(x), before)
    for _ in range(2):
        torch.testing.assert_close(ours(x), plain(x))
    assert len(ours.report().captures) == graphs + 1
    assert all(record.fallback == "" for record in ours.report().captures)


def found_on_disk(plain: Net, change: Callable[[], None]) -> list[bool]:
    """Return which of four modules found their graph on disk; something changes before the third."""
    x, from_disk = values(), []
    for step in range(4):
        if step == 2:
            before = plain(x)
            change()
            assert not torch.equal(plain(x), before)
        ours = ORTModule(copy.copy(plain))
        torch.testing.assert_close(ours(x), plain(x))
        from_disk.append(ours.report().captures[-1].from_disk)
    return from_disk

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Arguments and results that are more than their items."""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from ortrain import ORTModule


@dataclasses.dataclass
class Batch:
    """A tensor, and what is no field of it."""

    x: torch.Tensor
    scale = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    """Sets an attribute more when it is made."""

    x: torch.Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", 3.0)


class ItemsAndMore(dict[str, torch.Tensor]):
    """A dictionary with attributes."""

    scale = 1.0


class Listed(list[torch.Tensor]):
    """A list with attributes."""

    scale = 1.0


class Reversed(list[torch.Tensor]):
    """Takes its items from behind."""

    def __init__(self, items: Any) -> None:
        super().__init__(reversed(list(items)))


class Private(list[torch.Tensor]):
    """A list with a private slot."""

    __slots__ = ("__scale",)

    @property
    def scale(self) -> float:
        """What is in the slot."""
        return getattr(self, "_Private__scale", 1.0)

    @scale.setter
    def scale(self, value: float) -> None:
        self.__scale = value


class Factor(float):
    """A number with attributes."""

    scale = 1.0


class Mode(enum.Enum):
    """Its members may have attributes."""

    PLAIN = 1


class Pair(NamedTuple):
    """Two tensors."""

    first: torch.Tensor
    second: torch.Tensor


def _tensor_of(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (Batch, Frozen)):
        return value.x
    items = list(value.values()) if hasattr(value, "values") else list(value)
    return items[0] - 2 * items[-1]


class Scaled(nn.Module):
    """Scales by an attribute of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, value: Any, other: Any = None) -> torch.Tensor:
        """Scale by what either argument says."""
        scale = getattr(value, "scale", 1.0) * getattr(other, "scale", 1.0)
        return self.layer(_tensor_of(value)) * scale


X, Y = torch.randn(4, 3), torch.randn(4, 3)
ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "dataclass": lambda: (Batch(X),),
    "frozen": lambda: (Frozen(X),),
    "dict": lambda: (ItemsAndMore(x=X, y=Y),),
    "list": lambda: (Listed([X, Y]),),
    "private slot": lambda: (Private([X, Y]),),
    "reversed": lambda: (Reversed([X, Y]),),
    "named tuple": lambda: (Pair(X, Y),),
    "encoding": lambda: (BatchEncoding({"x": X, "y": Y}, n_sequences=2),),
    "number": lambda: (X, Factor(2.0)),
    "member": lambda: (X, Mode.PLAIN),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_attributes_of_arguments_are_followed(kind: str) -> None:
    """An argument with another attribute is another argument."""
    model = Scaled()
    wrapped = ORTModule(model)
    for scale in (None, 2.0, 3.0):
        arguments = ARGUMENTS[kind]()
        if scale is not None and kind not in ("frozen", "named tuple"):
            arguments[-1].scale = scale
        torch.testing.assert_close(wrapped(*arguments), model(*arguments))
    vars(Mode.PLAIN).pop("scale", None)


def test_numbers_that_are_equal_are_told_apart() -> None:
    """0.0 and -0.0 are, also as parts of a complex number and of NumPy's."""
    import numpy as np

    class Signs(nn.Module):
        def forward(self, x: torch.Tensor, sign: Any) -> torch.Tensor:
            return torch.copysign(x, torch.tensor(sign.real))

    model = Signs()
    wrapped = ORTModule(model)
    for sign in (
        0.0,
        -0.0,
        complex(0.0, 1.0),
        complex(-0.0, 1.0),
        np.float64(0.0),
        np.float64(-0.0),
    ):
        torch.testing.assert_close(wrapped(X, sign), model(X, sign))


class Returns(nn.Module):
    """Returns what a function makes of its result."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self._make = make

    def forward(self, x: torch.Tensor) -> Any:
        """Make it."""
        return self._make(self.layer(x))


def _with_scale(value: Any) -> Any:
    value.scale = 7.0
    return value


def _with_item(y: torch.Tensor) -> BaseModelOutput:
    output = BaseModelOutput(last_hidden_state=y)
    output["extra"] = y * 2
    return output


def _twice(y: torch.Tensor) -> dict[str, Any]:
    held = [y]
    return {"a": held, "b": held}


RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "dataclass": lambda y: _with_scale(Batch(y)),
    "frozen": Frozen,
    "dict": lambda y: _with_scale(ItemsAndMore(x=y)),
    "list": lambda y: _with_scale(Listed([y])),
    "output": lambda y: _with_scale(BaseModelOutput(last_hidden_state=y)),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_results_keep_their_attributes(kind: str) -> None:
    """A result is not made again of its items alone."""
    model = Returns(RESULTS[kind])
    wrapped = ORTModule(model)
    for _ in range(2):
        result, expected = wrapped(X), model(X)
        assert type(result) is type(expected)
        assert result.scale == expected.scale


def test_an_output_keeps_an_item_that_is_no_field() -> None:
    """transformers' outputs take any; their classes' constructors do not."""
    model = Returns(_with_item)
    torch.testing.assert_close(ORTModule(model)(X)["extra"], model(X)["extra"])


def test_an_output_keeps_the_order_of_its_items() -> None:
    """Which of them is the first, its positions say."""

    def make(y: torch.Tensor) -> BaseModelOutput:
        output = BaseModelOutput(hidden_states=(y,))
        output["last_hidden_state"] = y * 2
        return output

    model = Returns(make)
    assert list(ORTModule(model)(X)) == list(model(X))


def test_one_container_in_two_places_stays_one() -> None:
    """Who changes one of them sees it in the other."""
    result = ORTModule(Returns(_twice))(X)
    assert result["a"] is result["b"]


def test_plain_containers_stay_whole() -> None:
    """What items tell whole is captured whole, with the outputs of transformers."""
    made: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda y: BaseModelOutput(last_hidden_state=y, hidden_states=(y, y * 2)),
        lambda y: Pair(y, y * 2),
        lambda y: collections.OrderedDict(a=y),
        lambda y: torch.max(y, 1),
        lambda y: [y, {"b": y * 2}],
    )
    for make in made:
        wrapped = ORTModule(Returns(make))
        wrapped(X)
        assert wrapped.report().captures, make
        assert not wrapped.report().pieces, make

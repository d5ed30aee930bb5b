# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which containers, objects and constants are made again exactly from the items that a graph knows."""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Iterator, Mapping
from typing import Any

from ortrain.capture.errors import UnsupportedInputError

_PLAIN = frozenset(
    {
        *(str, bytes, int, float, complex, bool, type(None), range),
        *(dict, collections.OrderedDict, collections.defaultdict, list, tuple),
    }
)
# Whose constructors take the items and do nothing else.
_MAKES_PLAINLY = ("builtins", "collections", "torch", "transformers", "ortrain", "enum", "numpy")
# Attributes that hold the items themselves.
_HOLDS_ITEMS = frozenset({"data"})


def refuse_more_than_items(value: Any, what: str) -> None:
    """Raise UnsupportedInputError for an object that its class, made of the same items, would not give again.

    Args:
      value: A constant, a container or a dataclass.
      what: It, in words.
    """
    kind = type(value)
    if kind in _PLAIN:
        return
    for name, held in _attributes(value):
        if held is None or _is_item(value, name, held):
            continue
        raise UnsupportedInputError(
            f"{what} is a {kind.__qualname__} whose attribute '{name}' is none of its items"
        )
    if dataclasses.is_dataclass(value):
        if isinstance(value, Mapping):
            fields = [field.name for field in dataclasses.fields(value)]
            if list(value) != [name for name in fields if name in value]:
                raise UnsupportedInputError(
                    f"{what} is a {kind.__qualname__} with other items than its fields, or in another order"
                )
    elif isinstance(value, (list, tuple, dict)) and not all(map(_makes_plainly, kind.__mro__)):
        raise UnsupportedInputError(
            f"{what} is a {kind.__qualname__}, whose constructor may do more than take items"
        )


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = {}
    if attributes is not value:  # AttrDict: its items
        yield from attributes.items()
    for base in type(value).__mro__:
        for name, held in base.__dict__.items() if "__slots__" in base.__dict__ else ():
            if isinstance(held, types.MemberDescriptorType):
                try:
                    yield name, held.__get__(value)
                except AttributeError:  # nothing was put there
                    continue


def _is_item(value: Any, name: str, held: Any) -> bool:
    if isinstance(value, enum.Enum):  # the key of a call has those that are numbers or texts
        return name.startswith("_") or type(held) in _PLAIN
    if dataclasses.is_dataclass(value):
        if name not in type(value).__dataclass_fields__:
            return False
        return not isinstance(value, Mapping) or value.get(name) is held
    return name in _HOLDS_ITEMS and isinstance(value, collections.UserDict)


def _makes_plainly(base: type) -> bool:
    """Tell whether a class leaves the making of an object to classes that are known, or to a named tuple's."""
    if str(base.__module__).partition(".")[0] in _MAKES_PLAINLY:
        return True
    own = base.__dict__
    is_named = "_fields" in own and "_field_defaults" in own
    return "__init__" not in own and ("__new__" not in own or is_named)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What tables, lists, sets, objects, classes and functions of installed packages hold, and what it was."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Container, Mapping
from typing import Any

from ortrain.capture.kept_changes import Change, Seen, cells_of, is_another_count, is_counted
from ortrain.capture.library_reads import slot_of, slots_of
from ortrain.capture.shallow_copies import MISSING, forget_classes_of_traces

MOST_ITEMS = 1024


def seen_table(table: dict[Any, Any]) -> Seen | None:
    return _seen_items(table, None) if dict.__len__(table) <= MOST_ITEMS else None


def seen_attributes(attributes: dict[str, Any]) -> Seen:
    """Watch the attributes of an object that code names."""
    return _seen_items(attributes, _is_named)


def seen_slots(value: Any) -> Seen | None:
    """Watch what is in the slots of an object that code names."""
    before = {name: slot_of(value, name, MISSING) for name in slots_of(value)}

    def write(name: str, content: Any) -> None:
        if content is not MISSING:
            object.__setattr__(value, name, content)
        elif slot_of(value, name, MISSING) is not MISSING:
            object.__delattr__(value, name)

    return (
        _seen_fields(before, lambda name: slot_of(value, name, MISSING), write) if before else None
    )


def seen_class(cls: type, held: dict[str, Any]) -> Seen:
    """Watch the attributes of a class that code names, those that come to be there too.

    Args:
      held: Those that may change.
    """
    table = type.__getattribute__(cls, "__dict__")
    known = set(table)

    def write(name: str, content: Any) -> None:
        if content is MISSING:
            type.__delattr__(cls, name)
        else:
            type.__setattr__(cls, name, content)

    def seen(where: str, names: Container[str]) -> Change | None:
        made = {name: MISSING for name in table if name not in known and name[:2] != "__"}
        read = functools.partial(_item, table)
        return _seen_fields({**held, **made}, read, write)(where, names)

    return seen


def _item(table: Mapping[str, Any], name: str) -> Any:
    return table.get(name, MISSING)


def seen_function(function: types.FunctionType) -> Seen | None:
    """Watch what a function closes over."""
    cells = cells_of(function)
    if not cells:
        return None
    before = [cell.cell_contents for cell in cells]

    def seen(where: str, _: Container[str]) -> Change | None:
        now = [cell.cell_contents for cell in cells]
        if all(a is b for a, b in zip(now, before, strict=True)):
            return None

        def set_back() -> None:
            for cell, content in zip(cells, before, strict=True):
                cell.cell_contents = content

        return Change(where, any(map(is_another_count, before, now)), set_back)

    return seen


def _seen_fields(
    before: dict[str, Any], read: Callable[[str], Any], write: Callable[[str, Any], None]
) -> Seen:
    def seen(where: str, names: Container[str]) -> Change | None:
        differing = [n for n, value in before.items() if n in names and read(n) is not value]
        if not differing:
            return None

        def set_back() -> None:
            for name in differing:
                write(name, before[name])

        counted = any(is_another_count(before[name], read(name)) for name in differing)
        return Change(f"{where} ({', '.join(differing)})", counted, set_back)

    return seen


def _is_named(name: str, names: Container[str]) -> bool:
    return name in names


def _seen_items(
    table: dict[Any, Any], counts: Callable[[Any, Container[str]], bool] | None
) -> Seen:
    """Watch a table.

    Args:
      table: It.
      counts: Tells whether an item counts, given the names in code; None where all do, and their order.
    """
    kind: Any = collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict
    before = dict(kind.items(table))

    def seen(where: str, names: Container[str]) -> Change | None:
        forget_classes_of_traces(table, before)
        now = dict(kind.items(table))
        others = {k: v for k, v in now.items() if k not in before or before[k] is not v}
        gone = before.keys() - now.keys()
        differing = [k for k in (*others, *gone) if counts is None or counts(k, names)]
        is_moved = counts is None and [k for k in now if k in before] != [
            k for k in before if k in now
        ]
        if not differing and not is_moved:
            return None

        def set_back() -> None:
            for key in differing:
                if key in before:
                    kind.__setitem__(table, key, before[key])
                else:
                    kind.pop(table, key, None)
            held = dict(kind.items(table))
            in_order = {k: held[k] for k in before if k in held} | held
            if list(in_order) != list(held):
                kind.clear(table)
                for key, value in in_order.items():
                    kind.__setitem__(table, key, value)

        pairs = [(before.get(key), now.get(key)) for key in differing]
        return Change(where, any(is_another_count(*pair) for pair in pairs), set_back)

    return seen


def seen_set(items: set[Any]) -> Seen | None:
    if set.__len__(items) > MOST_ITEMS:
        return None
    before = set.copy(items)

    def seen(where: str, _: Container[str]) -> Change | None:
        if set.__eq__(items, before):
            return None

        def set_back() -> None:
            set.intersection_update(items, before)
            set.update(items, before)

        return Change(where, False, set_back)

    return seen


def seen_list(items: Any) -> Seen | None:
    """Watch a list or a queue; of numbers, those that come count too."""
    kind: Any = list if isinstance(items, list) else collections.deque
    if kind.__len__(items) > MOST_ITEMS:
        return None
    before = list(kind.__iter__(items))

    def seen(where: str, _: Container[str]) -> Change | None:
        now = list(kind.__iter__(items))
        if len(now) == len(before):
            if all(a is b for a, b in zip(now, before, strict=True)):
                return None
            counted = any(map(is_another_count, before, now))
        else:
            counted = all(is_counted(type(item)) for item in (*before, *now))

        def set_back() -> None:
            kind.clear(items)
            kind.extend(items, before)

        return Change(where, counted, set_back)

    return seen

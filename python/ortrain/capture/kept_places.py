# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Where counts, iterators and generators that installed packages keep stand."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Container, Iterable
from typing import Any

from ortrain.capture.kept_changes import Change, Seen, cells_of, nothing


def seen_count(holders: list[Any], count: Any) -> Seen:
    """Watch a count; nobody can set one back, so that another one takes its place wherever it is held."""
    before = copy.copy(count)

    def set_back() -> None:
        for holder in holders:
            _replace(holder, count, before)

    def seen(where: str, _: Container[str]) -> Change | None:
        return None if repr(count) == repr(before) else Change(where, True, set_back)

    return seen


def _replace(holder: Any, value: Any, by: Any) -> None:
    """Put another object where one is held by a table, a list, a class, a function or a partial function."""

    def replaced(items: Iterable[Any]) -> list[Any]:
        return [by if item is value else item for item in items]

    if isinstance(holder, dict):
        for key in [key for key, item in dict.items(holder) if item is value]:
            dict.__setitem__(holder, key, by)
    elif isinstance(holder, list):
        holder[:] = replaced(holder)
    elif isinstance(holder, type):
        for name in [n for n, item in vars(holder).items() if item is value]:
            type.__setattr__(holder, name, by)
    elif isinstance(holder, types.FunctionType):
        for cell in cells_of(holder):
            if cell.cell_contents is value:
                cell.cell_contents = by
        if holder.__defaults__:
            holder.__defaults__ = tuple(replaced(holder.__defaults__))
        _replace(holder.__kwdefaults__ or {}, value, by)
        _replace(holder.__dict__, value, by)
    elif isinstance(holder, functools.partial):
        args, state = tuple(replaced(holder.args)), vars(holder)
        _replace(holder.keywords, value, by)
        holder.__setstate__((holder.func, args, holder.keywords, state))  # type: ignore[attr-defined]


def seen_generator(generator: types.GeneratorType[Any, Any, Any]) -> Seen:
    """Watch where a generator stands, which nobody can set back."""
    step, before = _state_of(generator)

    def seen(where: str, _: Container[str]) -> Change | None:
        step_now, now = _state_of(generator)
        is_there = step_now == step and len(now) == len(before)
        if is_there and all(a is b for a, b in zip(now, before, strict=True)):
            return None
        return Change(where, True, nothing)

    return seen


def _state_of(generator: types.GeneratorType[Any, Any, Any]) -> tuple[int, list[Any]]:
    frame = generator.gi_frame
    return (-2, []) if frame is None else (frame.f_lasti, list(frame.f_locals.values()))


def seen_iterator(iterator: Any) -> Seen | None:
    """Watch where an iterator of Python's stands; not all can be set back."""
    reduced = iterator.__reduce__()
    before = _place_of(reduced)
    index = reduced[2] if len(reduced) > 2 and isinstance(reduced[2], int) else None

    def seen(where: str, _: Container[str]) -> Change | None:
        if _place_of(iterator.__reduce__()) == before:
            return None
        back = nothing if index is None else functools.partial(iterator.__setstate__, index)
        return Change(where, True, back)

    return seen


def _place_of(part: Any) -> Any:
    """Return what tells where an iterator stands, of a part of what copies it."""
    if isinstance(part, tuple):
        return tuple(map(_place_of, part))
    if isinstance(part, (int, list)):
        return part if isinstance(part, int) else len(part)
    is_iterator = hasattr(type(part), "__next__") and hasattr(part, "__reduce__")
    if is_iterator and type(part).__module__ in ("builtins", "itertools"):
        return _place_of(part.__reduce__())
    return id(part)

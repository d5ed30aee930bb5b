# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What installed packages keep in their modules and change at each call: counts, averages, histories, generators."""

from __future__ import annotations

import contextlib
import contextvars
import decimal
import functools
import sys
import types
from collections.abc import Collection, Container, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch.utils._config_module import ConfigModule

from ortrain.capture.kept_changes import ANY_NAME, Change, Seen, is_another_count, nothing
from ortrain.capture.kept_contents import seen_attributes, seen_class, seen_function, seen_slots
from ortrain.capture.kept_places import seen_count
from ortrain.capture.kept_values import (
    NO_STATE,
    Kind,
    held_by,
    held_by_class,
    holds_nothing,
    kind_of,
)
from ortrain.capture.library_reads import attributes_of
from ortrain.capture.shallow_copies import MISSING

_MOST_HOLDERS = 3  # within each other, each by a name
_MOST_DEPTH = 12


class _Kept(NamedTuple):
    """An object that a package keeps.

    Attributes:
      names: The global of its module, and attributes that lead there; others that lead to it.
      holders: What holds it there.
      module: The first of these modules.
      seen: What returns which change there is, None for none; whether what changes has names of its own.
    """

    names: list[tuple[str, ...]]
    holders: list[Any]
    module: str
    seen: list[tuple[Seen, bool]]


class LibraryState:
    """The state of packages at the moment at which this is made.

    Objects that do not let themselves be looked at are left out.

    Args:
      modules: Of the packages.
    """

    def __init__(self, modules: Iterable[types.ModuleType]) -> None:
        # By the class, which need not be hashable; kept alive beside it.
        self._kinds: dict[int, tuple[type, Kind | None]] = {id(c): (c, None) for c in NO_STATE}
        self._known: dict[int, _Kept] = {}  # by the object
        # Functions with nothing behind them, attributes of their own neither.
        self._bare: list[tuple[str, str, types.FunctionType]] = []
        for module in modules:
            table = vars(module)
            for name, value in list(table.items()):
                self._take(table, (name,), value, str(table.get("__name__")))

    def changes(self, names: Collection[str], computing: Collection[str]) -> list[Change]:
        """Return what has changed since, as far as code led there by names.

        Args:
          names: Those in the code that ran.
          computing: Packages whose code makes up others.
        """
        found = []
        for kept in self._known.values():
            named: Container[str] = names
            if kept.module.partition(".")[0] in computing:
                named = ANY_NAME
            # The last name alone: objects have others by which code comes to them.
            is_named = any(way[-1] in named for way in kept.names)
            for seen, has_names in kept.seen:
                # Of what a package's objects do when they are asked.
                with contextlib.suppress(Exception):
                    where = f"'{'.'.join(kept.names[0])}' of {kept.module}"
                    change = seen(where, named) if has_names or is_named else None
                    found += [] if change is None else [change]
        for module, name, function in self._bare:
            of_module = ANY_NAME if module.partition(".")[0] in computing else names
            made = [each for each in function.__dict__ if each in of_module]
            if made:
                where = f"'{name}' of {module} ({', '.join(map(str, made))})"
                take_back = functools.partial(_without_attributes, function, made)
                found.append(Change(where, False, take_back))
        return found

    def _take(
        self,
        holder: Any,
        names: tuple[str, ...],
        value: Any,
        module: str,
        depth: int = 0,
    ) -> None:
        cls = type(value)
        known_kind = self._kinds.get(id(cls))
        if known_kind is None:
            kind = None
            with contextlib.suppress(Exception):  # of a metaclass
                kind = kind_of(cls)
            known_kind = self._kinds[id(cls)] = cls, kind
        kind = known_kind[1]
        if kind is None:
            return
        if kind is seen_function and holds_nothing(value):
            self._bare.append((module, names[-1], value))
            return
        if id(value) in self._known:
            self._known[id(value)].names.append(names)
            self._known[id(value)].holders.append(holder)
            return
        kept = self._known[id(value)] = _Kept([names], [holder], module, [])
        if len(names) > _MOST_HOLDERS or depth > _MOST_DEPTH:
            return
        held: list[tuple[str, Any]] = []
        attributes: dict[str, Any] | None = None

        def watch(seen: Seen | None, has_names: bool) -> None:
            if seen is not None:
                kept.seen.append((seen, has_names))

        with contextlib.suppress(Exception):  # of a class that answers in its own way
            name, attributes = names[-1], attributes_of(value)
            if kind is seen_count:
                watch(seen_count(kept.holders, value), False)
            elif kind is seen_class:
                if value.__module__ == module or "<locals>" in value.__qualname__:
                    of_class, bare = held_by_class(value)
                    self._bare += [(module, *each) for each in bare]
                    watch(seen_class(value, of_class), True)
                    held += of_class.items()
            elif kind is seen_attributes:
                watch(seen_slots(value), True)
                if attributes is not None:
                    watch(seen_attributes(attributes), True)
                held += [*held_by(value, name), (name, cls)]
            else:
                watch(kind(value), False)
                held += held_by(value, name)
                if attributes is not None:
                    watch(seen_attributes(attributes), True)
                    held += attributes.items()
        for each, content in held:
            way = names if each == names[-1] else (*names, each)
            # The attributes are what holds, of an object.
            by = attributes if kind is seen_attributes and attributes is not None else value
            self._take(by, way, content, module, depth + 1)


def _without_attributes(function: types.FunctionType, names: Iterable[str]) -> None:
    for name in names:
        function.__dict__.pop(name, None)


def changes_of_globals(
    before: Mapping[str, Any], table: dict[str, Any], names: Iterable[str]
) -> Iterator[Change]:
    """Return what has changed of the globals of a module, given what it had before."""
    for name in names:
        then, now = before.get(name, MISSING), table.get(name, MISSING)
        if now is not then:
            yield Change(
                f"'{name}' of {table.get('__name__')}",
                is_another_count(then, now),
                functools.partial(table.__setitem__, name, then)
                if then is not MISSING
                else functools.partial(table.pop, name, None),
            )


def changes_of_context(before: contextvars.Context) -> Iterator[Change]:
    """Return which context variables stand for something else now; a trace has a context of its own, which ends with it.

    Those of PyTorch itself, and of Python's decimal numbers, come to be set when they are first used.
    """
    changed = [
        (variable, before.get(variable), value)
        for variable, value in contextvars.copy_context().items()
        if before.get(variable, MISSING) is not value and not isinstance(value, decimal.Context)
    ]
    of_torch = _variables_of_torch() if changed else ()
    for variable, then, now in changed:
        if id(variable) not in of_torch and not variable.name.startswith("torch."):
            where = f"the context variable '{variable.name}'"
            yield Change(where, is_another_count(then, now), nothing)


def _variables_of_torch() -> set[int]:
    """Return which context variables PyTorch keeps for itself: in its modules, and behind its settings."""
    homes = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "torch" and isinstance(module, types.ModuleType)
    ]
    settings = [
        getattr(entry, "user_override", None)
        for module in homes
        if isinstance(module, ConfigModule)
        for entry in module._config.values()
    ]
    held = [value for module in homes for value in list(vars(module).values())]
    return {id(v) for v in (*settings, *held) if isinstance(v, contextvars.ContextVar)}

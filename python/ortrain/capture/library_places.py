# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the variables of installed packages stand, in words by which another process finds them.

A place is a list of four texts: a module; in it "" for itself, or the qualified name of a class, and "=" with the name of
an object or a function there whose attributes are meant, of which another one may follow, and "=" where its slots are; the
name of the variable; what counts of it.
"""

from __future__ import annotations

import array
import collections
import contextvars
import logging
import random
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ortrain.capture.announcements import LogThreshold
from ortrain.capture.library_reads import (
    PARTS_WITH_TABLES,
    Variable,
    attributes_of,
    is_of_library,
    slot_of,
    slots_of,
)
from ortrain.capture.prepared import NotStorableError
from ortrain.capture.reachable_state import home_of

Place = list[str]

_COUNTS = frozenset({"", "same", "own", "stands", "items", "names", "level"})
_MOST_PLACES = 1 << 14
_LOADED = "sys", "=modules"
_HOLDERS = (
    *(dict, list, set, frozenset, tuple, bytearray, memoryview, types.MappingProxyType),
    *(collections.deque, array.array, contextvars.ContextVar, random.Random, torch.Generator),
)


def places_of(variables: Iterable[Variable]) -> list[Place]:
    """Return where variables stand.

    Raises:
      NotStorableError: Nothing leads to one of them by names.
    """
    variables = list(variables)
    objects = _objects_of(variables)
    places = []
    for owner, name, *counts in variables:
        if isinstance(owner, LogThreshold):
            places.append(["logging", "", owner.of.name, "level"])
            continue
        place = _place_of(owner, objects)
        if place is None:
            raise NotStorableError(f"no name leads to what holds '{name}'")
        places.append([*place, name, *(counts or [""])])
    return places


def read_once(variables: Iterable[Variable]) -> tuple[str, ...]:
    """Return which variables hold something that may change and that no guard looks into, in words."""
    variables = list(variables)
    objects = _objects_of(variables)
    found = set()
    for owner, name, *counts in variables:
        if counts != ["stands"]:
            continue
        value = _held_by(owner, name)
        if _may_change_unseen(value):
            if isinstance(owner, types.FunctionType):
                module, path = owner.__module__, owner.__qualname__
            else:
                module, path = _place_of(owner, objects) or ("?", "")
            place = ".".join(filter(None, (module, *path.split("="), name)))
            found.add(f"{place} ({type(value).__name__})")
    return tuple(sorted(found))


def _may_change_unseen(value: Any) -> bool:
    """Tell whether a value that counts by standing there has contents of which nobody tells."""
    cls = type(value)
    if issubclass(cls, _HOLDERS) or hasattr(cls, "__next__"):
        return True
    if cls.__module__.partition(".")[0] == "numpy":
        return cls.__name__ in ("ndarray", "Generator", "RandomState")
    return is_of_library(cls) and attributes_of(value) is None and not slots_of(value)


def _objects_of(variables: Iterable[Variable]) -> dict[int, tuple[str, str]]:
    """Return where objects and functions that variables hold have attributes and slots, by the id of what has them."""
    objects: dict[int, tuple[str, str]] = {}
    known = -1
    while known < len(objects):
        known = len(objects)
        for owner, name, *counts in variables:
            value = _held_by(owner, name)
            if counts != ["stands"] and not isinstance(value, types.FunctionType):
                continue
            place = _place_of(owner, objects)
            if place is None:
                continue
            module, path = place
            attributes = attributes_of(value)
            if attributes is not None:
                objects.setdefault(id(attributes), (module, f"{path}={name}"))
            if slots_of(value):
                objects.setdefault(id(value), (module, f"{path}={name}="))
    return objects


def _place_of(owner: Any, objects: Mapping[int, tuple[str, str]]) -> tuple[str, str] | None:
    """Return the module and the path that lead to what holds variables; None where none does."""
    if isinstance(owner, type):
        place = owner.__module__, owner.__qualname__
    elif id(owner) in objects:
        place = objects[id(owner)]
    elif owner is sys.modules:
        return _LOADED
    elif not isinstance(owner, dict):
        return None
    else:
        place = str(owner.get("__name__")), ""
    return place if _owner_at(*place) is owner else None


def check_places(places: Any) -> None:
    """See that places are some, whether or not something stands there.

    Raises:
      NotStorableError: They are not.
    """
    if type(places) is not list or len(places) > _MOST_PLACES:
        raise NotStorableError("places in packages are no list, or a long one")
    for place in places:
        if type(place) is not list or [type(part) for part in place] != [str] * 4:
            raise NotStorableError("a place in a package is none")
        if place[3] not in _COUNTS or (
            place[3] in ("own", "names") and (place[1] == "" or "=" in place[1])
        ):
            raise NotStorableError("of a place in a package counts what is not known")


def variables_at(places: Iterable[Place]) -> list[Variable]:
    """Return the variables at places; runs no code of theirs.

    Raises:
      NotStorableError: Something is not there in this process.
    """
    found: list[Variable] = []
    for module, path, name, counts in places:
        if counts == "level":
            found.append((LogThreshold.about(_logger_of(name)), "level"))
            continue
        owner = _owner_at(module, path)
        if owner is None:
            raise NotStorableError(f"there is no '{path}' in {module}")
        found.append((owner, name, counts) if counts else (owner, name))
    return found


def _logger_of(name: str) -> logging.Logger:
    """Return the logger of a name.

    Raises:
      NotStorableError: Nobody has asked for it in this process.
    """
    logger = logging.root if name == "root" else logging.root.manager.loggerDict.get(name)
    if not isinstance(logger, logging.Logger):
        raise NotStorableError("there is no logger of a name")
    return logger


def _owner_at(module: str, path: str) -> Any:
    """Return what holds variables; None where there is none."""
    if (module, path) == _LOADED:
        return sys.modules
    home = home_of({"__name__": module})
    if not isinstance(home, types.ModuleType):
        return None
    found: Any = home.__dict__
    classes, *objects = path.split("=")
    for name in classes.split(".") if classes else ():
        found = _held_by(found, name)
        if not isinstance(found, type):
            return None
    for i, name in enumerate(objects):
        if not name:
            continue
        value = _held_by(found, name)
        has_slots = objects[i + 1 : i + 2] == [""] and bool(slots_of(value))
        found = value if has_slots else attributes_of(value)
        if found is None:
            return None
    return found


def _held_by(owner: Any, name: str) -> Any:
    """Return what a dictionary, a class or the slots of an object hold under a name, None for nothing; runs no code of theirs."""
    if isinstance(owner, dict):
        return dict.get(owner, name)
    if isinstance(owner, type):
        return type.__getattribute__(owner, "__dict__").get(name)
    if isinstance(owner, types.FunctionType):
        return getattr(owner, name) if name in PARTS_WITH_TABLES else None
    return slot_of(owner, name)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the variables of installed packages stand, in words by which another process finds them.

A place is a list of four texts: a module; in it "" for itself, the qualified name of a class, or "=" and the name of an
object whose attributes are meant; the name of the variable; what counts of it.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

from ortrain.capture.library_reads import Variable
from ortrain.capture.prepared import NotStorableError
from ortrain.capture.reachable_state import home_of

Place = list[str]

_COUNTS = frozenset({"", "same", "own", "stands", "items"})
_MOST_PLACES = 1 << 14


def places_of(variables: Iterable[Variable]) -> list[Place]:
    """Return where variables stand.

    Raises:
      NotStorableError: Nothing leads to one of them by names.
    """
    variables = list(variables)
    objects: dict[int, tuple[str, str]] = {}
    for owner, name, *counts in variables:
        if counts == ["stands"] and isinstance(owner, dict):
            attributes = getattr(owner.get(name), "__dict__", None)
            objects[id(attributes)] = str(owner.get("__name__")), f"={name}"
    places = []
    for owner, name, *counts in variables:
        if isinstance(owner, type):
            module, path = owner.__module__, owner.__qualname__
        elif id(owner) in objects:
            module, path = objects[id(owner)]
        else:
            module, path = str(owner.get("__name__")), ""
        place = [module, path, name, *(counts or [""])]
        if _owner_at(module, path) is not owner:
            raise NotStorableError(f"no name leads to what holds '{name}' of {module}")
        places.append(place)
    return places


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
        if place[3] not in _COUNTS or (place[3] == "own" and place[1][:1] in ("", "=")):
            raise NotStorableError("of a place in a package counts what is not known")


def variables_at(places: Iterable[Place]) -> list[Variable]:
    """Return the variables at places; runs no code of theirs.

    Raises:
      NotStorableError: Something is not there in this process.
    """
    found: list[Variable] = []
    for module, path, name, counts in places:
        owner = _owner_at(module, path)
        if owner is None:
            raise NotStorableError(f"there is no '{path}' in {module}")
        found.append((owner, name, counts) if counts else (owner, name))
    return found


def _owner_at(module: str, path: str) -> Any:
    """Return what holds variables; None where there is none."""
    home = home_of({"__name__": module})
    if not isinstance(home, types.ModuleType):
        return None
    table = home.__dict__
    if path == "":
        return table
    if path.startswith("="):
        attributes = getattr(table.get(path[1:]), "__dict__", None)
        return attributes if type(attributes) is dict else None
    found: Any = None
    for name in path.split("."):
        found = (table if found is None else type.__getattribute__(found, "__dict__")).get(name)
        if not isinstance(found, type):
            return None
    return found

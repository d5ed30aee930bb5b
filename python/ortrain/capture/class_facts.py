# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What Python keeps of classes and functions, in no dictionary."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import functools
import operator
import types
import weakref
from typing import Any, ClassVar

from typing_extensions import Self

# In somebody's hands these read any attribute of anything.
READERS = (getattr, hasattr, vars, dir, object.__getattribute__)
OF_CLASSES = ("__name__", "__qualname__", "__module__", "__doc__", "__bases__", "__mro__")
OF_FUNCTIONS = ("__name__", "__qualname__", "__module__", "__doc__")
_HEAP_TYPE = 1 << 9
_IMMUTABLE_TYPE = 1 << 8


def is_made_by_a_statement(cls: type) -> bool:
    """Tell whether a class was made while Python ran, and not by the compiler of a library in C."""
    return bool(cls.__flags__ & _HEAP_TYPE)


def may_get_attributes(cls: type) -> bool:
    """Tell whether somebody can give a class an attribute that it does not have."""
    return is_made_by_a_statement(cls) and not cls.__flags__ & _IMMUTABLE_TYPE


def reads_by_names(value: Any) -> bool:
    """Tell whether a function or an object that is called reads attributes by names that no code need mention."""
    if isinstance(value, operator.attrgetter):
        return True
    if isinstance(value, operator.methodcaller):
        return str(value.__reduce__()[1][0]).startswith("__")
    is_format = isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, str)
    return is_format or any(value is reader for reader in READERS)


def function_behind(value: Any) -> types.FunctionType | None:
    """Return the function that an entry of a class calls; None where it is none."""
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.cached_property):
        value = value.func
    return value if isinstance(value, types.FunctionType) else None


class Facet:
    """What Python tells of an object by other ways than attributes, as attributes.

    Of one object there is one of each kind, as long as somebody holds it.
    """

    _all: ClassVar[weakref.WeakValueDictionary[tuple[type, int], Any]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, of: Any) -> None:
        self.of = of

    @classmethod
    def about(cls, of: Any) -> Self:
        """Return the one of an object."""
        known = cls._all.get((cls, id(of)))
        if known is None:
            known = cls._all[cls, id(of)] = cls(of)
        return known


class RegisteredClasses(Facet):
    """The classes that are registered with an abstract one, by the names that ask for them."""

    def __init__(self, of: abc.ABCMeta) -> None:
        super().__init__(of)
        self._token: object = None
        self._known: tuple[type, ...] = ()

    @property
    def isinstance(self) -> tuple[type, ...]:
        """The classes, and those that are registered with these and with classes below, by their names."""
        token = abc.get_cache_token()
        if token != self._token:
            self._token, self._known = token, _registered_with(self.of)
        return self._known

    issubclass = isinstance


def _registered_with(cls: type) -> tuple[type, ...]:
    found: set[type] = set()
    pending, seen = [cls], set()
    while pending:
        each = pending.pop()
        if each in seen:
            continue
        seen.add(each)
        below = type.__subclasses__(each)
        if isinstance(each, abc.ABCMeta):
            registered = [reference() for reference in _abc._get_dump(each)[0]]
            found.update(c for c in registered if c is not None)
            below += [c for c in registered if c is not None]
        pending += below
    return tuple(sorted(found, key=lambda each: (each.__module__, each.__qualname__)))

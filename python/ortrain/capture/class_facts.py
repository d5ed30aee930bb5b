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


class RegisteredClasses:
    """The classes that are registered with an abstract one, as attributes of the names that ask for them.

    Of one class there is one, as long as somebody holds it.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, RegisteredClasses]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, cls: abc.ABCMeta) -> None:
        self.of = cls
        self._token: object = None
        self._known: tuple[type, ...] = ()

    @classmethod
    def with_class(cls, of: abc.ABCMeta) -> RegisteredClasses:
        """Return the one of an abstract class."""
        known = cls._all.get(id(of))
        if known is None:
            known = cls._all[id(of)] = cls(of)
        return known

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

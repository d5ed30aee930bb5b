# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What Python keeps of classes and functions, in no dictionary."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import abc
import weakref
from typing import ClassVar

OF_CLASSES = ("__name__", "__qualname__", "__module__", "__doc__", "__bases__", "__mro__")
OF_FUNCTIONS = ("__name__", "__qualname__", "__module__", "__doc__")
_HEAP_TYPE = 1 << 9


def is_made_by_a_statement(cls: type) -> bool:
    """Tell whether a class was made while Python ran, and not by the compiler of a library in C."""
    return bool(cls.__flags__ & _HEAP_TYPE)


class RegisteredClasses:
    """The classes that are registered with an abstract one, as attributes of the names that ask for them.

    Of one class there is one, as long as somebody holds it.
    """

    _all: ClassVar[weakref.WeakValueDictionary[int, RegisteredClasses]] = (
        weakref.WeakValueDictionary()
    )

    def __init__(self, cls: abc.ABCMeta) -> None:
        self.of = cls

    @classmethod
    def with_class(cls, of: abc.ABCMeta) -> RegisteredClasses:
        """Return the one of an abstract class."""
        known = cls._all.get(id(of))
        if known is None:
            known = cls._all[id(of)] = cls(of)
        return known

    @property
    def isinstance(self) -> tuple[type, ...]:
        """The classes, sorted by their names."""
        registry = _abc._get_dump(self.of)[0]
        classes = [cls for cls in (reference() for reference in registry) if cls is not None]
        return tuple(sorted(classes, key=lambda cls: (cls.__module__, cls.__qualname__)))

    issubclass = isinstance

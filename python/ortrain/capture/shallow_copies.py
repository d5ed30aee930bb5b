# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Shallow copies of what Python objects hold, which tell what has changed and set it back."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

import torch

from ortrain.capture.torch_internals import outside_of_modes

_BY_VALUE = (bool, int, float, complex, str, bytes)
# Modules of the classes that tensors have in traces; they are not imported here, which takes as long as PyTorch.
_OF_TRACES = "torch._subclasses.fake_tensor", "torch._subclasses.functional_tensor"
# Stands for what is not there.
MISSING = object()
# Of a tensor that is copied before a trace.
_MOST_ELEMENTS = 1 << 20
# Of the way to an object, of which the beginning says most.
_LONGEST_NAME = 400


@dataclasses.dataclass(frozen=True, slots=True)
class MadePlain:
    """A value that a forward put into a table."""

    name: str
    table: Any
    key: Any
    value: Any
    before: Any = MISSING

    def make(self) -> None:
        """Put it there again."""
        raw(self.table)[self.key] = self.value

    def take_back(self) -> None:
        """Let there be what was there before."""
        table = raw(self.table)
        if self.before is not MISSING:
            table[self.key] = self.before
        elif self.key in table:
            del table[self.key]


@dataclasses.dataclass(slots=True)
class Changes:
    """Names of what has changed.

    Attributes:
      changed: What was there, and is another or gone.
      made: What was absent or None before, and holds tensors or layers.
      made_plain: What was absent or None before, and is a number, a name, a function: a call that makes it again
        needs nothing of the trace.
      symbols: Of those changed, what holds a size of the trace now, which is a symbol.
      drawn: Generators of random numbers of Python and NumPy that were drawn from.
      unfollowed: Objects that changed and that Dynamo does not follow: generators of the user's own, deques, orders of
        keys, attributes of classes, which it reads anew in some ways only, and of functions.
    """

    changed: list[str] = dataclasses.field(default_factory=list)
    made: list[str] = dataclasses.field(default_factory=list)
    made_plain: list[MadePlain] = dataclasses.field(default_factory=list)
    symbols: list[str] = dataclasses.field(default_factory=list)
    drawn: list[str] = dataclasses.field(default_factory=list)
    unfollowed: list[str] = dataclasses.field(default_factory=list)


class Copy(Protocol):
    """What one object held when this was made."""

    def held(self) -> Iterable[tuple[str, Any]]:
        """Return the objects that it held, with their names."""

    def places(self) -> Iterable[tuple[Any, Any, Any]]:
        """Return where it held each of its objects: something with items, the key, the object."""

    def differing(self) -> Iterable[tuple[str, Any, Any]]:
        """Return what differs now: its name, what was there, what is; `MISSING` for nothing."""

    def restore(self, changes: Changes) -> None:
        """Set the object back, adding the names of what differed."""


class Table:
    """Of names and what they stand for: attributes, items of a dictionary, globals, a cell.

    Args:
      where: What names begin with; "" for none.
      table: The mapping.
      names: Those that count; None for all there are, now and later.
      is_followed: Whether Dynamo follows changes.
    """

    def __init__(
        self,
        where: str,
        table: Any,
        names: Iterable[Any] | None = None,
        *,
        is_followed: bool = True,
    ) -> None:
        self._where, self._is_followed = where, is_followed
        self._table = raw(table)
        self._names = None if names is None else list(names)
        self._before = self._read()

    def _read(self) -> dict[Any, Any]:
        if self._names is None:
            return dict(self._table)
        return {n: self._table[n] for n in self._names if n in self._table}

    def _name(self, key: Any) -> str:
        return f"{self._where[:_LONGEST_NAME]}.{key}" if self._where else str(key)

    def held(self) -> Iterable[tuple[str, Any]]:
        """Return what the names stood for."""
        return [(self._name(key), value) for key, value in self._before.items()]

    def places(self) -> Iterable[tuple[Any, Any, Any]]:
        """Return the names in the table."""
        return [(self._table, key, value) for key, value in self._before.items()]

    def differing(self) -> Iterable[tuple[str, Any, Any]]:
        """Return the names that stand for something else now."""
        before, now = self._before, self._read()
        for key in dict.fromkeys([*before, *now]):
            old, new = before.get(key, MISSING), now.get(key, MISSING)
            if not is_same(old, new):
                yield self._name(key), old, new
        if self._is_reordered(now):
            yield self._name("the order of keys"), list(before), list(now)

    def _is_reordered(self, now: dict[Any, Any]) -> bool:
        """Tell whether the names that are still there stand in another order."""
        return [k for k in now if k in self._before] != [k for k in self._before if k in now]

    def restore(self, changes: Changes) -> None:
        """Set the table back, in its order too."""
        if self._names is None and isinstance(self._table, dict):
            forget_classes_of_traces(self._table, self._before)
        before, now = self._before, self._read()
        keys = list(before)
        if keys == list(now) and all(is_same(before[k], now[k]) for k in keys):
            return
        if self._is_reordered(now):
            changes.unfollowed.append(self._name("the order of keys"))
        for key in dict.fromkeys([*before, *now]):
            old = before.get(key, MISSING)
            if is_same(old, now.get(key, MISSING)):
                continue
            name, new = self._name(key), now.get(key, MISSING)
            if old is MISSING and isinstance(new, types.ModuleType):
                continue  # an import, which happens once
            if old is not MISSING and old is not None:
                (changes.changed if self._is_followed else changes.unfollowed).append(name)
                if isinstance(new, (torch.SymInt, torch.SymFloat)):
                    changes.symbols.append(name)
            elif is_plain(new):
                changes.made_plain.append(MadePlain(name, self._table, key, new, old))
            else:
                changes.made.append(name)
            if old is MISSING:
                del self._table[key]
            else:
                self._table[key] = old
        if self._names is None and list(self._table) != keys:
            self._table.clear()
            self._table.update(before)


class Items:
    """Of a list, deque or set."""

    def __init__(self, where: str, owner: Any) -> None:
        self._where = where
        self._owner = owner
        # Its items as they are stored, whatever methods its class has of its own.
        self._kind: Any = next(k for k in (list, collections.deque, set) if isinstance(owner, k))
        self._before = self._read()

    def _read(self) -> list[Any]:
        return list(self._kind.__iter__(self._owner))

    def held(self) -> Iterable[tuple[str, Any]]:
        """Return the items."""
        where = self._where[:_LONGEST_NAME]
        return [(f"{where}[{i}]", value) for i, value in enumerate(self._before)]

    def places(self) -> Iterable[tuple[Any, Any, Any]]:
        """Return the positions of what has some."""
        if isinstance(self._owner, set):
            return []
        return [(self._owner, i, value) for i, value in enumerate(self._before)]

    def differing(self) -> Iterable[tuple[str, Any, Any]]:
        """Return the items as a whole where they differ."""
        now = self._read()
        if len(now) != len(self._before) or not all(map(is_same, self._before, now)):
            yield self._where, self._before, now

    def restore(self, changes: Changes) -> None:
        """Put the items back where they differ."""
        now = self._read()
        if len(now) == len(self._before) and all(map(is_same, self._before, now)):
            return
        unfollowed = isinstance(self._owner, collections.deque)  # Dynamo forgets what falls out
        (changes.unfollowed if unfollowed else changes.changed).append(self._where)
        self._kind.clear(self._owner)
        add = self._kind.update if self._kind is set else self._kind.extend
        add(self._owner, self._before)


class Told:
    """What functions say of an object, such as the state of a generator, or a digest of an array.

    Args:
      where: Its name.
      read: Returns what is compared: tuples, dictionaries, arrays, plain values.
      write: Sets it back.
      kind: The list of `Changes` that its name goes to.
    """

    def __init__(
        self,
        where: str,
        read: Callable[[], Any],
        write: Callable[[Any], object],
        kind: str = "changed",
    ) -> None:
        self._where, self._read, self._write, self._kind = where, read, write, kind
        self._before = read()

    def held(self) -> Iterable[tuple[str, Any]]:
        """Return nothing: what the object holds is compared with it."""
        return ()

    def places(self) -> Iterable[tuple[Any, Any, Any]]:
        """Return nothing."""
        return ()

    def differing(self) -> Iterable[tuple[str, Any, Any]]:
        """Return what the functions say where it is something else."""
        now = self._read()
        if not is_equal(self._before, now):
            yield self._where, self._before, now

    def restore(self, changes: Changes) -> None:
        """Set the object back where it says something else."""
        if is_equal(self._before, self._read()):
            return
        getattr(changes, self._kind).append(self._where)
        self._write(self._before)


class Contents:
    """Of a tensor that a trace finds with its contents, and writes to in earnest.

    Args:
      where: Its name.
      tensor: The tensor.
    """

    def __init__(self, where: str, tensor: torch.Tensor) -> None:
        self._where, self._tensor = where, tensor
        self._version = tensor._version
        self._before: torch.Tensor | None = None
        if tensor.numel() <= _MOST_ELEMENTS:
            with outside_of_modes():
                self._before = tensor.detach().clone()

    def held(self) -> Iterable[tuple[str, Any]]:
        """Return nothing."""
        return ()

    def places(self) -> Iterable[tuple[Any, Any, Any]]:
        """Return nothing."""
        return ()

    def differing(self) -> Iterable[tuple[str, Any, Any]]:
        """Return the tensor where its contents were written to, if they were copied."""
        before = self._before
        if before is None or self._tensor._version == self._version:
            return
        with outside_of_modes():
            if not torch.equal(self._tensor.detach(), before):
                yield self._where, before, self._tensor

    def restore(self, changes: Changes) -> None:
        """Copy back what was there.

        Raises:
          RuntimeError: Nobody has kept it.
        """
        if self._tensor._version == self._version:
            return
        if self._before is None:
            raise RuntimeError(
                f"tracing has written to '{self._where}', a large tensor that is no buffer: register it"
            )
        changes.unfollowed.append(self._where)
        with outside_of_modes(), torch.no_grad():
            self._tensor.copy_(self._before)
        self._version = self._tensor._version


class Attributes(Mapping):
    """Attributes of an object that has no dictionary to write to, as one.

    Args:
      owner: The object, or a class.
      names: Returns the names that count.
    """

    def __init__(self, owner: Any, names: Callable[[], Iterable[str]]) -> None:
        self._owner, self._names = owner, names

    def __getitem__(self, name: str) -> Any:
        if isinstance(self._owner, type):  # not what a base or a descriptor gives
            return self._owner.__dict__[name]
        value = getattr(self._owner, name, MISSING)
        if value is MISSING:
            raise KeyError(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names() if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._owner, name)


class RawItems(MutableMapping):
    """The items of a dictionary as they are stored, whatever methods its class has of its own.

    Args:
      table: Of a class derived from ``dict``.
    """

    def __init__(self, table: dict[Any, Any]) -> None:
        self._table = table
        ordered = isinstance(table, collections.OrderedDict)
        self._kind: Any = collections.OrderedDict if ordered else dict

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self._table, key)

    def __iter__(self) -> Iterator[Any]:
        return self._kind.__iter__(self._table)

    def __len__(self) -> int:
        return dict.__len__(self._table)

    def __contains__(self, key: Any) -> bool:
        return dict.__contains__(self._table, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._kind.__setitem__(self._table, key, value)

    def __delitem__(self, key: Any) -> None:
        self._kind.__delitem__(self._table, key)

    def clear(self) -> None:
        """Take all items out."""
        self._kind.clear(self._table)


def raw(table: Any) -> Any:
    """Return a table whose items are read and written as they are stored."""
    plain = type(table) in (dict, collections.OrderedDict, collections.defaultdict)
    return RawItems(table) if isinstance(table, dict) and not plain else table


class CellVariable(Mapping):
    """The variable in a cell of a closure, as a dictionary of at most one item."""

    def __init__(self, cell: types.CellType, name: str) -> None:
        self._cell, self._name = cell, name

    def __getitem__(self, name: str) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:  # it is empty
            raise KeyError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter([self._name] if self._name in self else [])

    def __len__(self) -> int:
        return int(self._name in self)

    def __setitem__(self, name: str, value: Any) -> None:
        self._cell.cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._cell.cell_contents


class ContextValue(Mapping):
    """What a context variable stands for in this context, None where it is not set, as a dictionary."""

    def __init__(self, variable: contextvars.ContextVar[Any]) -> None:
        self._variable = variable

    def __getitem__(self, name: str) -> Any:
        if name != self._variable.name:
            raise KeyError(name)
        return self._variable.get(None)

    def __iter__(self) -> Iterator[str]:
        return iter([self._variable.name])

    def __len__(self) -> int:
        return 1

    def __setitem__(self, name: str, value: Any) -> None:
        self._variable.set(value)


def forget_classes_of_traces(table: Any, before: Mapping[Any, Any]) -> None:
    """Take out of a dictionary what is kept by the class of a tensor that there is in traces alone; a count stays.

    Args:
      table: The dictionary.
      before: What it held before the trace.
    """
    for key in [key for key in dict.keys(table) if key not in before]:
        cls = key() if isinstance(key, weakref.ref) else key
        is_of_traces = isinstance(cls, type) and cls.__module__ in _OF_TRACES
        if is_of_traces and not isinstance(table[key], (int, float, torch.Tensor)):
            type(table).pop(table, key)


def is_same(a: Any, b: Any) -> bool:
    """Tell whether two values are one object, or equal plain values of one type."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) in _BY_VALUE:
        return a == b or (a != a and b != b)
    return type(a) is types.MethodType and a == b  # made anew at each access


def is_plain(value: Any) -> bool:
    """Tell whether a value holds nothing that a trace has made."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_plain, value))
    if isinstance(value, functools.partial):
        return all(map(is_plain, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return not any(isinstance(c.cell_contents, torch.Tensor) for c in cells)
    return value is None or isinstance(
        value, (*_BY_VALUE, enum.Enum, type, torch.dtype, torch.device, types.BuiltinFunctionType)
    )


def is_equal(a: Any, b: Any) -> bool:
    """Tell whether two states are equal: tuples, lists, dictionaries, arrays, plain values."""
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(is_equal(a[k], b[k]) for k in a)
    if hasattr(a, "tobytes"):
        return a.tobytes() == b.tobytes()
    return bool(a == b)

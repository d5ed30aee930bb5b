# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions of installed packages that a forward has run, in whose place somebody may put others.

What is in their place counts, not what becomes of it: packages do not rewrite their own functions.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ortrain.capture.reachable_state import globals_of, home_of, is_own, named_in
from ortrain.capture.source_files import is_installed

# A dictionary, class, function or cell, and the name of an item or attribute; True: only which object it is counts.
Variable = tuple[Any, str] | tuple[Any, str, bool]

_FUNCTIONS = types.FunctionType, functools.partial, type(functools.lru_cache(len))
# Of each layer, by the guards themselves.
_COMPARED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"})


def library_functions(
    ran: Mapping[types.CodeType, dict[str, Any]],
    naming: Iterable[types.CodeType],
    classes: Iterable[type],
) -> Iterator[Variable]:
    """Return where the functions are that packages have run, that code names, and that define what has run.

    Args:
      ran: Code that has run, with its globals.
      naming: Of it, that which is neither Python's nor PyTorch's.
      classes: Of the layers, of which the methods that ran count.
    """
    seen = set()
    for table, name, value in itertools.chain.from_iterable(_named(c, ran[c]) for c in naming):
        if isinstance(value, _FUNCTIONS) and (id(table), name) not in seen:
            seen.add((id(table), name))
            yield table, name, True
    for cls in {base for each in classes for base in each.__mro__}:
        for name, value in list(vars(cls).items()):
            is_function = isinstance(value, types.FunctionType) and name not in _COMPARED
            if is_function and value.__code__ in ran:
                yield cls, name, True


def _named(
    code: types.CodeType, table: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], str, Any]]:
    is_users = not is_installed(code.co_filename)
    for name in globals_of(code) & table.keys():
        value = table[name]
        if not isinstance(value, types.ModuleType):
            if not is_users:  # those of the user's own code are compared in any case
                yield table, name, value
        elif not value.__name__.startswith(("torch", "ortrain")) and not is_own(value):
            yield from named_in(value, code.co_names)
    # Somebody may have found it by an import of his own.
    home = home_of(table)
    defined = None if home is None or is_users else vars(home).get(code.co_name)
    if isinstance(defined, types.FunctionType) and defined.__code__ is code:
        yield vars(home), code.co_name, defined

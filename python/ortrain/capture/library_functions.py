# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions of installed packages that a forward has run, in whose place somebody may put others.

What is in their place counts, not what becomes of it: packages do not rewrite their own functions.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ortrain.capture.reachable_state import globals_of

# A dictionary, class, function or cell, and the name of an item or attribute; True: only which object it is counts.
Variable = tuple[Any, str] | tuple[Any, str, bool]

# Of each layer, by the guards themselves.
_COMPARED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl", "__getattr__"})


def library_functions(
    ran: Mapping[types.CodeType, dict[str, Any]],
    naming: Iterable[types.CodeType],
    classes: Iterable[type],
) -> Iterator[Variable]:
    """Return where the functions are that code of packages has run or names.

    Args:
      ran: Code of packages that has run, with its globals.
      naming: Of it, that whose globals count.
      classes: Of the layers, of which the methods that ran count.
    """
    seen = set()
    for code in naming:
        table = ran[code]
        for name in globals_of(code):
            if isinstance(table.get(name), types.FunctionType) and (id(table), name) not in seen:
                seen.add((id(table), name))
                yield table, name, True
    for cls in {base for each in classes for base in each.__mro__}:
        for name, value in list(vars(cls).items()):
            is_function = isinstance(value, types.FunctionType) and name not in _COMPARED
            if is_function and value.__code__ in ran:
                yield cls, name, True

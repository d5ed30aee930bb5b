# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What Dynamo's guards shall compare of the constants that it finds, beyond what Python's ``==`` does."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

from ortrain.capture.constant_identity import SEQUENCES, identity_of

_NUMBERS = (int, float, complex)
_DICTIONARIES = (dict, collections.OrderedDict, collections.defaultdict)
# Tables of each layer, whose keys and order Dynamo compares by itself, or that they are empty.
_OF_LAYERS = (
    "_modules",
    "_parameters",
    "_buffers",
    "_hooks",
    "_hooks_with_kwargs",
    "_always_called",
)
_COMPARED = (str, bytes, type(None), *_NUMBERS, *SEQUENCES, slice, range)


@functools.cache
def tell_equal_values_apart(applies: Callable[[], bool]) -> None:
    """Let guards tell from each other the constants that are equal and give a forward something else to compute with.

    Those are 0.0 and -0.0, numbers of other types in tuples, lists and sets, and sets in another order; and
    dictionaries whose keys are others, of other types or in another order. Dynamo's own guards compare the type of the
    whole and ask ``==``; of dictionaries they look for keys one by one, and some ways to read one ask for none.

    Args:
      applies: Tells whether the guard that is being made shall.
    """
    from torch._dynamo.guards import GuardBuilder

    original = GuardBuilder.EQUALS_MATCH

    @functools.wraps(original)
    def compare(builder: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        original(builder, guard, *args, **kwargs)
        value = builder.get(guard)
        if applies() and _has_equals(value):
            known = identity_of(value)
            builder.get_guard_manager(guard).add_lambda_guard(
                lambda other: identity_of(other) == known,
                [f"{guard.name} is {value!r}, and not what is equal to it"],
                guard.user_stack,
            )

    GuardBuilder.EQUALS_MATCH = compare
    match_type = GuardBuilder.TYPE_MATCH

    @functools.wraps(match_type)
    def compare_keys(builder: Any, guard: Any, *args: Any, **kwargs: Any) -> None:
        match_type(builder, guard, *args, **kwargs)
        value = builder.get(guard)
        if not applies() or type(value) not in _DICTIONARIES or guard.name.endswith(_OF_LAYERS):
            return
        manager = builder.get_guard_manager(guard)
        if type(manager).__name__ == "DictGuardManager":  # which takes no function
            builder.guard_on_dict_keys_and_order(value, guard)
        else:
            told = [f"the keys of {guard.name} come in the same order"]
            manager.add_lambda_guard(_has_keys_of(value), told, guard.user_stack)

    GuardBuilder.TYPE_MATCH = compare_keys


def _has_keys_of(value: dict[Any, Any]) -> Callable[[dict[Any, Any]], bool]:
    """Return what tells whether a dictionary has the keys of another one, in its order."""
    ordered = collections.OrderedDict
    each = ordered.__iter__ if isinstance(value, ordered) else dict.__iter__
    known = [*each(value)]
    if all(type(key) is str for key in known):
        return lambda other: [*each(other)] == known
    kinds = [(type(key), identity_of(key)) for key in known]
    # Objects by what they are: their own __eq__ says nothing of what else they hold.
    objects = [None if isinstance(k, _COMPARED) else k for k in known]

    def has(other: dict[Any, Any]) -> bool:
        keys = [*each(other)]
        return len(keys) == len(known) and all(
            key is held if held is not None else (type(key), identity_of(key)) == kind
            for key, held, kind in zip(keys, objects, kinds, strict=True)
        )

    return has


def _has_equals(value: Any) -> bool:
    """Tell whether there is another constant of the same type that is equal to a constant."""
    if isinstance(value, (float, complex)):
        return 0.0 in (value.real, value.imag)
    if isinstance(value, (set, frozenset)):
        return bool(value)
    if isinstance(value, SEQUENCES):
        return any(isinstance(each, _NUMBERS) or _has_equals(each) for each in value)
    return isinstance(value, (slice, range))

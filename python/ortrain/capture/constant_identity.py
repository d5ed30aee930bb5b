# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What tells a constant from others that it is equal to: 0.0 and -0.0, 1 and True, sets in another order."""

from __future__ import annotations

from typing import Any

SEQUENCES = (tuple, list, set, frozenset)


def identity_of(value: Any) -> Any:
    """Return of a constant what differs for each that it is equal to; its type aside, but for items.

    Of numbers that can be hashed, and of what holds such, it can be, too.
    """
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return value.real.hex(), value.imag.hex()
    if isinstance(value, SEQUENCES):
        return tuple((type(each), identity_of(each)) for each in value)
    if isinstance(value, (slice, range)):
        return identity_of((value.start, value.stop, value.step))
    return value

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What tracing a module must neither take into the graph nor leave behind in the module."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ortrain.capture.errors import ChangingAttributeError, FirstCallError
from ortrain.capture.torch_internals import is_fake

_BAKED_IN = (bool, int, float, complex, str, type(None))
_HOOK_TABLES = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)


@contextlib.contextmanager
def without_root_hooks(module: nn.Module) -> Iterator[None]:
    """Keep the module's own hooks out of the graph; its wrapper runs them."""
    saved = {table: getattr(module, table) for table in _HOOK_TABLES}
    try:
        for table in _HOOK_TABLES:
            module.__dict__[table] = collections.OrderedDict()
        yield
    finally:
        module.__dict__.update(saved)


def _tensor_tables(part: nn.Module) -> tuple[Any, Any]:
    return part._parameters, part._buffers


@contextlib.contextmanager
def nothing_added(module: nn.Module) -> Iterator[None]:
    """Take out of the layers what tracing put into them, tensors without contents; refuse it then.

    A forward that makes layers or tensors at its first call does so in PyTorch; later calls find
    them there.
    """
    # By keys(): the tables of a scripted layer are no dictionaries.
    before = [
        (part.__dict__, set(part.__dict__), [(t, set(t.keys())) for t in _tensor_tables(part)])
        for part in module.modules()
    ]
    layers = [(part._modules, set(part._modules.keys())) for part in module.modules()]
    added: list[str] = []
    try:
        yield
    finally:
        for attributes, names, tables in before:
            for table, known in [*tables, (attributes, names)]:
                fake = {name for name in set(table.keys()) - known if is_fake(table[name])}
                for name in sorted(fake):
                    del table[name]
                    added.append(name)
        for table, known in layers:
            for name in sorted(set(table.keys()) - known):
                del table[name]
                added.append(name)
    if added:
        raise FirstCallError(
            f"its forward makes {', '.join(map(repr, added))} at its first call",
            module=type(module).__name__,
        )


def has_hooks(part: nn.Module, *, observers: bool = True) -> bool:
    """Tell whether a layer has hooks that run with its forward or backward.

    Those by which transformers and peft let gradients flow into an embedding count for nothing: a
    graph has the gradients that are asked for.

    Args:
      part: The layer.
      observers: Whether those count that say of themselves ``only_observes``.
    """
    return any(
        not _lets_gradients_flow(hook) and (observers or not getattr(hook, "only_observes", False))
        for table in _HOOK_TABLES
        for hook in (getattr(part, table, None) or {}).values()
    )


def _lets_gradients_flow(hook: Any) -> bool:
    return getattr(hook, "__name__", "").startswith("make_inputs_require_grad") and getattr(
        hook, "__module__", ""
    ).startswith(("transformers.", "peft."))


def scalars(module: nn.Module) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return path, attributes and a copy of the numbers, flags and names of each layer."""
    return [
        (path, part.__dict__, {k: v for k, v in part.__dict__.items() if type(v) in _BAKED_IN})
        for path, part in module.named_modules()
    ]


def refuse_changed_attributes(
    before: list[tuple[str, dict[str, Any], dict[str, Any]]], module: str
) -> None:
    """Set back what differs from earlier `scalars`, and refuse it."""
    changed: list[str] = []
    made: list[str] = []
    for path, attributes, values in before:
        for name, value in values.items():
            now = attributes.get(name)
            if now is not value and (type(now) is not type(value) or now != value):
                attributes[name] = value
                (made if value is None else changed).append(
                    f"'{path}.{name}'" if path else f"'{name}'"
                )
    if changed:
        raise ChangingAttributeError(
            f"its forward changes {', '.join(changed)}, which a graph would do only once",
            module=module,
        )
    if made:  # PyTorch's first call makes it; later ones find it there
        raise FirstCallError(
            f"its forward makes {', '.join(made)} at its first call", module=module
        )

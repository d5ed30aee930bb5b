# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A digest of what the guards of a captured graph compare, in the words of the guards themselves.

`_core.comparisons` takes the snapshots that a guard takes, and tells what each of them compares: nothing can be compared
that is not told. What is told and has no description raises Unkeyable.
"""

from __future__ import annotations

import collections
import threading
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.class_facts import Facet
from ortrain.capture.library_reads import Variable, is_of_library, is_plain
from ortrain.capture.names_read import OthersFunctions
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.source_files import is_installed, is_standard
from ortrain.capture.value_digest import (
    HASHES,
    Unkeyable,
    ValueDigest,
    gaps_of,
    has_its_name,
    is_array,
)

# That cached properties have; nobody can ask whether it is held.
_LOCK = type(threading.RLock())
Comparison = tuple[str, Any, int]


def variables_of(
    module: nn.Module,
    names: frozenset[str] | None,
    others: OthersFunctions = OthersFunctions(),  # noqa: B008
) -> list[Variable]:
    """Return what the guards of a graph compare outside of the module.

    Args:
      module: The module that it is a graph of.
      names: Of the attributes and variables that its forward may have read; None for all.
      others: Functions that have run and to which the module does not lead, and those of libraries.
    """
    reached = ReachableState(module, others.functions, keeps_contents=False)
    return [*reached.variables_named(names), *others.variables, *others.libraries]


def digest_of_compared(
    module: nn.Module,
    names: frozenset[str] | None,
    variables: Iterable[Variable],
    outside: Iterable[torch.Tensor],
) -> str:
    """Return a digest of what the guards of a graph compare at this moment.

    Args:
      module: The module that it is a graph of.
      names: Of the attributes and variables that its forward may have read; None for all.
      variables: Those of `variables_of`.
      outside: Tensors that it takes as inputs wherever they are held.

    Raises:
      Unkeyable: The guards compare something that has no description.
    """
    distinct = {(id(variable[0]), variable[1]): variable for variable in variables}
    inputs = list(outside)
    told = _core.comparisons(list(module.modules()), names, list(distinct.values()), inputs)
    return _ComparisonDigest(module, inputs).of(told)


class _ComparisonDigest(ValueDigest):
    """Describes comparisons; containers and objects by number, since their parts are told as well.

    Args:
      module: The module.
      inputs: Tensors of which the guards compare the kind alone.
    """

    def __init__(self, module: nn.Module, inputs: list[torch.Tensor]) -> None:
        super().__init__(module)
        self._inputs = {id(tensor): i for i, tensor in enumerate(inputs)}
        self._places: dict[int, int] = {}

    def of(self, told: list[Comparison]) -> str:
        """Return the digest of comparisons, in their order."""
        where, hash_follows = "", False
        for kind, value, number in told:
            self.token(kind, number)
            if kind == "name" and isinstance(value, str):
                where = f"'{value}'"
            if not hash_follows or kind != "equal":
                self._comparison(kind, value, number, where)
            hash_follows = kind == "name" and isinstance(value, str) and value in HASHES
        return self.digest()

    def _comparison(self, kind: str, value: Any, number: int, where: str) -> None:
        if kind in ("equal", "name", "key", "tensor"):
            self.add(value, where)
        elif kind == "layer":
            self.add(value, where)
            self._class(type(value))
        elif kind == "table":
            for name, held in value.items():
                self.token(name, self._layers.get(id(held), type(held).__name__))
        elif kind == "variable":
            self._owner(value, where)
        elif kind == "input":
            self.token(self._inputs[id(value)])
        elif kind == "stands":
            self._place(value)
            # Attributes of the first are told; the others grow by imports.
            is_set_of_classes = isinstance(value, set) and all(isinstance(v, type) for v in value)
            is_told = is_of_library(type(value)) or is_set_of_classes or type(value) is object
            if is_told:
                self._class(type(value))
            else:
                self.add(value, where)
        elif kind == "items":
            self._items(value, where)
        elif kind == "same":
            self._same(value, where)
        elif kind == "set":
            self._place(value)
            for item in value:  # in an order that code may see
                self.add(item, where)
        elif kind == "array":
            self._array(value, where)
        elif kind == "kind":
            self._kind(value)
        elif kind == "object" and number == 0:
            self._leaf(value, where)
        elif kind in ("object", "sequence", "made", "dictionary"):
            self.expect_told(value, where)
            self._place(value)
            self._class(type(value))
            self.add_plain(value)
        elif kind == "attributes":
            self._place(value)
        elif kind not in ("slot", "hooks", "end"):  # with hooks there is no graph to be found
            raise Unkeyable(f"{where} is compared as {kind}")

    def _place(self, value: Any) -> None:
        self.token(self._places.setdefault(id(value), len(self._places)))

    def _same(self, value: Any, where: str) -> None:
        """Describe what only has to be the same object: one that was told of, a layer, what has a name."""
        if id(value) in self._places:
            self._place(value)
        elif type(value).__module__.startswith("ortrain."):  # which say nothing about a graph
            self._class(type(value))
        elif _is_as_written(value):  # in sources that are looked at
            code = value.__code__
            self.token("function", value.__module__, value.__qualname__, code.co_filename)
            self.token(code.co_firstlineno, code.co_code.hex())
            if not is_standard(code.co_filename):
                self.add((value.__defaults__, value.__kwdefaults__), where)
        else:
            self.add(value, where)

    def _items(self, table: Any, where: str) -> None:
        self._place(table)
        self._class(type(table))
        if isinstance(table, (dict, types.MappingProxyType)):
            self._mapping(dict(table), where)
            if isinstance(table, collections.OrderedDict):
                self._sequence(collections.OrderedDict.__iter__(table), where)
        elif isinstance(table, (list, tuple, collections.deque)):
            self._sequence(table, where)
        elif isinstance(table, set):
            self._set(table, where)
        else:
            self.add(table, where)

    def _leaf(self, value: Any, where: str) -> None:
        if is_array(value):
            raise Unkeyable(f"{where} is an array whose contents are not compared")
        if isinstance(value, _LOCK):
            self._class(_LOCK)
        else:
            self.add(value, where)

    def _owner(self, owner: Any, where: str) -> None:
        if isinstance(owner, dict):
            self.token(owner.get("__name__"))
        elif isinstance(owner, type):
            self._class(owner)
        elif isinstance(owner, types.FunctionType):
            self.add(owner, where)
        elif isinstance(owner, Facet):
            self.add(owner.of, where)
        self._place(owner)

    def _kind(self, tensor: torch.Tensor | None) -> None:
        if tensor is None:
            self.token(None)
            return
        self._class(type(tensor))
        self.token(tensor.dtype, tuple(tensor.shape), tensor.device, tensor.layout)
        self.token(tensor.requires_grad, gaps_of(tensor))


def _is_as_written(value: Any) -> bool:
    """Tell whether a value is the function of an installed package that its sources define under its name."""
    if not isinstance(value, types.FunctionType) or value.__closure__:
        return False
    code = value.__code__
    name = getattr(code, "co_qualname", value.__qualname__)
    defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    return (
        name == value.__qualname__
        and is_installed(code.co_filename)
        and has_its_name(value)
        and (is_standard(code.co_filename) or all(map(is_plain, defaults)))
    )

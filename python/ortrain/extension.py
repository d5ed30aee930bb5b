# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators, gradients, conversions and rewrites of a program's own.

An operator with kernels comes from a shared library written against
``<ortrain/extension/extension.h>`` (`include_dir`, `load_library`). A conversion says which of
PyTorch's operators become it. Gradient rules and graph passes may be Python functions. All of it
holds for graphs that are captured afterwards; graphs on disk are neither read nor kept then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from ortrain import _core
from ortrain.capture import cache
from ortrain.capture.convert import registry
from ortrain.errors import FileError

Rule = TypeVar("Rule", bound=Callable[..., Any])
Stage = Literal["simplify", "fuse"]

__all__ = [
    "include_dir",
    "load_library",
    "register_conversion",
    "register_gradient",
    "register_pass",
    "unregister_pass",
]


def include_dir() -> Path:
    """Return the folder for a C++ compiler's ``-I``.

    Raises:
      FileError: The headers are not installed.
    """
    folder = Path(__file__).resolve().parent / "include"
    if not (folder / "ortrain" / "extension" / "extension.h").is_file():
        raise FileError(f"the headers for extensions are not in {folder}")
    return folder


def load_library(path: str | os.PathLike[str]) -> list[str]:
    """Load a shared library of operators and return their names, such as ``mylib::Square``.

    A library that is loaded already is not asked again.

    Raises:
      FileError: The file cannot be loaded.
      InvalidModelError: It is no library of operators, is of another version, or defines an
        operator wrongly or one that is there already. None of its operators are added then.
    """
    names: list[str] = _core.load_extension(os.fspath(path))
    cache.disable()
    return names


def register_gradient(name: str, *, replace: bool = False) -> Callable[[Rule], Rule]:
    """Make a function the gradient rule of an operator.

    The function gets a builder ``g`` and returns one gradient per input of the node, None where
    there is none; one alone may come without a list. ``g.input(i)``, ``g.output(i)`` and
    ``g.output_grad(i)`` are values of the graph (None where absent) that take part in arithmetic;
    ``g.attributes`` has the attributes, ``g.needs_grad(i)`` tells what is wanted, and
    ``g.op("Mul", a, b, domain="", outputs=1, **attributes)`` adds a node.

    Args:
      name: The operator, ``Softplus`` or ``mylib::Square``.
      replace: The operator may have a rule already.

    Raises:
      UnsupportedError: There is no such operator.
      InvalidModelError: It has a rule already, or no gradient by definition.
    """
    domain, _, op = name.rpartition("::")

    def register(rule: Rule) -> Rule:
        _core.register_gradient(domain, op, rule, replace)
        cache.disable()
        return rule

    return register


def register_conversion(*targets: str) -> Callable[[Rule], Rule]:
    """Make a function the conversion of operators of PyTorch, such as ``mylib::square.default``.

    The function gets an emitter ``g`` and the operator's arguments, tensors among them with
    ``value``, ``dtype`` and ``shape``. It adds nodes by ``g.node("Square", x, domain="mylib")`` and
    returns a value, or a tuple of them: ``g.nodes`` adds one with several outputs.
    ``raise g.unsupported("reason")`` leaves a call to PyTorch.

    Args:
      targets: With namespace and overload; an operator without overloads has ``default``.

    Raises:
      ValueError: A target is not written so, or has a conversion.
    """
    names = []
    for target in targets:
        found = re.fullmatch(r"(\w+)::(\w+)\.(\w+)", target)
        if found is None:
            raise ValueError(f"'{target}' is not of the form namespace::operator.overload")
        names.append(".".join(found.groups()))
    known = set(registry.targets())
    for name in names:
        if name in known:
            raise ValueError(f"{name} has a conversion already")

    def register(conversion: Rule) -> Rule:
        registry.converts(*names)(conversion)
        cache.disable()
        return conversion

    return register


def register_pass(
    name: str, *, stage: Stage = "simplify", summary: str = ""
) -> Callable[[Rule], Rule]:
    """Make a function a rewrite of graphs.

    The function gets an editor ``graph`` and returns whether it changed anything.
    ``graph.nodes()`` has the nodes in order, each with ``op``, ``domain``, ``layer``, ``inputs``,
    ``outputs``, ``attributes`` and ``is_backward``; a value has ``dtype``, ``shape``, ``constant``
    and ``producer``, and takes part in arithmetic. ``graph.at(node)`` gives the layer and phase of
    a node to those added next, ``graph.op(...)`` adds one, ``graph.replace(value, by)`` lets all
    readers of a value read another. What nobody reads is removed afterwards, and the graph is
    verified: a wrong one raises, with the name of the pass.

    Args:
      name: Also its name in ORTRAIN_DISABLE_PASSES.
      stage: ``simplify``, on the forward alone, after the engine's own simplifications, or
        ``fuse``, on forward and backward together, before the engine's fusions.
      summary: One sentence.

    Raises:
      InvalidModelError: There is a pass of this name, or no such stage.
    """

    def register(function: Rule) -> Rule:
        _core.add_pass(stage, name, summary, function)
        cache.disable()
        return function

    return register


def unregister_pass(name: str) -> None:
    """Remove a pass that `register_pass` added.

    Raises:
      KeyError: There is none.
    """
    if not _core.remove_pass(name):
        raise KeyError(name)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a program of ``onnxruntime.training`` or Optimum's trainer has to change: ``ortrain migrate``."""

from __future__ import annotations

import ast
from typing import NamedTuple

from ortrain import legacy


class Change(NamedTuple):
    """A name in a program that is another one here.

    Attributes:
      line: Where it stands, from 1.
      name: The ancestor's, whole.
      ours: What stands in its place; empty where nothing does.
      note: What is different, or why there is nothing.
    """

    line: int
    name: str
    ours: str
    note: str

    def __str__(self) -> str:
        if not self.ours:
            return f"{self.name}: nothing stands in its place; {self.note}"
        return f"{self.name} -> {self.ours}" + (f" ({self.note})" if self.note else "")


def changes(source: str, file: str = "<program>") -> list[Change]:
    """Return what a program names of the ancestor's, in the order of its lines.

    Args:
      source: The program's text.
      file: Its name, for errors.

    Raises:
      SyntaxError: It is no Python program.
    """
    finder = _Finder()
    finder.visit(ast.parse(source, file))
    return sorted(set(finder.found))


class _Finder(ast.NodeVisitor):
    """Follows names from their imports to where attributes of modules are taken."""

    def __init__(self) -> None:
        self.found: list[Change] = []
        self._whole: dict[str, str] = {}

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            bound = each.asname or each.name.partition(".")[0]
            self._whole[bound] = each.name if each.asname else bound
            if legacy.is_below_roots(each.name):
                self._tell(node.lineno, each.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for each in node.names:
            if each.name == "*" and legacy.is_below_roots(node.module):
                note = "import by name what is used"
                self.found.append(Change(node.lineno, f"{node.module}.*", "", note))
                continue
            name = f"{node.module}.{each.name}"
            self._whole[each.asname or each.name] = name
            if legacy.is_below_roots(name):
                self._tell(node.lineno, name)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        names: list[str] = []
        inner: ast.expr = node
        while isinstance(inner, ast.Attribute):
            names.append(inner.attr)
            inner = inner.value
        if not isinstance(inner, ast.Name) or inner.id not in self._whole:
            self.generic_visit(node)
            return
        # The longest name that the table has; what follows are attributes of the object.
        parts = [self._whole[inner.id], *reversed(names)]
        for end in range(len(parts), 1, -1):
            name = ".".join(parts[:end])
            if legacy.find_exactly(name) is not None:
                self._tell(node.lineno, name)
                return
        name = ".".join(parts)
        if legacy.is_below_roots(name) and legacy.find(name) is None:
            self._tell(node.lineno, name)

    def _tell(self, line: int, name: str) -> None:
        known = legacy.find(name)
        if known is not None:
            rest = name.removeprefix(known.name) if known.ours else ""
            self.found.append(Change(line, name, known.ours + rest, known.note))
            return
        home = legacy.home_of(name)
        if home:
            self.found.append(Change(line, name, home, ""))
        elif name not in legacy.ROOTS:
            note = "no public name of training that is known here"
            self.found.append(Change(line, name, "", note))

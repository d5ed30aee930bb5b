# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators without a conversion, taken apart as PyTorch does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ortrain.capture import operator_internals
from ortrain.capture.composite_operators import run_decompositions


def decompose_unknown(
    program: torch.export.ExportedProgram, known: Callable[[Any], bool]
) -> torch.export.ExportedProgram:
    """Replace operators that have no conversion by simpler ones, as far as PyTorch knows how.

    Composite operators come apart exactly as they do in eager PyTorch, so their gradient stays.
    Others stay whole where their parts would have no conversion either.
    """
    whole: set[str] = set()  # by name: a trace may hold copies of operators

    def has_place(target: Any) -> bool:
        return str(target) in whole or known(target)

    while True:
        result = _decomposed(program, has_place)
        # Parts without conversion tell which operator they came from.
        left = [node for node in _needed(result.graph) if not has_place(node.target)]
        origins = [node.meta.get("original_aten") for node in left]
        names = {
            str(op)
            for op in origins
            if operator_internals.is_escapable(op) and not operator_internals.is_composite(op)
        } - whole
        if not names:
            return result
        whole |= names


def _needed(graph: fx.Graph) -> list[fx.Node]:
    """Return the operators that an output depends on."""
    pending = [node for node in graph.nodes if node.op == "output"]
    seen = set(pending)
    while pending:
        for node in pending.pop().all_input_nodes:
            if node not in seen:
                seen.add(node)
                pending.append(node)
    return [node for node in graph.nodes if node in seen and node.op == "call_function"]


def _decomposed(
    program: torch.export.ExportedProgram, known: Callable[[Any], bool]
) -> torch.export.ExportedProgram:
    refused: set[Any] = set()
    for _ in range(8):
        table = {}
        for node in program.graph.nodes:
            target = node.target
            if node.op != "call_function" or target in refused or known(target):
                continue
            function = operator_internals.decomposition(target)
            if function is None:
                refused.add(target)
            else:
                table[target] = function
        if not table:
            break
        refused.update(table)
        program = run_decompositions(program, table)
    return program

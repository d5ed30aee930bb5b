# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators without a conversion, taken apart as PyTorch does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ortrain.capture import torch_internals as internals


def decompose_unknown(
    program: torch.export.ExportedProgram, known: Callable[[Any], bool]
) -> torch.export.ExportedProgram:
    """Replace operators that have no conversion by simpler ones, as far as PyTorch knows how.

    Composite operators come apart exactly as they do in eager PyTorch, so their gradient stays.
    """
    refused: set[Any] = set()
    for _ in range(8):
        table = {}
        for node in program.graph.nodes:
            target = node.target
            if node.op != "call_function" or target in refused or known(target):
                continue
            function = internals.decomposition(target)
            if function is None:
                refused.add(target)
            else:
                table[target] = function
        if not table:
            break
        refused.update(table)
        program = program.run_decompositions(table)
    return program

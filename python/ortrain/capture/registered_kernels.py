# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Kernels that Python code gives to operators, and may take back: ``torch.library``.

A graph computes what PyTorch's own operators mean, and holds those that operators of others are made of.
"""

from __future__ import annotations

from typing import Any

import torch

from ortrain.capture.trace_internals import nodes_of

# Operators of these give results, draw from PyTorch's generators, and do nothing else.
_WITHOUT_EFFECTS = frozenset(["aten", "prims", "torchvision"])
# By which keys a call on the CPU comes to a kernel. On GPUs PyTorch itself registers some in Python, for the same values.
_OF_CALLS = frozenset(
    [
        *("CPU", "Autograd", "AutogradCPU", "AutocastCPU", "ADInplaceOrView", "Functionalize"),
        "CompositeImplicitAutograd",
        "CompositeExplicitAutograd",
        "CompositeExplicitAutogradNonFunctional",
        *("Python", "BackendSelect", "PythonDispatcher"),
    ]
)
# How many kernels there were at the last look, and what it found.
_seen: tuple[int, str] = (-1, "")


def replaced_operator() -> str:
    """Return an operator of PyTorch's own, with a key, for which Python code has registered a kernel; "" for none.

    All kernels are looked at when there are more or fewer of them than at the last look.
    """
    global _seen
    kernels: set[str] = torch.library._impls
    if len(kernels) != _seen[0]:
        found = (kernel for kernel in kernels.copy() if kernel.startswith("aten/"))
        replaced = [name for name in found if name.rpartition("/")[2] in _OF_CALLS]
        _seen = len(kernels), min(replaced, default="")
    return _seen[1]


def calls_operators_of_others(program: torch.export.ExportedProgram) -> bool:
    """Tell whether a program calls operators of which only their authors know what they do beside their results."""
    return any(
        isinstance(node.target, torch._ops.OpOverload)
        and node.target.namespace not in _WITHOUT_EFFECTS
        for node in nodes_of(program)
    )


def is_made_of_others(op: Any) -> bool:
    """Tell whether an operator of others than PyTorch computes by Python code that calls further operators."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace == "aten":
        return False
    name = op.name().replace("::", "/")
    return f"{name}/CompositeImplicitAutograd" in torch.library._impls

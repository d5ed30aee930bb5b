# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch knows of its operators: kernels, rules of autocast, decompositions, random numbers.

As in `torch_internals`, a release of PyTorch that moves one of these names is met here. Checked
against 2.11 to 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ortrain.capture.recurrent_cells import CELLS
from ortrain.capture.recurrent_internals import written_out
from ortrain.capture.registered_kernels import is_made_of_others


@functools.cache
def _decomposition_table() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    return dict(decomposition_table)


def has_kernels(op: torch._ops.OpOverload) -> bool:
    """Tell whether an operator is one of the dispatcher's, and not a question that tracing puts to tensors."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Tell whether eager PyTorch itself differentiates ``op`` through the operators inside it."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


# Composite, with parts that autocast casts, while it does not know them. Convolutions with a padding
# in words are known to autocast on the CPU alone.
_HIDE_AUTOCAST = frozenset(
    f"aten::{name}" for name in ("inner", "nll_loss_nd", "pad", "conv1d", "conv2d", "conv3d")
)


# Composite, with parts that CUDA's autocast runs in float32, while it does not know them.
_HIDE_FLOAT_ON_CUDA = frozenset(
    f"aten::{name}"
    for name in (
        "cross_entropy_loss",
        "square",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
    )
)


def knows_autocast(op: torch._ops.OpOverload, device: str) -> bool:
    """Tell whether the autocast of a type of devices ("cpu", "cuda") has a rule for ``op``."""
    key = "AutocastCUDA" if device == "cuda" else "AutocastCPU"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def hides_float(op: Any, device: str) -> bool:
    """Tell whether autocast runs all parts of ``op`` in float32 that it knows, and not ``op``."""
    return (
        device == "cuda"
        and isinstance(op, torch._ops.OpOverload)
        and op.name().partition(".")[0] in _HIDE_FLOAT_ON_CUDA
        and not knows_autocast(op, device)
    )


def loses_autocast(op: Any, known: Callable[[Any], bool], device: str) -> bool:
    """Tell whether autocast acts on the parts of ``op`` alone, and it has to come apart for that."""
    if not isinstance(op, torch._ops.OpOverload) or not is_composite(op):
        return False
    if knows_autocast(op, device):
        return False
    return op.name().partition(".")[0] in _HIDE_AUTOCAST or not known(op)


# Whole, their gradient is right where their parts' is NaN, or they check what they computed, which
# an export could only order by tokens.
_KEPT_WHOLE = frozenset(
    f"aten::{name}"
    for name in (
        "special_log_ndtr",
        "special_entr",
        *(f"special_xlog1py{kind}" for kind in ("", ".other_scalar", ".self_scalar")),
        *(f"xlogy.{kind}" for kind in ("Tensor", "Scalar_Other", "Scalar_Self")),
        # Exact at powers, and where 1 - erf(x) has no digits left.
        *("erfc", "log10", "log2"),
        "linalg_cholesky",
        "linalg_inv",
        "linalg_ldl_factor",
        "linalg_lu_factor",
        "linalg_solve",
        # What PyTorch writes it out as counts padding as a target.
        "multilabel_margin_loss",
        "multilabel_margin_loss_forward",
        # There a negative index counts from the end.
        "max_unpool2d",
        "max_unpool3d",
    )
)


def _embedding_bag(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten._embedding_bag.default(*args, **kwargs)


# What eager PyTorch calls in the place of an operator when nothing wants a gradient has none.
_WITH_GRADIENT = {"aten::_embedding_bag_forward_only": _embedding_bag}


def decomposition(op: Any) -> Callable[..., Any] | None:
    """Return a function that computes ``op`` by simpler operators, or None."""
    if not isinstance(op, torch._ops.OpOverload) or op.name() in _KEPT_WHOLE:
        return None
    if is_made_of_others(op):
        return None  # of which may be others later
    if moves_generator(op) and not is_composite(op):
        return None  # what it is made of draws other numbers
    if op in CELLS:
        return CELLS[op]
    if is_composite(op):
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        kernel = op.py_kernels.get(key)
        if kernel is not None and not isinstance(kernel, torch._C.DispatchKey):
            return written_out.get(op, kernel)
        # Not op.decompose: the export registers this function as the operator's kernel, so that
        # would call itself.
        return functools.partial(op._op_dk, key)
    return _WITH_GRADIENT.get(op.name()) or _decomposition_table().get(op)


def higher_order_name(target: Any) -> str:
    """Return the name of an operator that takes graphs (cond, while_loop); empty for others."""
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""


_OF_STRIDES = frozenset(
    f"aten::{name}"
    for name in ("as_strided_copy", "as_strided_scatter", "resize", "resize_as", "set")
)


def is_escapable(op: Any) -> bool:
    """Tell whether ``op`` can run in PyTorch as one node: from tensors to tensors, no writes."""
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace != "prims"  # those have no gradient
        and op.name() not in _WITH_GRADIENT
        and not op._schema.is_mutable
        # Views depend on strides, which tensors of a graph do not have.
        and all(r.alias_info is None for r in op._schema.returns)
        and op.name().partition(".")[0] not in _OF_STRIDES
        and bool(op._schema.returns)
        and all("Tensor" in str(r.type) for r in op._schema.returns)
    )


def has_dense_gradients(node: torch.fx.Node) -> bool:
    """Tell whether the gradients of an operator have the layout of its arguments."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return not given.get("sparse", False)


def draws_random_numbers(op: Any) -> bool:
    """Tell whether an operator may read PyTorch's generator; of others than its own nobody knows."""
    return op.namespace != "aten" or moves_generator(op)


def moves_generator(op: Any) -> bool:
    """Tell whether an operator is known to draw from PyTorch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())

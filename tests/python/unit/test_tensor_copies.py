# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies of arguments: what is asked of them, and what is written to them, is as with the originals."""

from __future__ import annotations

import random

import pytest
import torch

from ortrain.capture.signature import has_gaps
from ortrain.tensor_copies import copies_of, named_copies, widened

DTYPES = (torch.float32, torch.int64, torch.bool, torch.complex64, torch.bfloat16)


def a_view(draw: random.Random, base: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor by up to four steps that are drawn."""
    view = base
    for _ in range(draw.randrange(5)):
        axis = draw.randrange(max(view.dim(), 1))
        step = draw.choice(
            ["slice", "skip", "turn", "widen", "window", "select", "imag", "conj", "bits"]
        )
        size = view.shape[axis] if view.dim() else 0
        if step == "slice" and size:
            begin = draw.randrange(size)
            view = view.narrow(axis, begin, draw.randint(0 if begin else 1, size - begin))
        elif step == "skip" and size:
            view = view.unflatten(axis, (1, size)).select(axis, 0)
            view = view[(slice(None),) * axis + (slice(None, None, draw.choice((2, 3))),)]
        elif step == "turn" and view.dim() > 1:
            view = view.transpose(axis, draw.randrange(view.dim()))
        elif step == "widen" and view.dim() < 4:
            view = view.unsqueeze(axis).expand(*view.shape[:axis], 3, *view.shape[axis:])
        elif step == "window" and size > 2 and view.dim() < 4:
            view = view.unfold(axis, 2, 1)
        elif step == "select" and size and view.dim() > 1:
            view = view.select(axis, draw.randrange(size))
        elif step == "imag" and view.is_complex():
            view = view.imag
        elif step == "conj" and view.is_complex():
            view = view.conj()
        elif step == "bits" and view.dtype == torch.float32:
            view = view.view(torch.int32)
    return view


def a_base(draw: random.Random) -> torch.Tensor:
    shape = [draw.randint(1, 5) for _ in range(draw.randint(1, 3))]
    dtype = draw.choice(DTYPES)
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) + 3
    return values.to(dtype) * (1j if dtype.is_complex else 1)


def what_is_asked(tensor: torch.Tensor) -> tuple[object, ...]:
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.is_contiguous(),
        tensor.is_neg(),
        tensor.is_conj(),
        tensor.data_ptr() % 64,
    )


@pytest.mark.parametrize("seed", range(200))
def test_copies_lie_as_their_originals(seed: int) -> None:
    draw = random.Random(seed)
    bases = [a_base(draw) for _ in range(2)]
    tensors = [a_view(draw, draw.choice(bases)) for _ in range(4)]
    tensors.append(tensors[draw.randrange(4)])
    copies = copies_of(tensors)
    before = [tensor.clone() for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        assert what_is_asked(copy) == what_is_asked(tensor)
        assert torch.equal(copy, tensor)
        own = copy.untyped_storage().data_ptr()
        assert all(own != base.untyped_storage().data_ptr() or not own for base in bases)
    assert copies[-1] is copies[next(i for i, t in enumerate(tensors) if t is tensors[-1])]

    # Writes to copies are seen by the same copies as by originals, and by no original.
    written = draw.randrange(4)
    _write(copies[written])
    assert all(map(torch.equal, tensors, before))
    _write(tensors[written])
    assert all(map(torch.equal, copies, tensors))


def _write(tensor: torch.Tensor) -> None:
    """Write to the first element, which may be several of an expanded tensor."""
    if tensor.numel():
        first = tensor[(0,) * tensor.dim()]
        first.copy_(~first if tensor.dtype == torch.bool else first + 1)


@pytest.mark.parametrize("seed", range(40))
def test_wide_copies_lie_as_their_originals(seed: int) -> None:
    draw = random.Random(seed)
    tensor = a_view(draw, torch.randn(4, 3, 5))
    if tensor.is_floating_point():
        wide = widened(tensor)
        assert wide.stride() == tensor.stride()
        assert torch.equal(wide, tensor.double())


@pytest.mark.parametrize("kind", ["columns", "turned", "rows", "conjugate", "windows"])
def test_gaps_that_take_far_more_than_elements_become_narrow(kind: str) -> None:
    table = torch.randn(3000, 1000, dtype=torch.complex64 if kind == "conjugate" else torch.float32)
    tensor = {
        "columns": lambda: table[:, 4:8],
        "turned": lambda: table[:, 4:8].t(),
        "rows": lambda: table[::500],
        "conjugate": lambda: table[:, 4:8].conj(),
        "windows": lambda: table[:, 4:8].unfold(1, 2, 1),
    }[kind]()
    copy = copies_of([tensor])[0]
    assert torch.equal(copy, tensor) and copy.is_conj() == tensor.is_conj()
    assert copy.untyped_storage().nbytes() < 4 * tensor.nbytes + (1 << 20)
    assert has_gaps(tensor) and has_gaps(copy)
    order = sorted(range(tensor.dim()), key=tensor.stride)
    assert order == sorted(range(tensor.dim()), key=copy.stride)


def test_what_has_no_strides_is_cloned() -> None:
    sparse = torch.eye(3).to_sparse()
    zero = torch._efficientzerotensor((2, 3))
    freed = torch.ones(2)[:0]
    given = {"sparse": sparse, "zero": zero, "none": freed}
    copies = named_copies(given)
    assert list(copies) == list(given)
    torch.testing.assert_close(copies["sparse"].to_dense(), torch.eye(3))
    torch.testing.assert_close(copies["zero"] + 1, torch.ones(2, 3))
    assert copies["none"].shape == (0,)


def test_copies_have_no_history() -> None:
    leaf = torch.ones(3, requires_grad=True)
    alone, made = copies_of([leaf, leaf * 2])
    assert alone.is_leaf and made.is_leaf and not alone.requires_grad and not made.requires_grad
    with torch.inference_mode():
        inference = torch.ones(3)
    assert not copies_of([inference])[0].is_inference()

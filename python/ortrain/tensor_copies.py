# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies of tensors that a run may write to, and ask anything of, in place of the tensors themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ortrain.overlap import bounds_of

# What PyTorch's allocators align memory to, in bytes: a copy lies as far behind such a place as its original.
_ALIGNMENT = 64
# Memory that a copy may take for its gaps, by that of its elements; and bytes that do not matter.
_MOST_GAPS = 4
_FEW_BYTES = 1 << 20


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies without history, which lie in memory as the tensors do.

    They have the orders and gaps of the originals, their expanded axes and windows, and the conjugate and negative
    bits; where two lie in the same bytes their copies do; and of one tensor there is one copy. Offsets in storages
    are others, and so are strides of a tensor by itself whose gaps take far more memory than its elements: these become one
    element wide. Of tensors that are not strided, or of a subclass, there are clones.

    Args:
      tensors: Of any types, shapes and devices.
    """
    made: dict[int, torch.Tensor] = {}
    strided = []
    with torch.no_grad():
        for tensor in {id(t): t for t in tensors}.values():
            if _is_plain(tensor):
                strided.append(tensor)
            else:
                made[id(tensor)] = tensor.detach().clone()
        for begin, end, group in _in_common_bytes(strided):
            if len(group) == 1 and end - begin > _MOST_GAPS * group[0].nbytes + _FEW_BYTES:
                made[id(group[0])] = _copied_closer(group[0])
                continue
            begin -= begin % _ALIGNMENT
            storage = torch.UntypedStorage(end - begin, device=group[0].device)
            for tensor in group:
                made[id(tensor)] = _copy_into(storage, begin, tensor)
    return [made[id(tensor)] for tensor in tensors]


def named_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `copies_of` tensors by the same names."""
    return dict(zip(tensors, copies_of(list(tensors.values())), strict=True))


def widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in float64, without history, in a memory of its own with the tensor's order and gaps."""
    with torch.no_grad():
        if not _is_plain(tensor):
            return tensor.detach().double()
        shape, strides = tensor.shape, tensor.stride()
        wide = torch.empty_strided(shape, strides, dtype=torch.float64, device=tensor.device)
        _each_once(wide).copy_(_each_once(tensor.detach()))
        return wide


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor._is_zerotensor()
        and (tensor.numel() == 0 or bounds_of(tensor) is not None)
    )


def _in_common_bytes(
    tensors: Iterable[torch.Tensor],
) -> Iterator[tuple[int, int, list[torch.Tensor]]]:
    """Yield tensors whose bytes, with those in their gaps, overlap; each time with the first address and the end."""
    group: list[torch.Tensor] = []
    begin = end = 0
    found = [(str(tensor.device), bounds_of(tensor) or (0, 0), tensor) for tensor in tensors]
    for _, (first, behind), tensor in sorted(found, key=lambda each: each[:2]):
        if group and (first >= end or tensor.device != group[0].device):
            yield begin, end, group
            group = []
        if not group:
            begin = end = first
        end = max(end, behind)
        group.append(tensor)
    if group:
        yield begin, end, group


def _copied_closer(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the order of the tensor's axes, and gaps where it has some, of one element each."""
    strides = list(tensor.stride())
    wide = [axis for axis, size in enumerate(tensor.shape) if size > 1 and strides[axis] > 0]
    dense = closer = 1
    for axis in sorted(wide, key=lambda each: strides[each]):
        stride = strides[axis]
        strides[axis] = closer if stride == dense else closer + 1
        dense, closer = stride * tensor.shape[axis], strides[axis] * tensor.shape[axis]
    raw, bits = _without_bits(tensor)
    made = torch.empty_strided(raw.shape, strides, dtype=raw.dtype, device=raw.device)
    _each_once(made).copy_(_each_once(raw))
    return bits(made)


def _copy_into(storage: torch.UntypedStorage, begin: int, tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in memory that stands for that from an address on."""
    raw, bits = _without_bits(tensor)
    offset = (raw.data_ptr() - begin) // raw.element_size() if raw.numel() else 0
    made = torch.empty(0, dtype=raw.dtype, device=raw.device)
    made.set_(storage, offset, raw.shape, raw.stride())
    _each_once(made).copy_(_each_once(raw))
    return bits(made)


def _without_bits(
    tensor: torch.Tensor,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Return a tensor as it lies in memory, and what gives another one its conjugate and negative bits."""
    raw = tensor.detach()
    if negative := raw.is_neg():
        raw = torch._neg_view(raw)
    if conjugate := raw.is_conj():
        raw = raw.conj()

    def bits(made: torch.Tensor) -> torch.Tensor:
        if conjugate:
            made = made.conj()
        return torch._neg_view(made) if negative else made

    return raw, bits


def _each_once(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with one element of each expanded axis."""
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor

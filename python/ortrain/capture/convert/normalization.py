# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Layer, group, batch and RMS normalization."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ortrain.capture.builder import Value
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.registry import converts
from ortrain.capture.convert.sizes import Size
from ortrain.capture.dtypes import LOW_PRECISION, onnx_code


def _stash_type(dtype: torch.dtype) -> int:
    """Return the code of the dtype in which statistics are computed."""
    return onnx_code(torch.float64 if dtype is torch.float64 else torch.float32)


def _refuse_other_types(e: Emitter, x: Tensor, *others: Tensor | None) -> None:
    """Leave to PyTorch what it raises for: its kernels take float32 beside 16 bits, or one type."""
    types = {other.dtype for other in others if other is not None}
    beside = {torch.float32} if x.dtype in LOW_PRECISION else set()
    if types and types not in ({x.dtype}, beside):
        names = ", ".join(sorted(map(str, types)))
        raise e.unsupported(f"weights or statistics of type {names} for an input of {x.dtype}")


def _layer_norm(
    e: Emitter,
    x: Tensor,
    normalized_shape: Sequence[Size],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Value, ...]:
    _refuse_other_types(e, x, weight, bias)
    scale = e.full(normalized_shape, 1, x.dtype) if weight is None else e.cast(weight, x.dtype)
    shift = None if bias is None else e.cast(bias, x.dtype)
    return e.nodes(
        "LayerNormalization",
        3,
        x,
        scale,
        shift,
        axis=-len(normalized_shape),
        epsilon=float(eps),
        stash_type=_stash_type(x.dtype),
    )


@converts("aten.layer_norm.default")
def layer_norm(
    e: Emitter,
    x: Tensor,
    normalized_shape: Sequence[Size],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    cudnn_enable: bool = True,
) -> Value:
    del cudnn_enable
    return _layer_norm(e, x, normalized_shape, weight, bias, eps)[0]


@converts("aten.native_layer_norm.default")
def native_layer_norm(
    e: Emitter,
    x: Tensor,
    normalized_shape: Sequence[Size],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Value, ...]:
    result, mean, deviation = _layer_norm(e, x, normalized_shape, weight, bias, eps)
    if e.uses_result(1) or e.uses_result(2):
        stash = torch.float64 if x.dtype is torch.float64 else torch.float32
        if stash is not x.dtype:
            raise e.unsupported(f"the statistics of a {x.dtype} tensor")
    else:
        return result, None, None  # type: ignore[return-value]
    return result, mean, deviation


@converts("aten.rms_norm.default")
def rms_norm(
    e: Emitter,
    x: Tensor,
    normalized_shape: Sequence[Size],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Value:
    scale = e.full(normalized_shape, 1, x.dtype) if weight is None else e.cast(weight, x.dtype)
    # PyTorch takes the epsilon of the dtype in which it computes.
    work = torch.float64 if x.dtype is torch.float64 else torch.float32
    epsilon = torch.finfo(work).eps if eps is None else eps
    return e.node(
        "RMSNormalization",
        x,
        scale,
        axis=-len(normalized_shape),
        epsilon=float(epsilon),
        stash_type=_stash_type(x.dtype),
    )


@converts("aten.group_norm.default")
def group_norm(
    e: Emitter,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    cudnn_enabled: bool = True,
) -> Value:
    del cudnn_enabled
    _refuse_other_types(e, x, weight, bias)
    channels = x.shape[1]
    scale = e.full([channels], 1, x.dtype) if weight is None else e.cast(weight, x.dtype)
    shift = e.full([channels], 0, x.dtype) if bias is None else e.cast(bias, x.dtype)
    return e.node(
        "GroupNormalization",
        x,
        scale,
        shift,
        num_groups=int(num_groups),
        epsilon=float(eps),
        stash_type=_stash_type(x.dtype),
    )


@converts("aten.native_group_norm.default")
def native_group_norm(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: Size,
    C: Size,
    HxW: Size,
    group: int,
    eps: float,
) -> tuple[Value, None, None]:
    del N, C, HxW
    if e.uses_result(1) or e.uses_result(2):
        raise e.unsupported("the statistics are used")
    return group_norm(e, x, group, weight, bias, eps), None, None


def _batch_norm_training(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | Value,
    var: Tensor | Value,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Return y, new mean, new variance, mean and inverse deviation of the batch."""
    return e.nodes(
        "BatchNormTraining",
        5,
        x,
        weight,
        bias,
        mean,
        var,
        epsilon=float(eps),
        momentum=float(momentum),
        domain="ortrain",
    )


def _by_batch_alone(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Return y, mean and inverse deviation of the batch; running statistics are made up, and dropped."""
    channels, dtype = [x.shape[1]], x.dtype if weight is None else weight.dtype
    mean, var = e.full(channels, 0, dtype), e.full(channels, 1, dtype)
    y, _, _, *statistics = _batch_norm_training(e, x, weight, bias, mean, var, momentum, eps)
    return y, *statistics


def _batch_norm_inference(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    var: Tensor,
    eps: float,
) -> Value:
    """Scale and shift by fixed statistics, in their dtype."""
    channel = list(range(1, x.rank - 1))  # axes after the channel, in a [C] tensor
    work = e.common_dtype(x, mean)

    def wide(t: Tensor | Value) -> Value:
        return e.unsqueeze(e.cast(t, work), channel)

    deviation = e.node("Sqrt", e.node("Add", e.cast(var, work), e.scalar(eps, work)))
    factor = e.node("Reciprocal", deviation)
    if weight is not None:
        factor = e.node("Mul", factor, e.cast(weight, work))
    result = e.node("Mul", e.node("Sub", e.cast(x, work), wide(mean)), wide(factor))
    if bias is not None:
        result = e.node("Add", result, wide(bias))
    return e.cast(result, x.dtype)


def _in_types_of_trace(e: Emitter, first: int, *statistics: Value) -> tuple[Value | None, ...]:
    """Return results from the ``first`` on as PyTorch has them, None for those that nobody uses.

    Statistics of a batch in 16 bits have its type on the CPU and are wider on other devices.
    """
    return tuple(
        # PyTorch differentiates by the first result alone.
        e.cast(e.node("StopGradient", value, domain="ortrain"), e.traced[index].dtype)
        if e.uses_result(index)
        else None
        for index, value in enumerate(statistics, first)
    )


def _no_statistics(e: Emitter, x: Tensor) -> tuple[Value | None, ...]:
    """Return the statistics of a batch that is normalized by others: nothing on the CPU."""
    used = [index for index in (1, 2) if e.uses_result(index)]
    if any(tuple(e.traced[index].shape) != (0,) for index in used):
        raise e.unsupported("the statistics are used")
    return tuple(e.full([0], 0, x.dtype) if index in used else None for index in (1, 2))


@converts("aten._native_batch_norm_legit_functional.default")
def batch_norm_functional(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    _refuse_other_types(e, x, weight, bias, running_mean, running_var)
    if not training:
        result = _batch_norm_inference(e, x, weight, bias, running_mean, running_var, eps)
        kept = (
            e.cast(running_mean, e.traced[3].dtype),
            e.cast(running_var, e.traced[4].dtype),
        )
        return result, *_no_statistics(e, x), *kept
    y, new_mean, new_var, mean, deviation = _batch_norm_training(
        e, x, weight, bias, running_mean, running_var, momentum, eps
    )
    return y, *_in_types_of_trace(e, 1, mean, deviation, new_mean, new_var)


@converts("aten._native_batch_norm_legit.no_stats")
def batch_norm_no_stats(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    del training
    _refuse_other_types(e, x, weight, bias)
    y, mean, deviation = _by_batch_alone(e, x, weight, bias, momentum, eps)
    return y, *_in_types_of_trace(e, 1, mean, deviation)


@converts("aten._native_batch_norm_legit_no_training.default")
def batch_norm_no_training(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Value | None, ...]:
    del momentum
    _refuse_other_types(e, x, weight, bias, running_mean, running_var)
    result = _batch_norm_inference(e, x, weight, bias, running_mean, running_var, eps)
    return result, *_no_statistics(e, x)


@converts("aten.batch_norm.default")
def batch_norm(
    e: Emitter,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Value:
    del cudnn_enabled
    _refuse_other_types(e, x, weight, bias, running_mean, running_var)
    if training or running_mean is None or running_var is None:
        if running_mean is not None:
            raise e.unsupported("an update of running statistics that is not functional")
        return _by_batch_alone(e, x, weight, bias, momentum, eps)[0]
    return _batch_norm_inference(e, x, weight, bias, running_mean, running_var, eps)

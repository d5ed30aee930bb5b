# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Meaning of each operator of a graph, as PyTorch computes it.

Every function takes the node's inputs (None for one left out) and its attributes, and returns a
tensor or a tuple of tensors. They are differentiable by torch.autograd where the operator is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ortrain.capture.dtypes import TORCH_DTYPE

Tensor = torch.Tensor
Attributes = dict[str, Any]
Operator = Callable[[list[Any], Attributes], Any]

OPERATORS: dict[tuple[str, str], Operator] = {}


def operator(name: str, domain: str = "") -> Callable[[Operator], Operator]:
    """Register the meaning of an operator."""

    def register(function: Operator) -> Operator:
        OPERATORS[(domain, name)] = function
        return function

    return register


def _truncated_div(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype.is_floating_point:
        return a / b
    return torch.div(a, b, rounding_mode="trunc")


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "BitwiseNot": torch.bitwise_not,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "IsInf": torch.isinf,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": torch.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    # No threshold: above torch's default of 20 the identity is off by 2e-9, seen in float64.
    "Softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "Div": _truncated_div,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "MatMul": torch.matmul,
    "Max": torch.maximum,
    "Min": torch.minimum,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
}
_WITHOUT_NUMBERS = ("And", "Or", "Xor", "Not")


def _check_same_dtype(op: str, a: Tensor, b: Tensor) -> None:
    if a.dtype is not b.dtype:
        raise TypeError(f"{op}: operands of dtypes {a.dtype} and {b.dtype}")
    if op in _WITHOUT_NUMBERS and a.dtype is not torch.bool:
        raise TypeError(f"{op}: operand of dtype {a.dtype}")


def _register_simple() -> None:
    for name, unary in _UNARY.items():
        OPERATORS[("", name)] = lambda inputs, _, f=unary: f(inputs[0])
    for name, binary in _BINARY.items():

        def run(inputs: list[Any], _: Attributes, f: Any = binary, op: str = name) -> Tensor:
            _check_same_dtype(op, inputs[0], inputs[1])
            return f(inputs[0], inputs[1])

        OPERATORS[("", name)] = run


_register_simple()


@operator("Mod")
def _mod(inputs: list[Any], attributes: Attributes) -> Tensor:
    _check_same_dtype("Mod", *inputs)
    return torch.fmod(*inputs) if attributes.get("fmod", 0) else torch.remainder(*inputs)


@operator("Pow")
def _pow(inputs: list[Any], _: Attributes) -> Tensor:
    return torch.pow(inputs[0], inputs[1].to(inputs[0].dtype))


@operator("LeakyRelu")
def _leaky_relu(inputs: list[Any], attributes: Attributes) -> Tensor:
    return F.leaky_relu(inputs[0], attributes.get("alpha", 0.01))


@operator("Elu")
def _elu(inputs: list[Any], attributes: Attributes) -> Tensor:
    return F.elu(inputs[0], attributes.get("alpha", 1.0))


@operator("Selu")
def _selu(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, alpha = inputs[0], attributes["alpha"]
    return attributes["gamma"] * torch.where(x > 0, x, alpha * torch.expm1(x.clamp(max=0)))


@operator("Gelu")
def _gelu(inputs: list[Any], attributes: Attributes) -> Tensor:
    return F.gelu(inputs[0], approximate=attributes.get("approximate", "none"))


@operator("Clip")
def _clip(inputs: list[Any], _: Attributes) -> Tensor:
    x, low, high = (*inputs, None, None)[:3]
    bounds = [None if b is None else b.item() for b in (low, high)]
    return torch.clamp(x, *bounds) if any(b is not None for b in bounds) else x


@operator("Where")
def _where(inputs: list[Any], _: Attributes) -> Tensor:
    _check_same_dtype("Where", inputs[1], inputs[2])
    return torch.where(*inputs)


@operator("Cast")
def _cast(inputs: list[Any], attributes: Attributes) -> Tensor:
    return inputs[0].to(TORCH_DTYPE[attributes["to"]])


# Shapes


def _target_shape(x: Tensor, shape: Tensor, allowzero: bool) -> list[int]:
    sizes = shape.tolist()
    return sizes if allowzero else [x.shape[i] if s == 0 else s for i, s in enumerate(sizes)]


@operator("Reshape")
def _reshape(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, shape = inputs
    return x.reshape(_target_shape(x, shape, bool(attributes.get("allowzero", 0))))


@operator("Squeeze")
def _squeeze(inputs: list[Any], _: Attributes) -> Tensor:
    x = inputs[0]
    axes = inputs[1].tolist() if len(inputs) > 1 else [i for i, s in enumerate(x.shape) if s == 1]
    axes = {a % x.dim() for a in axes}
    if any(x.shape[a] != 1 for a in axes):
        raise ValueError(f"Squeeze: axes {sorted(axes)} of shape {list(x.shape)}")
    return x.reshape([s for i, s in enumerate(x.shape) if i not in axes])


@operator("Unsqueeze")
def _unsqueeze(inputs: list[Any], _: Attributes) -> Tensor:
    x, axes = inputs[0], inputs[1].tolist()
    rank = x.dim() + len(axes)
    for axis in sorted(a % rank for a in axes):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def _transpose(inputs: list[Any], attributes: Attributes) -> Tensor:
    x = inputs[0]
    return x.permute(attributes.get("perm", list(reversed(range(x.dim())))))


@operator("Concat")
def _concat(inputs: list[Any], attributes: Attributes) -> Tensor:
    for other in inputs[1:]:
        _check_same_dtype("Concat", inputs[0], other)
    return torch.cat(inputs, dim=attributes["axis"])


@operator("Split")
def _split(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, ...]:
    return torch.split(inputs[0], inputs[1].tolist(), dim=attributes.get("axis", 0))


@operator("Slice")
def _slice(inputs: list[Any], _: Attributes) -> Tensor:
    x, starts, ends = inputs[0], inputs[1].tolist(), inputs[2].tolist()
    axes = inputs[3].tolist() if len(inputs) > 3 else list(range(len(starts)))
    steps = inputs[4].tolist() if len(inputs) > 4 else [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        # ONNX lets a backward slice end before the first element by a very small number.
        stop = None if step < 0 and end < -size else end
        rows = list(range(size))[slice(start, stop, step)]
        if step == 1:
            x = x.narrow(axis, rows[0] if rows else 0, len(rows))
        else:
            x = x.index_select(axis, torch.tensor(rows, dtype=torch.int64))
    return x


@operator("Expand")
def _expand(inputs: list[Any], _: Attributes) -> Tensor:
    x, shape = inputs[0], inputs[1].tolist()
    return x.expand(torch.broadcast_shapes(tuple(x.shape), tuple(shape)))


@operator("Tile")
def _tile(inputs: list[Any], _: Attributes) -> Tensor:
    return inputs[0].repeat(inputs[1].tolist())


_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


@operator("Pad")
def _pad(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, pads = inputs[0], inputs[1].tolist()
    value = inputs[2].item() if len(inputs) > 2 and inputs[2] is not None else 0
    mode = attributes.get("mode", "constant")
    if mode == "constant":
        order = [p for i in reversed(range(x.dim())) for p in (pads[i], pads[i + x.dim()])]
        return F.pad(x, order, value=value)
    for axis in range(x.dim()):
        before, after = pads[axis], pads[axis + x.dim()]
        if before or after:
            x = x.index_select(axis, _padded_rows(x.shape[axis], before, after, mode))
    return x


def _padded_rows(size: int, before: int, after: int, mode: str) -> Tensor:
    rows = torch.arange(-before, size + after)
    if mode == "edge":
        return rows.clamp(0, size - 1)
    if mode == "wrap":
        return rows.remainder(size)
    rows = rows.abs()
    return torch.where(rows >= size, 2 * (size - 1) - rows, rows)


@operator("Shape")
def _shape(inputs: list[Any], attributes: Attributes) -> Tensor:
    sizes = list(inputs[0].shape)[attributes.get("start", 0) : attributes.get("end")]
    return torch.tensor(sizes, dtype=torch.int64)


@operator("Range")
def _range(inputs: list[Any], _: Attributes) -> Tensor:
    start, limit, delta = (v.item() for v in inputs)
    count = max(math.ceil((limit - start) / delta), 0)
    return start + torch.arange(count, dtype=inputs[0].dtype) * delta


@operator("Trilu")
def _trilu(inputs: list[Any], attributes: Attributes) -> Tensor:
    k = int(inputs[1].item()) if len(inputs) > 1 else 0
    return (torch.triu if attributes.get("upper", 1) else torch.tril)(inputs[0], k)


@operator("OneHot")
def _one_hot(inputs: list[Any], attributes: Attributes) -> Tensor:
    indices, depth, values = inputs
    classes = torch.arange(int(depth.item()))
    axis = attributes.get("axis", -1)
    hot = indices.unsqueeze(axis).remainder(depth.item())
    shape = [1] * hot.dim()
    shape[axis] = -1
    return torch.where(hot == classes.reshape(shape), values[1], values[0])


# Indexing


def _positive(index: Tensor, size: int, op: str) -> Tensor:
    if index.numel() and not (int(index.min()) >= -size and int(index.max()) < size):
        raise IndexError(f"{op}: index outside [-{size}, {size})")
    return torch.where(index < 0, index + size, index)


@operator("Gather")
def _gather(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, index = inputs
    axis = attributes.get("axis", 0) % x.dim()
    index = _positive(index, x.shape[axis], "Gather")
    picked = x.index_select(axis, index.reshape(-1))
    return picked.reshape([*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]])


@operator("GatherElements")
def _gather_elements(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, index = inputs
    axis = attributes.get("axis", 0)
    return torch.gather(x, axis, _positive(index, x.shape[axis], "GatherElements"))


def _split_coordinates(index: Tensor) -> tuple[Tensor, ...]:
    return tuple(index.unbind(-1))


@operator("GatherND")
def _gather_nd(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, index = inputs
    lead = attributes.get("batch_dims", 0)
    if lead:
        grid = torch.meshgrid(*(torch.arange(s) for s in x.shape[:lead]), indexing="ij")
        rest = index.dim() - 1 - lead
        batch = [g.reshape(*g.shape, *[1] * rest).expand(index.shape[:-1]) for g in grid]
        return x[(*batch, *_split_coordinates(index))]
    return x[_split_coordinates(index)]


_SCATTER = {"mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterElements")
def _scatter_elements(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, index, updates = inputs
    axis, reduction = attributes.get("axis", 0), attributes.get("reduction", "none")
    index = _positive(index, x.shape[axis], "ScatterElements")
    if reduction == "none":
        return x.scatter(axis, index, updates)
    if reduction == "add":
        return x.scatter_add(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, _SCATTER[reduction])


@operator("ScatterND")
def _scatter_nd(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, index, updates = inputs
    reduction = attributes.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise NotImplementedError(f"ScatterND with reduction {reduction}")
    return x.index_put(_split_coordinates(index), updates, accumulate=reduction == "add")


@operator("TopK")
def _topk(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor]:
    x, k = inputs[0], int(inputs[1].item())
    axis, largest = attributes.get("axis", -1), bool(attributes.get("largest", 1))
    order = torch.argsort(x, dim=axis, descending=largest, stable=True).narrow(axis, 0, k)
    return torch.gather(x, axis, order), order


@operator("CumSum")
def _cumsum(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, axis = inputs[0], int(inputs[1].item())
    if attributes.get("exclusive") or attributes.get("reverse"):
        raise NotImplementedError("CumSum with exclusive or reverse")
    return torch.cumsum(x, axis, dtype=x.dtype)


# Reductions


def _axes(inputs: list[Any], x: Tensor) -> list[int]:
    if len(inputs) < 2 or inputs[1] is None or not inputs[1].numel():
        return list(range(x.dim()))
    return [a % x.dim() for a in inputs[1].tolist()]


def _reduction(name: str, function: Callable[[Tensor, list[int], bool], Tensor]) -> None:
    @operator(name)
    def run(inputs: list[Any], attributes: Attributes) -> Tensor:
        x = inputs[0]
        axes = _axes(inputs, x)
        return function(x, axes, bool(attributes.get("keepdims", 1))) if axes else x


def _prod(x: Tensor, axes: list[int], keepdim: bool) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = torch.prod(x, axis, keepdim, dtype=x.dtype)
    return x


_reduction("ReduceSum", lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype))
_reduction("ReduceMean", lambda x, axes, keep: torch.mean(x, axes, keep))
_reduction("ReduceMax", lambda x, axes, keep: torch.amax(x, axes, keep))
_reduction("ReduceMin", lambda x, axes, keep: torch.amin(x, axes, keep))
_reduction("ReduceProd", _prod)


def _arg(function: Callable[..., Tensor]) -> Operator:
    def run(inputs: list[Any], attributes: Attributes) -> Tensor:
        axis, keepdims = attributes.get("axis", 0), bool(attributes.get("keepdims", 1))
        return function(inputs[0], axis, keepdims)

    return run


OPERATORS[("", "ArgMax")] = _arg(torch.argmax)
OPERATORS[("", "ArgMin")] = _arg(torch.argmin)


def _softmax(function: Callable[..., Tensor]) -> Operator:
    return lambda inputs, attributes: function(inputs[0], dim=attributes.get("axis", -1))


OPERATORS[("", "Softmax")] = _softmax(torch.softmax)
OPERATORS[("", "LogSoftmax")] = _softmax(torch.log_softmax)


# Products


@operator("Gemm")
def _gemm(inputs: list[Any], attributes: Attributes) -> Tensor:
    a, b, c = (*inputs, None)[:3]
    a = a.T if attributes.get("transA", 0) else a
    b = b.T if attributes.get("transB", 0) else b
    result = attributes.get("alpha", 1.0) * (a @ b)
    return result if c is None else result + attributes.get("beta", 1.0) * c


@operator("Linear", "ortrain")
def _linear(inputs: list[Any], _: Attributes) -> Tensor:
    return F.linear(*inputs)


@operator("GroupedMatMul", "ortrain")
def _grouped_matmul(inputs: list[Any], _: Attributes) -> Tensor:
    x, weight, offsets = inputs
    pieces, start = [], 0
    for group, end in enumerate(offsets.tolist()):
        pieces.append(x[start:end] @ weight[group])
        start = end
    # Rows behind the last group belong to none.
    pieces.append(x.new_zeros(x.shape[0] - start, weight.shape[2]))
    return torch.cat(pieces)


# Convolution and pooling


def _symmetric(x: Tensor, pads: Sequence[int], value: float) -> tuple[Tensor, list[int]]:
    """Return x and paddings equal on both sides, padding by hand what is not."""
    count = len(pads) // 2
    before, after = list(pads[:count]), list(pads[count:])
    if before == after:
        return x, before
    order = [p for i in reversed(range(count)) for p in (before[i], after[i])]
    return F.pad(x, order, value=value), [0] * count


@operator("Conv")
def _conv(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, weight, bias = (*inputs, None)[:3]
    function = (F.conv1d, F.conv2d, F.conv3d)[weight.dim() - 3]
    x, padding = _symmetric(x, attributes["pads"], 0.0)
    return function(
        x,
        weight,
        bias,
        attributes["strides"],
        padding,
        attributes["dilations"],
        attributes["group"],
    )


@operator("ConvTranspose")
def _conv_transpose(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, weight, bias = (*inputs, None)[:3]
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[weight.dim() - 3]
    pads = attributes["pads"]
    return function(
        x,
        weight,
        bias,
        attributes["strides"],
        pads[: len(pads) // 2],
        attributes["output_padding"],
        attributes["group"],
        attributes["dilations"],
    )


@operator("MaxPool")
def _max_pool(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor]:
    x = inputs[0]
    spatial = x.dim() - 2
    function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial - 1]
    pads = attributes["pads"]
    y, index = function(
        x,
        attributes["kernel_shape"],
        attributes["strides"],
        pads[:spatial],
        attributes.get("dilations", [1] * spatial),
        bool(attributes.get("ceil_mode", 0)),
        return_indices=True,
    )
    planes = torch.arange(x.shape[0] * x.shape[1]).reshape(x.shape[:2] + (1,) * spatial)
    return y, index + planes * math.prod(x.shape[2:])


@operator("AveragePool")
def _average_pool(inputs: list[Any], attributes: Attributes) -> Tensor:
    x = inputs[0]
    spatial = x.dim() - 2
    function = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[spatial - 1]
    return function(
        x,
        attributes["kernel_shape"],
        attributes["strides"],
        attributes["pads"][:spatial],
        bool(attributes.get("ceil_mode", 0)),
        bool(attributes.get("count_include_pad", 0)),
    )


@operator("GlobalAveragePool")
def _global_average_pool(inputs: list[Any], _: Attributes) -> Tensor:
    return inputs[0].mean(dim=tuple(range(2, inputs[0].dim())), keepdim=True)


@operator("GridSample")
def _grid_sample(inputs: list[Any], attributes: Attributes) -> Tensor:
    names = {"linear": "bilinear", "cubic": "bicubic", "nearest": "nearest"}
    return F.grid_sample(
        inputs[0],
        inputs[1],
        names[attributes["mode"]],
        attributes["padding_mode"],
        bool(attributes["align_corners"]),
    )


# Normalization


def _stash(x: Tensor, attributes: Attributes) -> Tensor:
    return x.to(TORCH_DTYPE[attributes.get("stash_type", 1)])


@operator("LayerNormalization")
def _layer_norm(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor, Tensor]:
    x, scale, bias = (*inputs, None)[:3]
    axis = attributes.get("axis", -1) % x.dim()
    y = F.layer_norm(x, x.shape[axis:], scale, bias, attributes["epsilon"])
    wide, axes = _stash(x.detach(), attributes), tuple(range(axis, x.dim()))
    variance, mean = torch.var_mean(wide, axes, correction=0, keepdim=True)
    return y, mean, torch.rsqrt(variance + attributes["epsilon"])


@operator("RMSNormalization")
def _rms_norm(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, scale = inputs
    axis = attributes.get("axis", -1) % x.dim()
    return F.rms_norm(x, x.shape[axis:], scale, attributes["epsilon"])


@operator("GroupNormalization")
def _group_norm(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, scale, bias = inputs
    return F.group_norm(x, attributes["num_groups"], scale, bias, attributes["epsilon"])


@operator("BatchNormTraining", "ortrain")
def _batch_norm(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, ...]:
    x, scale, bias, running_mean, running_var = inputs
    mean, var = running_mean.detach().clone(), running_var.detach().clone()
    momentum, epsilon = attributes["momentum"], attributes["epsilon"]
    y = F.batch_norm(x, mean, var, scale, bias, True, momentum, epsilon)
    axes = (0, *range(2, x.dim()))
    batch_var, batch_mean = torch.var_mean(x.detach(), axes, correction=0)
    return y, mean, var, batch_mean, torch.rsqrt(batch_var + epsilon)


# Training operators


@operator("StopGradient", "ortrain")
def _stop_gradient(inputs: list[Any], _: Attributes) -> Tensor:
    return inputs[0].detach()


@operator("Log1p", "ortrain")
def _log1p(inputs: list[Any], _: Attributes) -> Tensor:
    return torch.log1p(inputs[0])


@operator("Expm1", "ortrain")
def _expm1(inputs: list[Any], _: Attributes) -> Tensor:
    return torch.expm1(inputs[0])


@operator("TruncDiv", "ortrain")
def _trunc_div(inputs: list[Any], _: Attributes) -> Tensor:
    _check_same_dtype("TruncDiv", *inputs)
    return torch.div(*inputs, rounding_mode="trunc")


@operator("Trunc", "ortrain")
def _trunc(inputs: list[Any], _: Attributes) -> Tensor:
    return torch.trunc(inputs[0])


@operator("FloorDiv", "ortrain")
def _floor_div(inputs: list[Any], _: Attributes) -> Tensor:
    _check_same_dtype("FloorDiv", *inputs)
    return torch.div(*inputs, rounding_mode="floor")


@operator("Embedding", "ortrain")
def _embedding(inputs: list[Any], attributes: Attributes) -> Tensor:
    padding = attributes["padding_idx"]
    return F.embedding(inputs[1], inputs[0], padding if padding >= 0 else None)


@operator("CheckIndices", "ortrain")
def _check_indices(inputs: list[Any], attributes: Attributes) -> Tensor:
    indices, extent = inputs
    if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < int(extent):
        raise IndexError(f"an index is outside of [0, {int(extent)})")
    return indices


@operator("BinCount", "ortrain")
def _bin_count(inputs: list[Any], attributes: Attributes) -> Tensor:
    x = inputs[0].detach()
    return torch.histc(x, attributes["bins"], attributes["min"], attributes["max"])


@operator("CrossEntropy", "ortrain")
def _cross_entropy(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor]:
    logits, labels, weight = (*inputs, None)[:3]
    full = bool(attributes.get("full_loss", 0)) and logits.dtype != torch.float64
    loss = F.cross_entropy(
        logits.float() if full else logits,
        labels,
        weight.float() if full and weight is not None else weight,
        ignore_index=attributes["ignore_index"],
        reduction=attributes["reduction"],
        label_smoothing=attributes["label_smoothing"],
    )
    return loss, torch.logsumexp(logits.detach(), 1)


def keep_mask(shape: Sequence[int], seed: int, stream: int, ratio: float) -> Tensor:
    """Return a mask that keeps each element with probability 1 - ratio.

    It stands for the engine's counter-based draws: equal arguments give equal masks.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + stream) % 2**63)
    return torch.rand(tuple(shape), generator=generator) >= ratio


@operator("Dropout", "ortrain")
def _dropout(inputs: list[Any], attributes: Attributes) -> Tensor:
    x, ratio = inputs[0], attributes["ratio"]
    mask = keep_mask(x.shape, int(inputs[1]), attributes["stream"], ratio)
    return x * mask.to(x.dtype) / (1 - ratio)


@operator("DropoutMask", "ortrain")
def _dropout_mask(inputs: list[Any], attributes: Attributes) -> Tensor:
    return keep_mask(inputs[0].shape, int(inputs[1]), attributes["stream"], attributes["ratio"])


@operator("Attention", "ortrain")
def _attention(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor]:
    """Rows without any allowed key give zeros."""
    q, k, v, mask, seed = (*inputs, None, None)[:5]
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = q @ k.transpose(-2, -1) * attributes["scale"]
    if attributes["is_causal"]:
        allowed = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    logsumexp = torch.logsumexp(scores.detach(), dim=-1)
    if attributes["dropout"] > 0:
        keep = keep_mask(weights.shape, int(seed), attributes["stream"], attributes["dropout"])
        weights = weights * keep.to(weights.dtype) / (1 - attributes["dropout"])
    return weights @ v, logsumexp


def _steps(count: int, reverse: int) -> range:
    return range(count - 1, -1, -1) if reverse else range(count)


@operator("LSTM", "ortrain")
def _lstm(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor, Tensor]:
    x, h, c, w_ih, w_hh, b_ih, b_hh = (*inputs, None, None)[:7]
    outputs: list[Tensor] = [x] * x.shape[0]
    for t in _steps(x.shape[0], attributes["reverse"]):
        gates = F.linear(x[t], w_ih, b_ih) + F.linear(h, w_hh, b_hh)
        i, f, g, o = gates.chunk(4, dim=1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        outputs[t] = h
    return torch.stack(outputs), h, c


@operator("GRU", "ortrain")
def _gru(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor]:
    x, h, w_ih, w_hh, b_ih, b_hh = (*inputs, None, None)[:6]
    outputs: list[Tensor] = [x] * x.shape[0]
    for t in _steps(x.shape[0], attributes["reverse"]):
        r_x, z_x, n_x = F.linear(x[t], w_ih, b_ih).chunk(3, dim=1)
        r_h, z_h, n_h = F.linear(h, w_hh, b_hh).chunk(3, dim=1)
        reset, update = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        candidate = torch.tanh(n_x + reset * n_h)
        h = candidate + update * (h - candidate)
        outputs[t] = h
    return torch.stack(outputs), h


@operator("RNN", "ortrain")
def _rnn(inputs: list[Any], attributes: Attributes) -> tuple[Tensor, Tensor]:
    x, h, w_ih, w_hh, b_ih, b_hh = (*inputs, None, None)[:6]
    activation = {"tanh": torch.tanh, "relu": torch.relu}[attributes["activation"]]
    outputs: list[Tensor] = [x] * x.shape[0]
    for t in _steps(x.shape[0], attributes["reverse"]):
        h = activation(F.linear(x[t], w_ih, b_ih) + F.linear(h, w_hh, b_hh))
        outputs[t] = h
    return torch.stack(outputs), h

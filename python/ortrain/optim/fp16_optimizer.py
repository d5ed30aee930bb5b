# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The float16 optimizers of DeepSpeed, Megatron-LM and Apex, with one pass over all gradients."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ortrain._core import gradient_norm

_APEX = "apex.amp"
_AS_IT_IS = "stays as it is"


def FP16_Optimizer(optimizer: Any, **kwargs: Any) -> Any:
    """Let a float16 optimizer of another library look at all of its gradients in one pass.

    The optimizer stays the object that its library made; methods of it are replaced:

    - DeepSpeed ZeRO 1 and 2: ``has_overflow_serial``, ``has_overflow_partitioned_grads_serial``,
      ``get_grad_norm_direct``;
    - Megatron-LM's ``FP16_Optimizer``: ``_check_overflow``, ``clip_master_grads``;
    - Apex amp (level O2): ``_post_amp_backward``, and ``zero_grad``, which drops gradients.

    Which it is tells the full name of its class, or for Apex the attribute ``_amp_stash``. Others,
    and those that lack one of the methods, come back as they are, with a warning.

    Args:
      optimizer: The optimizer that the library has made already.
      **kwargs: For Megatron-LM with parallel layers: ``get_tensor_model_parallel_rank`` and
        ``get_tensor_model_parallel_group`` (or ``horizontal`` in place of ``tensor``), functions
        without arguments.

    Returns:
      The same object.

    Raises:
      TypeError: An argument is unknown, or no function.

    Example:
      >>> engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, ...)
      >>> optimizer = FP16_Optimizer(optimizer)
    """
    parallel = _parallel_functions(kwargs)
    name = _APEX if hasattr(optimizer, "_amp_stash") else _full_name(type(optimizer))
    if name not in _REPLACEMENTS:
        warnings.warn(
            f"FP16_Optimizer knows nothing of {name}, which {_AS_IT_IS}; there are "
            f"{', '.join(_REPLACEMENTS)}",
            stacklevel=2,
        )
        return optimizer
    required, make = _REPLACEMENTS[name]
    missing = [m for m in required if not callable(getattr(optimizer, m, None))]
    if missing:
        warnings.warn(
            f"FP16_Optimizer: this version of {name} has no {', '.join(missing)}; it {_AS_IT_IS}",
            stacklevel=2,
        )
        return optimizer
    for method, function in make(optimizer, parallel).items():
        setattr(optimizer, method, types.MethodType(function, optimizer))
    return optimizer


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _parallel_functions(
    given: dict[str, Any],
) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """Return the functions that give rank and group of parallel layers, or None."""
    kept: dict[str, Any] = {}
    for key, value in given.items():
        what = key.removeprefix("get_tensor_model_parallel_")
        what = what.removeprefix("get_horizontal_model_parallel_")
        if what not in ("rank", "group") or what in kept:
            raise TypeError(
                f"FP16_Optimizer takes get_tensor_model_parallel_rank and "
                f"get_tensor_model_parallel_group, got {key!r}"
            )
        if value is not None and not callable(value):
            raise TypeError(f"{key} is {value!r}, expected a function without arguments")
        kept[what] = value
    rank, group = kept.get("rank"), kept.get("group")
    return None if rank is None or group is None else (rank, group)


def _has_overflow(gradients: Iterable[torch.Tensor | None]) -> bool:
    """Tell whether one of the gradients holds an infinity or NaN."""
    given = [g.detach() for g in gradients if g is not None]
    # Squares of float32 and less do not overflow in the sum's float64.
    if all(g.dtype != torch.float64 for g in given):
        return not math.isfinite(gradient_norm(given))
    return any(not bool(torch.isfinite(g).all()) for g in given)


def _is_parallel(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "model_parallel", False))


# --- DeepSpeed


def _deepspeed(optimizer: Any, parallel: object) -> dict[str, Callable[..., Any]]:
    del parallel  # DeepSpeed knows its groups
    original = type(optimizer)

    def flag(overflow: bool) -> torch.Tensor:
        return torch.tensor([overflow])

    def has_overflow_serial(
        self: Any, params: Iterable[torch.Tensor], is_grad_list: bool = False
    ) -> torch.Tensor:
        del self, is_grad_list
        return flag(_has_overflow(p.grad for p in params))

    def has_overflow_partitioned_grads_serial(self: Any) -> torch.Tensor:
        groups = self.averaged_gradients
        lists = groups.values() if isinstance(groups, dict) else groups
        return flag(_has_overflow(g for gradients in lists for g in gradients or ()))

    def get_grad_norm_direct(
        self: Any,
        gradients: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        norm_type: float = 2,
    ) -> Any:
        """Return the norm over all processes, -1 where it is not finite."""
        if float(norm_type) != 2.0:
            return original.get_grad_norm_direct(self, gradients, params, norm_type)
        import deepspeed.comm as dist

        real = (g for g in gradients if not getattr(g, "_zero_padding", False))
        counted = [
            g.detach()
            for g, p in zip(real, params, strict=False)
            if not getattr(p, "ds_pipe_replicated", False)
            and (_is_parallel(p) or self.model_parallel_rank == 0)
        ]
        square = torch.tensor(gradient_norm(counted) ** 2, dtype=torch.float64)
        dist.all_reduce(square, op=dist.ReduceOp.SUM, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
        norm = square.sqrt().float()
        return norm if math.isfinite(norm.item()) else torch.full_like(norm, -1.0)

    return {
        "has_overflow_serial": has_overflow_serial,
        "has_overflow_partitioned_grads_serial": has_overflow_partitioned_grads_serial,
        "get_grad_norm_direct": get_grad_norm_direct,
    }


# --- Megatron-LM


def _megatron(
    optimizer: Any, parallel: tuple[Callable[[], Any], Callable[[], Any]] | None
) -> dict[str, Callable[..., Any]]:
    original = type(optimizer)

    def check_overflow(self: Any) -> bool:
        groups = (*self.fp16_groups, *self.fp32_from_fp32_groups)
        self.overflow = _has_overflow(p.grad for group in groups for p in group)
        return bool(self.overflow)

    def clip_master_grads(self: Any, max_norm: float, norm_type: float = 2) -> float:
        """Clip the gradients of the float32 parameters; return their norm, -1 after an overflow."""
        if self.overflow:
            return -1
        if float(norm_type) != 2.0:
            return original.clip_master_grads(self, max_norm, norm_type)
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.grad is not None]
        gradients = [p.grad.detach() for p in params]
        counted = gradients
        if parallel is not None and parallel[0]() != 0:
            # What every rank holds counts once.
            counted = [g for g, p in zip(gradients, params, strict=True) if _is_parallel(p)]
        norm = gradient_norm(counted)
        if parallel is not None:
            square = torch.tensor(norm**2, dtype=torch.float64)
            torch.distributed.all_reduce(square, group=parallel[1]())
            norm = math.sqrt(square.item())
        factor = float(max_norm) / (norm + 1e-6)
        if factor < 1:
            torch._foreach_mul_(gradients, factor)
        return norm

    return {"_check_overflow": check_overflow, "clip_master_grads": clip_master_grads}


# --- Apex


def _apex(optimizer: Any, parallel: object) -> dict[str, Callable[..., Any]]:
    del parallel

    def post_amp_backward(self: Any, scaler: Any) -> None:
        """Unscale the gradients into those of the float32 parameters, and look for overflows."""
        stash = self._amp_stash
        self._amp_lazy_init()
        pairs = [
            (half.grad, wide, wide.grad)
            for half, wide in zip(
                stash.all_fp16_params, stash.all_fp32_from_fp16_params, strict=True
            )
            if half.grad is not None
        ]
        # Gradients of float32 parameters are their own masters.
        pairs += [
            (wide.grad, wide, kept)
            for wide, kept in zip(
                stash.all_fp32_from_fp32_params, stash.all_fp32_from_fp32_grad_stash, strict=True
            )
            if wide.grad is not None
        ]
        if not pairs:
            return
        scaled = [gradient.detach() for gradient, _, _ in pairs]
        if _has_overflow(scaled):
            scaler._has_overflow = True
            if getattr(scaler, "_overflow_buf", None) is not None:
                scaler._overflow_buf.fill_(1)
        results = [gradient.to(torch.float32, copy=True) for gradient in scaled]
        torch._foreach_mul_(results, 1.0 / float(scaler.loss_scale()))
        for result, (_, wide, kept) in zip(results, pairs, strict=True):
            if kept is not None:  # of an earlier backward
                result += kept
            wide.grad = result
        for i in range(len(stash.all_fp32_from_fp32_grad_stash)):
            stash.all_fp32_from_fp32_grad_stash[i] = None

    def zero_grad(self: Any, set_to_none: bool = True) -> None:
        stash = self._amp_stash
        self._amp_lazy_init()
        for param in (*stash.all_fp16_params, *stash.all_fp32_from_fp32_params):
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_()
                param.grad.zero_()
        for param in stash.all_fp32_from_fp16_params:
            param.grad = None

    methods: dict[str, Callable[..., Any]] = {"zero_grad": zero_grad}
    # Apex's own FusedSGD unscales in its step.
    if not _full_name(type(optimizer)).startswith("apex.optimizers.fused_sgd."):
        methods["_post_amp_backward"] = post_amp_backward
    return methods


_DEEPSPEED = (
    ("has_overflow_serial", "has_overflow_partitioned_grads_serial", "get_grad_norm_direct"),
    _deepspeed,
)
_REPLACEMENTS: dict[str, tuple[tuple[str, ...], Callable[..., dict[str, Callable[..., Any]]]]] = {
    "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": _DEEPSPEED,
    "deepspeed.runtime.zero.stage2.FP16_DeepSpeedZeroOptimizer": _DEEPSPEED,
    "megatron.fp16.fp16.FP16_Optimizer": (("_check_overflow", "clip_master_grads"), _megatron),
    _APEX: (("_post_amp_backward", "zero_grad"), _apex),
}

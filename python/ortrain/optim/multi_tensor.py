# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the multi-tensor optimizers share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from ortrain import devices
from ortrain._core import MultiTensorStep
from ortrain.capture.torch_internals import outside_compiled_code
from ortrain.errors import UnsupportedError
from ortrain.optim.closure_step import ClosureStep

Group = dict[str, Any]
State = dict[str, torch.Tensor]


def zeros_like(param: torch.Tensor) -> torch.Tensor:
    """Return zeros in the shape, type and memory order of a parameter."""
    return torch.zeros_like(param, memory_format=torch.preserve_format)


def init_moments(param: torch.Tensor, group: Group, state: State) -> None:
    """Fill an empty entry of the state as torch.optim.AdamW does."""
    wide = torch.get_default_dtype() == torch.float64 and not group.get("fused")
    dtype = torch.float64 if wide else torch.float32
    state["step"] = torch.zeros((), dtype=dtype, device=param.device)
    state["exp_avg"] = zeros_like(param)
    state["exp_avg_sq"] = zeros_like(param)
    if group.get("amsgrad"):
        state["max_exp_avg_sq"] = zeros_like(param)


def init_buffer(param: torch.Tensor, group: Group, state: State) -> None:
    """Add a momentum buffer to an entry of the state."""
    del group
    state["momentum_buffer"] = zeros_like(param)


def check_adam_numbers(
    lr: float | torch.Tensor, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    """Raise ValueError where a number of Adam's family is out of range, in PyTorch's words."""
    if isinstance(lr, torch.Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0:
        raise ValueError(f"Invalid learning rate: {lr}")
    for index, beta in enumerate(betas):
        if not 0 <= beta < 1:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not eps >= 0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    if not weight_decay >= 0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


class MultiTensorOptimizer(ClosureStep):
    """One native pass over all parameters in place of a kernel per parameter.

    A subclass also inherits its constructor and its state_dict from a class of torch.optim. With
    ``max_grad_norm`` the step clips: parameters and state become what they become after
    ``torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)``, over the parameters of all groups.
    Gradients themselves stay as they are. The norm is a sum in float64, which holds where the squares of float32
    overflow. torch.amp.GradScaler leaves unscaling to the step, behind which gradients are unscaled, as behind the fused
    steps of torch.optim; on a GPU they stay scaled.

    Parameters are all on the CPU, or all on one GPU; there nothing waits for the device.

    A step raises DeviceError for tensors on different devices or on one that nothing here runs, DTypeError for complex or integer ones,
    UnsupportedError for sparse gradients and ShapeError for a state that does not fit, each naming
    the parameter. Nothing is changed then.
    """

    _kind: ClassVar[str]
    _init_state: ClassVar[Callable[[torch.Tensor, Group, State], None]]
    _step_supports_amp_scaling = True

    max_grad_norm: float | None = None
    _native: MultiTensorStep | None = None
    _norm: float | torch.Tensor | None = None

    def _set_max_grad_norm(self, max_grad_norm: float | None) -> None:
        if max_grad_norm is not None and not max_grad_norm >= 0:
            raise ValueError(f"Invalid max_grad_norm value: {max_grad_norm}")
        self.max_grad_norm = max_grad_norm

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch.optim.Optimizer does.

        The options of compiled steps are refused, and a parameter that is twice in the group.
        """
        for option in ("capturable", "differentiable"):
            if param_group.get(option, self.defaults.get(option)):
                raise UnsupportedError(f"{type(self).__name__} has no {option}=True")
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        if len({id(param) for param in params}) != len(params):
            del self.param_groups[-1]
            raise ValueError("a parameter is twice in the same group")

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The norm of the gradients in the last step, before clipping, as a scalar tensor.

        None before the first step, after a step that was skipped, and without ``max_grad_norm``.
        """
        norm = self._norm
        return norm if isinstance(norm, torch.Tensor) or norm is None else torch.tensor(norm)

    @outside_compiled_code
    def _update_all(self) -> None:
        self._norm = None
        found_inf = getattr(self, "found_inf", None)
        grad_scale = getattr(self, "grad_scale", None)
        if self._native is None:
            self._native = MultiTensorStep(
                self._kind, type(self)._init_state, increment_version, devices.is_simulated()
            )
        stepped = (p for g in self.param_groups for p in g["params"] if p.grad is not None)
        first = next(stepped, None)
        if first is not None and (first.device.type != "cpu" or devices.is_simulated()):
            norm = self._native.step(
                self.param_groups, self.state, 1.0, self.max_grad_norm, grad_scale, found_inf
            )
            self._norm = None if norm is None else norm.to(torch.get_default_dtype())
            return
        if found_inf is not None and float(found_inf) != 0:
            return
        factor = 1.0 if grad_scale is None else 1.0 / float(grad_scale)
        self._norm = self._native.step(self.param_groups, self.state, factor, self.max_grad_norm)
        if factor != 1.0:  # only now: 16 bits may not hold what the step computes with
            parameters = (p for group in self.param_groups for p in group["params"])
            scaled = {id(p.grad): p.grad for p in parameters if p.grad is not None}
            if scaled:
                torch._foreach_mul_(list(scaled.values()), factor)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._native = None  # lets go of the state that is replaced
        super().__setstate__(state)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The states of a trainer's optimizer under the names that ``onnxruntime.training`` gave them.

By parameter, ``{"w": {"Moment_1": ..., "Moment_2": ..., "Update_Count": ...}}``, or flat, ``{"Moment_1_w": ...}``.
``Update_Count`` of Adam, one per parameter, and ``Step`` of other rules, one for all, count from 1: they are the number
of the step that comes next, int64 of shape [1]. Of other rules parameters have an ``Update_Count`` where it is another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ortrain import _core
from ortrain.errors import InvalidModelError
from ortrain.trainer.flat_layout import state_dtype

if TYPE_CHECKING:
    from ortrain.trainer.orttrainer import ORTTrainer

# By the engine's names.
_NAMES = {
    "exp_avg": "Moment_1",
    "exp_avg_sq": "Moment_2",
    "momentum_buffer": "Momentum",
    "sum": "Sum_Of_Squares",
    "grad": "Accumulated_Gradient",
}
_ENGINE_NAMES = {name: engine for engine, name in _NAMES.items()}
_SHARED = "shared_optimizer_state"
_STEP = "Step"
_COUNT = "Update_Count"
_COUNTS_EACH = "AdamOptimizer"


@dataclasses.dataclass(frozen=True, slots=True)
class CheckedStates:
    """States that fit a trainer.

    Attributes:
      tensors: By the engine's names, in the types that the optimizer keeps them in.
      steps: Optimizer steps so far; None where the states do not say.
      updates: How many updates parameters have had that have had fewer.
      begun: Whether there were gradients of a step that was not over, which are left out.
    """

    tensors: dict[str, torch.Tensor]
    steps: int | None
    updates: dict[str, int]
    begun: bool


def tensor_of(what: str, value: Any) -> torch.Tensor:
    """Return a tensor of a state; of a NumPy array a copy.

    Raises:
      InvalidModelError: It is neither, or an array of a type that tensors do not have.
    """
    if isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, (np.ndarray, np.generic)):
        raise InvalidModelError(f"{what} is a {type(value).__name__}, expected a tensor")
    try:
        return torch.tensor(np.asarray(value))
    except TypeError as error:
        raise InvalidModelError(f"{what} is an array of {value.dtype}") from error


def as_own(what: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of a state in the type that it is to have here.

    Raises:
      InvalidModelError: It holds nothing that can be read, or values that the type does not have.
    """
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        kind = "on the device 'meta'" if tensor.device.type == "meta" else str(tensor.layout)
        raise InvalidModelError(f"{what} is {kind}, expected a dense tensor")
    if tensor.dtype == dtype:
        return tensor
    given, own = (str(t).removeprefix("torch.") for t in (tensor.dtype, dtype))
    if tensor.is_complex() and not dtype.is_complex:
        raise InvalidModelError(f"{what} is {given}, the trainer has {own} there")
    made = tensor.detach().to(dtype)
    if dtype.is_floating_point or dtype.is_complex:  # which rounds
        lost = ~made.isfinite() & tensor.isfinite()
    elif dtype == torch.bool:  # which asks for truth
        lost = torch.zeros((), dtype=torch.bool)
    else:
        lost = made.to(tensor.dtype) != tensor
    if bool(lost.any()):
        raise InvalidModelError(f"{what} has {given} values that {own} does not hold")
    return made


def misfits(trainer: ORTTrainer, checkpoint: Any, *, strict: bool) -> list[str]:
    """Return the states of a checkpoint that the trainer's optimizer cannot use.

    Raises:
      InvalidModelError: With ``strict``: there is one, or some states of a parameter are missing.
    """
    own = trainer.engine.tensors
    if not checkpoint.has_optimizer or (strict and set(checkpoint.tensors) != set(own)):
        return []  # which of another model cannot be loaded anyhow
    kinds = _kinds_by_parameter(trainer)
    trains = trainer.engine.trains
    found: dict[str, set[str]] = {}
    odd: list[str] = []
    for target, tensor in checkpoint.optimizer.items():
        name, _, kind = target.rpartition(":")
        reason = ""
        if name not in trains:
            reason = "there is no such parameter"
        elif kind not in _NAMES:
            reason = f"the optimizer keeps {', '.join(sorted(kinds(name))) or 'nothing'} of it"
        elif kind not in (*kinds(name), "grad"):
            odd.append(target)  # of other numbers of the same rule: without momentum there is none
            continue
        elif tensor.dtype != state_dtype(own[name]) or tensor.shape != own[name].shape:
            wanted = str(state_dtype(own[name])).removeprefix("torch.")
            reason = (
                f"it is {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}, expected "
                f"{wanted}{list(own[name].shape)}"
            )
        if not reason:
            found.setdefault(name, set()).add(kind)
        elif strict:
            raise InvalidModelError(f"the checkpoint has the state '{target}': {reason}")
        else:
            odd.append(target)
    for name, those in found.items():
        missing = kinds(name) - those if those != {"grad"} else set()
        if missing and strict and checkpoint.steps > 0:
            raise InvalidModelError(
                f"the checkpoint lacks the state '{name}:{min(missing)}' and has others of '{name}'"
            )
    return odd


def _kinds_by_parameter(trainer: ORTTrainer) -> Callable[[str], set[str]]:
    """Return what gives the engine's names of the states that are kept of a parameter."""
    rule = trainer.optim_config.engine_options()
    common = set(_core.optimizer_states(rule["step"], rule["attributes"]))
    groups = {
        name: set(_core.optimizer_states(rule["step"], {**rule["attributes"], **g["attributes"]}))
        for g in rule["groups"]
        for name in g["params"]
    }
    return lambda name: groups.get(name, common)


def by_parameter(held: Any, rule: str) -> dict[str, Any]:
    """Return copies of the states of an engine's state or a checkpoint, by parameter.

    Args:
      held: Has ``optimizer``, ``steps`` and ``updates``.
      rule: The optimizer's name.
    """
    result: dict[str, Any] = {_SHARED: {}}
    for target, tensor in held.optimizer.items():
        name, _, kind = target.rpartition(":")
        result.setdefault(name, {})[_NAMES.get(kind, kind)] = tensor.clone()
    steps, updates = held.steps, held.updates
    counts_each = rule == _COUNTS_EACH
    if not counts_each:
        result[_SHARED][_STEP] = torch.tensor([steps + 1])
    for name, kinds in result.items():
        count = updates.get(name, steps)
        if name != _SHARED and (counts_each or count != steps):
            kinds[_COUNT] = torch.tensor([count + 1])
    return result


def without_gradients(states: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return states by parameter without gradients of an optimizer step, which is over."""
    kept = _NAMES["grad"]
    return {
        name: {kind: value for kind, value in kinds.items() if kind != kept}
        for name, kinds in states.items()
    }


def flat(states: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return states by parameter as ``Moment_1_w`` and the like; gradients of unfinished steps are left out."""
    result = dict(states[_SHARED])
    for name, kinds in without_gradients(states).items():
        for kind, tensor in kinds.items() if name != _SHARED else ():
            result[f"{kind}_{name}"] = tensor
    return result


def split(
    given: Mapping[str, Any], parameters: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a flat dictionary has of the model and, by parameter, of the optimizer.

    Args:
      given: Tensors and arrays by name.
      parameters: The names that the model has.
    """
    model: dict[str, Any] = {}
    states: dict[str, Any] = {}
    for name, value in given.items():
        kind = next((k for k in (*_ENGINE_NAMES, _COUNT) if name.startswith(f"{k}_")), None)
        if name in parameters or (kind is None and name != _STEP):
            model[name] = value
        elif kind is None:
            states.setdefault(_SHARED, {})[_STEP] = value
        else:
            states.setdefault(name.removeprefix(f"{kind}_"), {})[kind] = value
    return model, states


def checked(
    trainer: ORTTrainer,
    own: Mapping[str, torch.Tensor],
    given: Mapping[str, Any],
    *,
    strict: bool = False,
) -> CheckedStates:
    """Return states by parameter in the types that the optimizer keeps them in.

    Raises:
      InvalidModelError: A name, a shape or an element type does not fit, or a parameter counts more steps than there were;
        with ``strict`` also where a parameter has some of its states and lacks others.
    """
    known = _kinds(trainer)
    tensors: dict[str, torch.Tensor] = {}
    steps: int | None = None
    updates: dict[str, int] = {}
    begun = False
    for name, kinds in given.items():
        if not isinstance(kinds, Mapping):
            raise InvalidModelError(f"the optimizer's states of '{name}' are no dictionary")
        if name == _SHARED:
            for kind in kinds if strict else ():
                if kind != _STEP:
                    raise InvalidModelError(f"'{_SHARED}' has '{kind}', which no optimizer keeps")
            if _STEP in kinds:
                steps = _steps(f"'{_STEP}'", kinds[_STEP])
            continue
        if name not in own:
            raise InvalidModelError(f"the optimizer has states of '{name}', which is no parameter")
        for kind, value in kinds.items():
            if kind == _COUNT:
                updates[name] = _steps(f"'{_COUNT}' of '{name}'", value)
                continue
            if kind not in known:
                raise InvalidModelError(
                    f"'{name}' has the state '{kind}'; the optimizer keeps "
                    f"{', '.join(sorted(known))}"
                )
            what = f"the state '{kind}' of '{name}'"
            tensor = tensor_of(what, value)
            if not tensor.is_floating_point():
                raise InvalidModelError(f"{what} is no tensor of floats")
            if tensor.shape != own[name].shape:
                raise InvalidModelError(
                    f"{what} has shape {list(tensor.shape)}, the parameter {list(own[name].shape)}"
                )
            if kind == _NAMES["grad"]:
                begun = True
                continue
            tensors[f"{name}:{_ENGINE_NAMES[kind]}"] = as_own(what, tensor, state_dtype(own[name]))
    if strict:
        _refuse_missing(trainer, tensors)
    most = max(updates, key=lambda name: updates[name], default="")
    if steps is None and updates:
        steps = updates[most]
    if steps is not None and updates.get(most, 0) > steps:
        raise InvalidModelError(
            f"'{_COUNT}' of '{most}' is {updates[most] + 1}, '{_STEP}' of all is {steps + 1}"
        )
    fewer = {name: count for name, count in updates.items() if count != steps}
    # Before the first step there are no states that could count.
    return CheckedStates(tensors, steps if steps is not None or tensors else 0, fewer, begun)


def _refuse_missing(trainer: ORTTrainer, tensors: Collection[str]) -> None:
    """Raise InvalidModelError where one of the states is missing that are kept of a parameter which has others."""
    kinds = _kinds_by_parameter(trainer)
    for name in {target.rpartition(":")[0] for target in tensors}:
        missing = [kind for kind in sorted(kinds(name)) if f"{name}:{kind}" not in tensors]
        if missing:
            raise InvalidModelError(f"the state '{_NAMES[missing[0]]}' of '{name}' is missing")


def _steps(what: str, value: Any) -> int:
    """Return the steps before the one of which a state says that it comes next."""
    if type(value) is not int:
        tensor = tensor_of(what, value)
        if tensor.numel() != 1 or tensor.is_floating_point() or tensor.is_complex():
            raise InvalidModelError(f"{what} is no single integer")
        value = int(tensor)
    if not 1 <= value < 2**62:
        raise InvalidModelError(f"{what} is {value}, expected 1 or more")
    return int(value) - 1


def _kinds(trainer: ORTTrainer) -> set[str]:
    """Return the names of the states that the trainer's optimizer keeps."""
    rule = trainer.optim_config.engine_options()
    rules = (rule["attributes"], *(group["attributes"] for group in rule["groups"]))
    kinds = {kind for given in rules for kind in _core.optimizer_states(rule["step"], given)}
    return {_NAMES[kind] for kind in (*kinds, "grad")}

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The state of a trainer as dictionaries of tensors, and in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import increment_version

from ortrain import _core, logs
from ortrain.checkpoint_folder import read_checkpoint, tell_of_damage
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.trainer import optimizer_states
from ortrain.trainer.kept_properties import KeptProperties
from ortrain.trainer.optimizer_states import as_own, tensor_of

if TYPE_CHECKING:
    from ortrain.amp import LossScaler
    from ortrain.trainer.orttrainer import ORTTrainer
    from ortrain.trainer.step_engine import StepEngine

StateDict = dict[str, Any]

_PROPERTY = "trainer"
_log = logs.get_logger("ortrain")
_COUNTERS = ("optimization_step", "step")


def state_dict(trainer: ORTTrainer, *, optimizer: bool = True) -> StateDict:
    """Return copies of parameters, buffers and optimizer states, with the counters.

    Several processes all call it: states that they share, and gradients so far, are put together.

    The keys are ``model``, ``optimizer``, ``trainer_options`` and ``train_step_info``.
    """
    trainer.engine.follow_module()
    info, distributed = trainer.train_step_info, trainer.options.distributed
    result: StateDict = {
        "model": {"full_precision": pytorch_state_dict(trainer)},
        "trainer_options": {
            "mixed_precision": trainer.options.mixed_precision.enabled,
            "optimizer_name": trainer.optim_config.name,
            "world_rank": trainer.world_rank,
            "world_size": distributed.world_size,
            "zero_stage": distributed.deepspeed_zero_optimization.stage,
        },
        "train_step_info": {"optimization_step": info.optimization_step, "step": info.step},
    }
    if optimizer:
        whole = trainer.engine.whole_state()
        states = optimizer_states.by_parameter(whole, trainer.optim_config.name)
        if trainer.engine.state.kept_batches == 0:
            states = optimizer_states.without_gradients(states)
        result["optimizer"] = states
    return result


def pytorch_state_dict(trainer: ORTTrainer) -> dict[str, torch.Tensor]:
    """Return copies of parameters and buffers as ``torch.nn.Module.state_dict`` names them."""
    return {name: tensor.clone() for name, tensor in _own_tensors(trainer).items()}


def flat_state_dict(trainer: ORTTrainer, *, optimizer: bool = True) -> dict[str, torch.Tensor]:
    """Return copies of parameters, buffers and states of the optimizer by one name each, ``Moment_1_fc.weight``."""
    if not optimizer:
        return pytorch_state_dict(trainer)
    whole = state_dict(trainer)
    return {**whole["model"]["full_precision"], **optimizer_states.flat(whole["optimizer"])}


def structured(trainer: ORTTrainer, flat: Mapping[str, Any]) -> StateDict:
    """Return what ``flat_state_dict`` gave as ``state_dict`` would have, without counters."""
    trainer.engine.follow_module()
    model, states = optimizer_states.split(flat, _own_tensors(trainer))
    return {"model": {"full_precision": model}} | ({"optimizer": states} if states else {})


def is_structured(given: Mapping[str, Any], names: Collection[str]) -> bool:
    """Tell whether a dictionary is one of ``state_dict``.

    Args:
      given: The dictionary.
      names: What the model has.
    """
    return isinstance(given.get("model"), Mapping) or (
        isinstance(given.get("optimizer"), Mapping) and "optimizer" not in names
    )


def load_state_dict(trainer: ORTTrainer, given: Mapping[str, Any], *, strict: bool) -> None:
    """Put a dictionary of either kind into a trainer; nothing changes where it does not fit.

    One with ``optimizer`` and without ``model`` leaves parameters and buffers as they are. Tensors may be NumPy arrays.

    Raises:
      InvalidModelError: Names differ and ``strict`` is set, or shapes or element types do.
    """
    trainer.engine.follow_module()
    own = _own_tensors(trainer)
    has_parts = is_structured(given, own)
    with_model = not has_parts or "model" in given
    tensors: Mapping[str, Any] = {}
    if with_model:
        if has_parts and not isinstance(given["model"].get("full_precision"), Mapping):
            raise InvalidModelError("the state's 'model' has no 'full_precision'")
        tensors = given["model"]["full_precision"] if has_parts else given
        tensors = _checked_tensors(own, tensors, strict)
    has_states = has_parts and "optimizer" in given
    states = (
        optimizer_states.checked(trainer, own, given["optimizer"], strict=strict)
        if has_states
        else None
    )
    counters = given.get("train_step_info", {}) if has_parts else {}
    counts = {name: _count(name, counters[name]) for name in _COUNTERS if name in counters}
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    state = trainer.engine.state
    if states is not None:
        if states.begun:
            _log.warning(
                "load_state_dict gives up gradients of an optimizer step that had begun when the state was taken; "
                "save_checkpoint keeps them"
            )
        if state.kept_batches > 0:
            _log.warning(
                "load_state_dict gives up the %d batches of the optimizer step that had begun",
                state.kept_batches,
            )
        state.kept_batches = 0
        state.clear_optimizer()
        for target, tensor in states.tensors.items():
            state.set_optimizer_state(target, tensor)
        if states.steps is not None:
            state.steps = states.steps
        state.updates = states.updates
    trainer.engine.adopt_state(optimizer=has_states)
    info = trainer.train_step_info
    info.optimization_step = counts.get("optimization_step", state.steps)
    info.step = counts.get("step", info.step)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not 0 <= int(value) < 2**62:
        raise InvalidModelError(f"'{name}' is {value!r}, expected a whole number, 0 or more")
    return int(value)


def _own_tensors(trainer: ORTTrainer) -> dict[str, torch.Tensor]:
    model, tensors = trainer.model, trainer.engine.tensors
    if not isinstance(model, torch.nn.Module):
        return dict(tensors)
    of_module = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    of_loss = {name: tensor for name, tensor in tensors.items() if name not in of_module}
    return {**{name: t.detach() for name, t in model.state_dict().items()}, **of_loss}


def _checked_tensors(
    own: Mapping[str, torch.Tensor], given: Mapping[str, Any], strict: bool
) -> dict[str, torch.Tensor]:
    if strict:
        for name in given:
            if name not in own:
                raise InvalidModelError(f"the state has '{name}', the model does not")
        for name in own:
            if name not in given:
                raise InvalidModelError(f"the model has '{name}', the state does not")
    tensors = {name: tensor_of(f"'{name}'", value) for name, value in given.items()}
    for name, tensor in tensors.items():
        if name in own and tensor.shape != own[name].shape:
            raise InvalidModelError(
                f"'{name}' has shape {list(tensor.shape)}, the model's {list(own[name].shape)}"
            )
    return {
        name: as_own(f"'{name}'", tensor, own[name].dtype)
        for name, tensor in tensors.items()
        if name in own
    }


# --- checkpoints


def save_checkpoint(
    trainer: ORTTrainer, folder: Path, user_dict: Mapping[str, Any], *, optimizer: bool, keep: int
) -> Path:
    """Write a checkpoint into a folder of them; see ``ORTTrainer.save_checkpoint``."""
    trainer.engine.follow_module()
    info, config = trainer.train_step_info, trainer.optim_config
    kept: StateDict = {
        "optimization_step": info.optimization_step,
        "step": info.step,
        "optimizer": config.name,
        "lr": float(config.lr).hex(),
        "user": trainer.engine.everywhere(lambda: _checked_user_dict(user_dict)),
    }
    scheduler, scaler = trainer.options.lr_scheduler, trainer.loss_scaler
    if scheduler is not None:
        kept["scheduler"] = scheduler._state()
    if scaler is not None:
        kept["loss_scaler"] = {"kind": scaler._kind, "state": scaler._state()}
    if optimizer and trainer.engine.state.kept_batches > 0:
        kept["accumulation"] = {
            "batches": trainer.engine.state.kept_batches,
            "of": trainer.options.batch.gradient_accumulation_steps,
            "loss_scale": trainer.engine.state.loss_scale if _scales(trainer) else 1.0,
        }
    state = trainer.engine.whole_state(optimizer=optimizer, on_all=False)
    properties = {_PROPERTY: json.dumps(kept)}
    return trainer.engine.on_first(
        lambda: Path(_core.save_checkpoint(folder, state, properties, optimizer, keep))
    )


def the_one_folder(paths: Sequence[str | Path]) -> Path:
    """Return the one folder of checkpoints among those that several processes may have named.

    All save one checkpoint together, into the folder that the first of them names.

    Raises:
      TypeError: There is none at all.
      UnsupportedError: Several exist.
    """
    if not paths:
        raise TypeError("the folder of the checkpoints is missing")
    folders = list(dict.fromkeys(Path(path) for path in paths))
    there = [folder for folder in folders if folder.exists()]
    if len(there) > 1:
        raise UnsupportedError(
            f"{len(there)} folders of checkpoints are given ({', '.join(map(str, there))}); all processes save one "
            "checkpoint together, into one folder"
        )
    return there[0] if there else folders[0]


def load_checkpoint(trainer: ORTTrainer, folder: Path, *, strict: bool) -> StateDict:
    """Read the newest complete checkpoint; see ``ORTTrainer.load_checkpoint``."""
    engine = trainer.engine
    engine.follow_module()
    checkpoint = _read_alike(engine, folder)
    tell_of_damage(checkpoint, stacklevel=3)
    kept = engine.everywhere(
        lambda: KeptProperties.parse(checkpoint.properties.get(_PROPERTY, "{}"))
    )
    name = kept.optimizer or trainer.optim_config.name
    if checkpoint.has_optimizer and strict and name != trainer.optim_config.name:
        raise InvalidModelError(
            f"the checkpoint has the states of {name}, the trainer is {trainer.optim_config.name}"
        )

    engine.everywhere(lambda: _check_kept(trainer, kept, strict=strict))
    odd = engine.everywhere(lambda: optimizer_states.misfits(trainer, checkpoint, strict=strict))
    engine.everywhere(lambda: _core.restore_checkpoint(engine.state, checkpoint, strict))
    for target in odd:
        engine.state.drop_state(target)
    if kept.accumulation is not None:
        # The rest of the batches is scaled as those before were.
        engine.state.loss_scale = kept.accumulation.loss_scale
    engine.adopt_state(optimizer=True, seed=engine.state.seed)
    increment_version(list(engine.tensors.values()))
    info = trainer.train_step_info
    steps = checkpoint.steps
    info.optimization_step = steps if kept.optimization_step is None else kept.optimization_step
    info.step = steps if kept.step is None else kept.step
    if kept.lr is not None:
        trainer.optim_config.lr = _configured_rate(kept, kept.lr)
    if trainer.options.lr_scheduler is not None and kept.scheduler is not None:
        trainer.options.lr_scheduler._load_state(kept.scheduler)
    scaler = trainer.loss_scaler
    if scaler is not None and _fitting_scaler_state(scaler, kept):
        scaler._load_state(kept.loss_scaler.state)
    return dict(kept.user)


def _configured_rate(kept: KeptProperties, lr: float) -> float:
    """Return the rate that schedules start from; in files of former versions it stands with the schedule."""
    base = (kept.scheduler or {}).get("base")
    return lr if base is None else float.fromhex(base)


def _check_kept(trainer: ORTTrainer, kept: KeptProperties, *, strict: bool) -> None:
    scheduler = trainer.options.lr_scheduler
    if scheduler is not None and kept.scheduler is not None:
        try:
            scheduler._check_state(kept.scheduler)
        except ValueError as error:
            raise InvalidModelError(f"the checkpoint's learning rates: {error}") from error
    _check_scaler(trainer, kept, strict=strict)
    _check_accumulation(trainer, kept)


def _scales(trainer: ORTTrainer) -> bool:
    return trainer.loss_scaler is not None and trainer.loss_scaler.enabled


def _fitting_scaler_state(scaler: LossScaler, kept: KeptProperties) -> bool:
    """Tell whether a checkpoint has the state of a scaler of this kind that was not disabled."""
    given = kept.loss_scaler
    return given is not None and given.kind == scaler._kind and bool(given.state)


def _check_scaler(trainer: ORTTrainer, kept: KeptProperties, *, strict: bool) -> None:
    """Raise InvalidModelError where the state of the loss scaler does not fit the trainer's."""
    scaler, given = trainer.loss_scaler, kept.loss_scaler
    if scaler is None or given is None:
        return
    if strict and given.kind != scaler._kind:
        raise InvalidModelError(
            f"the checkpoint has the state of a {given.kind}, the trainer's loss scaler is a "
            f"{scaler._kind}"
        )
    if _fitting_scaler_state(scaler, kept):
        try:
            scaler._check_state(given.state)
        except ValueError as error:
            raise InvalidModelError(f"the checkpoint's loss scaler: {error}") from error


def _check_accumulation(trainer: ORTTrainer, kept: KeptProperties) -> None:
    """Raise InvalidModelError where gradients of a step's first batches do not fit the rest of it.

    They have been divided by the number of batches, and hold the loss scale. The number of
    processes may be another: each of their batches had its part of the mean.
    """
    accumulation = kept.accumulation
    if accumulation is None:
        return
    batches, number, scale = accumulation.batches, accumulation.of, accumulation.loss_scale
    own = trainer.options.batch.gradient_accumulation_steps
    if number != own:
        raise InvalidModelError(
            f"the checkpoint was written after {batches} of {number} batches of a step, and "
            f"'batch.gradient_accumulation_steps' is {own}: go on with {number}, or save between "
            "two optimizer steps"
        )
    if scale != 1.0 and not _scales(trainer):
        raise InvalidModelError(
            f"the checkpoint was written after {batches} of {number} batches of a step, whose "
            f"gradients hold the loss scale {scale:g}, and the trainer does not scale the loss: go "
            "on with a loss scaler, or save between two optimizer steps"
        )


def _read_alike(engine: StepEngine, folder: Path) -> Any:
    """Return the checkpoint that the first process finds, read by each."""
    found: list[Any] = []

    def read() -> Path:
        found.append(_core.load_checkpoint(folder))
        return Path(found[0].path)

    path = engine.on_first(read)
    return engine.everywhere(lambda: found[0] if found else _core.load_checkpoint(path))


def _checked_user_dict(given: Mapping[str, Any]) -> StateDict:
    """Return it as it will come back; what JSON does not hold is refused by name."""
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"user_dict has the key {key!r}, expected strings")
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise TypeError(
                f"user_dict['{key}'] is a {type(value).__name__}, which does not come back from "
                "JSON as it is: keep numbers, strings, lists and dicts with string keys"
            )
    return dict(given)


def read_state_dict(folder: Path, *, pytorch_format: bool) -> StateDict:
    """Return what ``state_dict`` gave when the newest checkpoint of a folder was written."""
    checkpoint = read_checkpoint(folder, stacklevel=3)
    tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    if pytorch_format:
        return tensors
    kept = KeptProperties.parse(checkpoint.properties.get(_PROPERTY, "{}"))
    return {
        "model": {"full_precision": tensors},
        "optimizer": optimizer_states.by_parameter(checkpoint, kept.optimizer or ""),
        "train_step_info": {
            "optimization_step": kept.optimization_step or 0,
            "step": kept.step or 0,
        },
    }

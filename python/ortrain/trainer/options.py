# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Options of ORTTrainer: every key of the 2020 schema is honoured, or refused by name."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ortrain import devices, logs
from ortrain.amp import GradScaler, LossScaler, MixedPrecision
from ortrain.amp.mixed_precision import LISTS, TYPE_NAMES, half_type
from ortrain.distributed.adasum import require_power_of_two
from ortrain.errors import ArgumentTypeError, UnsupportedError
from ortrain.memory_budget import MemoryBudget
from ortrain.optim.lr_scheduler import _LRScheduler

_log = logs.get_logger("ortrain")

# Returns why a value is refused; None where it is honoured.
Refusal = Callable[[Any], str | None]


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    """One option: its default, the types that it takes, what is refused, and why it has no effect where it has none."""

    default: Any
    types: tuple[type, ...]
    refuse: Refusal = lambda value: None
    at_least: int | None = None
    unused: str = ""


def _only(expected: Any, reason: str) -> Refusal:
    return lambda value: None if value == expected else reason


_PIPELINE = "there is no pipeline parallelism: processes share the batch"
_PARALLEL = "processes share the batch (distributed.data_parallel_size), not the layers"


def _bool(default: bool, refuse: Refusal = lambda value: None) -> _Key:
    return _Key(default, (bool,), refuse)


def _count(default: int, at_least: int, refuse: Refusal = lambda value: None) -> _Key:
    return _Key(default, (int,), refuse, at_least)


_PIPELINE_KEYS: dict[str, _Key] = {
    "pipeline_parallel_size": _count(1, 1, _only(1, _PIPELINE)),
    "num_pipeline_micro_batches": _count(1, 1, _only(1, _PIPELINE)),
    "pipeline_cut_info_string": _Key("", (str,), _only("", _PIPELINE)),
    "sliced_schema": _Key({}, (dict,), _only({}, _PIPELINE)),
    "sliced_axes": _Key({}, (dict,), _only({}, _PIPELINE)),
    "sliced_tensor_names": _Key([], (list,), _only([], _PIPELINE)),
}


def _refuse_device(device: str) -> str | None:
    try:
        place = torch.device(device)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    if devices.is_supported(place):
        return None
    return "this build of ortrain has no provider for it"


def _refuse_max_memory(value: Any) -> str | None:
    MemoryBudget.parse(value, "option 'device.max_memory'")
    return None


def _refuse_stage(stage: int) -> str | None:
    if stage <= 1:
        return None
    return (
        "ORTTrainer partitions the optimizer's states (1); use DeepSpeed around ORTModule for more"
    )


def _refuse_half(dtype: str | torch.dtype) -> str | None:
    return None if half_type(dtype) is not None else f"expected {TYPE_NAMES}"


_SCHEMA: dict[str, Any] = {
    "batch": {"gradient_accumulation_steps": _count(1, 1)},
    "device": {
        "id": _Key("cpu", (str,), _refuse_device),
        "mem_limit": _count(0, 0),
        "max_memory": _Key(None, (int, str, type(None)), _refuse_max_memory),
    },
    "distributed": {
        "world_rank": _count(0, 0),
        "world_size": _count(1, 1),
        "local_rank": _count(0, 0),
        "data_parallel_size": _count(1, 1),
        "horizontal_parallel_size": _count(
            1, 1, _only(1, f"there is no tensor parallelism: {_PARALLEL}")
        ),
        "pipeline_parallel": _PIPELINE_KEYS,
        **_PIPELINE_KEYS,  # as they stood before there was a group of them
        "allreduce_post_accumulation": _bool(False),
        "deepspeed_zero_optimization": {"stage": _count(0, 0, _refuse_stage)},
        "enable_adasum": _bool(False),
    },
    "lr_scheduler": _Key(None, (_LRScheduler, type(None))),
    "mixed_precision": {
        "enabled": _bool(False),
        "dtype": _Key("bfloat16", (str, torch.dtype), _refuse_half),
        "loss_scaler": _Key(None, (LossScaler, torch.amp.GradScaler, type(None))),
        "allow": _Key([], (list,)),
        "deny": _Key([], (list,)),
        "promote": _Key([], (list,)),
    },
    "graph_transformer": {
        # Dropout masks and GELU are computed again in the backward in any case: none is stored.
        "attn_dropout_recompute": _bool(False),
        "gelu_recompute": _bool(False),
        "transformer_layer_recompute": _bool(False),
        "number_recompute_layers": _count(0, 0),
        # Casts stand where autocast puts them and are fused, whatever of these is asked for.
        "propagate_cast_ops_config": {
            "strategy": _Key("FLOOD_FILL", (str, int, enum.Enum)),
            "level": _count(1, -1),
            "allow": _Key([], (list,)),
        },
    },
    "utils": {
        "frozen_weights": _Key([], (list,)),
        "grad_norm_clip": _bool(True),
        # Gradients are given up as soon as they are used in any case.
        "memory_efficient_gradient": _bool(False),
        # Shapes are always inferred with symbols.
        "run_symbolic_shape_infer": _bool(False),
        # Of a normalization its input is kept, or computed again, as memory allows.
        "invertible_layer_norm_gradient": _bool(False),
    },
    "debug": {
        # Steps are deterministic in any case.
        "deterministic_compute": _bool(False),
        "check_model_export": _bool(False),
        "graph_save_paths": {
            "model_after_graph_transforms_path": _Key("", (str,)),
            "model_with_gradient_graph_path": _Key("", (str,)),
            "model_with_training_graph_path": _Key("", (str,)),
            "model_with_training_graph_after_optimization_path": _Key("", (str,)),
        },
    },
    "provider_options": _Key({}, (dict,), unused="providers of ortrain have no options"),
    "session_options": _Key(None, (object,), unused="there is no session of ONNX Runtime"),
    "_internal_use": {
        "enable_internal_postprocess": _bool(
            True, _only(True, "the exported graph needs no post-processing that could be left out")
        ),
        "extra_postprocess": _Key(None, (Callable, type(None))),  # type: ignore[arg-type]
        "onnx_opset_version": _count(23, 12),
        "enable_onnx_contrib_ops": _bool(True),
    },
}


class _Options:
    """A group of options; its keys are attributes."""

    def __init__(self, given: Any, schema: dict[str, Any], path: str) -> None:
        if not isinstance(given, Mapping):
            raise ArgumentTypeError(
                f"option {path or 'dict'} must be a dict, got {type(given).__name__}"
            )
        for key in given:
            if key not in schema:
                raise ValueError(
                    f"unknown option '{path}{key}'; there are {', '.join(sorted(schema))}"
                )
        for key, entry in schema.items():
            if isinstance(entry, dict):
                setattr(self, key, _Options(given.get(key, {}), entry, f"{path}{key}."))
            else:
                setattr(self, key, _checked(given, key, entry, path + key))
        self._given = frozenset(given)

    def given(self, key: str) -> Any:
        """Return an option that the caller has set; None for one that has its default."""
        return getattr(self, key) if key in self._given else None

    def __repr__(self) -> str:
        return repr({key: value for key, value in vars(self).items() if key != "_given"})


def _checked(given: Mapping[str, Any], key: str, entry: _Key, path: str) -> Any:
    if key not in given:
        return type(entry.default)(entry.default) if entry.default in ({}, []) else entry.default
    value = given[key]
    wrong = isinstance(value, bool) and bool not in entry.types
    if wrong or not isinstance(value, entry.types):
        expected = " or ".join(t.__name__ for t in entry.types)
        raise ArgumentTypeError(f"option '{path}' is {value!r}, expected {expected}")
    if entry.at_least is not None and value < entry.at_least:
        raise ValueError(f"option '{path}' is {value}, expected {entry.at_least} or more")
    reason = entry.refuse(value)
    if reason is not None:
        raise UnsupportedError(f"option '{path}' is {value!r}: {reason}")
    if entry.unused and value != entry.default:
        _log.warning("option '%s' has no effect: %s", path, entry.unused)
    return value


class ORTTrainerOptions(_Options):
    """Options of ORTTrainer, as nested dicts; what is left out has its default.

    Groups are ``batch``, ``device``, ``distributed``, ``lr_scheduler``, ``mixed_precision``,
    ``graph_transformer``, ``utils``, ``debug``, ``provider_options``, ``session_options`` and
    ``_internal_use``; docs/trainer.md lists their keys. They are read as attributes:
    ``options.batch.gradient_accumulation_steps``.

    Args:
      options: The options that differ from their defaults.

    Raises:
      ValueError: A key is unknown, or a value out of range.
      TypeError: A value has another type.
      UnsupportedError: A value asks for something that there is not, with the reason.
    """

    batch: Any
    device: Any
    distributed: Any
    lr_scheduler: _LRScheduler | None
    mixed_precision: Any
    graph_transformer: Any
    utils: Any
    debug: Any
    provider_options: dict[str, Any]
    session_options: Any
    _internal_use: Any

    @property
    def budget(self) -> MemoryBudget | None:
        """What the plan of a step may take; None for any memory."""
        return MemoryBudget.parse(self.device.max_memory)

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        super().__init__({} if options is None else options, _SCHEMA, "")
        mixed = self.mixed_precision
        mixed.dtype = half_type(mixed.dtype)
        for key in LISTS:
            _check_names(f"mixed_precision.{key}", getattr(mixed, key), "operators")
        _check_names("utils.frozen_weights", self.utils.frozen_weights, "parameters")
        _check_distributed(self.distributed)

    @property
    def precision(self) -> MixedPrecision | None:
        """What is computed in 16 bits; None for nothing."""
        mixed = self.mixed_precision
        if not mixed.enabled:
            return None
        return MixedPrecision(
            mixed.dtype, tuple(mixed.allow), tuple(mixed.deny), tuple(mixed.promote)
        )


def _check_distributed(options: Any) -> None:
    """Complete the places of processes; raise ValueError where they contradict each other."""
    size = options.world_size
    for key in ("world_rank", "local_rank"):
        if getattr(options, key) >= size:
            raise ValueError(
                f"option 'distributed.{key}' is {getattr(options, key)}, expected less than "
                f"'distributed.world_size', {size}"
            )
    if options.given("data_parallel_size") not in (None, size):
        raise ValueError(
            f"option 'distributed.data_parallel_size' is {options.data_parallel_size}, expected "
            f"'distributed.world_size', {size}: every process takes a part of the batch"
        )
    options.data_parallel_size = size
    if options.enable_adasum:
        require_power_of_two(size)


def _check_names(path: str, names: list[Any], what: str) -> None:
    for name in names:
        if not isinstance(name, str):
            raise ArgumentTypeError(f"option '{path}' must hold names of {what}, it holds {name!r}")


def with_mixed_precision(options: ORTTrainerOptions, given: Any) -> ORTTrainerOptions:
    """Return the options with an argument ``mixed_precision`` put into the group of that name.

    Keys that stand on one side only are taken from there.

    Args:
      options: What they are; they stay as they are.
      given: A 16-bit type ("bf16", "fp16", "bfloat16", "float16", a torch.dtype), of which float16
        brings a GradScaler where the options say nothing of a loss scaler; or keys of the group as a
        dict, which turns mixed precision on unless ``enabled`` is False. None and "no" add nothing.

    Raises:
      ValueError: It is on in the options already, both sides have a key and differ in it, a key is
        unknown, or the group says how to compute and not whether to.
      TypeError: ``given`` has another type.
      UnsupportedError: The type is another one.
    """
    mixed = options.mixed_precision
    if given is None or given == "no":
        _require_enabled_said(mixed)
        return options
    if not isinstance(given, (str, torch.dtype, Mapping)):
        raise TypeError(
            f"mixed_precision is {given!r}, expected the name of a 16-bit type, a torch.dtype or a "
            "dict"
        )
    if mixed.enabled:
        raise ValueError("mixed_precision is given, and enabled in the options too; give one")
    keys = dict(given) if isinstance(given, Mapping) else {"dtype": given}
    keys.setdefault("enabled", True)
    argument = ORTTrainerOptions({"mixed_precision": keys}).mixed_precision
    for key in (key for key in keys if key in mixed._given):
        ours, theirs = getattr(argument, key), getattr(mixed, key)
        if ours is not theirs and ours != theirs:
            raise ValueError(
                f"the argument mixed_precision has '{key}' {ours!r}, the option "
                f"'mixed_precision.{key}' is {theirs!r}; give one"
            )
    merged = {**{key: getattr(mixed, key) for key in mixed._given}, **keys}
    if not isinstance(given, Mapping) and argument.dtype == torch.float16:
        merged.setdefault("loss_scaler", GradScaler())
    result = copy.copy(options)
    result.mixed_precision = ORTTrainerOptions({"mixed_precision": merged}).mixed_precision
    return result


def _require_enabled_said(mixed: Any) -> None:
    """Raise ValueError for a group that would be without effect by an oversight."""
    if mixed.enabled or "enabled" in mixed._given:
        return
    for key in ("dtype", "loss_scaler", *LISTS):
        if mixed.given(key) not in (None, [], torch.bfloat16):
            raise ValueError(
                f"option 'mixed_precision.{key}' is given and 'mixed_precision.enabled' is not: "
                "without it nothing is computed in 16 bits"
            )

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of ORTTrainer as functions, under the names of 2020."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ortrain.errors import UnsupportedError
from ortrain.trainer import ORTTrainer, state_dicts


def experimental_state_dict(
    ort_trainer: ORTTrainer, include_optimizer_state: bool = True
) -> dict[str, Any]:
    """Return copies of parameters, buffers and states of the optimizer by one name each.

    States are ``Moment_1_fc.weight``, ``Update_Count_fc.weight``, ``Step`` and the like.
    """
    return state_dicts.flat_state_dict(ort_trainer, optimizer=include_optimizer_state)


def experimental_load_state_dict(
    ort_trainer: ORTTrainer, state_dict: Mapping[str, Any], strict: bool = False
) -> None:
    """Take over what ``experimental_state_dict`` or ``ORTTrainer.state_dict`` returned.

    Raises:
      InvalidModelError: Names, shapes or states do not fit; nothing has changed.
    """
    if not state_dicts.is_structured(state_dict, ort_trainer.engine.tensors):
        state_dict = state_dicts.structured(ort_trainer, state_dict)
    ort_trainer.load_state_dict(state_dict, strict)


def experimental_save_checkpoint(
    ort_trainer: ORTTrainer,
    checkpoint_dir: str | Path,
    checkpoint_prefix: str = "ORT_checkpoint",
    checkpoint_state_dict: Mapping[str, Any] | None = None,
    include_optimizer_state: bool = True,
) -> None:
    """Write a checkpoint into the folder ``checkpoint_dir/checkpoint_prefix``.

    Raises:
      UnsupportedError: ``checkpoint_state_dict`` is given: the trainer's own state is written.
      FileError: It cannot be written.
    """
    if checkpoint_state_dict is not None:
        raise UnsupportedError("checkpoint_state_dict: the trainer's own state is written")
    folder = Path(checkpoint_dir) / checkpoint_prefix
    ort_trainer.save_checkpoint(folder, include_optimizer_states=include_optimizer_state)


def experimental_load_checkpoint(
    ort_trainer: ORTTrainer,
    checkpoint_dir: str | Path,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> None:
    """Go on from the newest complete checkpoint of ``checkpoint_dir/checkpoint_prefix``.

    Raises:
      FileError: There is none.
    """
    ort_trainer.load_checkpoint(Path(checkpoint_dir) / checkpoint_prefix, strict=strict)


def aggregate_checkpoints(
    paths: Sequence[str | Path], pytorch_format: bool = True
) -> dict[str, Any]:
    """Return the state of a checkpoint.

    ORTTrainer writes one for all of its processes, which is whole whatever they shared.

    Args:
      paths: The folder, alone or once for each process; of different ones that processes named, one exists.
      pytorch_format: Parameters and buffers alone; otherwise the optimizer's states too.

    Raises:
      UnsupportedError: Several of the folders exist.
      FileError: There is no complete checkpoint.
    """
    folder = state_dicts.the_one_folder(paths)
    return state_dicts.read_state_dict(folder, pytorch_format=pytorch_format)

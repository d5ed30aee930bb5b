# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which operators of a captured graph stand inside torch.utils.checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import traceback as fx_traceback

from ortrain.capture.errors import UnseenStateError
from ortrain.capture.trace_internals import CheckpointGenerator, checkpoints_by, has_own_contexts

_KEY = "ortrain_checkpoint"


@contextlib.contextmanager
def marked_checkpoints(module: nn.Module) -> Iterator[None]:
    """Mark what this thread traces inside checkpoints, and trace it as if there were none.

    Reentrant checkpoints, and those with contexts of their own, stay what they are.

    Args:
      module: What is traced. PyTorch's backward runs a checkpoint again, whose layers write to their buffers again.
    """
    thread, numbers = threading.get_ident(), itertools.count(1)
    is_open = has_ended = False

    def marking(original: CheckpointGenerator) -> CheckpointGenerator:
        def generator(
            function: Any, preserve_rng_state: bool, context_fn: Any, *args: Any, **kwargs: Any
        ) -> Iterator[None]:
            nonlocal is_open
            if threading.get_ident() != thread or has_own_contexts(context_fn):
                yield from original(function, preserve_rng_state, context_fn, *args, **kwargs)
                return
            if is_open:  # a checkpoint inside of another is part of it
                yield
                return
            is_open, before = True, _versions(module)
            around = fx_traceback.current_meta.get("custom")
            fx_traceback.current_meta["custom"] = {**(around or {}), _KEY: next(numbers)}
            try:
                yield
                if torch.is_grad_enabled() and _versions(module) != before:
                    raise UnseenStateError(
                        "a checkpoint in its forward writes to a buffer, and does so again in the backward"
                    )
            finally:
                is_open = False
                # Behind an error the generator may live for longer than the trace.
                if not has_ended:
                    fx_traceback.current_meta["custom"] = around
                    if around is None:
                        del fx_traceback.current_meta["custom"]

        return generator

    # The export copies no annotations to its nodes otherwise.
    with checkpoints_by(marking), fx_traceback.preserve_node_meta():
        try:
            yield
        finally:
            has_ended = True


def _versions(module: nn.Module) -> list[int]:
    return [buffer._version for buffer in module.buffers()]


def checkpoint_of(node: torch.fx.Node) -> int:
    """Return the number of the checkpoint that an operator stands in, from 1; 0 for none."""
    return int((node.meta.get("custom") or {}).get(_KEY, 0))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Forwards of transformers' models without the key-value cache that a configuration asks for by default."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

from torch import nn

from ortrain.capture.errors import UnseenStateError

# What configurations say meanwhile: as good as False, which a call says that wants no cache in PyTorch either.
_OFF = 0


@contextlib.contextmanager
def without_cache(module: nn.Module) -> Iterator[None]:
    """Set ``use_cache`` to 0 in the configurations found in a module, for a while.

    Masks are those of a model with a cache all the same, where PyTorch's has one: where there is none, transformers looks
    for packed sequences in positions.
    """
    changed: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and id(config) not in changed and getattr(config, "use_cache", False):
            changed[id(config)] = (config, config.use_cache)
    try:
        for config, _ in changed.values():
            _set(config, _OFF)
        with _masks_as_in_pytorch(), _masks_as_with_cache(changed):
            yield
    finally:
        for config, value in changed.values():
            _set(config, value)


def _set(config: Any, value: Any) -> None:
    held = getattr(config, "__dict__", {})
    if "use_cache" in held:
        held["use_cache"] = value  # past checks of its type
    else:
        config.use_cache = bool(value)


@contextlib.contextmanager
def _masks_as_in_pytorch() -> Iterator[None]:
    """Let transformers make masks where PyTorch's forward does: an export has one everywhere, which some layers refuse."""
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "is_torchdynamo_exporting", None)
    if masking is None or original is None:
        yield
        return
    thread = threading.get_ident()

    def is_exporting() -> bool:
        return threading.get_ident() != thread and original()

    with mock.patch.object(masking, "is_torchdynamo_exporting", is_exporting):
        yield


@contextlib.contextmanager
def _masks_as_with_cache(configs: Mapping[int, Any]) -> Iterator[None]:
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "_preprocess_mask_arguments", None)
    if not configs or original is None:
        yield
        return
    thread = threading.get_ident()
    signature = inspect.signature(original)

    @functools.wraps(original)
    def preprocess(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments
        looks = given.get("attention_mask") is None and given.get("past_key_values") is None
        if looks and given.get("position_ids") is not None and threading.get_ident() == thread:
            config = given.get("config")
            if id(config) in configs and _has_cache_in_pytorch(sys._getframe(1), config):
                given["position_ids"] = None
        return original(*bound.args, **bound.kwargs)

    with mock.patch.object(masking, "_preprocess_mask_arguments", preprocess):
        yield


def _has_cache_in_pytorch(frame: Any, config: Any) -> bool:
    """Tell whether the forward that makes a mask would have a cache if its configuration were not changed.

    Raises:
      UnseenStateError: It cannot be told.
    """
    while frame is not None:
        held = frame.f_locals
        model = held.get("self")
        if isinstance(model, nn.Module) and getattr(model, "config", None) is config:
            options = held.get("kwargs")
            asked = held["use_cache"] if "use_cache" in held else (options or {}).get("use_cache")
            checkpoints = getattr(model, "gradient_checkpointing", False) and model.training
            if asked is not None:
                return type(asked) is int and not checkpoints
        frame = frame.f_back
    raise UnseenStateError(
        "whether PyTorch's forward has a key-value cache, on which masks of packed sequences depend, cannot be told"
    )

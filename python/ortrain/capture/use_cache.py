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


@contextlib.contextmanager
def without_cache(module: nn.Module, *, by_default: bool = True) -> Iterator[None]:
    """Set ``use_cache = False`` in the configurations found in a module, for a while.

    Masks are those of a module with a cache all the same: where there is none, transformers looks for packed sequences
    in positions.

    Args:
      module: The module.
      by_default: Whether the call leaves it to the configurations; otherwise it has no cache in PyTorch either.
    """
    changed: dict[int, Any] = {}
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None and id(config) not in changed and getattr(config, "use_cache", False):
            changed[id(config)] = (config, config.use_cache)
    try:
        for config, _ in changed.values():
            config.use_cache = False
        with _masks_as_with_cache(changed if by_default else {}):
            yield
    finally:
        for config, value in changed.values():
            config.use_cache = value


@contextlib.contextmanager
def _masks_as_with_cache(configs: Mapping[int, Any]) -> Iterator[None]:
    masking = sys.modules.get("transformers.masking_utils")
    original = getattr(masking, "_preprocess_mask_arguments", None)
    if not configs or original is None:
        yield
        return
    thread = threading.get_ident()

    @functools.wraps(original)
    def preprocess(config: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or id(config) not in configs:
            return original(config, *args, **kwargs)
        bound = inspect.signature(original).bind(config, *args, **kwargs)
        if "position_ids" in bound.arguments:
            bound.arguments["position_ids"] = None
        return original(*bound.args, **bound.kwargs)

    with mock.patch.object(masking, "_preprocess_mask_arguments", preprocess):
        yield

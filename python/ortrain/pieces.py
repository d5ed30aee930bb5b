# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that cannot be captured whole: Dynamo cuts them, and each piece is a graph of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from ortrain import dynamo
from ortrain.capture import dynamo_internals as internals
from ortrain.engine import Engine


class Pieces:
    """Runs a module's forward, what Dynamo can cut out of it on the engine, the rest in PyTorch.

    Args:
      module: The module; what changes in it between calls is seen by Dynamo's guards.
    """

    def __init__(self, module: nn.Module) -> None:
        self._engines: list[Engine] = []
        self._breaks: dict[str, None] = {}
        self._forward = internals.compiled_in_pieces(module.forward, self._backend)

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward; what it returns and raises is what the module would."""
        causes: list[str] = []
        try:
            with internals.settings_for_pieces(), internals.graph_breaks(causes):
                return self._forward(*args, **kwargs)
        finally:
            self._breaks.update(dict.fromkeys(causes))

    @property
    def engines(self) -> Sequence[Engine]:
        """One per piece, oldest first."""
        return self._engines

    @property
    def breaks(self) -> Sequence[str]:
        """Why the forward was cut, each cause once."""
        return list(self._breaks)

    def _backend(self, graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        def make_engine(piece: nn.Module) -> Engine:
            self._engines.append(Engine(piece, tells=False))
            return self._engines[-1]

        return dynamo.runner_of(graph_module, make_engine)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that cannot be captured whole: Dynamo cuts them, and each piece is a graph of its own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from ortrain import dynamo
from ortrain.capture import dynamo_internals as internals
from ortrain.capture.object_places import ObjectPlaces
from ortrain.engine import Engine
from ortrain.random_numbers import DropoutSource
from ortrain.verification.check import run_piece

# Ways in which places hold the same objects for which there is code.
_MOST_PATTERNS = 8


class Pieces:
    """Runs a module's forward, what Dynamo can cut out of it on the engine, the rest in PyTorch.

    Args:
      module: The module; what changes in it between calls is seen by Dynamo's guards.
      dropout: Who draws the masks of dropout.
    """

    def __init__(self, module: nn.Module, dropout: DropoutSource = DropoutSource.ENGINE) -> None:
        self._module = module
        self._breaks: dict[str, None] = {}
        # Dynamo keeps backends and compiled code for longer than the module lives.
        self._engines: list[Engine] = []
        owner = weakref.ref(self)

        def run_on_engine(piece: nn.Module) -> Callable[..., Any]:
            pieces = owner()
            if pieces is None:
                return lambda args, _: piece(*args)
            engine = Engine(piece, tells=False, dropout=dropout)
            pieces._engines.append(engine)
            held = weakref.ref(engine)

            def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
                engine = held()
                return piece(*args) if engine is None else run_piece(engine, args, kwargs)

            return run

        def backend(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            return dynamo.runner_of(graph_module, run_on_engine)

        self._backend = backend
        self._compiled_for: Any = None
        self._places: ObjectPlaces | None = None
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward; what it returns and raises is what the module would."""
        forward = self._module.forward
        if self._places is None or forward != self._compiled_for:  # another was put in its place
            self._places = ObjectPlaces(self._module, (args, kwargs))
            self._compiled.clear()
            self._compiled_for = forward
        pattern = self._places.pattern()
        if pattern not in self._compiled and len(self._compiled) == _MOST_PATTERNS:
            return forward(*args, **kwargs)
        if pattern not in self._compiled:
            self._compiled[pattern] = internals.compiled_in_pieces(forward, self._backend)
        causes: list[str] = []
        try:
            with (
                internals.settings_for_pieces(),
                internals.graph_breaks(causes),
                internals.failures_untold(),
            ):
                return self._compiled[pattern](*args, **kwargs)
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

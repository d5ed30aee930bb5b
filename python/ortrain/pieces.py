# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that cannot be captured whole: Dynamo cuts them, and each piece is a graph of its own."""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx, nn

from ortrain import dynamo, piece_costs
from ortrain.capture import dynamo_internals as internals
from ortrain.capture.object_places import ObjectPlaces
from ortrain.engine import Engine
from ortrain.random_numbers import DropoutSource
from ortrain.verification.check import run_piece

# Ways in which places hold the same objects for which there is code.
_MOST_PATTERNS = 8
# Calls in a row for which Dynamo had to compile something, after which it is left.
_MOST_COMPILED_CALLS = 8


@dataclasses.dataclass(slots=True, weakref_slot=True)
class _Piece:
    """One piece.

    Attributes:
      gain: Microseconds that a call of it is expected to save on the engine.
      engine: Runs it; None where PyTorch does.
      calls: How often it ran since the last call of the module began.
    """

    gain: float
    engine: Engine | None = None
    calls: int = 0

    @property
    def is_refused(self) -> bool:
        """Whether the engine has found no graph for it."""
        records = [] if self.engine is None else self.engine.records
        return bool(records) and all(r.fallback and not r.first_call for r in records)


class Pieces:
    """Runs a module's forward, what Dynamo can cut out of it on the engine, the rest in PyTorch.

    Pieces that are expected to lose by it (`piece_costs`) run in PyTorch too.

    Args:
      module: The module; what changes in it between calls is seen by Dynamo's guards.
      dropout: Who draws the masks of dropout.

    Attributes:
      loss: Why calls like the last one are better left to PyTorch as a whole; empty where they are not.
      is_settled: Whether the last call ran through code that was there.
    """

    def __init__(self, module: nn.Module, dropout: DropoutSource = DropoutSource.ENGINE) -> None:
        self.loss = ""
        self.is_settled = False
        self._module = module
        self._dropout = dropout
        self._breaks: dict[str, None] = {}
        # Dynamo keeps backends and compiled code for longer than the module lives.
        self._pieces: list[_Piece] = []
        self._compiled_calls = 0  # in a row
        owner = weakref.ref(self)

        def backend(graph_module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
            pieces = owner()
            return graph_module.forward if pieces is None else pieces._runner_of(graph_module)

        self._backend = backend
        self._compiled_for: Any = None
        self._places: ObjectPlaces | None = None
        self._is_misread = False
        self._compiled: dict[tuple[int, ...], Callable[..., Any]] = {}

    def _runner_of(self, graph_module: fx.GraphModule) -> Callable[..., Any]:
        """Return what runs a piece; it keeps neither this object nor an engine."""
        dynamo.restore_meaning(graph_module)
        in_pytorch = graph_module.forward
        chooses = piece_costs.Choice.current() is piece_costs.Choice.WORTHWHILE
        piece = _Piece(piece_costs.gain(graph_module) if chooses else math.inf)
        self._pieces.append(piece)
        runs = in_pytorch
        if piece.gain > 0:
            varies = dynamo.has_sizes_that_vary(graph_module)
            made = functools.partial(self._engine_of, piece, varies)
            runs = dynamo.runner_of(graph_module, made)
        held = weakref.ref(piece)

        def run(*args: Any) -> Any:
            piece = held()
            if piece is None:
                return in_pytorch(*args)
            piece.calls += 1
            return in_pytorch(*args) if chooses and piece.is_refused else runs(*args)

        return run

    def _engine_of(self, piece: _Piece, varies: bool, module: nn.Module) -> Callable[..., Any]:
        piece.engine = Engine(module, tells=False, dropout=self._dropout, any_sizes=varies)
        held = weakref.ref(piece.engine)

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            engine = held()
            return module(*args) if engine is None else run_piece(engine, args, kwargs)

        return run

    def run(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the forward; what it returns and raises is what the module would."""
        forward = self._module.forward
        if self._places is not None and not self._places.are_current():
            self._is_misread |= not self._places.are_followed()
            self._places = None
        if self._is_misread:
            self.loss = "a class got or lost a special method, which Dynamo would not follow"
            return forward(*args, **kwargs)
        if self._places is None or forward != self._compiled_for:  # another was put in its place
            self._places = ObjectPlaces(self._module, (args, kwargs))
            self._compiled.clear()
            self._compiled_for = forward
        pattern = self._places.pattern()
        if pattern not in self._compiled and len(self._compiled) == _MOST_PATTERNS:
            return forward(*args, **kwargs)
        if pattern not in self._compiled:
            self._compiled[pattern] = internals.compiled_in_pieces(forward, self._backend)
        known, self.is_settled = len(self._pieces), False
        for piece in self._pieces:
            piece.calls = 0
        causes: list[str] = []
        try:
            with (
                internals.settings_for_pieces(),
                internals.graph_breaks(causes),
                internals.failures_untold(),
            ):
                result = self._compiled[pattern](*args, **kwargs)
        finally:
            self._breaks.update(dict.fromkeys(causes))
        self.is_settled = len(self._pieces) == known
        self._weigh(not self.is_settled)
        return result

    def _weigh(self, compiled: bool) -> None:
        """Set `loss` after a call, whether or not Dynamo compiled something for it."""
        compiled_before = self._compiled_calls > 0
        self._compiled_calls = self._compiled_calls + 1 if compiled else 0
        if piece_costs.Choice.current() is piece_costs.Choice.ALL:
            self.loss = ""
        elif self._compiled_calls >= _MOST_COMPILED_CALLS:
            self.loss = f"each of the last {self._compiled_calls} calls was cut in other pieces"
        elif compiled or compiled_before:
            saved = sum(
                p.gain * p.calls for p in self._pieces if p.engine is not None and not p.is_refused
            )
            price = piece_costs.price_of_cutting(sum(p.calls for p in self._pieces))
            self.loss = "" if saved > price else "its pieces are too small to gain by the engine"

    @property
    def engines(self) -> Sequence[Engine]:
        """Of the pieces that run on one, oldest first."""
        return [piece.engine for piece in self._pieces if piece.engine is not None]

    @property
    def breaks(self) -> Sequence[str]:
        """Why the forward was cut, each cause once."""
        return list(self._breaks)

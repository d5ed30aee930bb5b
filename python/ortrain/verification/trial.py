# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One call on the engine against the same call in PyTorch: results, and what it wrote to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ortrain.capture.signature import flatten_outputs
from ortrain.verification.comparison import (
    Difference,
    Pair,
    first_difference,
    largest,
    structure_difference,
    value_difference,
)
from ortrain.verification.draws import DrawsOfRun, RepeatedDraws, UnrepeatableError
from ortrain.verification.replay import Answer, Replay, ReplayError
from ortrain.verification.watching import GraphRun


class Trial:
    """PyTorch's side of a call that has run on the engine.

    Args:
      replay: The call, from before it ran.
      run: Of the graph; None where there were several, with PyTorch in between.
      result: What the engine's side returned.
      called_with: Positional and keyword arguments of the engine's side.
      given: The tensors among them.
      prefix: What names of parameters and buffers begin with.

    Attributes:
      replay: The call.
      results: What the engine's side gave, until they are released.
      answer: What PyTorch gave, after `forward_difference`.

    Raises:
      UnsupportedInputError: The result holds what cannot be compared.
    """

    def __init__(
        self,
        replay: Replay,
        run: GraphRun | None,
        result: Any,
        called_with: tuple[Sequence[Any], Mapping[str, Any]],
        given: Sequence[torch.Tensor],
        prefix: str = "",
    ) -> None:
        self.replay = replay
        self.answer: Answer
        self._random = DrawsOfRun(run, replay.dropout)
        self._draws = RepeatedDraws(self._random)
        self.results, self._structure = flatten_outputs(result)
        self._called_with, self._given = called_with, given
        module = replay.module
        self.parameters = {id(p): (prefix + n, p) for n, p in module.named_parameters()}
        self._buffers = {id(b): prefix + n for n, b in module.named_buffers()}
        self._wide: Answer | None = None
        self._runs_wide = True

    @property
    def precision(self) -> torch.dtype:
        """The least precise type that takes part."""
        return self._draws.precision

    def release_results(self) -> None:
        """Let the engine's results go: their graph may lead back to this object."""
        self.results = []

    def forward_difference(self) -> Difference | None:
        """Run PyTorch's side; return what differs: of the results, then of what was written.

        Raises:
          ReplayError: PyTorch raises.
          UnrepeatableError: PyTorch draws random numbers that the graph does not.
          UnsupportedInputError: Its result holds what cannot be compared.
        """
        replay = self.replay
        with replay.rewound() as rewound:
            self.answer = replay.run(self._draws)
            changed = replay.changed_tensors(rewound)
            attributes = [
                found
                for name, mine, theirs in rewound.present.differing()
                if (found := self._attribute_difference(name, mine, theirs))
            ]
        found = structure_difference(self._structure, self.answer.structure)
        found = found or self._result_difference() or self._argument_difference()
        found = found or self._tensor_difference(changed)
        replay.forget([tensor for tensor, _, _ in changed])
        return found or (attributes[0] if attributes else None)

    def wide_answer(self) -> Answer | None:
        """Return what PyTorch gives in float64; None where the module does not run in it."""
        if self._wide is None and self._runs_wide:
            try:
                with self.replay.rewound():
                    self._wide = self.replay.run(RepeatedDraws(self._random, wide=True), wide=True)
            except (ReplayError, UnrepeatableError):  # its code fixes types
                self._runs_wide = False
        wide = self._wide
        if wide is None or len(wide.tensors) != len(self.answer.tensors):
            return None
        return wide

    def forget_wide(self) -> None:
        """Give the memory of the run in float64 back."""
        self._wide = None

    def _result_difference(self) -> Difference | None:
        expected, names = self.answer.tensors, self.answer.structure.paths
        pairs = [
            Pair(_name_of_result(i, names[i]), mine, theirs)
            for i, (mine, theirs) in enumerate(zip(self.results, expected, strict=True))
        ]

        def exact() -> Sequence[torch.Tensor | None] | None:
            wide = self.wide_answer()
            return None if wide is None else wide.tensors

        found = first_difference(pairs, self.precision, largest(expected), exact)
        if found is not None:
            return found
        for pair, mine, theirs in zip(pairs, self.results, expected, strict=True):
            if theirs.requires_grad and not mine.requires_grad:
                return Difference(pair.what, math.inf, "a gradient reaches it in PyTorch alone")
        return None

    def _argument_difference(self) -> Difference | None:
        ran = self.answer.arguments
        pairs = [
            Pair(f"argument '{path}' after the call", mine, theirs)
            for path, mine, theirs in zip(self.replay.call.paths, self._given, ran, strict=True)
        ]
        found = first_difference(pairs, self.precision, largest(ran), lambda: None)
        if found is not None:
            return found
        mine = (list(self._called_with[0]), dict(self._called_with[1]))
        theirs = (list(self.answer.called_with[0]), dict(self.answer.called_with[1]))
        for one, other in zip(mine, theirs, strict=True):
            if found := value_difference(
                "the arguments after the call", one, other, self.precision
            ):
                return found
        return None

    def _tensor_difference(
        self, changed: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    ) -> Difference | None:
        pairs = [Pair(self._name_of_tensor(tensor), a, b) for tensor, a, b in changed]
        scale = largest([pair.expected for pair in pairs])
        return first_difference(pairs, self.precision, scale, lambda: None)

    def _name_of_tensor(self, tensor: torch.Tensor) -> str:
        if id(tensor) in self._buffers:
            return f"buffer '{self._buffers[id(tensor)]}'"
        if id(tensor) in self.parameters:
            return f"parameter '{self.parameters[id(tensor)][0]}' after the call"
        return "a tensor that is no buffer"

    def _attribute_difference(self, name: str, mine: Any, theirs: Any) -> Difference | None:
        kind = "buffer" if isinstance(mine, torch.Tensor) and id(mine) in self._buffers else None
        what = f"{kind or 'attribute'} '{name}'"
        return value_difference(what, mine, theirs, self.precision)


def _name_of_result(index: int, path: str) -> str:
    plain = not path or path.partition(".")[0] == "output"
    return f"output #{index}" if plain else f"output #{index} ('{path}')"

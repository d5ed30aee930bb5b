# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of one call on the engine against those of PyTorch, as they are made."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch

from ortrain.verification.comparison import Difference, Pair, first_difference, largest
from ortrain.verification.draws import UnrepeatableError
from ortrain.verification.replay import Answer
from ortrain.verification.seeds import Seeds, UnknownSeedsError
from ortrain.verification.trial import Trial
from ortrain.verification.watching import GraphRun

# What PyTorch says of a tensor that its backward needs and that was written to since.
_OVERWRITTEN = "modified by an inplace operation"
# What has a gradient: ("argument", index), or ("parameter", id).
_Key = tuple[str, int]
Incoming = Sequence[torch.Tensor | None]


class Gradients:
    """What PyTorch's backward of a trial makes of the gradients of its results.

    Args:
      trial: Whose forward has run.
      incoming: Gradient per result; None for none.
    """

    def __init__(self, trial: Trial, incoming: Incoming) -> None:
        self._trial = trial
        self._incoming = incoming
        self._names = {
            ("argument", i): f"argument '{path}'"
            for i, path in enumerate(trial.replay.call.paths)
            if trial.replay.call.tensors[i].requires_grad
        }
        self._names |= {
            ("parameter", number): f"parameter '{name}'"
            for number, (name, parameter) in trial.parameters.items()
            if parameter.requires_grad
        }
        with trial.replay.backward_apart():
            self._expected = self._of(trial.answer, incoming)
        self._scale = largest(list(self._expected.values()))

    @property
    def keys(self) -> Sequence[_Key]:
        """What may have a gradient."""
        return list(self._names)

    def difference(self, actual: Mapping[_Key, torch.Tensor | None]) -> Difference | None:
        """Return the first gradient that differs."""
        keys = [key for key in actual if key in self._names]
        pairs = [
            Pair(f"gradient of {self._names[k]}", actual[k], self._expected[k], absent_is_zero=True)
            for k in keys
        ]

        def exact() -> Sequence[torch.Tensor | None] | None:
            wide = self._trial.wide_answer()
            if wide is None:
                return None
            given = [None if g is None else g.double() for g in self._incoming]
            with self._trial.replay.backward_apart():
                found = self._of(wide, given)
            return [found[k] for k in keys]

        return first_difference(pairs, self._trial.precision, self._scale, exact)

    def _of(self, answer: Answer, incoming: Incoming) -> dict[_Key, torch.Tensor | None]:
        tensors: list[tuple[_Key, torch.Tensor]] = []
        for kind, number in self._names:
            if kind == "argument":
                tensors.append(((kind, number), answer.arguments[number]))
                continue
            # What reaches a parameter by a list or a closure finds itself, others its stand-in.
            parameter = self._trial.parameters[number][1]
            both = {id(t): t for t in (answer.leaves.get(number, parameter), parameter)}
            tensors += [((kind, number), tensor) for tensor in both.values()]
        found: dict[_Key, torch.Tensor | None] = dict.fromkeys(self._names)
        roots = [
            (result, gradient.to(result.dtype))
            for result, gradient in zip(answer.tensors, incoming, strict=True)
            if gradient is not None and result.requires_grad
        ]
        if not roots or not tensors:
            return found
        results, given = zip(*roots, strict=True)
        with answer.draws.repeating():  # a checkpoint runs layers again
            made = torch.autograd.grad(
                results, [t for _, t in tensors], given, retain_graph=True, allow_unused=True
            )
        for (key, _), gradient in zip(tensors, made, strict=True):
            if gradient is not None:
                sofar = found[key]
                found[key] = gradient if sofar is None else sofar + gradient
        return found


class Witness:
    """Compares what the backward of one run of a graph hands on.

    Args:
      trial: Of the run; its forward agreed.
      run: The run.
      on_difference: Raises; is given what differs and the gradients of the results.
      on_agreement: Is given the seconds that comparing one backward took.
      on_unknown: Is told why PyTorch has no such backward, or none any more, where the engine has.
    """

    def __init__(
        self,
        trial: Trial,
        run: GraphRun,
        on_difference: Callable[[Difference, Incoming], None],
        on_agreement: Callable[[float], None],
        on_unknown: Callable[[str], None],
    ) -> None:
        self._trial = trial
        results = len(trial.answer.tensors)
        self._seeds = Seeds(run.entry, trial.replay.call.tensors, results)
        self._keys: list[_Key | None] = []
        for position, (kind, where) in enumerate(run.entry.tensors):
            number = where if kind == "user" else id(run.inputs[position])
            self._keys.append(
                {"user": ("argument", number), "module": ("parameter", number)}.get(kind)
            )
        self._on_difference, self._on_agreement = on_difference, on_agreement
        self._on_unknown = on_unknown
        self._incoming: list[torch.Tensor | None] = []
        self._gradients: Gradients | None = None
        self._awaited: set[int] = set()
        self._seconds = 0.0

    def begin(self, incoming: Incoming, made: Sequence[int]) -> None:
        """Take the gradients of the graph's outputs, and the inputs that will get one."""
        began = time.perf_counter()
        self._gradients = None
        try:
            self._incoming = self._seeds.of(incoming)
            self._gradients = Gradients(self._trial, self._incoming)
        except (UnknownSeedsError, UnrepeatableError) as error:
            self._on_unknown(str(error))
            return
        except RuntimeError as error:
            if _OVERWRITTEN not in str(error):
                raise
            self._on_unknown(str(error))
            return
        self._awaited = set(made)
        self._seconds = time.perf_counter() - began
        seen = {self._keys[position] for position in made}
        self._look({key: None for key in self._gradients.keys if key not in seen})

    def compare(self, positions: Sequence[int], gradients: Incoming) -> None:
        """Look at gradients of inputs of the graph, by position, before they are handed on."""
        actual = {
            key: gradient
            for position, gradient in zip(positions, gradients, strict=True)
            if position in self._awaited and (key := self._keys[position]) is not None
        }
        self._awaited -= set(positions)
        self._look(actual)
        if not self._awaited and self._gradients is not None:
            self._gradients = None
            self._trial.forget_wide()
            self._on_agreement(self._seconds)

    def _look(self, actual: Mapping[_Key, torch.Tensor | None]) -> None:
        if self._gradients is None:
            return
        began = time.perf_counter()
        found = self._gradients.difference(actual)
        self._seconds += time.perf_counter() - began
        if found is not None:
            self._gradients = None
            self._on_difference(found, self._incoming)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Finds the first layer, in the order of execution, that the engine computes differently."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.errors import CaptureError
from ortrain.capture.signature import flatten_outputs
from ortrain.engine import Engine
from ortrain.verification.comparison import Difference
from ortrain.verification.draws import DrawsOfRun, RepeatedDraws, UnrepeatableError
from ortrain.verification.gradients import Gradients, Incoming
from ortrain.verification.replay import Answer, Replay, ReplayError
from ortrain.verification.trial import Trial
from ortrain.verification.watching import GraphRun, watched

_LAYER = re.compile(r"@(\S+?)/[^/\s]+(?:\s|$)")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """The first layer that differs.

    Attributes:
      layer: Its path; empty for the module itself.
      difference: What differs when the layer runs alone on PyTorch's inputs; None where that is nothing.
      outdated: Whether a graph captured anew agrees with PyTorch: the one that ran is out of date.
    """

    layer: str
    difference: Difference | None
    outdated: bool = False


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of a layer while PyTorch ran the one around it."""

    path: str
    replay: Replay
    incoming: list[torch.Tensor | None]


@dataclasses.dataclass(slots=True)
class _Alone:
    """What a layer gave when it ran alone: whether in one graph, which, and what differs."""

    run: GraphRun | None
    difference: Difference | None


def first_layer(replay: Replay, run: GraphRun | None, incoming: Incoming | None) -> Found:
    """Run layers one by one, on the inputs and gradients that they have in PyTorch.

    Args:
      replay: The call of the whole module that differs.
      run: The run of its graph; None where there were several.
      incoming: Gradients of the results; None where the forward differs.
    """
    found = _in_children(replay, run, incoming, "")
    if found is not None:
        return found
    alone = _alone(replay, incoming, "")
    if alone.run is not None and run is not None and alone.difference is None:
        return Found(_first_changed_layer(run, alone.run), None, outdated=True)
    return Found("", alone.difference)


def _in_children(
    replay: Replay, run: GraphRun | None, incoming: Incoming | None, path: str
) -> Found | None:
    """Return the first layer inside of a module that differs, the innermost one."""
    for call in _calls_of_children(replay, run, incoming, path):
        seeds = call.incoming if incoming is not None else None
        alone = _alone(call.replay, seeds, call.path)
        if alone.difference is None and alone.run is not None:
            continue
        # What is no graph of its own may hold layers that are.
        inner = _in_children(call.replay, alone.run, seeds, call.path)
        if inner is not None or alone.difference is not None:
            return inner or Found(call.path, alone.difference)
    return None


def _calls_of_children(
    replay: Replay, run: GraphRun | None, incoming: Incoming | None, path: str
) -> Sequence[_Call]:
    """Run a module in PyTorch; return the calls of the layers in it, outermost ones, in order."""
    calls: list[_Call] = []

    names = {layer: name for name, layer in replay.module.named_modules() if name}

    def record(layer: nn.Module, args: Any, kwargs: Any, call: Callable[..., Any]) -> Any:
        whole = f"{path}.{names[layer]}" if path else names[layer]
        try:
            recorded = _Call(whole, Replay(layer, args, kwargs, replay.dropout), [])
        except CaptureError:  # other arguments than tensors and numbers
            return call(layer, *args, **kwargs)
        calls.append(recorded)
        result = call(layer, *args, **kwargs)
        recorded.incoming = _collected(result)
        return result

    try:
        with replay.rewound():
            with _calls_by(record, names):
                answer = replay.run(RepeatedDraws(DrawsOfRun(run, replay.dropout)))
            if incoming is not None:
                _differentiate(replay, answer, incoming)
    except (ReplayError, UnrepeatableError):
        return []
    return calls


@contextlib.contextmanager
def _calls_by(handler: Callable[..., Any], layers: Container[nn.Module]) -> Iterator[None]:
    """Let a function make the calls of some layers in this thread, but not those inside of them.

    Hooks would not do: no graph is made of a layer that has them.
    """
    original = nn.Module.__call__
    thread, is_inside = threading.get_ident(), False

    def call(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal is_inside
        if threading.get_ident() != thread or is_inside or layer not in layers:
            return original(layer, *args, **kwargs)
        is_inside = True
        try:
            return handler(layer, args, kwargs, original)
        finally:
            is_inside = False

    nn.Module.__call__ = call  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = original  # type: ignore[method-assign]


def _collected(result: Any) -> list[torch.Tensor | None]:
    """Return a list that takes the gradients of a result when they are made."""
    try:
        tensors, _ = flatten_outputs(result)
    except CaptureError:  # a result that no graph has
        return []
    gradients: list[torch.Tensor | None] = [None] * len(tensors)

    def keep(index: int) -> Any:
        def take(gradient: torch.Tensor) -> None:
            gradients[index] = gradient.detach()

        return take

    for index, tensor in enumerate(tensors):
        if tensor.requires_grad:
            tensor.register_hook(keep(index))
    return gradients


def _differentiate(replay: Replay, answer: Answer, incoming: Incoming) -> None:
    """Run a backward for what its hooks see."""
    pairs = [
        (r, g)
        for r, g in zip(answer.tensors, incoming, strict=True)
        if g is not None and r.requires_grad
    ]
    leaves = [*answer.leaves.values(), *answer.arguments, *replay.module.parameters()]
    wanted = [t for t in leaves if t.requires_grad]
    if pairs and wanted:
        roots, given = zip(*pairs, strict=True)
        with replay.backward_apart(), answer.draws.repeating():
            torch.autograd.grad(roots, wanted, given, allow_unused=True)


def _alone(replay: Replay, incoming: Incoming | None, path: str) -> _Alone:
    """Run a layer on an engine of its own, and compare."""
    engine = Engine(replay.module, tells=False, dropout=replay.dropout, any_gradients=True)
    prefix = f"{path}." if path else ""
    try:
        with replay.rewound():
            given = replay.arguments()
            args, kwargs = replay.bound(given)
            with replay.modes(), watched() as runs:
                result = engine.run(args, kwargs)
            if len(runs) != 1:
                return _Alone(None, None)
            trial = Trial(replay, runs[0], result, (args, kwargs), given, prefix)
            found = trial.forward_difference()
            if found is None and incoming is not None:
                found = _gradient_difference(trial, incoming, given)
    except (_core.OrtrainError, ReplayError, UnrepeatableError):  # it is no graph alone
        return _Alone(None, None)
    return _Alone(runs[0], found)


def _gradient_difference(
    trial: Trial, incoming: Incoming, given: Sequence[torch.Tensor]
) -> Difference | None:
    if len(incoming) != len(trial.answer.tensors):
        return None
    expected = Gradients(trial, incoming)
    results = [
        (result, gradient)
        for result, gradient in zip(trial.results, incoming, strict=True)
        if gradient is not None and result.requires_grad
    ]
    tensors = {
        key: given[key[1]] if key[0] == "argument" else trial.parameters[key[1]][1]
        for key in expected.keys
    }
    if not results or not tensors:
        return None
    roots, seeds = zip(*results, strict=True)
    with trial.replay.backward_apart():
        made = torch.autograd.grad(roots, list(tensors.values()), seeds, allow_unused=True)
    return expected.difference(dict(zip(tensors, made, strict=True)))


def _first_changed_layer(before: GraphRun, now: GraphRun) -> str:
    """Return the layer of the first node that differs in a graph captured anew."""
    texts = [run.entry.captured.graph.text().splitlines() for run in (before, now)]
    for old, new in zip(*texts, strict=False):
        if old != new:
            return next(_layers(new, texts[1]), "")
    return ""


def _layers(line: str, lines: Sequence[str]) -> Iterator[str]:
    """Return the layer of a node's line, or of the nodes that read a constant."""
    constant = re.match(r"\s*const (\S+) =", line)
    readers = [line]
    if constant is not None:
        used = re.compile(rf"[(,\s]{re.escape(constant[1])}[),]")
        readers = [text for text in lines if "@" in text and used.search(text)]
    for text in readers:
        if found := _LAYER.search(text):
            yield found[1]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The random numbers of a graph's run, drawn again for PyTorch."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain import _core, devices
from ortrain.capture.convert.control_flow import CONTROL_FLOW
from ortrain.capture.escapes import seed_of_stream
from ortrain.capture.torch_internals import draws_random_numbers
from ortrain.verification.watching import GraphRun

_NODE = re.compile(
    r"= ortrain::(?P<op>Dropout|Attention) <(?P<attributes>[^>]*)>.*# \w+\[(?P<shape>[^\]]*)\]"
)
_EXTERNAL = re.compile(
    r"= ortrain::External <callable = \"(?P<key>[^\"]*)\".* site = (?P<site>\d+)"
)
_FLOAT = re.compile(r"\b(b?float(?:16|32|64))\[")
_PACKED = "packed_rows"
_CLOSE = 1e-6
_DROPOUTS = (torch.ops.aten.bernoulli_.float, torch.ops.aten.native_dropout.default)
# Arguments of operators that say how much is dropped.
_SHARES = ("dropout_p", "dropout", "p")
# Least precision last; other floating point types are taken for the last one.
_PRECISIONS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class UnrepeatableError(Exception):
    """PyTorch draws a random number to which the graph has no equal."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Draw:
    """A place of a graph that draws.

    Attributes:
      stream: Its number in the graph.
      ratio: Of dropout; None for an operator that runs in PyTorch.
      packed: "rows" or "pairs" of rows that are left, or "" for all.
      operator: What runs in PyTorch; "" for dropout.
    """

    stream: int
    ratio: float | None
    packed: str = ""
    operator: str = ""

    @property
    def may_draw_nothing(self) -> bool:
        """Whether it is an operator or a function of the user's own, of which nobody knows."""
        return bool(self.operator) and not self.operator.startswith("aten.")


class DrawsOfRun:
    """What one run of a graph drew.

    Args:
      run: The run; None for one that draws nothing.

    Attributes:
      places: Where it draws, in the order of execution.
      left_out: Places that it may have had and does not: nobody reads what they would give.
      precision: The least precise floating point type that it computes in; None for no graph.
    """

    def __init__(self, run: GraphRun | None) -> None:
        self.places: list[_Draw] = []
        self.left_out = 0
        self.precision: torch.dtype | None = None
        if run is None:
            return
        entry = run.entry
        graph = entry.captured.graph
        self.precision = _precision(graph)
        if run.form is not None and entry.rows is not None:
            graph = entry.rows.packed(run.form)
            derived = run.inputs[len(entry.tensors) :]
            self._positions, self._offsets = derived[0].cpu(), derived[3].cpu()
        self._device = entry.device
        seeds = [run.inputs[i] for i, (kind, _) in enumerate(entry.tensors) if kind == "seed"]
        self._seed = int(seeds[0]) if seeds else 0
        if seeds:
            drawing = {call.key for call in entry.captured.escaped_calls if call.draws}
            self._read(graph, drawing)

    def _read(self, graph: Any, drawing: set[str]) -> None:
        others = set()
        for line in graph.text().splitlines():
            if found := _NODE.search(line):
                attributes = _attributes(found["attributes"])
                ratio = float(attributes.get("ratio") or attributes.get("dropout") or 0)
                if ratio:
                    how = {"Dropout": "rows", "Attention": "pairs"}[found["op"]]
                    how = how if _PACKED in found["shape"] else ""
                    self.places.append(_Draw(int(attributes["stream"]), ratio, how))
            elif found := _EXTERNAL.search(line):
                if found["key"] in drawing:
                    operator = found["key"].rpartition("#")[0]
                    self.places.append(_Draw(int(found["site"]), None, operator=operator))
                else:
                    others.add(int(found["site"]))
        self.places.sort(key=lambda draw: draw.stream)
        known = {draw.stream for draw in self.places} | others
        self.left_out = max(known, default=-1) + 1 - len(known)

    def seed(self, draw: _Draw) -> int:
        """Return the seed with which an operator ran in PyTorch."""
        return seed_of_stream(self._seed, draw.stream)

    def mask(self, draw: _Draw, shape: Sequence[int]) -> torch.Tensor:
        """Return what dropout kept of a tensor of some shape, as bool."""
        if not draw.packed:
            return self._kept(draw, torch.Size(shape).numel()).reshape(tuple(shape))
        positions = self._positions[: int(self._offsets[-1])]
        rows = len(self._positions)
        if draw.packed == "rows":
            inner = torch.Size(shape[2:]).numel()
            mask = torch.ones(shape[0] * shape[1], inner, dtype=torch.bool)
            mask[positions] = self._kept(draw, rows * inner).reshape(rows, inner)[: len(positions)]
            return mask.reshape(tuple(shape))
        heads, length = torch.Size(shape[1:-2]).numel(), shape[-1]
        drawn = self._kept(draw, heads * rows * rows).reshape(heads, rows, rows)
        mask = torch.ones(shape[0], heads, length, length, dtype=torch.bool)
        for sequence in range(shape[0]):
            begin, end = self._offsets[sequence], self._offsets[sequence + 1]
            columns = positions[begin:end] % length
            kept = drawn[:, begin:end, begin:end]
            mask[sequence, :, columns[:, None], columns[None, :]] = kept
        return mask.reshape(tuple(shape))

    def _kept(self, draw: _Draw, count: int) -> torch.Tensor:
        """Return what dropout kept of a flat tensor."""
        builder = _core.GraphBuilder("mask")
        x = builder.input("x", 1, [count], "user", False)
        seed = builder.input("seed", 7, [], "seed", False)
        attributes = {"ratio": draw.ratio, "stream": draw.stream}
        mask = builder.node("DropoutMask", [x, seed], attributes, 1, "mask", "ortrain")
        builder.output(mask, "mask", "user", "")
        session = _core.Session(builder.finish(), device=devices.provider_of(self._device))
        given = [
            torch.empty(count, device=self._device),
            torch.tensor(self._seed, device=self._device),
        ]
        return _core.Run(session).forward(given)[0].cpu()


def _precision(graph: Any) -> torch.dtype:
    """Return the least precise type among the inputs of a graph and the values that it computes."""
    lines = [line for line in graph.text().splitlines() if not line.startswith("  const ")]
    found = [getattr(torch, name) for line in lines for name in _FLOAT.findall(line)]
    return functools.reduce(_coarser, found, torch.float64)


def _attributes(text: str) -> Mapping[str, str]:
    parts = (part.partition(" = ") for part in text.split(", "))
    return {name: value for name, _, value in parts}


class RepeatedDraws(TorchDispatchMode):
    """While it is on, PyTorch's operators that draw random numbers get those of a graph's run.

    The numbers are handed out in the order of execution. What is run again by a checkpoint gets the
    same ones: it sets PyTorch's generator back, and each place is known by what it draws from it.

    Args:
      draws: Of the run.
    """

    def __init__(self, draws: DrawsOfRun) -> None:
        super().__init__()
        self._draws = draws
        self._next = 0
        self._left_out = draws.left_out
        self._places: dict[int, _Draw | None] = {}
        self._coarsest = torch.float64

    @property
    def wants_parts(self) -> bool:
        """Whether attention is to run in parts: kernels that do all of it draw by themselves."""
        return any(draw.ratio for draw in self._draws.places)

    def begin(self) -> None:
        """Hand the numbers out from the first one again."""
        self._next, self._left_out = 0, self._draws.left_out
        self._places.clear()

    @property
    def precision(self) -> torch.dtype:
        """The least precise floating point type that the graph, or else PyTorch, computes in."""
        return self._draws.precision or self._coarsest

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Be on, or see that nothing is drawn: torch.cond and its like run under no such mode.

        Raises:
          UnrepeatableError: Something is drawn all the same.
        """
        places = self._draws.places
        if not any(draw.operator in CONTROL_FLOW for draw in places):
            with self:
                yield
            return
        before = torch.get_rng_state()
        yield
        drawn = not torch.equal(before, torch.get_rng_state())
        if drawn or not all(draw.may_draw_nothing for draw in places):
            raise UnrepeatableError("random numbers are drawn beside a branch or loop on values")

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operator."""
        kwargs = kwargs or {}
        if draws_random_numbers(function) and kwargs.get("generator") is None:
            result = self._drawn(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self._coarsest = _coarser(self._coarsest, tensor.dtype)
        return result

    def _drawn(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        ratio = _probability(function, args, kwargs)
        if ratio == 0.0 or (ratio == 1.0 and function in _DROPOUTS):  # nothing is drawn
            return function(*args, **kwargs)
        place = int(torch.randint(1 << 62, ()))
        if place not in self._places:
            self._places[place] = self._take(function, ratio)
        draw = self._places[place]
        if draw is None:  # what it gives is of no effect, or it draws nothing
            return function(*args, **kwargs)
        if draw.ratio is None:
            return _seeded(self._draws.seed(draw), function, args, kwargs)
        x = args[0]
        kept = self._draws.mask(draw, x.shape).to(x.device)
        if function is torch.ops.aten.native_dropout.default:
            return x * kept / (1 - draw.ratio), kept
        return x.copy_(kept)

    def finish(self) -> None:
        """Raise UnrepeatableError where the graph draws what PyTorch has not drawn."""
        if not all(draw.may_draw_nothing for draw in self._draws.places[self._next :]):
            raise UnrepeatableError("the graph draws random numbers that PyTorch does not")

    def _take(self, function: Any, ratio: float | None) -> _Draw | None:
        """Return the next place of the graph; None where the graph has dropped this one."""
        places, own = self._draws.places, function.namespace != "aten"
        for index in range(self._next, len(places)):
            draw = places[index]
            if draw.operator:
                fits = not draw.may_draw_nothing and not own or draw.operator == str(function)
            else:
                fits = function in _DROPOUTS and ratio is not None
                fits = fits and abs((draw.ratio or 0.0) - (ratio or 0.0)) < _CLOSE
            if fits:
                self._next = index + 1
                return draw
            if not draw.may_draw_nothing:
                break
        if own:
            return None
        if self._left_out:
            self._left_out -= 1
            return None
        raise UnrepeatableError(f"{function} draws random numbers that the graph does not")


def _seeded(seed: int, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operator as a graph does: from a seed, on contiguous tensors, of which numbers depend."""

    def contiguous(value: Any) -> Any:
        return value.contiguous() if isinstance(value, torch.Tensor) else value

    generator = torch.default_generator
    state = generator.get_state()
    try:
        generator.manual_seed(seed)
        result = function(*pytree.tree_map(contiguous, args), **pytree.tree_map(contiguous, kwargs))
    finally:
        generator.set_state(state)
    if not function._schema.is_mutable:
        return result
    return args[0].copy_(result)


def _probability(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the share that an operator drops, 0 where it draws nothing; None where it has no such."""
    names = [argument.name for argument in function._schema.arguments]
    given = {a.name: a.default_value for a in function._schema.arguments}
    given |= dict(zip(names, args, strict=False)) | kwargs
    if function is torch.ops.aten.bernoulli_.float:
        return 1 - given["p"]
    if given.get("train") is False or given.get("training") is False:
        return 0.0
    ratio = next((given[name] for name in _SHARES if name in given), None)
    return None if ratio is None or isinstance(ratio, torch.Tensor) else float(ratio)


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    ranks = [_PRECISIONS.index(t) if t in _PRECISIONS else len(_PRECISIONS) - 1 for t in (a, b)]
    return _PRECISIONS[max(ranks)]

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
from ortrain.capture.operator_internals import draws_random_numbers
from ortrain.random_numbers import DropoutSource
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
# What PyTorch's dropout runs, as far as it can be told; others use these too.
_DROPOUTS = (
    torch.ops.aten.bernoulli_.float,
    torch.ops.aten.bernoulli.p,
    torch.ops.aten.native_dropout.default,
)
# The same in a graph, where they run in PyTorch.
_DROPOUTS_IN_PYTORCH = ("aten.bernoulli.p", "aten.bernoulli_.float", "aten.native_dropout.default")
# Arguments of operators that say how much is dropped.
_SHARES = ("dropout_p", "dropout")
# Least precision last; other floating point types are taken for the last one.
_PRECISIONS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class UnrepeatableError(Exception):
    """PyTorch draws a random number to which the graph has no equal."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Draw:
    """A place of a graph that drops elements.

    Attributes:
      stream: Its number in the graph.
      ratio: What the engine drops; None where PyTorch does.
      packed: "rows" or "pairs" of rows that are left, or "" for all.
      by_attention: Whether it drops probabilities of attention, which draw otherwise.
    """

    stream: int
    ratio: float | None
    packed: str = ""
    by_attention: bool = False

    @property
    def correction(self) -> float:
        """Of what attention keeps: PyTorch divides by 1 - p, it by the share that 16 bits keep."""
        assert self.ratio is not None
        kept = 65536 - _attention_threshold(self.ratio)
        return (1 - self.ratio) * 65536 / kept if kept else 0.0


_DEAD = _Draw(-1, None)


@dataclasses.dataclass(slots=True)
class _Place:
    """A place of the replay that draws.

    Attributes:
      number: Its number, in the order of execution.
      dropout: What it is in the graph; None where PyTorch draws the true numbers.
      state: What PyTorch's generator is set to for it; None before it has run.
    """

    number: int
    dropout: _Draw | None
    state: torch.Tensor | None = None


class DrawsOfRun:
    """What one run of a graph drew.

    Args:
      run: The run; None where there is no single one, and only PyTorch's draws are known.
      dropout: Who draws the masks of dropout on the engine's side.

    Attributes:
      has_masks: Whether masks of dropout are the engine's.
      places: Where it drops elements, in the order of execution.
      left_out: Places that it may have had and does not: nobody reads what they would give.
      branches: Whether a branch or loop on values runs in PyTorch, and may draw.
      precision: The least precise floating point type that it computes in; None for no graph.
      types: Of the tensors among the arguments of PyTorch's operators that draw, by place.
    """

    def __init__(self, run: GraphRun | None, dropout: DropoutSource) -> None:
        self.places: list[_Draw] = []
        self.left_out = 0
        self.branches = False
        self.precision: torch.dtype | None = None
        self.types: dict[int, list[torch.dtype]] = {}
        self.has_masks = dropout is DropoutSource.ENGINE
        if run is None:
            return
        entry = run.entry
        graph = entry.captured.graph
        self.precision = _precision(graph)
        calls = [call.key.rpartition("#")[0] for call in entry.captured.escaped_calls if call.draws]
        self.branches = any(operator in CONTROL_FLOW for operator in calls)
        self.has_masks = entry.seed_at is not None
        if not self.has_masks:
            return
        if run.form is not None and entry.rows is not None:
            graph = entry.rows.packed(run.form)
            derived = run.inputs[len(entry.tensors) :]
            self._positions, self._offsets = derived[0].cpu(), derived[3].cpu()
        self._device = entry.device
        self._seed = int(run.inputs[entry.seed_at])
        self._read(graph)

    def _read(self, graph: Any) -> None:
        others = set()
        for line in graph.text().splitlines():
            if found := _NODE.search(line):
                attributes = _attributes(found["attributes"])
                ratio = float(attributes.get("ratio") or attributes.get("dropout") or 0)
                if ratio:
                    how = {"Dropout": "rows", "Attention": "pairs"}[found["op"]]
                    how = how if _PACKED in found["shape"] else ""
                    stream, by_attention = int(attributes["stream"]), found["op"] == "Attention"
                    self.places.append(_Draw(stream, ratio, how, by_attention))
            elif found := _EXTERNAL.search(line):
                if found["key"].rpartition("#")[0] in _DROPOUTS_IN_PYTORCH:
                    self.places.append(_Draw(int(found["site"]), None))
                else:
                    others.add(int(found["site"]))
        self.places.sort(key=lambda draw: draw.stream)
        known = {draw.stream for draw in self.places} | others
        self.left_out = max(known, default=-1) + 1 - len(known)

    def mask(self, draw: _Draw, shape: Sequence[int]) -> torch.Tensor:
        """Return what dropout kept of a tensor of some shape, as bool."""
        if not draw.packed:
            if draw.by_attention:
                return self._kept_pairs(draw, *shape[-2:], torch.Size(shape[:-2]).numel()).reshape(
                    tuple(shape)
                )
            return self._kept(draw, torch.Size(shape).numel()).reshape(tuple(shape))
        positions = self._positions[: int(self._offsets[-1])]
        rows = len(self._positions)
        if draw.packed == "rows":
            inner = torch.Size(shape[2:]).numel()
            mask = torch.ones(shape[0] * shape[1], inner, dtype=torch.bool)
            mask[positions] = self._kept(draw, rows * inner).reshape(rows, inner)[: len(positions)]
            return mask.reshape(tuple(shape))
        heads, length = torch.Size(shape[1:-2]).numel(), shape[-1]
        drawn = self._kept_pairs(draw, rows, rows, heads)
        mask = torch.ones(shape[0], heads, length, length, dtype=torch.bool)
        for sequence in range(shape[0]):
            begin, end = self._offsets[sequence], self._offsets[sequence + 1]
            columns = positions[begin:end] % length
            kept = drawn[:, begin:end, : end - begin]
            mask[sequence, :, columns[:, None], columns[None, :]] = kept
        return mask.reshape(tuple(shape))

    def _kept_pairs(self, draw: _Draw, queries: int, keys: int, heads: int) -> torch.Tensor:
        """Return what attention kept: [heads, queries, keys]."""
        assert draw.ratio is not None
        kept = attention_kept(self._seed, draw.stream, draw.ratio, heads * queries, keys)
        return kept.reshape(heads, queries, keys)

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


def attention_kept(seed: int, stream: int, ratio: float, rows: int, keys: int) -> torch.Tensor:
    """Return what dropout of attention keeps, as bool: [rows, keys].

    Sixteen bits of Philox 4x32-7 for each key, and whole blocks for each row:
    ``ortrain/base/philox.h`` and ``ortrain/cpu/attention.h`` have the convention.
    """
    low = 0xFFFFFFFF
    blocks = torch.arange(rows * ((keys + 7) // 8))
    words = [blocks & low, blocks >> 32, torch.tensor(stream & low), torch.tensor(stream >> 32)]
    key = [seed & low, seed >> 32 & low]
    for _ in range(7):
        # Products wrap around 2^64, which leaves their bits.
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (second >> 32 & low) ^ words[1] ^ key[0],
            second & low,
            (first >> 32 & low) ^ words[3] ^ key[1],
            first & low,
        ]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    threshold = _attention_threshold(ratio)
    kept = [half >= threshold for word in words for half in (word & 0xFFFF, word >> 16)]
    per_row = len(blocks) // max(rows, 1) * 8
    return torch.stack(kept, 1).reshape(rows, per_row)[:, :keys]


def _attention_threshold(ratio: float) -> int:
    return min(int(ratio * 65536 + 0.5), 65536)


def _precision(graph: Any) -> torch.dtype:
    """Return the least precise type among the inputs of a graph and the values that it computes."""
    lines = [line for line in graph.text().splitlines() if not line.startswith("  const ")]
    found = [getattr(torch, name) for line in lines for name in _FLOAT.findall(line)]
    return functools.reduce(_coarser, found, torch.float64)


def _attributes(text: str) -> Mapping[str, str]:
    parts = (part.partition(" = ") for part in text.split(", "))
    return {name: value for name, _, value in parts}


class RepeatedDraws(TorchDispatchMode):
    """While it is on, PyTorch's operators draw the random numbers of a graph's run.

    Dropout gets the engine's masks, in the order of execution. Others draw from PyTorch's generator
    as if there were no dropout. What is run again by a checkpoint gets the same ones: it sets the
    generator back, and each place is known by what it draws from it.

    Args:
      draws: Of the run.
      wide: Whether numbers of float64 stand for others, which are the ones to be drawn.
    """

    def __init__(self, draws: DrawsOfRun, *, wide: bool = False) -> None:
        super().__init__()
        self._draws, self._wide = draws, wide
        self._next = 0
        self._left_out = draws.left_out
        self._places: dict[int, _Place] = {}
        self._now = torch.empty(0)  # state of the generator where numbers are drawn
        self._in_forward = False
        self._coarsest = torch.float64

    @property
    def wants_parts(self) -> bool:
        """Whether attention is to run in parts: kernels that do all of it draw by themselves."""
        return any(draw.ratio for draw in self._draws.places)

    def begin(self) -> None:
        """Begin a forward: hand the numbers out from the first one again."""
        self._next, self._left_out = 0, self._draws.left_out
        self._places.clear()
        self._now = torch.default_generator.get_state()
        self._in_forward = True

    def finish(self) -> None:
        """End the forward.

        Raises:
          UnrepeatableError: The graph drops elements where PyTorch does not.
        """
        self._in_forward = False
        if self._next < len(self._draws.places):
            raise UnrepeatableError("the graph draws random numbers that PyTorch does not")

    @property
    def precision(self) -> torch.dtype:
        """The least precise floating point type that the graph, or else PyTorch, computes in."""
        return self._draws.precision or self._coarsest

    @contextlib.contextmanager
    def repeating(self) -> Iterator[None]:
        """Be on; beside a branch on values, which runs under no such mode, PyTorch draws by itself.

        Raises:
          UnrepeatableError: Such a branch draws again in the backward, or in another precision.
        """
        if not self._draws.branches:
            with self:
                yield
            return
        if self._draws.places:
            raise UnrepeatableError("there is dropout beside a branch or loop on values")
        before = torch.get_rng_state()
        yield
        is_first = self._in_forward and not self._wide
        if not is_first and not torch.equal(before, torch.get_rng_state()):
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
        identity = int(torch.randint(1 << 62, ()))
        place = self._places.get(identity)
        if place is None:
            dropout = self._take(function, _share(function, args, kwargs))
            place = self._places[identity] = _Place(len(self._places), dropout)
        draw = place.dropout
        if draw is _DEAD:
            return function(*args, **kwargs)
        if draw is None or draw.ratio is None:
            return self._drawn_by_pytorch(place, function, args, kwargs)
        x = args[0]
        kept = self._draws.mask(draw, x.shape).to(x.device)
        factors = kept * draw.correction if draw.by_attention else kept
        if function is torch.ops.aten.native_dropout.default:
            return x * factors / (1 - draw.ratio), kept
        return x.copy_(factors)

    def _take(self, function: Any, share: float | None) -> _Draw | None:
        """Return the place of the graph that drops what an operator drops; None where that draws as ever."""
        if not self._draws.has_masks:
            return None
        is_certain = share not in (None, 0.0, 1.0)
        if function in _DROPOUTS and self._next < len(self._draws.places):
            draw = self._draws.places[self._next]
            if draw.ratio is None or (is_certain and abs(draw.ratio - share) < _CLOSE):
                self._next += 1
                return draw
        if not is_certain:
            return None
        if function in _DROPOUTS and self._left_out:
            self._left_out -= 1
            return _DEAD
        raise UnrepeatableError(f"{function} draws random numbers that the graph does not")

    def _drawn_by_pytorch(
        self, place: _Place, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator on the true state of PyTorch's generator."""
        given, structure = pytree.tree_flatten((args, kwargs))
        found = [leaf.dtype for leaf in given if isinstance(leaf, torch.Tensor)]
        types = self._draws.types.get(place.number, found) if self._wide else found
        if not self._wide:
            self._draws.types[place.number] = found
        narrow = _of_types(given, types)
        positional, named = pytree.tree_unflatten(narrow, structure)
        generator = torch.default_generator
        identities, is_first = generator.get_state(), place.state is None
        if place.state is None:
            place.state = self._now
        generator.set_state(place.state)
        try:
            result = function(*positional, **named)
            if is_first:
                self._now = generator.get_state()
        finally:
            generator.set_state(identities)
        if found == types:
            return result
        if function._schema.is_mutable:
            return args[0].copy_(result)
        return pytree.tree_map_only(torch.Tensor, _in_float64, result)


def _of_types(values: Sequence[Any], types: Sequence[torch.dtype]) -> list[Any]:
    """Return values with tensors of these types, one per tensor."""
    wanted = iter(types)
    return [v.to(next(wanted, v.dtype)) if isinstance(v, torch.Tensor) else v for v in values]


def _in_float64(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _share(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """Return the share that an operator drops; None where it is nothing of dropout."""
    names = [argument.name for argument in function._schema.arguments]
    given = {a.name: a.default_value for a in function._schema.arguments}
    given |= dict(zip(names, args, strict=False)) | kwargs
    if function is torch.ops.aten.bernoulli_.float:
        return 1 - given["p"]
    if given.get("train") is False or given.get("training") is False:
        return 0.0
    if function is torch.ops.aten.native_dropout.default:
        return given["p"]
    ratio = next((given[name] for name in _SHARES if name in given), None)
    return None if ratio is None or isinstance(ratio, torch.Tensor) else float(ratio)


def _coarser(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    ranks = [_PRECISIONS.index(t) if t in _PRECISIONS else len(_PRECISIONS) - 1 for t in (a, b)]
    return _PRECISIONS[max(ranks)]

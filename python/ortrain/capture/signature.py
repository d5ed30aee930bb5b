# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Arguments and results of a module as flat lists of tensors, and back."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import enum
import functools
import inspect
import math
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortrain.capture.constant_identity import identity_of
from ortrain.capture.errors import TensorClassError, UnsupportedInputError
from ortrain.capture.exact_containers import refuse_more_than_items
from ortrain.capture.number_functions import stands_for_numpy

_CONSTANT_TYPES = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    enum.Enum,
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_CPU = torch.device("cpu")
# As a size, which memory of no element has.
_LARGEST_LIVE = 1 << 31
# Arguments of models of transformers.
_OF_CACHES = frozenset({"use_cache", "past_key_values"})
_MOST_FORMS = 256  # of calls whose names are kept


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """Place of a tensor in the flat list."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """Place of a 0-d int64 tensor that stands for a Python int which depends on sizes."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class LiveInt:
    """Place, from the end, of a tensor without elements whose first extent is an int of the caller's."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class LiveFloat:
    """Place, from the end, of a 0-d float64 tensor that holds a float of the caller's."""

    index: int


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A value that is the same in every call that shares the structure."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Container:
    """A container with its children; ``build`` makes it again from the children's values."""

    build: Builder
    children: tuple[Tree, ...]


Tree = Slot | Number | LiveInt | LiveFloat | Constant | Container

_SLOTS = tuple(map(Slot, range(64)))  # making one takes as long as reading four properties


def restore(tree: Tree, tensors: Sequence[Any]) -> Any:
    """Return the structure that ``tree`` describes, with ``tensors`` in its places."""
    if isinstance(tree, Slot):
        return tensors[tree.index]
    if isinstance(tree, Constant):
        return tree.value
    if isinstance(tree, Number):
        return int(tensors[tree.index])
    if isinstance(tree, LiveInt):
        return tensors[tree.index].shape[0]
    if isinstance(tree, LiveFloat):
        return tensors[tree.index].item()
    return tree.build([restore(child, tensors) for child in tree.children])


@dataclasses.dataclass(slots=True)  # made at each call: a frozen one takes twice as long
class FlatCall:
    """One call of a module, flat.

    Attributes:
      tensors: The tensors among the arguments; one that is passed twice stands here once.
      paths: Of each tensor the parameter's name and the path inside it.
      tree: The bound arguments, by parameter name.
      key: Hashable; equal for calls that differ in sizes and values of tensors, and in live
        numbers, only.
      numbers: The live numbers by path.
      attributes: Layer, name and place of the live ones that are attributes.
    """

    tensors: list[torch.Tensor]
    paths: list[str]
    tree: dict[str, Tree]
    key: Hashable
    numbers: Mapping[str, int | float] = dataclasses.field(default_factory=dict)
    attributes: tuple[tuple[nn.Module, str, Tree], ...] = ()

    @property
    def names(self) -> list[str]:
        """A valid Python name per tensor, all distinct, made of its path."""
        names: list[str] = []
        for path in self.paths:
            name = base = _identifier(path)
            count = 1
            while name in names:
                count += 1
                name = f"{base}_{count}"
            names.append(name)
        return names


@contextlib.contextmanager
def attributes_set(
    attributes: Sequence[tuple[nn.Module, str, Tree]], tensors: Sequence[Any]
) -> Iterator[None]:
    """Let layers have the live attributes of a call, for a while."""
    before = [(layer.__dict__, name, layer.__dict__.get(name)) for layer, name, _ in attributes]
    try:
        for layer, name, tree in attributes:
            layer.__dict__[name] = restore(tree, tensors)
        yield
    finally:
        for table, name, value in before:
            table[name] = value


class CallSignature:
    """Signature of a forward method, flattening calls of it and binding flat lists back."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.signature = inspect.signature(forward)
        parameters = self.signature.parameters.values()
        kinds = {parameter.kind for parameter in parameters}
        # What binds without inspect.Signature, which costs more than all the rest.
        self._is_plain = kinds <= {
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
            inspect.Parameter.VAR_KEYWORD,
        }
        self._positional = [
            p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        self._names = [p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        # Of the ways in which it is called.
        self._forms: dict[tuple[int, tuple[str, ...]], tuple[str, ...]] = {}
        # Whether it has the arguments of a model of transformers with a key-value cache.
        self.takes_cache = _OF_CACHES.issubset(self._names)
        self._required = frozenset(
            p.name
            for p in parameters
            if p.default is inspect.Parameter.empty and p.kind is not inspect.Parameter.VAR_KEYWORD
        )
        self._collecting = next(
            (p.name for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD), ""
        )

    def flatten(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        live: Collection[str] = (),
        attributes: Sequence[tuple[str, nn.Module, str]] = (),
    ) -> FlatCall:
        """Bind ``args`` and ``kwargs`` to the signature and flatten them.

        Args:
          args: Positional arguments of a call.
          kwargs: Keyword arguments of that call.
          live: Paths of numbers that stand as tensors in the flat call, whatever their value: finite
            floats but 0.0, and ints from 2 on. (Of sizes, a graph takes 0 and 1 for themselves.)
          attributes: Path, layer and name of attributes that stand as tensors too.

        Raises:
          TypeError: The arguments do not fit the signature.
          UnsupportedInputError: An argument is of a type that cannot enter a graph.
        """
        flat = _Flattener(live)
        tree: dict[str, Tree] = {}
        key = []
        for name, value in self._bind(args, kwargs).items():
            tree[name], part = flat.visit(value, "" if name == self._collecting else name)
            key.append((name, part))
        held = []
        for path, layer, name in attributes:
            value = layer.__dict__.get(name)
            if may_be_live(value):  # others are compared as attributes are
                part, kind = flat.number(value, path)
                held.append((layer, name, part))
                key.append((path, kind))
        flat.finish()
        return FlatCall(
            flat.tensors, flat.paths, tree, tuple(key), flat.numbers, attributes=tuple(held)
        )

    def asks_for_cache(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a call asks a model of transformers for its key-value cache, or extends one."""
        if args and not _OF_CACHES.isdisjoint(self._names):
            kwargs = self._by_name(args, kwargs)
        if kwargs.get("use_cache") is True:
            return True
        # A prefix that is trained comes as a cache too.
        return kwargs.get("past_key_values") is not None and not torch.is_grad_enabled()

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {**kwargs, **dict(zip(self._positional, args, strict=False))}

    def may_give_cache(self, module: nn.Module, kwargs: Mapping[str, Any]) -> bool:
        """Tell whether a call may give a cache for which its module's configuration alone asks.

        Without gradients and without labels, that is: of a training nobody takes one.
        """
        if torch.is_grad_enabled() or not self.takes_cache:
            return False
        if kwargs.get("use_cache") is not None or kwargs.get("labels") is not None:
            return False
        return getattr(getattr(module, "config", None), "use_cache", None) is True

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments by name, in the order of the signature."""
        names = self._bound_names(len(args), tuple(kwargs))
        if not names:
            return self.signature.bind(*args, **kwargs).arguments
        arguments = dict(zip(names, args, strict=False))
        for name in names[len(args) :]:
            arguments[name] = kwargs[name]
        return arguments

    def _bound_names(self, count: int, named: tuple[str, ...]) -> tuple[str, ...]:
        """Return the names of so many arguments and these, in order; none where inspect has to bind them.

        That is where some are missing, unknown, given twice or collected.
        """
        form = count, named
        known = self._forms.get(form)
        if known is None:
            rest = [name for name in self._names[count:] if name in named]
            known = (*self._positional[:count], *rest)
            fits = self._is_plain and count <= len(self._positional) and len(rest) == len(named)
            if not fits or not self._required.issubset(known):
                known = ()
            if len(self._forms) < _MOST_FORMS:
                self._forms[form] = known
        return known

    def unflatten(
        self, tree: Mapping[str, Tree], tensors: Sequence[Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with ``tensors`` in the places that ``tree`` names."""
        arguments = {name: restore(part, tensors) for name, part in tree.items()}
        bound = inspect.BoundArguments(self.signature, arguments)  # type: ignore[arg-type]
        return bound.args, bound.kwargs


class Form(enum.Enum):
    """How a container is made again from its children."""

    SEQUENCE = "sequence"  # kind(items)
    ARGUMENTS = "arguments"  # kind(*items): named tuples
    MAPPING = "mapping"  # kind(dict)
    FACTORY = "factory"  # kind(default factory, dict)
    KEYWORDS = "keywords"  # kind(**dict): ModelOutput and the like
    FIELDS = "fields"  # dataclasses, without running their __init__


@dataclasses.dataclass(frozen=True, slots=True)
class Builder:
    """Makes a container of a class from the values of its children.

    Attributes:
      kind: The class.
      form: How it takes the values.
      keys: Keys of a mapping, or names of fields.
      factory: Of a defaultdict.
    """

    kind: type
    form: Form
    keys: tuple[Any, ...] = ()
    factory: Callable[[], Any] | None = None

    def __call__(self, items: list[Any]) -> Any:
        """Return the container."""
        kind: Any = self.kind
        if self.form is Form.SEQUENCE:
            return kind(items)
        if self.form is Form.ARGUMENTS:
            return kind(*items)
        named = dict(zip(self.keys, items, strict=True))
        if self.form is Form.MAPPING:
            return named if kind is dict else kind(named)
        if self.form is Form.FACTORY:
            return kind(self.factory, named)
        if self.form is Form.KEYWORDS:
            return kind(**named)
        made = object.__new__(kind)
        for name, item in named.items():
            object.__setattr__(made, name, item)
        return made


def _sequence_builder(value: Sequence[Any]) -> Builder:
    form = Form.ARGUMENTS if hasattr(type(value), "_fields") else Form.SEQUENCE
    return Builder(type(value), form)


def _mapping_builder(value: Mapping[Any, Any]) -> Builder:
    kind, keys = type(value), tuple(value)
    if kind is dict:
        return Builder(kind, Form.MAPPING, keys)
    if isinstance(value, collections.defaultdict):
        return Builder(kind, Form.FACTORY, keys, value.default_factory)
    if dataclasses.is_dataclass(value) or _is_model_output(value):
        return Builder(kind, Form.KEYWORDS, keys)
    return Builder(kind, Form.MAPPING, keys)


def _dataclass_builder(value: Any) -> Builder:
    names = tuple(field.name for field in dataclasses.fields(value))
    return Builder(type(value), Form.FIELDS, names)


def _is_model_output(value: Any) -> bool:
    return any(c.__name__ == "ModelOutput" for c in type(value).__mro__)


def _is_cache(value: Any) -> bool:
    """Tell whether ``value`` is a key-value cache of transformers."""
    return any(
        c.__name__ in ("Cache", "EncoderDecoderCache") and c.__module__.startswith("transformers.")
        for c in type(value).__mro__
    )


def may_be_live(value: Any) -> bool:
    """Tell whether a value is a number that a tensor can stand for.

    Symbols obey rules that 0.0, infinity and NaN do not: ``x / x`` is 1, ``x - x`` is 0.
    """
    if type(value) is float:
        return value != 0.0 and math.isfinite(value)
    return type(value) is int and 1 < value < _LARGEST_LIVE


def holds_cache(result: Any) -> bool:
    """Tell whether a key-value cache of transformers is what a module returns, or one of the items."""
    items = result.values() if isinstance(result, Mapping) else result
    return _is_cache(result) or (
        isinstance(result, (Mapping, tuple)) and any(map(_is_cache, items))
    )


def _is_of_every_member(name: str) -> bool:
    """Tell whether an attribute of a member of an enumeration is one of Python's own."""
    return name.startswith("_") and name.endswith("_")


def _identity(value: Any) -> Any:
    """Return what tells a constant from others that it is equal to: 0.0 and -0.0 are."""
    if isinstance(value, enum.Enum) and value.__dict__:
        if isinstance(value.value, (list, dict, set, bytearray)):
            raise UnsupportedInputError(f"{value} has a value that may change")
        more = [(n, v) for n, v in value.__dict__.items() if not _is_of_every_member(n)]
        for name, held in more:
            if type(held).__hash__ is None:
                raise UnsupportedInputError(f"{value} has a {name} that may change")
        return value, tuple((n, type(v), _identity(v)) for n, v in more)
    if isinstance(value, range):
        return value.start, value.stop, value.step
    return identity_of(value)


def _identities(keys: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what tells the keys of a mapping from others that are equal to them: 1 and 1.0 and True are."""
    if all(type(key) is str for key in keys):
        return keys
    return tuple((type(key), _identity(key)) for key in keys)


def _is_dataclass_instance(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _identifier(path: str) -> str:
    name = re.sub(r"\W+", "_", path).strip("_")
    return f"input_{name}" if not name or name[0].isdigit() else name


class _Flattener:
    """Walks arguments, collecting tensors and the key of the structure."""

    def __init__(self, live: Collection[str] = ()) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self.numbers: dict[str, int | float] = {}
        self._live = live
        self._seen: dict[int, int] = {}

    def finish(self) -> None:
        """Put tensors for live numbers behind the others, the last number first, on their device."""
        if not self.numbers:
            return
        device = self.tensors[0].device if self.tensors else _CPU
        for path, value in reversed(self.numbers.items()):
            if type(value) is int:
                made = torch.empty((value, 0), dtype=torch.bool, device=device)
            else:
                made = torch.tensor(value, dtype=torch.float64, device=device)
            self.tensors.append(made)
            self.paths.append(path)

    def number(self, value: int | float, path: str) -> tuple[Tree, Hashable]:
        """Return the tree of a live number and its part of the key."""
        self.numbers[path] = value
        index = -len(self.numbers)
        kind = LiveInt if type(value) is int else LiveFloat
        return kind(index), (kind, index)

    def visit(self, value: Any, path: str) -> tuple[Tree, Hashable]:
        """Return the tree of ``value`` and its part of the key."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if self._live and path in self._live and may_be_live(value):
            return self.number(value, path)
        refuse_more_than_items(value, f"argument '{path}'")
        if isinstance(value, _CONSTANT_TYPES):
            return Constant(value), (type(value), _identity(value))
        if isinstance(value, slice):
            if not all(
                isinstance(n, (int, type(None))) for n in (value.start, value.stop, value.step)
            ):
                raise UnsupportedInputError(f"argument '{path}' is a slice of more than ints")
            return Constant(value), (slice, value.start, value.stop, value.step)
        if isinstance(value, Mapping) or _is_dataclass_instance(value):
            if isinstance(value, Mapping):
                keys, items, build = tuple(value), list(value.values()), _mapping_builder(value)
            else:
                build = _dataclass_builder(value)
                keys, items = build.keys, [getattr(value, n) for n in build.keys]
            children = [
                self.visit(v, f"{path}.{k}" if path else str(k))
                for k, v in zip(keys, items, strict=False)
            ]
        elif isinstance(value, (list, tuple)):
            keys, build = (), _sequence_builder(value)
            children = [self.visit(v, f"{path}.{i}") for i, v in enumerate(value)]
        else:
            raise UnsupportedInputError(
                f"argument '{path}' is of type {type(value).__module__}.{type(value).__qualname__}; "
                "tensors, numbers, strings, None and lists, tuples, mappings or dataclasses of these "
                "can enter a graph"
            )
        key = (type(value), _identities(keys), tuple(part for _, part in children))
        return Container(build, tuple(tree for tree, _ in children)), key

    def _tensor(self, value: torch.Tensor, path: str) -> tuple[Tree, Hashable]:
        if type(value) not in (torch.Tensor, nn.Parameter):
            raise TensorClassError(
                f"argument '{path}' is a tensor of class {type(value).__qualname__}"
            )
        if value.layout is not torch.strided or value.is_nested:
            layout = "nested" if value.is_nested else value.layout
            raise UnsupportedInputError(f"argument '{path}' has layout {layout}")
        index = self._seen.get(id(value))
        if index is None:
            index = self._seen[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.paths.append(path)
        return _SLOTS[index] if index < len(_SLOTS) else Slot(index), (
            index,
            value.dtype,
            value.dim(),
            *_parts_of_device(value.device),
            value.requires_grad,
            None if value.is_contiguous() else order_of(value),
            type(value) is nn.Parameter,
            frozenset(value.__dict__)
            if value.__dict__
            else None,  # attributes that somebody gave it
        )


@functools.cache
def _parts_of_device(device: torch.device) -> tuple[str, int | None]:
    """Return the type and index of a device, whose type PyTorch makes a new text for."""
    return device.type, device.index


def order_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the axes of a tensor as they lie in memory, the slowest first; None for rows after rows.

    Axes that were expanded lie anywhere; they go where PyTorch's elementwise operators put them in results.
    """
    strides = tensor.stride()
    plain = tuple(range(tensor.dim()))
    if 0 in strides:
        order = _order_of_result(strides)
    else:
        order = tuple(sorted(plain, key=lambda axis: -strides[axis]))
    return None if order == plain else order


def has_gaps(tensor: torch.Tensor) -> bool:
    """Tell whether there is memory between the elements of a tensor, whatever the order of its axes, or less than one each."""
    expected = 1
    strides = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in strides:
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() != 0
        expected *= size
    return False


def _order_of_result(strides: Sequence[int]) -> tuple[int, ...]:
    """Return the axes, the slowest first, as `reorder_dimensions` of PyTorch's TensorIterator sorts them.

    From the last axis on each goes behind the faster ones; an axis of stride 0 is passed over.
    """
    order = list(reversed(range(len(strides))))  # the fastest first
    for i in range(1, len(order)):
        place = i
        for before in range(i - 1, -1, -1):
            faster, slower = strides[order[before]], strides[order[place]]
            if faster == 0 or slower == 0:
                continue
            if faster <= slower:
                break
            order[before], order[place] = order[place], order[before]
            place = before
    return tuple(reversed(order))


@dataclasses.dataclass(frozen=True, slots=True)
class OutputTree:
    """Structure of what a module returns.

    Attributes:
      tree: The structure; places count the flat list of tensors.
      paths: A name per tensor: the key, field or position that leads to it.
    """

    tree: Tree
    paths: tuple[str, ...]

    def with_more(self, paths: Iterable[str]) -> OutputTree:
        """Return the structure of the same result, behind whose tensors others stand."""
        return OutputTree(self.tree, (*self.paths, *paths))

    def rebuild(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the module's result with ``tensors`` in it."""
        return restore(self.tree, tensors)


def flatten_outputs(result: Any) -> tuple[list[torch.Tensor], OutputTree]:
    """Return the tensors of a module's result, each once, and the structure around them.

    Key-value caches become None. An int that depends on sizes becomes a 0-d tensor.

    Raises:
      UnsupportedInputError: The result holds an object that is no tensor, number or container.
    """
    found = _FoundTensors()
    tree = found.visit(result, "")
    return found.tensors, OutputTree(tree, tuple(found.paths))


class _FoundTensors:
    """The tensors of a result; no function refers to itself here, which would keep them.

    Attributes:
      tensors: Each once.
      paths: Where each was found first.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[str] = []
        self._seen: dict[int, int] = {}
        self._containers: dict[int, Any] = {}  # by address; keeps them alive

    def _place(self, tensor: torch.Tensor, path: str) -> int:
        index = self._seen.get(id(tensor))
        if index is None:
            index = self._seen[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
            self.paths.append(path or "output")
        return index

    def visit(self, value: Any, path: str) -> Tree:
        """Take the tensors of a part of the result; return its structure."""
        if isinstance(value, torch.Tensor):
            return Slot(self._place(value, path))
        if stands_for_numpy(value):
            raise UnsupportedInputError(
                f"result '{path or 'output'}' is a number of NumPy that depends on sizes"
            )
        if isinstance(value, torch.SymInt):
            return Number(self._place(torch.scalar_tensor(value, dtype=torch.int64), path))
        if _is_cache(value):
            return Constant(None)
        refuse_more_than_items(value, f"result '{path or 'output'}'")
        if isinstance(value, _CONSTANT_TYPES):
            return Constant(value)
        if not isinstance(value, tuple):
            if id(value) in self._containers:
                raise UnsupportedInputError(
                    f"result '{path or 'output'}' is a {type(value).__qualname__} that it holds twice"
                )
            self._containers[id(value)] = value
        dot = f"{path}." if path else ""
        if isinstance(value, Mapping):
            children = tuple(self.visit(v, f"{dot}{k}") for k, v in value.items())
            return Container(_mapping_builder(value), children)
        if _is_dataclass_instance(value):
            build = _dataclass_builder(value)
            fields = tuple(self.visit(getattr(value, n), f"{dot}{n}") for n in build.keys)
            return Container(build, fields)
        if isinstance(value, (list, tuple)):
            labels = getattr(type(value), "_fields", range(len(value)))
            prefix = dot or ("" if hasattr(type(value), "_fields") else "output.")
            both = zip(labels, value, strict=True)
            children = tuple(self.visit(v, f"{prefix}{k}") for k, v in both)
            return Container(_sequence_builder(value), children)
        raise UnsupportedInputError(
            f"result '{path or 'output'}' is of type {type(value).__module__}."
            f"{type(value).__qualname__}, which is no tensor, number or container of these"
        )

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A captured and converted module, as the engine runs it, and its form as bytes.

The bytes hold JSON and an ONNX model; reading them runs no code and imports nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.branches import Branch
from ortrain.capture.dtypes import ONNX_CODE
from ortrain.capture.escapes import Escape, EscapedCall
from ortrain.capture.guards import Guards, compile_guards
from ortrain.capture.names_read import MemoryQuestions, OthersFunctions
from ortrain.capture.result_views import ResultViews
from ortrain.capture.signature import (
    Builder,
    Constant,
    Container,
    Form,
    Number,
    OutputTree,
    Slot,
    Tree,
    has_gaps,
)

Json = dict[str, Any]

# Of a description or a head: those of transformers have 0.5 MB. An object in memory may take 30 times its text.
_MOST_BYTES = 8 << 20
_MOST_DIGITS = 1000
# Of a result, which each call makes anew.
_MOST_PARTS = 1 << 16
_MOST_DEPTH = 64


class NotStorableError(Exception):
    """A result of the module holds something that has no form as bytes."""


@dataclasses.dataclass(slots=True)
class PreparedGraph:
    """A graph before autodiff, with what the engine needs to call it.

    Attributes:
      graph: The graph in the engine's operators.
      user_inputs: (name, index among the flat tensors of a call) of each used input, in order.
      aten_nodes: Number of ATen operators that were converted.
      guards: Whether the graph holds for inputs of given sizes.
      input_names: Names of the flat user inputs.
      output_tree: Rebuilds the module's result from the user outputs.
      grad_enabled: Grad mode at the capture.
      autocast_regions: Whether the module turns autocast on or off inside of its forward.
      escapes: The operators that run in PyTorch.
      escaped_calls: Their functions, which must live as long as the graph.
      unsaved_inputs: Names of the inputs of which PyTorch's backward would read nothing.
      common_saves: Of each user output those after whose backward PyTorch refuses another one.
      needed_results: Of each user output the user outputs that PyTorch's backward from it reads.
      names_read: Names of attributes that the forward may have read; None for all.
      num_made: How many plain attributes the forward made, which are there now.
      views: How results are made of the user outputs, where these are not the results.
      cloned: Names of the inputs of which the module uses copies alone.
      fixed: The sizes that are those of the sample, though the caller did not ask for it, in words.
      branches: How branches on values go in it; their conditions are the last user outputs, behind the results.
      outside: By the name of an input of the graph, a tensor in no table of a layer.
      others: Functions of the user's that have run and to which the module does not lead.
      asks_of_memory: What the user's own code may ask of how its arguments lie in memory.
      read_once: What installed packages hold that the forward has read and no guard looks into, in words.
    """

    graph: Any
    user_inputs: list[tuple[str, int]]
    aten_nodes: int
    guards: Guards
    input_names: list[str]
    output_tree: OutputTree
    grad_enabled: bool
    autocast_regions: bool
    escapes: list[Escape] = dataclasses.field(default_factory=list)
    escaped_calls: list[EscapedCall] = dataclasses.field(default_factory=list)
    unsaved_inputs: frozenset[str] = frozenset()
    common_saves: tuple[frozenset[int], ...] = ()
    needed_results: tuple[frozenset[int], ...] = ()
    names_read: frozenset[str] | None = None
    num_made: int = 0
    cloned: frozenset[str] = frozenset()
    outside: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    others: OthersFunctions = OthersFunctions()
    asks_of_memory: MemoryQuestions = MemoryQuestions()
    views: ResultViews | None = None
    fixed: str = ""
    branches: tuple[Branch, ...] = ()
    read_once: tuple[str, ...] = ()

    @property
    def draws(self) -> bool:
        """Whether a run of it may draw from PyTorch's generators, the engine's seed aside."""
        return any(call.draws for call in self.escaped_calls)

    # Said of such a call.
    HAS_GAPS: ClassVar[str] = "it asks for, or writes to, the memory of an argument that has gaps"

    def takes_for_dense(self, tensors: Sequence[torch.Tensor], written: Iterable[int] = ()) -> bool:
        """Tell whether arguments have gaps of which the forward asks, or in whose memory it writes or gives views.

        A trace is given arguments without gaps, each in a memory of its own: of these ``contiguous()`` and ``reshape``
        are views.

        Args:
          tensors: The arguments, flat.
          written: Positions of those that the graph writes to.
        """
        asks = self.asks_of_memory
        if asks.gaps:
            return any(map(has_gaps, tensors))
        shown = list(written)
        if asks.copies and self.views is not None:
            shown += [view.source[1] for view in self.views.views if view.source[0] == "user"]
        return any(has_gaps(tensors[i]) for i in shown)

    def to_bytes(self, module: nn.Module) -> bytes:
        """Return a form that ``from_bytes`` reads.

        Args:
          module: The module that it is the graph of.

        Raises:
          NotStorableError: The result's structure holds objects that have no such form, or an
            operator runs in PyTorch.
        """
        if self.escapes:
            raise NotStorableError("operators that run in PyTorch")
        if self.views is not None:
            raise NotStorableError("results that share memory")
        if self.others.functions or self.others.variables:
            raise NotStorableError("functions to which the module does not lead")
        description = {
            "user_inputs": self.user_inputs,
            "aten_nodes": self.aten_nodes,
            "conditions": self.guards.conditions,
            "input_names": self.input_names,
            "tree": _tree_to_json(self.output_tree.tree),
            "paths": self.output_tree.paths,
            "grad_enabled": self.grad_enabled,
            "autocast_regions": self.autocast_regions,
            "unsaved_inputs": sorted(self.unsaved_inputs),
            "common_saves": [sorted(outputs) for outputs in self.common_saves],
            "needed_results": [sorted(outputs) for outputs in self.needed_results],
            "names_read": None if self.names_read is None else sorted(self.names_read),
            "cloned": sorted(self.cloned),
            "outside": {n: _attribute_that_holds(module, t) for n, t in self.outside.items()},
            "fixed": self.fixed,
            "asks_of_memory": list(self.asks_of_memory),
            "read_once": list(self.read_once),
            "name": self.graph.name,
        }
        text = json.dumps(description).encode()
        _read(text, self.graph, module)  # else it would be written and refused in each process
        return len(text).to_bytes(8, "little") + text + self.graph.to_onnx_bytes()

    @staticmethod
    def from_bytes(data: bytes, module: nn.Module) -> PreparedGraph:
        """Read what ``to_bytes`` wrote, for a module like the one that it was written for.

        Raises:
          NotStorableError: The bytes mean nothing in this process.
        """
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            graph = _core.load_onnx(data[end:])
        except Exception as error:
            raise NotStorableError(f"{type(error).__name__}: {error}") from error
        return _read(data[8:end], graph, module)


def read_json(text: bytes) -> Any:
    """Return what a text says that anybody may have written.

    Raises:
      ValueError: It is no JSON, or long, or has numbers of a thousand digits.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{len(text)} bytes of JSON")
    return json.loads(text, parse_int=_parsed_int)


def _parsed_int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _read(text: bytes, graph: Any, module: nn.Module) -> PreparedGraph:
    """Return a graph with what a description says of it, all that is used of it later checked.

    Raises:
      NotStorableError: It says something that is not written, or not of this graph and module.
    """
    try:
        return _described(read_json(text), graph, module)
    except NotStorableError:
        raise
    except Exception as error:
        raise NotStorableError(f"{type(error).__name__}: {error}") from error


def _described(read: Json, graph: Any, module: nn.Module) -> PreparedGraph:
    outputs = [output for output in graph.outputs if output["role"] == "user"]
    input_names, paths = _texts(read["input_names"]), _texts(read["paths"])
    user_inputs = [(name, _index(i, input_names)) for name, i in _items(read["user_inputs"])]
    if any(input_names[i] != name for name, i in user_inputs):
        raise NotStorableError("its inputs have other names")
    if len(paths) != len(outputs):
        raise NotStorableError(f"it names {len(paths)} of {len(outputs)} outputs")
    grad_enabled = _flag(read["grad_enabled"])
    layers = dict(module.named_modules())
    outside = {
        name: vars(layers[path])[attribute] for name, (path, attribute) in read["outside"].items()
    }
    _check_ends(graph, dict(user_inputs), module, outside)
    names = read["names_read"]
    return PreparedGraph(
        graph=graph,
        user_inputs=user_inputs,
        aten_nodes=_count(read["aten_nodes"]),
        guards=compile_guards(_texts(read["conditions"]), input_names, (), kept=True),
        input_names=input_names,
        output_tree=OutputTree(_TreeReader(outputs).tree(read["tree"]), tuple(paths)),
        grad_enabled=grad_enabled,
        autocast_regions=_flag(read["autocast_regions"]),
        unsaved_inputs=frozenset(_texts(read["unsaved_inputs"])),
        common_saves=_of_outputs(read["common_saves"], outputs if grad_enabled else []),
        needed_results=_of_outputs(read["needed_results"], outputs if grad_enabled else []),
        names_read=None if names is None else frozenset(_texts(names)),
        outside=outside,
        cloned=frozenset(_texts(read["cloned"])),
        fixed=_texts([read["fixed"]])[0],
        asks_of_memory=MemoryQuestions(*map(_flag, read["asks_of_memory"])),
        read_once=tuple(_texts(read["read_once"])),
    )


def _check_ends(
    graph: Any, users: Mapping[str, int], module: nn.Module, outside: Mapping[str, torch.Tensor]
) -> None:
    """See that there is what the inputs of a graph stand for, and what its outputs are written to.

    Raises:
      NotStorableError: There is not.
    """
    held = {
        **outside,
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    for described in graph.inputs:
        role, target = described["role"], described["target"]
        if role == "user":
            fits = described["name"] in users
        elif role in ("parameter", "buffer"):
            tensor = held.get(target)
            fits = isinstance(tensor, torch.Tensor) and (
                ONNX_CODE.get(tensor.dtype) == described["dtype"]
                and list(tensor.shape) == described["shape"]
            )
        else:
            fits = role == "seed"
        if not fits:
            raise NotStorableError(f"there is no {role} '{target}' of its form")
    for described in graph.outputs:
        role, target = described["role"], described["target"]
        if role == "buffer_update":
            fits = target in held and target not in outside
        else:
            fits = role == "user" or (role == "input_update" and target in users)
        if not fits:
            raise NotStorableError(f"there is no place for its {role} '{target}'")


def _items(read: Any) -> list[Any]:
    if type(read) is not list:
        raise NotStorableError(f"{type(read).__name__} in the place of a list")
    return read


def _texts(read: Any) -> list[str]:
    if any(type(text) is not str for text in _items(read)):
        raise NotStorableError("a list is not of texts")
    return list(read)


def _flag(read: Any) -> bool:
    if type(read) is not bool:
        raise NotStorableError(f"{type(read).__name__} in the place of a flag")
    return read


def _count(read: Any) -> int:
    if type(read) is not int or not 0 <= read < 1 << 63:
        raise NotStorableError(f"{type(read).__name__} in the place of a count")
    return read


def _index(read: Any, items: Sequence[Any]) -> int:
    if type(read) is not int or not 0 <= read < len(items):
        raise NotStorableError(f"an index is none of {len(items)}")
    return read


def _of_outputs(read: Any, outputs: Sequence[Any]) -> tuple[frozenset[int], ...]:
    if len(_items(read)) != len(outputs):
        raise NotStorableError(f"{len(read)} sets for {len(outputs)} outputs")
    return tuple(frozenset(_index(i, outputs) for i in _items(indices)) for indices in read)


def _attribute_that_holds(module: nn.Module, tensor: torch.Tensor) -> tuple[str, str]:
    """Return the path of the layer that has a tensor as a plain attribute, and the attribute's name."""
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            if value is tensor:
                return path, name
    raise NotStorableError("tensors outside of the module")


def _tree_to_json(tree: Tree) -> list[Any]:
    if isinstance(tree, Slot):
        return ["slot", tree.index]
    if isinstance(tree, Number):
        return ["number", tree.index]
    if isinstance(tree, Constant):
        return ["constant", _constant_to_json(tree.value)]
    build = tree.build
    if build.factory is not None:
        raise NotStorableError(f"a {build.kind.__qualname__} with a factory")
    return [
        build.form.value,
        _class_to_json(build.kind),
        [_constant_to_json(key) for key in build.keys],
        [_tree_to_json(child) for child in tree.children],
    ]


class _TreeReader:
    """Reads the structure of a result.

    Args:
      outputs: What the graph says of the outputs that it is made of.
    """

    def __init__(self, outputs: Sequence[Json]) -> None:
        self._outputs = outputs
        self._left = _MOST_PARTS

    def tree(self, read: Any, depth: int = 0) -> Tree:
        """Return what ``_tree_to_json`` gave.

        Raises:
          NotStorableError: A call could not build it.
        """
        self._left -= 1
        if self._left < 0 or depth > _MOST_DEPTH:
            raise NotStorableError("its result has many parts")
        kind, *parts = _items(read)
        if kind in ("slot", "number"):
            (place,) = parts
            index = _index(place, self._outputs)
            if kind == "slot":
                return Slot(index)
            output = self._outputs[index]
            if (output["dtype"], output["shape"]) != (ONNX_CODE[torch.int64], []):
                raise NotStorableError("a tensor in the place of a number")
            return Number(index)
        if kind == "constant":
            (value,) = parts
            return Constant(_constant_from_json(value))
        name, keys_read, children_read = parts
        form = Form(kind)
        keys = tuple(_constant_from_json(key) for key in _items(keys_read))
        children = tuple(self.tree(child, depth + 1) for child in _items(children_read))
        cls = _class_from_json(name, form)
        if not _takes(cls, form, keys, children):
            raise NotStorableError(f"{cls.__qualname__} is not made of {len(children)} such parts")
        return Container(Builder(cls, form, keys), children)


def _takes(cls: Any, form: Form, keys: Sequence[Any], children: Sequence[Tree]) -> bool:
    """Tell whether a class of containers can be made of children."""
    if form is Form.ARGUMENTS:
        return not keys and len(children) == len(cls._fields)
    if form is Form.SEQUENCE:
        # Those of PyTorch's operators have a length of their own.
        fits = getattr(cls, "n_sequence_fields", len(children)) == len(children)
        return fits and not keys and (cls is not torch.Size or all(map(_is_int, children)))
    if len(keys) != len(children) or len(set(keys)) != len(keys):
        return False
    if form is Form.MAPPING:
        return True
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    names = [field.name for field in fields]
    if form is Form.FIELDS:
        return list(keys) == names
    needed = {
        field.name
        for field in fields
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    }
    return all(type(key) is str for key in keys) and (
        not fields or needed <= set(keys) <= {field.name for field in fields if field.init}
    )


def _is_int(tree: Tree) -> bool:
    return isinstance(tree, Number) or (isinstance(tree, Constant) and type(tree.value) is int)


def _constant_to_json(value: Any) -> list[Any]:
    if value is None or type(value) in (bool, int, str):
        return [type(value).__name__, value]
    if type(value) is float:
        return ["float", value.hex()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    raise NotStorableError(f"a constant of type {type(value).__qualname__}")


def _constant_from_json(read: Any) -> Any:
    kind, value = _items(read)
    if kind == "float":
        return float.fromhex(value)
    if kind == "dtype":
        dtype = vars(torch).get(value)  # asked by getattr, torch imports
        if not isinstance(dtype, torch.dtype):
            raise NotStorableError(f"{value} is no dtype")
        return dtype
    if type(value) not in (type(None), bool, int, str) or type(value).__name__ != kind:
        raise NotStorableError(f"{type(value).__name__} in the place of {kind}")
    return value


def _class_to_json(cls: type) -> list[str]:
    if _find_class(cls.__module__, cls.__qualname__) is not cls:
        raise NotStorableError(f"class {cls.__qualname__}, which its module does not name")
    return [cls.__module__, cls.__qualname__]


def _class_from_json(read: Any, form: Form) -> type:
    """Return a class of containers that is loaded already."""
    module, qualified = _texts(read)
    cls = _find_class(module, qualified)
    if isinstance(cls, type) and not inspect.isabstract(cls):
        is_named = hasattr(cls, "_fields")
        if form is Form.SEQUENCE and issubclass(cls, (list, tuple)) and not is_named:
            return cls
        if form is Form.ARGUMENTS and issubclass(cls, tuple) and is_named:
            return cls
        if form is Form.MAPPING and issubclass(cls, Mapping):
            return cls
        is_fields = dataclasses.is_dataclass(cls)
        if form is Form.FIELDS and is_fields:
            return cls
        # Of dataclasses that are no mappings the __init__ might do anything.
        is_fields |= any(c.__name__ == "ModelOutput" for c in cls.__mro__)
        if form is Form.KEYWORDS and is_fields and issubclass(cls, Mapping):
            return cls
    raise NotStorableError(f"{module}.{qualified} is no class of containers that is loaded")


def _find_class(module: str, qualified: str) -> Any:
    """Return a class by its names; what a module imports when it is asked for stays unknown."""
    value: Any = sys.modules.get(module)
    for name in qualified.split("."):
        table = value.__dict__ if isinstance(value, (types.ModuleType, type)) else {}
        value = table.get(name)
    return value

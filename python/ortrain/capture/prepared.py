# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A captured and converted module, as the engine runs it, and its form as bytes.

The bytes hold JSON and an ONNX model; reading them runs no code and imports nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.escapes import Escape, EscapedCall
from ortrain.capture.guards import Guards, compile_guards
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
)

Json = dict[str, Any]


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
      squeezes: Whether it holds only where the same extents are 1 as in the sample.
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
      outside: By the name of an input of the graph, a tensor in no table of a layer.
    """

    graph: Any
    user_inputs: list[tuple[str, int]]
    aten_nodes: int
    guards: Guards
    input_names: list[str]
    output_tree: OutputTree
    grad_enabled: bool
    squeezes: bool
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
    views: ResultViews | None = None
    fixed: str = ""

    @property
    def draws(self) -> bool:
        """Whether a run of it may draw from PyTorch's generators, the engine's seed aside."""
        return any(call.draws for call in self.escaped_calls)

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
        description = {
            "user_inputs": self.user_inputs,
            "aten_nodes": self.aten_nodes,
            "conditions": self.guards.conditions,
            "input_names": self.input_names,
            "tree": _tree_to_json(self.output_tree.tree),
            "paths": self.output_tree.paths,
            "grad_enabled": self.grad_enabled,
            "squeezes": self.squeezes,
            "autocast_regions": self.autocast_regions,
            "unsaved_inputs": sorted(self.unsaved_inputs),
            "common_saves": [sorted(outputs) for outputs in self.common_saves],
            "needed_results": [sorted(outputs) for outputs in self.needed_results],
            "names_read": None if self.names_read is None else sorted(self.names_read),
            "cloned": sorted(self.cloned),
            "outside": {n: _attribute_that_holds(module, t) for n, t in self.outside.items()},
            "fixed": self.fixed,
            "name": self.graph.name,
        }
        text = json.dumps(description).encode()
        return len(text).to_bytes(8, "little") + text + self.graph.to_onnx_bytes()

    @staticmethod
    def from_bytes(data: bytes, module: nn.Module) -> PreparedGraph:
        """Read what ``to_bytes`` wrote, for a module like the one that it was written for.

        Raises:
          NotStorableError: The bytes mean nothing in this process.
        """
        end = 8 + int.from_bytes(data[:8], "little")
        try:
            read: Json = json.loads(data[8:end])
            names = read["names_read"]
            guards = compile_guards(read["conditions"], read["input_names"], ())
            return PreparedGraph(
                graph=_core.load_onnx(data[end:]),
                user_inputs=[(name, index) for name, index in read["user_inputs"]],
                aten_nodes=read["aten_nodes"],
                guards=guards,
                input_names=read["input_names"],
                output_tree=OutputTree(_tree_from_json(read["tree"]), tuple(read["paths"])),
                grad_enabled=read["grad_enabled"],
                squeezes=read["squeezes"],
                autocast_regions=read["autocast_regions"],
                unsaved_inputs=frozenset(map(str, read["unsaved_inputs"])),
                common_saves=tuple(map(frozenset, read["common_saves"])),
                needed_results=tuple(map(frozenset, read["needed_results"])),
                names_read=None if names is None else frozenset(map(str, names)),
                outside={
                    name: vars(module.get_submodule(path))[attribute]
                    for name, (path, attribute) in read["outside"].items()
                },
                cloned=frozenset(map(str, read["cloned"])),
                fixed=str(read["fixed"]),
            )
        except NotStorableError:
            raise
        except Exception as error:
            raise NotStorableError(f"{type(error).__name__}: {error}") from error


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


def _tree_from_json(read: list[Any]) -> Tree:
    kind = read[0]
    if kind == "slot":
        return Slot(read[1])
    if kind == "number":
        return Number(read[1])
    if kind == "constant":
        return Constant(_constant_from_json(read[1]))
    form, keys = Form(kind), tuple(_constant_from_json(key) for key in read[2])
    built = Builder(_class_from_json(read[1], form), form, keys)
    if form is Form.FIELDS and keys != tuple(f.name for f in dataclasses.fields(built.kind)):
        raise NotStorableError(f"{read[1]} has other fields")
    return Container(built, tuple(_tree_from_json(child) for child in read[3]))


def _constant_to_json(value: Any) -> list[Any]:
    if value is None or type(value) in (bool, int, str):
        return [type(value).__name__, value]
    if type(value) is float:
        return ["float", value.hex()]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value).removeprefix("torch.")]
    raise NotStorableError(f"a constant of type {type(value).__qualname__}")


def _constant_from_json(read: list[Any]) -> Any:
    kind, value = read
    if kind == "float":
        return float.fromhex(value)
    if kind == "dtype":
        dtype = getattr(torch, value)
        if not isinstance(dtype, torch.dtype):
            raise NotStorableError(f"{value} is no dtype")
        return dtype
    return value


def _class_to_json(cls: type) -> list[str]:
    if _find_class(cls.__module__, cls.__qualname__) is not cls:
        raise NotStorableError(f"class {cls.__qualname__}, which its module does not name")
    return [cls.__module__, cls.__qualname__]


def _class_from_json(read: list[str], form: Form) -> type:
    """Return a class of containers that is loaded already."""
    cls = _find_class(*read)
    if isinstance(cls, type):
        if form in (Form.SEQUENCE, Form.ARGUMENTS) and issubclass(cls, (list, tuple)):
            return cls
        if form in (Form.MAPPING, Form.KEYWORDS) and issubclass(cls, Mapping):
            return cls
        if form in (Form.FIELDS, Form.KEYWORDS) and dataclasses.is_dataclass(cls):
            return cls
    raise NotStorableError(f"{'.'.join(read)} is no class of containers that is loaded")


def _find_class(module: str, qualified: str) -> Any:
    value: Any = sys.modules.get(module)
    for name in qualified.split("."):
        value = getattr(value, name, None)
    return value

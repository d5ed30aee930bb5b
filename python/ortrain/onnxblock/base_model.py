# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The ONNX model that blocks add to: ``with base(model) as accessor: ...; accessor.model``."""

from __future__ import annotations

import contextlib
import contextvars
import copy
from collections.abc import Iterator
from typing import Any

import onnx

# As ONNX Runtime 1.19 made them; the checker knows both.
_OPSET, _IR_VERSION = 17, 8


class ModelAccessor:
    """Holds the model that blocks change.

    Attributes:
      model: The onnx.ModelProto.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self.model = model

    # --- for blocks

    @property
    def graph(self) -> onnx.GraphProto:
        """The graph of the model."""
        return self.model.graph

    def names(self) -> set[str]:
        """Return the names of all values and nodes."""
        graph = self.graph
        held = (graph.input, graph.output, graph.initializer, graph.value_info, graph.node)
        found = {each.name for kind in held for each in kind}
        return found.union(*({*node.input, *node.output} for node in graph.node))

    def new_name(self, stem: str) -> str:
        """Return a name that nothing has, the stem and a number."""
        taken = self.names()
        number = 0
        while f"{stem}_{number}" in taken:
            number += 1
        return f"{stem}_{number}"

    def described(self, name: str) -> onnx.ValueInfoProto:
        """Return a copy of the description of a value.

        Raises:
          LookupError: There is none, and none can be inferred.
        """
        for graph in (self.graph, None):
            graph = graph or onnx.shape_inference.infer_shapes(self.model).graph
            for kind in (graph.output, graph.input, graph.value_info):
                for each in kind:
                    if each.name == name:
                        return copy.deepcopy(each)
        raise LookupError(f"the model describes no value '{name}'")

    def add_node(
        self, operator: str, inputs: list[str], domain: str = "", **attributes: Any
    ) -> str:
        """Add a node with one result; return the result's name."""
        stem = operator.lower()
        result = self.new_name(f"{stem}_output")
        node = onnx.helper.make_node(
            operator, inputs, [result], name=self.new_name(stem), domain=domain, **attributes
        )
        self.graph.node.append(node)
        return result

    def add_initializer(self, stem: str, value: Any) -> str:
        """Add a constant, a NumPy array; return its name."""
        name = self.new_name(stem)
        self.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
        return name


_present: contextvars.ContextVar[ModelAccessor | None] = contextvars.ContextVar(
    "ortrain.onnxblock", default=None
)


def present() -> ModelAccessor:
    """Return the model of the ``with`` around.

    Raises:
      RuntimeError: There is none.
    """
    found = _present.get()
    if found is None:
        raise RuntimeError("blocks are called inside of `with onnxblock.base(model)`")
    return found


@contextlib.contextmanager
def _held(model: onnx.ModelProto) -> Iterator[ModelAccessor]:
    if _present.get() is not None:
        raise RuntimeError("there is a base model already: one `with` stands inside of another")
    accessor = ModelAccessor(model)
    token = _present.set(accessor)
    try:
        yield accessor
    finally:
        _present.reset(token)


def base(model: onnx.ModelProto) -> contextlib.AbstractContextManager[ModelAccessor]:
    """Let blocks add to a copy of a model.

    Raises:
      TypeError: It is no onnx.ModelProto.
      RuntimeError: (when entered) Another one is there.
    """
    if not isinstance(model, onnx.ModelProto):
        raise TypeError(f"model is a {type(model).__name__}, expected an onnx.ModelProto")
    return _held(copy.deepcopy(model))


def empty_base(
    opset_version: int | None = None,
) -> contextlib.AbstractContextManager[ModelAccessor]:
    """Let blocks make a model from nothing, of an opset (17)."""
    model = onnx.ModelProto(ir_version=_IR_VERSION, producer_name="ortrain")
    model.graph.name = "graph"
    model.opset_import.append(onnx.helper.make_opsetid("", opset_version or _OPSET))
    return _held(model)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Walks a captured graph and calls the conversion of each operator."""

from __future__ import annotations

import dataclasses
import enum
import operator
import time
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from ortrain.capture import operator_internals, size_internals
from ortrain.capture.aliases import is_cloned_alone
from ortrain.capture.builder import GraphBuilder, Value
from ortrain.capture.captured import CapturedModule, OutputRole, Placeholder, Role
from ortrain.capture.checkpoints import checkpoint_of
from ortrain.capture.convert.control_flow import control_flow
from ortrain.capture.convert.emitter import Emitter, Tensor
from ortrain.capture.convert.escape import add_escape
from ortrain.capture.convert.numbers_in_range import number_out_of_range
from ortrain.capture.convert.registry import conversion
from ortrain.capture.convert.sizes import Size, linear_root
from ortrain.capture.dtypes import TORCH_DTYPE, category, onnx_code
from ortrain.capture.errors import (
    CaptureError,
    ConversionError,
    UnsupportedOperatorError,
)
from ortrain.capture.escapes import Escape, EscapedCall, Layout
from ortrain.capture.locations import module_path, node_source
from ortrain.capture.needed_results import results_that_gradients_need
from ortrain.capture.saved_inputs import inputs_not_saved
from ortrain.capture.shared_nodes import outputs_with_common_saves
from ortrain.random_numbers import DropoutSource

# Keyword arguments of ATen operators that a graph does not have.
_PLACEMENT = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking"})

# Checks that the graph need not carry: what they check is fixed by the capture or by its guards.
_CHECKS = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class Converted:
    """A finished graph and how the module's tensors meet it.

    Attributes:
      graph: What the builder's ``finish`` returned.
      user_inputs: (name, index among the flat tensors of a call) of each used input, in order.
      parameters: Names of the parameters that are inputs of the graph, in order.
      buffers: Names of the buffers that are inputs of the graph, in order.
      cloned: Names of the inputs of which the module uses copies alone.
      has_seed: Whether the engine draws random numbers and takes a seed.
      unsaved_inputs: Names of the inputs of which PyTorch's backward would read nothing.
      common_saves: Of each user output those after whose backward PyTorch refuses another one.
      needed_results: Of each user output the user outputs that PyTorch's backward from it reads.
      user_outputs: Names of the user outputs, in order.
      nodes: Number of ATen operators that were converted.
      escapes: Those of them that run in PyTorch.
      escaped_calls: Their functions, which the graph needs as long as it is run.
      seconds: Wall time of the conversion.
    """

    graph: Any
    user_inputs: list[tuple[str, int]]
    parameters: list[str]
    buffers: list[str]
    outside: dict[str, torch.Tensor]
    cloned: frozenset[str]
    has_seed: bool
    unsaved_inputs: frozenset[str]
    common_saves: tuple[frozenset[int], ...]
    needed_results: tuple[frozenset[int], ...]
    user_outputs: list[str]
    nodes: int
    escapes: list[Escape]
    escaped_calls: list[EscapedCall]
    seconds: float


class Outside(enum.Enum):
    """What becomes of tensors that are in no table of a layer, by the role of inputs of the graph.

    KEPT: they stay what they are at this moment. HELD: inputs like buffers, which the graph may write and which may get
    gradients. GIVEN: inputs that come with each call.
    """

    KEPT = ""
    HELD = "buffer"
    GIVEN = "user"


def convert(
    captured: CapturedModule,
    builder: GraphBuilder,
    dropout: DropoutSource = DropoutSource.ENGINE,
    *,
    outside: Outside = Outside.KEPT,
) -> Converted:
    """Build the graph of a captured module.

    Args:
      captured: The module.
      builder: Makes the graph.
      dropout: Who draws the masks of dropout.
      outside: What becomes of tensors outside of the module.

    Only inputs that an output depends on become inputs of the graph, so an unused parameter gets
    no gradient, as in PyTorch.

    Raises:
      UnsupportedOperatorError: An operator, or a form of it, has no conversion.
      ConversionError: A conversion disagrees with PyTorch about a dtype or a shape.
    """
    return _Conversion(captured, builder, dropout, outside).run()


class _Conversion:
    def __init__(
        self,
        captured: CapturedModule,
        builder: GraphBuilder,
        dropout: DropoutSource,
        outside: Outside,
    ) -> None:
        self._outside_becomes = outside
        self._outside: dict[str, torch.Tensor] = {}
        self._captured = captured
        self._builder = builder
        self._e = Emitter(builder, dropout)
        self._env: dict[fx.Node, Any] = {}
        self._symbols = {dim.symbol: dim.name for dim in captured.dims}
        self._user_inputs: list[tuple[str, int]] = []
        self._parameters: dict[str, Value] = {}
        self._buffers: dict[str, Value] = {}
        self._cloned: set[str] = set()
        self._live: set[fx.Node] = set()
        self._converted = 0
        self._escapes: list[Escape] = []

    def run(self) -> Converted:
        start = time.perf_counter()
        graph = self._captured.graph_module.graph
        self._live = needed = self._needed(graph)
        placeholders = iter(self._captured.placeholders)
        for node in graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node, next(placeholders), node in needed)
            elif node.op == "output":
                self._outputs(node)
            elif node in needed:
                self._convert(node)
        return Converted(
            graph=self._builder.finish(),
            user_inputs=self._user_inputs,
            parameters=list(self._parameters),
            buffers=[name for name in self._buffers if name not in self._outside],
            outside=self._outside,
            cloned=frozenset(self._cloned),
            has_seed=self._e.has_seed,
            unsaved_inputs=self._unsaved_inputs(graph),
            common_saves=self._of_outputs(outputs_with_common_saves, graph),
            needed_results=self._of_outputs(results_that_gradients_need, graph),
            user_outputs=[o.name for o in self._captured.outputs if o.role is OutputRole.USER],
            nodes=self._converted,
            escapes=self._escapes,
            escaped_calls=self._e.escaped_calls,
            seconds=time.perf_counter() - start,
        )

    def _needed(self, graph: fx.Graph) -> set[fx.Node]:
        """Return the nodes that an output or a size depends on, and those that draw in PyTorch."""
        origins = self._size_origins(graph)
        output = next(n for n in graph.nodes if n.op == "output")
        needed: set[fx.Node] = set()
        pending = [
            *(
                argument
                for described, argument in zip(self._captured.outputs, output.args[0], strict=True)
                if described.role is not OutputRole.NONE
            ),
            *filter(self._draws_in_pytorch, graph.nodes),
        ]
        while pending:
            node = pending.pop()
            if node in needed:
                continue
            needed.add(node)
            if _is_size(node):
                value = size_internals.number_expression(node.meta["val"])
                symbols = value.free_symbols if isinstance(value, sympy.Basic) else ()
                pending.extend(origins[s] for s in symbols if s in origins)
                if node.target is not operator.getitem and _reads_value(node):
                    pending.extend(node.all_input_nodes)
                continue
            pending.extend(node.all_input_nodes)
            pending.extend(origins[s] for s in _symbols_of(node) if s in origins)
        return needed

    def _draws_in_pytorch(self, node: fx.Node) -> bool:
        """Tell whether a node moves PyTorch's generators, so that it runs though nobody reads it."""
        if node.op != "call_function":
            return False
        target = node.target
        if target in self._captured.functions.calls or control_flow(target) is not None:
            return True
        engine = self._e.dropout is DropoutSource.ENGINE
        return operator_internals.moves_generator(target) and not (engine and conversion(target))

    def _size_origins(self, graph: fx.Graph) -> dict[sympy.Basic, fx.Node]:
        """Map each symbol to the input, or the node that reads a value, which defines it."""
        users = [p.node for p in self._captured.placeholders if p.role is Role.USER]
        nodes = {n.name: n for n in graph.nodes}
        origins: dict[sympy.Basic, fx.Node] = {
            dim.symbol: nodes[users[dim.index]] for dim in self._captured.dims
        }
        for node in graph.nodes:
            if node.op == "placeholder":
                value = node.meta.get("val")
                for size in value.shape if isinstance(value, torch.Tensor) else ():
                    root = linear_root(size_internals.size_expression(size))
                    if root is not None:
                        origins.setdefault(root[0], node)
            elif _reads_value(node):
                value = size_internals.number_expression(node.meta["val"])
                if isinstance(value, sympy.Symbol):
                    origins.setdefault(value, node)
        return origins

    # Inputs

    def _unsaved_inputs(self, graph: fx.Graph) -> frozenset[str]:
        # A checkpoint reads its inputs again, in PyTorch too: to copy them would undo it.
        if not self._captured.grad_enabled or any(map(checkpoint_of, graph.nodes)):
            return frozenset()
        unsaved = inputs_not_saved(graph)
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        names = list(zip(placeholders, self._captured.placeholders, strict=True))
        # A tied parameter stands in several places.
        saved = {placeholder.name for node, placeholder in names if node not in unsaved}
        return frozenset(placeholder.name for _, placeholder in names) - saved

    def _of_outputs(
        self, found: Callable[..., tuple[frozenset[int], ...]], graph: fx.Graph
    ) -> tuple[frozenset[int], ...]:
        if not self._captured.grad_enabled:
            return ()
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        pairs = zip(placeholders, self._captured.placeholders, strict=True)
        output = next(n for n in graph.nodes if n.op == "output")
        described = zip(self._captured.outputs, output.args[0], strict=True)
        return found(
            graph,
            [node for node, placeholder in pairs if placeholder.requires_grad],
            [node for one, node in described if one.role is OutputRole.USER],
        )

    def _placeholder(self, node: fx.Node, placeholder: Placeholder, needed: bool) -> None:
        if not needed:
            return
        if placeholder.node != node.name:
            raise ConversionError(f"placeholder {node.name} is not {placeholder.node}")
        value = node.meta["val"]
        shape = tuple(size_internals.size_expression(s) for s in value.shape)
        self._e.path = self._e.source = ""
        if placeholder.role is Role.CONSTANT or (
            placeholder.role is Role.OUTSIDE and self._outside_becomes is Outside.KEPT
        ):
            tensor = self._captured.constants[node.name].detach()
            self._env[node] = Tensor(self._e.constant(tensor), value.dtype, shape, Layout.of(value))
            return
        name = placeholder.name
        if is_cloned_alone(node):
            self._cloned.add(name)
        if placeholder.role is Role.USER:
            made = self._input(placeholder, value.dtype, shape)
            self._user_inputs.append((name, placeholder.index))
            self._define_sizes(made, shape)
        else:
            held = self._parameters if placeholder.role is Role.PARAMETER else self._buffers
            if placeholder.role is Role.OUTSIDE:
                self._outside[name] = self._captured.constants[node.name]
            if name not in held:
                held[name] = self._input(placeholder, value.dtype, shape)
            made = held[name]
        self._env[node] = Tensor(made, value.dtype, shape, Layout.of(value))

    def _input(self, placeholder: Placeholder, dtype: torch.dtype, shape: Sequence[Size]) -> Value:
        name = placeholder.name
        outside = placeholder.role is Role.OUTSIDE
        role = self._outside_becomes.value if outside else placeholder.role.value
        dims: list[int | str] = []
        for axis, size in enumerate(shape):
            if isinstance(size, int) or size in self._captured.ones:
                dims.append(size if isinstance(size, int) else 1)
            else:
                dims.append(self._symbols.get(size) or f"{name}_{axis}")
        try:
            code = onnx_code(dtype)
        except TypeError as error:
            raise CaptureError(f"{role} '{name}': {error}") from None
        return self._builder.input(name, code, dims, role, placeholder.requires_grad)

    def _define_sizes(self, value: Value, shape: Sequence[Size]) -> None:
        for axis, size in enumerate(shape):
            root = linear_root(size)
            if root is None or self._e.sizes.knows(root[0]):
                continue
            symbol, solve = root
            # The value is made at first use, so that sizes nobody needs leave no node.
            self._e.sizes.define_lazily(symbol, value, axis, solve)

    # Operators

    def _convert(self, node: fx.Node) -> None:
        e = self._e
        e.path, e.source, e.target = module_path(node), node_source(node), str(node.target)
        self._builder.set_checkpoint(checkpoint_of(node))
        e.used_results = frozenset(
            user.args[1]
            for user in node.users
            if user.target is operator.getitem and user in self._live
        )
        e.traced = node.meta.get("val")
        if node.op == "get_attr" and isinstance(
            held := getattr(self._captured.graph_module, str(node.target), None), fx.GraphModule
        ):
            self._env[node] = held  # of a branch or loop
            return
        if node.op != "call_function":
            raise e.unsupported(f"nodes of kind {node.op} have no conversion")
        if _is_size(node):
            self._size_node(node)
            return
        if node.target is operator.getitem:
            self._env[node] = self._resolve(node.args[0])[node.args[1]]
            return
        if e.target in _CHECKS:
            self._env[node] = None
            return
        args = [self._resolve(a) for a in node.args]
        kwargs = {k: self._resolve(v) for k, v in node.kwargs.items()}
        try:
            result = self._native(node, args, kwargs)
        except UnsupportedOperatorError as error:
            result = self._escaped(node, args, kwargs, error)
        self._env[node] = self._checked(node, result, node.meta["val"])
        self._converted += 1

    def _native(self, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Add the nodes that the operator is converted to; return its results."""
        e = self._e
        function = conversion(node.target)
        if function is None:
            raise e.unsupported("there is no conversion for this operator")
        if isinstance(node.meta["val"], torch.Tensor):
            number = number_out_of_range(e.target, args, kwargs, node.meta["val"].dtype)
            if number is not None:
                raise e.unsupported(f"{number} is beyond {node.meta['val'].dtype}")
        try:
            kept = {k: v for k, v in kwargs.items() if k not in _PLACEMENT}
            return function(e, *args, **kept)
        except (CaptureError, ConversionError):
            raise
        except TypeError as error:
            raise UnsupportedOperatorError(
                e.target, f"called in an unknown form ({error})", module=e.path, source=e.source
            ) from error

    def _escaped(
        self, node: fx.Node, args: list[Any], kwargs: dict[str, Any], why: UnsupportedOperatorError
    ) -> Any:
        """Add a node that runs the operator in PyTorch; return its results."""
        function = self._captured.functions.calls.get(node.target)
        if not all(self._e.sizes.knows(symbol) for symbol in _symbols_of(node)):
            raise why
        made = add_escape(self._e, node, function, args, kwargs, why)
        self._escapes.append(made.escape)
        return made.results

    def _size_node(self, node: fx.Node) -> None:
        """Keep a size as an expression; a number read from a tensor gets its value here."""
        expression = size_internals.number_expression(node.meta["val"])
        self._env[node] = expression
        if _reads_value(node) and isinstance(expression, sympy.Symbol):
            tensor = self._resolve(node.args[0])
            dtype = torch.int64 if expression.is_integer else torch.float64
            if category(tensor.dtype) >= 2:  # a number of Python has no gradient
                tensor = self._e.node("StopGradient", tensor, domain="ortrain")
            value = self._e.cast(self._e.node("Reshape", tensor, self._e.ints()), dtype)
            self._e.sizes.define(expression, value)

    def _resolve(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument not in self._env and _is_size(argument):
                return size_internals.number_expression(argument.meta["val"])
            return self._env[argument]
        if isinstance(argument, (list, tuple)):
            return type(argument)(self._resolve(a) for a in argument)
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return size_internals.number_expression(argument)
        return argument

    def _checked(self, node: fx.Node, result: Any, value: Any) -> Any:
        """Pair the values of a conversion with PyTorch's dtypes and sizes, which must agree."""
        if isinstance(value, (list, tuple)):
            if not isinstance(result, (list, tuple)) or len(result) != len(value):
                raise self._disagrees(node, f"{len(value)} results expected")
            return tuple(self._checked(node, r, v) for r, v in zip(result, value, strict=True))
        if value is None or result is None:
            return None
        made = result.value if isinstance(result, Tensor) else result
        shape = tuple(size_internals.size_expression(s) for s in value.shape)
        if TORCH_DTYPE[made.dtype] is not value.dtype:
            raise self._disagrees(
                node, f"dtype {TORCH_DTYPE[made.dtype]}, PyTorch has {value.dtype}"
            )
        if made.rank != len(shape) or any(
            isinstance(a, int) and isinstance(b, int) and a != b
            for a, b in zip(made.shape, shape, strict=True)
        ):
            raise self._disagrees(
                node, f"shape {list(made.shape)}, PyTorch has {list(value.shape)}"
            )
        return Tensor(made, value.dtype, shape, Layout.of(value))

    def _disagrees(self, node: fx.Node, what: str) -> ConversionError:
        return ConversionError(
            f"[{self._e.path or 'forward'}] conversion of {node.target} ({node.name}) gives {what}"
        )

    # Outputs

    def _outputs(self, node: fx.Node) -> None:
        self._e.path = self._e.source = ""
        inputs = {id(v) for v in (*self._parameters.values(), *self._buffers.values())}
        inputs |= {
            id(self._env[n].value)
            for n in self._env
            if n.op == "placeholder" and isinstance(self._env[n], Tensor)
        }
        taken: set[int] = set()
        pairs = [
            pair
            for pair in zip(self._captured.outputs, node.args[0], strict=True)
            if pair[0].role is not OutputRole.NONE
        ]
        # What the user sees comes first, then updates.
        for output, argument in sorted(pairs, key=lambda p: p[0].role is not OutputRole.USER):
            value = self._env[argument].value
            # An output that is an input, or stands twice, gets a value of its own.
            if id(value) in inputs or id(value) in taken:
                value = self._e.node("Identity", value)
            taken.add(id(value))
            self._builder.output(value, output.name, output.role.value, output.target)
        if self._e.token is not None:
            self._builder.output(self._e.token, "token", "token")


def _is_size(node: fx.Node) -> bool:
    return isinstance(
        node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)
    )


def _reads_value(node: fx.Node) -> bool:
    return str(node.target) in ("aten.item.default", "aten._local_scalar_dense.default")


def _symbols_of(node: fx.Node) -> set[sympy.Basic]:
    """Return the symbols in the sizes of a node's result."""
    value = node.meta.get("val")
    symbols: set[sympy.Basic] = set()
    for tensor in value if isinstance(value, (list, tuple)) else (value,):
        if isinstance(tensor, torch.Tensor):
            for size in tensor.shape:
                expression = size_internals.size_expression(size)
                if isinstance(expression, sympy.Basic):
                    symbols |= expression.free_symbols
    return symbols

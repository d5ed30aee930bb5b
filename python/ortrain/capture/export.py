# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Capture of a module as a functional ATen graph by torch.export."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import inspect
import linecache
import logging
import os
import time
import traceback
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind

from ortrain.capture import torch_internals as internals
from ortrain.capture.errors import CaptureError, ChangingAttributeError
from ortrain.capture.functional import inline_regions, is_functional
from ortrain.capture.guards import Guards, compile_guards, sizes_of
from ortrain.capture.signature import (
    CallSignature,
    FlatCall,
    OutputTree,
    flatten_outputs,
    without_cache,
)

_log = logging.getLogger("ortrain.capture")

_PREFIX = "m"
_TORCH_ROOT = os.path.dirname(torch.__file__) + os.sep
_BAKED_IN = (bool, int, float, complex, str, type(None))
_OWN_ROOT = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Role(enum.Enum):
    """What a placeholder of the captured graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    USER = "user"


@dataclasses.dataclass(frozen=True, slots=True)
class Placeholder:
    """One input of the captured graph.

    Attributes:
      node: Name of the FX node.
      role: Where its value comes from.
      name: Qualified name in the module (parameter, buffer), name of the input, or of the constant.
        Tied parameters carry the name that ``named_parameters`` gives.
      requires_grad: As the module, or the caller, set it.
      index: Position among the flat tensors of the call for a user input, else -1.
    """

    node: str
    role: Role
    name: str
    requires_grad: bool
    index: int = -1


class OutputRole(enum.Enum):
    """What an output of the captured graph is for."""

    USER = "user"
    BUFFER_UPDATE = "buffer_update"
    INPUT_UPDATE = "input_update"


@dataclasses.dataclass(frozen=True, slots=True)
class Output:
    """One output of the captured graph; ``target`` is the buffer or input that it replaces."""

    node: str
    role: OutputRole
    name: str
    target: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Dimension:
    """A dynamic axis: the symbol is the size of ``axis`` of the flat input ``index``."""

    symbol: sympy.Symbol
    name: str
    index: int
    axis: int
    hint: int


@dataclasses.dataclass(frozen=True, slots=True)
class AutocastState:
    """(device type, dtype) of each device type whose autocast is on."""

    enabled: tuple[tuple[str, torch.dtype], ...]

    @staticmethod
    def current() -> AutocastState:
        """Return the state of the calling thread."""
        devices = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
        return AutocastState(
            tuple((d, torch.get_autocast_dtype(d)) for d in devices if torch.is_autocast_enabled(d))
        )

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Enter autocast as recorded."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype))
            yield


@dataclasses.dataclass(slots=True)
class CapturedModule:
    """A module as a functional graph of ATen operators, before autograd.

    Attributes:
      graph_module: The graph; parameters, buffers and constants are placeholders.
      placeholders: Inputs of the graph, in order.
      outputs: Outputs of the graph, in order.
      constants: Tensors of the placeholders with role CONSTANT, by FX node name.
      input_names: Names of the flat user inputs.
      output_tree: Rebuilds the module's result from the user outputs.
      guards: Whether the graph holds for inputs of given sizes.
      dims: The dynamic axes, one per symbol.
      training: Training flag per submodule, by qualified name.
      autocast: Autocast state at the capture.
      grad_enabled: Grad mode at the capture.
      dynamic: False where the sizes of the sample are baked in.
      seconds: Wall time per stage.
      ones: Symbols of axes that the guards hold at 1, as the sample had them.
    """

    module_name: str
    graph_module: torch.fx.GraphModule
    placeholders: list[Placeholder]
    outputs: list[Output]
    constants: dict[str, torch.Tensor]
    input_names: list[str]
    output_tree: OutputTree
    guards: Guards
    dims: list[Dimension]
    training: dict[str, bool]
    autocast: AutocastState
    grad_enabled: bool
    dynamic: bool
    seconds: dict[str, float]
    ones: frozenset[sympy.Symbol] = frozenset()


def module_path(node: torch.fx.Node) -> str:
    """Return the qualified name of the layer whose forward made ``node``; empty for the root."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = next(reversed(stack.values()))[0]
    if path == _PREFIX or not path.startswith(_PREFIX + "."):
        return ""
    return path[len(_PREFIX) + 1 :]


def node_source(node: torch.fx.Node) -> str:
    """Return ``file:line: code`` of the user's line that made ``node``, or an empty string."""
    trace = node.meta.get("stack_trace") or ""
    lines = trace.strip().splitlines()
    for i in range(len(lines) - 1, -1, -1):
        line = lines[i].strip()
        if line.startswith('File "'):
            file, number, _ = ([*line.split(", "), "", ""])[:3]
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            return f"{file[6:-1]}:{number.removeprefix('line ')}: {code}"
    return ""


def _error_source(error: BaseException) -> str:
    """Return the deepest line of an exception that is neither PyTorch's nor ours."""
    seen: BaseException | None = error
    while seen is not None:
        for frame, line in reversed(list(traceback.walk_tb(seen.__traceback__))):
            file = frame.f_code.co_filename
            if file.startswith(("<", _TORCH_ROOT, _OWN_ROOT)) or f"{os.sep}contextlib.py" in file:
                continue
            return f"{file}:{line}: {linecache.getline(file, line).strip()}"
        seen = seen.__cause__ or seen.__context__
    return ""


def _reason(error: BaseException) -> str:
    text = str(error).strip()
    head = text.split("\n\n")[0].replace("\n", " ") if text else ""
    return f"{type(error).__name__}: {head}" if head else type(error).__name__


def _scalars(module: nn.Module) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Return path, attributes and a copy of the numbers, flags and names of each layer."""
    return [
        (path, part.__dict__, {k: v for k, v in part.__dict__.items() if type(v) in _BAKED_IN})
        for path, part in module.named_modules()
    ]


def _refuse_changed_attributes(
    before: list[tuple[str, dict[str, Any], dict[str, Any]]], module: str
) -> None:
    """Set back what differs from earlier `_scalars`, and refuse it."""
    changed: list[str] = []
    made: list[str] = []
    for path, attributes, values in before:
        for name, value in values.items():
            now = attributes.get(name)
            if now is not value and (type(now) is not type(value) or now != value):
                attributes[name] = value
                (made if value is None else changed).append(
                    f"'{path}.{name}'" if path else f"'{name}'"
                )
    if changed:
        raise ChangingAttributeError(
            f"its forward changes {', '.join(changed)}, which a graph would do only once",
            module=module,
        )
    if made:  # PyTorch's first call makes it; later ones find it there
        raise CaptureError(f"its forward makes {', '.join(made)} at its first call", module=module)


def environment_key() -> Hashable:
    """Return what a captured graph depends on besides the call and the module."""
    return (
        AutocastState.current(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        internals.has_global_module_hooks(),
    )


class _FlatModule(nn.Module):
    """The module behind a signature of flat tensors; returns the flat tuple of result tensors."""

    def __init__(
        self,
        module: nn.Module,
        signature: CallSignature,
        call: FlatCall,
        equal: Sequence[Sequence[tuple[int, int]]],
        autocast: AutocastState,
        trees: list[OutputTree],
    ) -> None:
        super().__init__()
        self.m = module
        name = type(module).__name__
        self.training = module.training

        def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for (first, first_axis), *rest in equal:
                for index, axis in rest:
                    torch._check(tensors[index].shape[axis] == tensors[first].shape[first_axis])
            args, kwargs = signature.unflatten(call.tree, tensors)
            buffers = [id(b) for b in module.buffers()]
            attributes = _scalars(module)
            try:
                with autocast.applied():
                    flat, tree = flatten_outputs(module(*args, **kwargs))
                if buffers != [id(b) for b in module.buffers()]:
                    # torch.export forgets it.
                    raise CaptureError("its forward assigns a new tensor to a buffer", module=name)
                _refuse_changed_attributes(attributes, name)
            except CaptureError:
                raise
            except Exception as error:
                raise internals.QuietError from error
            trees.append(tree)
            return tuple(flat)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in call.names]
        )
        self.forward = forward


def _equal_sizes(tensors: Sequence[torch.Tensor]) -> list[list[tuple[int, int]]]:
    """Group the axes of the inputs that agree in position and size in the sample."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, tensor in enumerate(tensors):
        for axis, size in enumerate(tensor.shape):
            groups.setdefault((axis, size), []).append((index, axis))
    return [group for group in groups.values() if len(group) > 1]


def _is_written_in_place(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _detach_no_grad_regions(program: torch.export.ExportedProgram) -> None:
    """Detach what leaves each no_grad region: functionalizing forgets the region itself."""
    region = internals.no_grad_region()
    graphs = [g for g in program.graph_module.modules() if isinstance(g, torch.fx.GraphModule)]
    for graph_module in graphs:
        for node in list(graph_module.graph.nodes):
            if node.op != "call_function" or node.target is not region or node.args[0] is not False:
                continue
            body = getattr(graph_module, node.args[1].target)
            _refuse_writes_to_tracked(body, node)
            _detach_outputs(body)


def _refuse_writes_to_tracked(body: torch.fx.GraphModule, call: torch.fx.Node) -> None:
    outer = dict(
        zip((n for n in body.graph.nodes if n.op == "placeholder"), call.args[2:], strict=True)
    )
    for node in body.graph.nodes:
        if node.op != "call_function" or not _is_written_in_place(node) or not node.args:
            continue
        source = outer.get(node.args[0])
        value = node.meta.get("val")
        if (
            isinstance(source, torch.fx.Node)
            and source.op != "placeholder"
            and isinstance(value, torch.Tensor)
            and value.is_floating_point()
        ):
            raise CaptureError(
                f"{node.target} writes, under no_grad, into a tensor that gradients flow through",
                module=module_path(node),
                source=node_source(node),
            )


def _detach_outputs(body: torch.fx.GraphModule) -> None:
    graph = body.graph
    output = next(n for n in graph.nodes if n.op == "output")

    def detached(node: torch.fx.Node) -> torch.fx.Node:
        value = node.meta.get("val")
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return node
        with graph.inserting_before(output):
            result = graph.call_function(torch.ops.aten.detach.default, (node,))
        result.meta.update(
            {k: node.meta[k] for k in ("val", "nn_module_stack", "stack_trace") if k in node.meta}
        )
        return result

    output.args = tuple(torch.fx.map_arg(a, detached) for a in output.args)
    body.recompile()


def _decompose_unknown(
    program: torch.export.ExportedProgram, known: Callable[[Any], bool]
) -> torch.export.ExportedProgram:
    """Replace operators that have no conversion by simpler ones, as far as PyTorch knows how.

    Composite operators come apart exactly as they do in eager PyTorch, so their gradient stays.
    """
    refused: set[Any] = set()
    for _ in range(8):
        table = {}
        for node in program.graph.nodes:
            target = node.target
            if node.op != "call_function" or target in refused or known(target):
                continue
            function = internals.decomposition(target)
            if function is None:
                refused.add(target)
            else:
                table[target] = function
        if not table:
            break
        refused.update(table)
        program = program.run_decompositions(table)
    return program


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense leaf like ``tensor``, so that the export sees no foreign strides."""
    return tensor.detach().contiguous().requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _capturing(module: nn.Module) -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with (
        warnings.catch_warnings(),
        without_cache(module),
        internals.refuse_autograd_functions(),
        internals.flexible_sizes(),
        internals.recurrent_layers_whole(),
        internals.quiet_logs(),
        torch.inference_mode(False),
        torch.set_grad_enabled(torch.is_grad_enabled()),
    ):
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")
        warnings.filterwarnings("ignore", category=FutureWarning)
        # nn.LSTM and nn.GRU keep their weights in a list as well.
        warnings.filterwarnings(
            "ignore", message="The tensor attributes? .* assigned during export"
        )
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    known: Callable[[Any], bool] | None = None,
    dynamic: bool = True,
) -> CapturedModule:
    """Capture ``module`` as it runs for the given arguments.

    Every axis of the input tensors is dynamic where the module allows it. The training flags, the
    autocast state and the grad mode are those of the moment.

    Args:
      module: The module; its parameters stay where they are.
      args: Positional arguments of a call; only their structure and sizes matter.
      kwargs: Keyword arguments of that call.
      known: Tells whether an operator has a conversion; others are decomposed where possible.
      dynamic: Whether sizes may vary at all.

    Raises:
      CaptureError: The module cannot be captured; names the module, the reason and the line.
      TypeError: The arguments do not fit the module's signature.
    """
    signature = CallSignature(module.forward)
    call = signature.flatten(args, kwargs or {})
    name = type(module).__name__
    try:
        if not dynamic:
            return _capture(module, name, signature, call, known, dynamic=False)
        try:
            return _capture(module, name, signature, call, known, dynamic=True)
        except CaptureError:
            raise
        except Exception as error:
            if internals.has_unbacked_symbols(error) or not call.tensors:
                raise
            reason = _reason(internals.unwrapped(error))
            _log.info("%s: no capture with dynamic sizes (%s)", name, reason)
        return _capture(module, name, signature, call, known, dynamic=False)
    except CaptureError as error:
        if error.module and error.source:
            raise
        text = CaptureError(
            error.reason, module=error.module or name, source=error.source or _error_source(error)
        )
        error.module, error.source, error.args = text.module, text.source, text.args
        raise
    except Exception as error:
        cause = internals.unwrapped(error)
        raise CaptureError(_reason(cause), module=name, source=_error_source(cause)) from cause


def _capture(
    module: nn.Module,
    name: str,
    signature: CallSignature,
    call: FlatCall,
    known: Callable[[Any], bool] | None,
    *,
    dynamic: bool,
) -> CapturedModule:
    seconds: dict[str, float] = {}
    autocast = AutocastState.current()
    tensors = tuple(_sample(t) for t in call.tensors)
    equal = _equal_sizes(tensors) if dynamic else []
    auto = torch.export.Dim.AUTO
    shapes = tuple(dict.fromkeys(range(t.dim()), auto) for t in tensors) if dynamic else None
    trees: list[OutputTree] = []  # outside the module: export resets a module's attributes
    flat = _FlatModule(module, signature, call, equal, autocast, trees)
    with _capturing(module):
        start = time.perf_counter()
        program = torch.export.export(flat, tensors, dynamic_shapes=shapes, strict=False)
        seconds["export"] = time.perf_counter() - start

        start = time.perf_counter()
        conditions = internals.guards_code(program)
        _detach_no_grad_regions(program)
        if known is not None and is_functional(program, known):
            inline_regions(program)
        else:
            program = program.run_decompositions({})
            if known is not None:
                program = _decompose_unknown(program, known)
            # Functionalizing traces once more, which may add conditions.
            conditions += internals.guards_code(program)
        seconds["functionalize"] = time.perf_counter() - start

    start = time.perf_counter()
    placeholders, constants = _placeholders(program, module, call)
    values = _user_values(program)
    static = [
        (index, axis, size)
        for index, value in enumerate(values)
        for axis, size in enumerate(map(internals.size_expression, value.shape))
        if isinstance(size, int)
    ]
    guards = compile_guards(conditions, call.names, static)
    if not guards.holds(sizes_of(tensors)):
        raise CaptureError("the conditions of the capture do not hold for its own sample")
    captured = CapturedModule(
        module_name=name,
        graph_module=program.graph_module,
        placeholders=placeholders,
        outputs=_outputs(program, trees[-1], call),
        constants=constants,
        input_names=list(call.names),
        output_tree=trees[-1],
        guards=guards,
        dims=_dimensions(values),
        ones=_held_at_one(values, guards, tensors),
        training={path: part.training for path, part in module.named_modules()},
        autocast=autocast,
        grad_enabled=torch.is_grad_enabled(),
        dynamic=dynamic,
        seconds=seconds,
    )
    seconds["guards"] = time.perf_counter() - start
    return captured


def _strip(target: str) -> str:
    return target.removeprefix(_PREFIX + ".")


def _user_values(program: torch.export.ExportedProgram) -> list[torch.Tensor]:
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [
        nodes[spec.arg.name].meta["val"]
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]


def _canonical_names(named: Iterator[tuple[str, torch.Tensor]]) -> dict[str, str]:
    """Map each name of a shared tensor to the first name that it has."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _placeholders(
    program: torch.export.ExportedProgram, module: nn.Module, call: FlatCall
) -> tuple[list[Placeholder], dict[str, torch.Tensor]]:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    canonical = _canonical_names(iter((*parameters.items(), *buffers.items())))
    placeholders: list[Placeholder] = []
    constants: dict[str, torch.Tensor] = {}
    users = 0
    for spec in program.graph_signature.input_specs:
        node, target = spec.arg.name, _strip(spec.target or "")
        if spec.kind is InputKind.USER_INPUT:
            tensor = call.tensors[users]
            placeholders.append(
                Placeholder(node, Role.USER, call.names[users], tensor.requires_grad, users)
            )
            users += 1
        elif spec.kind is InputKind.PARAMETER:
            placeholders.append(
                Placeholder(
                    node, Role.PARAMETER, canonical[target], parameters[target].requires_grad
                )
            )
        elif spec.kind is InputKind.BUFFER:
            placeholders.append(
                Placeholder(node, Role.BUFFER, canonical[target], buffers[target].requires_grad)
            )
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[spec.target]
            if constant.requires_grad:
                raise CaptureError(
                    f"tensor '{target}' requires a gradient but is no registered parameter of the module"
                )
            constants[node] = constant
            placeholders.append(Placeholder(node, Role.CONSTANT, target, False))
        else:
            raise CaptureError(
                f"an input of kind {spec.kind.name} ({spec.target}) enters the graph"
            )
    return placeholders, constants


def _outputs(
    program: torch.export.ExportedProgram, tree: OutputTree, call: FlatCall
) -> list[Output]:
    outputs: list[Output] = []
    users = 0
    taken: set[str] = set()
    input_nodes = [
        spec.arg.name
        for spec in program.graph_signature.input_specs
        if spec.kind is InputKind.USER_INPUT
    ]
    for spec in program.graph_signature.output_specs:
        node = spec.arg.name
        if spec.kind is OutputKind.USER_OUTPUT:
            name = tree.paths[users]
            users += 1
            while name in taken:
                name += "_"
            taken.add(name)
            outputs.append(Output(node, OutputRole.USER, name))
        elif spec.kind is OutputKind.BUFFER_MUTATION:
            target = _strip(spec.target or "")
            outputs.append(Output(node, OutputRole.BUFFER_UPDATE, f"{target}.update", target))
        elif spec.kind is OutputKind.USER_INPUT_MUTATION:
            target = call.names[input_nodes.index(spec.target or "")]
            outputs.append(Output(node, OutputRole.INPUT_UPDATE, f"{target}.update", target))
        else:
            raise CaptureError(
                f"forward writes to {_strip(spec.target or node)} ({spec.kind.name})"
            )
    return outputs


def _held_at_one(
    values: Sequence[torch.Tensor], guards: Guards, tensors: Sequence[torch.Tensor]
) -> frozenset[sympy.Symbol]:
    """Return the symbols for which a sample of 1 was traced as the number, so that no 2 fits."""
    held: set[sympy.Symbol] = set()
    for dimension in _dimensions(values):
        if dimension.hint != 1:
            continue
        sizes = [
            [
                2 if internals.size_expression(size) == dimension.symbol else given
                for size, given in zip(value.shape, tensor.shape, strict=True)
            ]
            for value, tensor in zip(values, tensors, strict=True)
        ]
        if not guards.holds(sizes):
            held.add(dimension.symbol)
    return frozenset(held)


def _dimensions(values: Sequence[torch.Tensor]) -> list[Dimension]:
    dims: dict[sympy.Symbol, Dimension] = {}
    for index, value in enumerate(values):
        for axis, size in enumerate(value.shape):
            expression = internals.size_expression(size)
            if isinstance(expression, sympy.Symbol) and expression not in dims:
                hint = internals.size_hint(size)
                dims[expression] = Dimension(expression, f"s{len(dims)}", index, axis, hint)
    return list(dims.values())

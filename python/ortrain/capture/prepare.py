# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""From a module and a call to a graph of Ortrain's operators."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ortrain import _core, progress
from ortrain.capture.branches import Branch
from ortrain.capture.captured import CapturedModule, OutputRole, Role
from ortrain.capture.convert import Converted, Outside, convert
from ortrain.capture.convert.registry import conversion
from ortrain.capture.errors import CaptureError, FirstCallError, ForeignModeError, UnseenStateError
from ortrain.capture.export import capture
from ortrain.capture.gradient_paths import add_zero_gradients
from ortrain.capture.library_places import read_once
from ortrain.capture.names_read import NamesRead, functions_with
from ortrain.capture.operator_internals import decomposition, is_escapable
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.registered_kernels import replaced_operator
from ortrain.capture.side_effects import (
    has_hooks,
    nothing_added,
    refuse_acting_tensors,
    without_root_hooks,
)
from ortrain.capture.signature import FlatCall, order_of
from ortrain.capture.source_files import take_for_own
from ortrain.capture.symbolic_budget import restrict_further
from ortrain.capture.torch_internals import (
    acts_by_itself,
    has_global_module_hooks,
    is_transforming,
    mode_around,
    nothing_saved_for_others,
)
from ortrain.random_numbers import DropoutSource, untouched_generator


def prepare(
    module: nn.Module,
    call: FlatCall,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    stages: dict[str, float],
    read: NamesRead | None = None,
    dropout: DropoutSource = DropoutSource.ENGINE,
    *,
    dynamic: bool = True,
    standalone: bool = True,
    outside: Outside | None = None,
    any_gradients: bool = False,
    branches: Sequence[Branch] = (),
) -> PreparedGraph:
    """Capture the module and convert it.

    Args:
      module: The module, as it runs at this moment.
      call: The arguments, flat.
      args: Positional arguments.
      kwargs: Keyword arguments.
      stages: Takes the seconds of each stage.
      read: Takes what the forward reads, as far as it came where an error is raised.
      dropout: Who draws the masks of dropout.
      dynamic: Whether sizes may vary at all.
      standalone: Whether the graph stands for the forward by itself: results that share memory are copies.
      outside: What becomes of tensors outside of the module; by default they are kept where the graph is to stand by
        itself, and held where not.
      any_gradients: Whether results may want other gradients than PyTorch's.
      branches: How branches on values went in PyTorch, which who runs the graph has to compare.

    Raises:
      CaptureError: The module cannot be captured or converted.
    """
    take_for_own(type(layer) for layer in module.modules())
    read = NamesRead() if read is None else read
    if outside is None:
        outside = Outside.KEPT if standalone else Outside.HELD
    preparation = _Preparation(
        *(module, call, args, kwargs, stages, read, dropout),
        *(standalone, outside, any_gradients, branches),
    )
    kept: list[str] = []
    with read.making():
        # Operators are asked for their histories in each stage, on stand-ins that are nobody's to save.
        with read.fakes.taken_back(kept), nothing_saved_for_others():
            prepared, captured = preparation.run(dynamic)
        layers = {type(layer) for layer in module.modules()}
        libraries = read.reads_of_libraries(layers, captured.classes - layers)
        # While a trace goes on they are hidden.
        thresholds = tuple((each, "level") for each in read.loggers.values())
        asked = read.asked.values()
        prepared.others = functions_with(captured.others, (*libraries, *thresholds, *asked))
        prepared.asks_of_memory = read.asks_of_memory()
        prepared.read_once = tuple(sorted({*read_once(libraries), *read.read_once()}))
        if kept:
            raise FirstCallError(
                f"its forward keeps tensors in {' and '.join(kept)}", module=type(module).__name__
            )
    return prepared


@dataclasses.dataclass(frozen=True, slots=True)
class _Preparation:
    """The arguments of `prepare`."""

    module: nn.Module
    call: FlatCall
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    stages: dict[str, float]
    read: NamesRead
    dropout: DropoutSource
    standalone: bool
    outside: Outside
    any_gradients: bool
    branches: Sequence[Branch]

    def run(self, dynamic: bool) -> tuple[PreparedGraph, CapturedModule]:
        """Return the graph, and what it was made of."""
        captured = self._captured(dynamic)
        while True:
            try:
                converted = self._converted(captured)
                break
            except _core.ShapeError as error:
                # Shapes that agree for all sizes, but not in a way that is seen in their formulas.
                if not captured.dynamic:
                    raise
                restrict_further(self.module, str(error).partition("\n")[0])
                captured = self._captured(dynamic)
        if captured.grad_enabled and not self.any_gradients:
            converted = self._with_gradients_of_pytorch(captured, converted)
        prepared = PreparedGraph(
            graph=converted.graph,
            user_inputs=converted.user_inputs,
            aten_nodes=converted.nodes,
            guards=captured.guards,
            input_names=captured.input_names,
            output_tree=captured.output_tree,
            grad_enabled=captured.grad_enabled,
            autocast_regions=captured.autocast_regions,
            escapes=converted.escapes,
            escaped_calls=converted.escaped_calls,
            unsaved_inputs=converted.unsaved_inputs,
            common_saves=converted.common_saves,
            needed_results=converted.needed_results,
            names_read=None if captured.reads_any_attribute else self.read.names(),
            num_made=captured.num_made,
            outside=converted.outside,
            cloned=converted.cloned,
            views=captured.views,
            fixed=captured.fixed,
            branches=captured.branches,
        )
        return prepared, captured

    def _captured(self, dynamic: bool) -> CapturedModule:
        with (
            progress.stage("capture") as timing,
            untouched_generator() as touched,
            without_root_hooks(self.module),
            nothing_added(self.module),
        ):
            captured = self._capture(dynamic)
            # A size that may vary is no int to who asks by type(), and does not tell whether a reshape is a view.
            if captured.dynamic and (
                self.read.compares_classes_of_numbers() or _reshapes_arguments(captured, self.call)
            ):
                captured = self._capture(dynamic=False)
        if any(touched):
            raise CaptureError(
                "its forward sets PyTorch's generator or asks for its state, which a graph would lose"
            )
        self.stages["capture"] = self.stages.get("capture", 0.0) + timing.seconds
        return captured

    def _capture(self, dynamic: bool) -> CapturedModule:
        return capture(
            self.module,
            self.args,
            self.kwargs,
            known=_has_place,
            dynamic=dynamic,
            read=self.read,
            standalone=self.standalone,
            call=self.call,
            branches=self.branches,
        )

    def _converted(self, captured: CapturedModule) -> Converted:
        with progress.stage("convert") as timing:
            converted = convert(
                captured,
                _core.GraphBuilder(type(self.module).__name__),
                self.dropout,
                outside=self.outside,
            )
            converted.graph.run_passes("simplify")
        self.stages["convert"] = timing.seconds
        return converted

    def _with_gradients_of_pytorch(
        self, captured: CapturedModule, converted: Converted
    ) -> Converted:
        missing = _missing_gradients(captured, converted.graph)
        if not missing:
            return converted
        add_zero_gradients(captured, missing)
        converted = self._converted(captured)
        if _missing_gradients(captured, converted.graph):
            raise UnseenStateError(
                f"gradients of its result '{min(missing)}' are lost in its graph",
                module=captured.module_name,
            )
        return converted


def _missing_gradients(captured: CapturedModule, graph: _core.Graph) -> dict[str, frozenset[str]]:
    """Return the inputs to which PyTorch's autograd leads from a result and the graph does not, by the result's name.

    Raises:
      UnseenStateError: The graph leads to others, or a result wants a gradient here or there alone.
    """
    results = [o for o in captured.outputs if o.role in (OutputRole.USER, OutputRole.NONE)]
    reached = {o.name: r for o, r in zip(results, captured.reached, strict=True)}
    outputs = [o["name"] for o in graph.outputs if o["role"] == "user"]
    missing = {}
    for name, paths in zip(outputs, map(frozenset, graph.gradient_paths()), strict=True):
        wanted = reached[name]
        if (wanted is None) != (not paths) and not wanted:
            wants = "wants no gradient" if wanted is None else "wants a gradient"
            raise UnseenStateError(
                f"its result '{name}' {wants}, which its operators do not show",
                module=captured.module_name,
            )
        if wanted is not None and (more := paths - wanted):
            raise UnseenStateError(
                f"its result '{name}' gives '{min(more)}' no gradient, which its operators do not show",
                module=captured.module_name,
            )
        if wanted and wanted - paths:
            missing[name] = wanted - paths
    # Zeros are right where the values do not matter; an operator that knows no gradient says nothing of it.
    values = dict(zip(outputs, map(frozenset, graph.value_paths()), strict=True)) if missing else {}
    for name, lost in missing.items():
        if lost & values[name]:
            raise UnseenStateError(
                f"its result '{name}' gives '{min(lost)}' a gradient, which its operators do not show",
                module=captured.module_name,
            )
    return missing


def refuse_hooks(module: nn.Module) -> None:
    """Raise CaptureError where hooks run inside of the module, which a graph would lose.

    A lazy layer has one until its first call, and parameters of a class decide for themselves.
    """
    for path, part in module.named_modules():
        if isinstance(part, LazyModuleMixin) and part.has_uninitialized_params():
            # Its first call draws random numbers, which Dynamo takes back.
            raise FirstCallError("the layer is initialized by its first call", module=path)
        if path and has_hooks(part):
            raise CaptureError("the layer has hooks, which a graph would lose", module=path)
    tables = (*module.named_parameters(), *module.named_buffers())
    refuse_acting_tensors([n for n, t in tables if acts_by_itself(t)], type(module).__name__)
    if has_global_module_hooks():
        raise UnseenStateError("hooks for all modules are registered, which a graph would lose")


def refuse_encoder_fast_path(module: nn.Module) -> None:
    """Raise UnseenStateError where PyTorch may take its fast path through an encoder, which gives zeros for padding."""
    if not torch.backends.mha.get_fastpath_enabled():
        return
    for path, part in module.named_modules():
        if not isinstance(part, nn.TransformerEncoder) or part.training:
            continue
        wants_gradients = torch.is_grad_enabled() and any(
            p.requires_grad for p in part.parameters()
        )
        if getattr(part, "use_nested_tensor", False) and not wants_gradients:
            raise UnseenStateError("PyTorch may leave out padding in this encoder", module=path)


def refuse_modes() -> None:
    """Raise CaptureError where PyTorch does more with a call than to compute its values, or computes others."""
    if (error := _more_than_values()) is not None:
        raise error


def computes_values_alone() -> bool:
    """Tell whether PyTorch would now do with a call what a graph does."""
    return _more_than_values() is None


def _more_than_values() -> CaptureError | None:
    """Return what PyTorch obeys now and a graph does not.

    Inside of a transform of torch.func tensors hold other tensors, in forward-mode differentiation they have
    tangents; a mode sees each operator; an operator may have been given a kernel.
    """
    if is_transforming():
        return CaptureError("it is called inside of a transform of torch.func")
    if (name := mode_around()) is not None:
        return ForeignModeError(f"it is called inside of {name}, which a graph would not obey")
    if name := replaced_operator():
        return ForeignModeError(f"an operator of PyTorch's has been given another kernel: {name}")
    return None


def refuse_inference_tensors(call: FlatCall) -> None:
    """Raise ForeignModeError for arguments that PyTorch would not save for a backward."""
    if torch.is_grad_enabled() and any(map(torch.is_inference, call.tensors)):
        for name, tensor in zip(call.names, call.tensors, strict=True):
            if tensor.is_inference():
                raise ForeignModeError(
                    f"argument '{name}' is an inference tensor, which no backward may need"
                )


def empty_extents(call: FlatCall) -> tuple[tuple[int, ...], ...]:
    """Return which axes of each tensor of a call are of size 0, those of live numbers left out.

    A symbolic size is taken for a positive one, and a forward may ask.
    """
    tensors = call.tensors[: len(call.tensors) - len(call.numbers)]
    return tuple(tuple(k for k, n in enumerate(t.shape) if n == 0) for t in tensors)


def _has_place(target: Any) -> bool:
    """Tell whether an operator need not be taken apart: it is converted, or runs in PyTorch."""
    if conversion(target) is not None:
        return True
    return is_escapable(target) and decomposition(target) is None


def _reshapes_arguments(captured: CapturedModule, call: FlatCall) -> bool:
    """Tell whether an argument whose axes lie in another order is reshaped, to a view or a copy by its sizes."""
    lying = {
        p.node
        for p in captured.placeholders
        if p.role is Role.USER and order_of(call.tensors[p.index])
    }
    for node in captured.graph_module.graph.nodes if lying else ():
        if node.op != "call_function" or not node.args or not hasattr(node.args[0], "name"):
            continue
        if node.args[0].name not in lying:
            continue
        if node.target is torch.ops.aten.reshape.default:
            return True
        if getattr(node.target, "is_view", False):
            lying.add(node.name)
    return False

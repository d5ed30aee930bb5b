# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Where the graph of a step comes from: a module with its loss function, or an ONNX model."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from ortrain import _core, devices, logs
from ortrain.amp import MixedPrecision
from ortrain.capture.captured import environment_key
from ortrain.capture.compared_state import variables_of
from ortrain.capture.convert import Outside
from ortrain.capture.errors import (
    CallError,
    CaptureError,
    ChangingAttributeError,
    FirstCallError,
)
from ortrain.capture.guards import sizes_of
from ortrain.capture.modes import modes_kept
from ortrain.capture.prepare import (
    computes_values_alone,
    empty_extents,
    prepare,
    refuse_encoder_fast_path,
    refuse_hooks,
    refuse_modes,
)
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.signature import CallSignature, FlatCall
from ortrain.capture.tracing import tracing_alone
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.module_states import ModuleStates
from ortrain.overlap import any_overlap, overlaps_itself
from ortrain.running_statistics import warn_of_kept_statistics
from ortrain.tensor_copies import named_copies
from ortrain.trainer.joined_module import LOSS, JoinedModule, LossFunction, Tensors
from ortrain.trainer.model_description import ModelDescription
from ortrain.trainer.piecewise_step import PiecewiseStep

_log = logs.get_logger("ortrain")


@dataclasses.dataclass(frozen=True, slots=True)
class StepGraph:
    """A graph of the model with the outputs that are described, in their order.

    Attributes:
      graph: The graph, before autodiff.
      inputs: Its user inputs in order: names of those of a call, and tensors outside of the module as they are.
      fits: Tells whether it holds for a call.
      kept: What must live as long as the graph.
    """

    graph: Any
    inputs: list[str | torch.Tensor]
    fits: Callable[[Tensors], bool]
    kept: Any = None

    @property
    def stands_alone(self) -> bool:
        """Whether a call and the model's own tensors are all that it needs."""
        return all(isinstance(each, str) for each in self.inputs)

    def given(self, inputs: Tensors) -> list[torch.Tensor]:
        """Return the user inputs of a call."""
        return [
            inputs[each] if isinstance(each, str) else each.detach().contiguous()
            for each in self.inputs
        ]


class StepSource(Protocol):
    """Gives graphs for calls, and the tensors that they work on."""

    def graph(self, inputs: Tensors, *, training: bool, alone: bool = False) -> StepGraph:
        """Return a graph that fits a call; with ``alone`` one that keeps tensors outside of the model as they are."""

    def tensors(self) -> Tensors:
        """Return parameters and buffers by name, dense in row-major order."""

    def parameters(self) -> dict[str, bool]:
        """Return whether each parameter is to be trained, by name."""

    def changed(self) -> bool:
        """Tell whether tensors, or what graphs depend on, are others than at the last ``settle``."""

    def settle(self) -> None:
        """Take what is there now, also what a capture has added, as what graphs are for."""

    def in_pieces(self, options: Mapping[str, Any]) -> PiecewiseStep | None:
        """Return what runs steps that no graph holds, with the options of a step; None where nothing does."""

    @property
    def name(self) -> str:
        """What warnings call the model."""

    @property
    def state(self) -> int:
        """Number of the state that was there when it was last looked: graphs hold for one."""

    def keep_states(self, numbers: Iterable[int]) -> None:
        """Forget all other states but the present one; none of them comes back under its number."""


class ModuleSource:
    """A module, and its loss function if it does not compute the loss itself.

    Args:
      module: The module; its parameters are trained where they are.
      loss_fn: Called with the module's result and the last input of the description.
      description: Inputs and outputs.
      precision: Computes in 16 bits: under torch.autocast, or by the lists of operators where some
        are given. None does not.
    """

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFunction | None,
        description: ModelDescription,
        precision: MixedPrecision | None,
    ) -> None:
        self.module = module
        self._joined = JoinedModule(module, loss_fn, description)
        by_lists = precision is not None and precision.by_lists
        self._lists = precision if by_lists else None
        self._autocast = None if precision is None or by_lists else precision.dtype
        # The joined one has the module's layers; what else the module holds is the module's own.
        self._states = ModuleStates(self._joined, beside=(module,))
        self._seen: tuple[int, list[tuple[int, int] | None]] = (0, [])

    def graph(self, inputs: Tensors, *, training: bool, alone: bool = False) -> StepGraph:
        """Capture the module for a call.

        What the forward reads, inside of the module and outside, is looked at from then on.

        Raises:
          CaptureError: It cannot be captured whole.
          UnsupportedError: It has autocast regions, and lists of operators are given.
        """
        joined = self._joined
        signature = CallSignature(joined.forward)
        outside = Outside.KEPT if alone else Outside.GIVEN
        with tracing_alone() as traces_alone, self._mode(training):
            if not traces_alone:
                raise CaptureError("another thread captures for long")
            refuse_modes()
            call = signature.flatten((), inputs)
            refuse_hooks(joined)
            if not alone:  # a file says what the layers compute
                refuse_encoder_fast_path(self.module)
            varies = not any(empty_extents(call))
            try:
                prepared = prepare(joined, call, (), inputs, {}, dynamic=varies, outside=outside)
            except (FirstCallError, ChangingAttributeError) as error:
                _log.info("PyTorch runs the forward, and it is captured again: %s", error)
                before = ReachableState(joined, (inputs,))
                try:
                    self._run_for_what_it_makes(inputs, error)
                    prepared = prepare(
                        joined, call, (), inputs, {}, dynamic=varies, outside=outside
                    )
                except BaseException:
                    before.restore()
                    raise
            if reason := _differs_in_memory(prepared, _written_arguments(prepared), call):
                error = CallError(reason, module=type(self.module).__name__)
                error.holds = _fits(prepared, signature, call, training, apart=True)
                raise error
            names = prepared.names_read
            names = None if names is None else names | {LOSS}
            variables = variables_of(joined, names, prepared.others)
            self._states.reads(names, variables, prepared.outside.values())
        if self._lists is not None:
            if prepared.autocast_regions:
                raise UnsupportedError(
                    f"option 'mixed_precision.{self._lists.first_list}' replaces torch.autocast by "
                    "lists of operators, and the module has autocast regions of its own, which lists "
                    "do not know: give no lists, or take the regions out of its forward"
                )
            self._lists.apply(prepared.graph)
        return StepGraph(
            graph=prepared.graph,
            inputs=_user_inputs(prepared, list(inputs)),
            fits=_fits(prepared, signature, call, training),
            kept=prepared,
        )

    def _run_for_what_it_makes(self, inputs: Tensors, why: CaptureError) -> None:
        """Run the forward in PyTorch for the attributes that it makes where there are none, or none that fit.

        Buffers and PyTorch's generators are as before afterwards: the step itself is yet to come.

        Raises:
          CaptureError: With them it does something else than the call that made them.
        """

        def refuse(what: str) -> None:
            raise CaptureError(
                f"{what} in a second call, and a step cannot be made in PyTorch: {why}",
                module=type(self.module).__name__,
            ) from why

        known = {id(buffer) for buffer in self._joined.buffers()}
        first, drawn, _ = self._forward_alone(inputs)
        second, drawn_again, written = self._forward_alone(inputs)
        if not torch.equal(drawn, drawn_again):
            refuse("it draws other numbers")
        if written - known:
            refuse("it writes to a buffer that it makes")
        for name, result in first.items():
            if not torch.allclose(result, second[name], equal_nan=True):
                refuse(f"its result '{name}' is another one")

    def _forward_alone(self, inputs: Tensors) -> tuple[Tensors, torch.Tensor, set[int]]:
        """Run the forward in PyTorch; put back buffers and generators.

        Returns:
          The results, where the CPU's generator stood, and the addresses of buffers that were written to.
        """
        kept = {name: (b, b.clone()) for name, b in self._joined.named_buffers()}
        cuda = [] if self._device_type() == "cpu" else None
        with torch.random.fork_rng(devices=cuda):
            results = self._joined.forward(**named_copies(inputs))
            drawn = torch.get_rng_state()
        written = set()
        with torch.no_grad():
            for name, buffer in self._joined.named_buffers():
                held, before = kept.get(name, (None, None))
                if held is buffer and not torch.equal(buffer, before):
                    written.add(id(buffer))
                    buffer.copy_(before)
        return {name: result.detach() for name, result in results.items()}, drawn, written

    def run(self, inputs: Tensors) -> list[torch.Tensor]:
        """Run the module in PyTorch, in eval mode and without gradients."""
        with self._mode(False):
            return list(self._joined.forward(**named_copies(inputs)).values())

    def tensors(self) -> Tensors:
        named = [*self._joined.named_parameters(), *self._joined.named_buffers()]
        _refuse_shared_memory(named)
        result: Tensors = {}
        for name, tensor in named:
            if not tensor.is_contiguous():
                tensor.data = tensor.data.contiguous()
            result[name] = tensor.detach()
        return result

    def parameters(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in self._joined.named_parameters()}

    def changed(self) -> bool:
        return self._look() != self._seen

    def settle(self) -> None:
        self._seen = self._look()

    def in_pieces(self, options: Mapping[str, Any]) -> PiecewiseStep | None:
        if self._lists is not None:
            return None  # lists of operators are for graphs
        return PiecewiseStep(self._joined, self._mode, options, beside=(self.module,))

    @property
    def name(self) -> str:
        return type(self.module).__name__

    @property
    def state(self) -> int:
        return self._states.present

    def keep_states(self, numbers: Iterable[int]) -> None:
        self._states.keep(numbers)

    def _device_type(self) -> str:
        first = next(self._joined.parameters(), None)
        return "cpu" if first is None else first.device.type

    def _look(self) -> tuple[int, list[tuple[int, int, bool] | None]]:
        """Return what a step depends on: the state of all layers, and where their tensors lie."""
        self._joined.follow_layers()
        tensors, _ = self._states.look()
        places = [None if t is None else (id(t), t.data_ptr(), t.is_neg()) for t in tensors]
        _refuse_gradient_hooks(self._joined)
        return self._states.present, places

    @contextlib.contextmanager
    def _mode(self, training: bool) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(modes_kept(self.module))
            stack.enter_context(modes_kept(self._joined))
            # Layers that were put into eval mode by themselves stay there.
            if not (training and self.module.training):
                self.module.train(training)
                self._joined.train(training)
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(training))
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self._device_type(), self._autocast))
            yield


def _refuse_gradient_hooks(module: nn.Module) -> None:
    """Raise UnsupportedError for hooks on gradients, which no autograd runs here."""
    for name, parameter in module.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"parameter '{name}' has hooks on its gradient, which the optimizer in the graph "
                "would not see: remove them, or train with ORTModule"
            )


def _refuse_shared_memory(named: list[tuple[str, torch.Tensor]]) -> None:
    """Raise UnsupportedError for two tensors in one piece of memory, which a step would write twice."""
    ranges = []
    for name, tensor in named:
        if tensor.numel() == 0:
            continue
        begin = tensor.data_ptr()
        span = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        ranges.append((begin, begin + span * tensor.element_size(), name))
    ranges.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(ranges):
        if begin < end:
            raise UnsupportedError(
                f"'{name}' and '{other}' lie in the same memory and are different tensors; tie "
                "them by one parameter"
            )


def _user_inputs(prepared: PreparedGraph, names: list[str]) -> list[str | torch.Tensor]:
    """Return where each user input of the graph comes from.

    Raises:
      CaptureError: A tensor outside of the module is written.
    """
    written = [o["target"] for o in prepared.graph.outputs if o.get("target") in prepared.outside]
    if written:
        raise CaptureError(f"its forward writes to '{written[0]}', a tensor outside of the module")
    of_call = dict(prepared.user_inputs)
    return [
        names[of_call[entry["name"]]]
        if entry["name"] in of_call
        else prepared.outside[entry["name"]]
        for entry in prepared.graph.inputs
        if entry["role"] == "user"
    ]


def _written_arguments(prepared: PreparedGraph) -> list[int]:
    """Return the positions of the arguments that a forward writes to."""
    arguments = dict(prepared.user_inputs)
    outputs = prepared.graph.outputs
    return [arguments[o["target"]] for o in outputs if o["role"] == "input_update"]


def _differs_in_memory(prepared: PreparedGraph, places: list[int], call: FlatCall) -> str:
    """Say in which way the arguments of a call lie otherwise than those of a trace, if that makes a difference.

    Args:
      prepared: The graph.
      places: The `_written_arguments`.
      call: The call.
    """
    if prepared.takes_for_dense(call.tensors, places):
        return prepared.HAS_GAPS
    if places:
        written = [call.tensors[place] for place in places]
        read = [t for place, t in enumerate(call.tensors) if place not in places]
        read += prepared.outside.values()
        if any_overlap(written, read) or any(map(overlaps_itself, written)):
            return "it writes to an argument in whose memory another tensor lies"
    return ""


def _environment(training: bool) -> Hashable:
    """Return what a graph depends on besides the model and a call, which says nothing of gradients here."""
    with torch.inference_mode(False), torch.set_grad_enabled(training):
        return environment_key()


def _fits(
    prepared: PreparedGraph,
    signature: CallSignature,
    call: FlatCall,
    training: bool,
    *,
    apart: bool = False,
) -> Callable[[Tensors], bool]:
    """Return what tells whether a graph holds for a call; with ``apart``, but for how its arguments lie in memory."""
    known: dict[Any, bool] = {tuple(sizes_of(call.tensors)): True}
    key, environment = (call.key, empty_extents(call)), _environment(training)
    places = _written_arguments(prepared)

    def fits(inputs: Tensors) -> bool:
        if not computes_values_alone() or _environment(training) != environment:
            return False
        other = signature.flatten((), inputs)
        if (other.key, empty_extents(other)) != key:
            return False
        if bool(_differs_in_memory(prepared, places, other)) != apart:
            return False
        sizes = tuple(sizes_of(other.tensors))
        if sizes not in known:
            known[sizes] = prepared.guards.holds(sizes)
        return known[sizes]

    return fits


class OnnxSource:
    """An ONNX model; its initializers are the parameters.

    Args:
      model: An onnx.ModelProto.
      description: Inputs and outputs.
      precision: Computes in 16 bits, by the lists of operators; None does not.
      device: Where it is trained.
    """

    def __init__(
        self,
        model: Any,
        description: ModelDescription,
        precision: MixedPrecision | None,
        device: torch.device = devices.CPU,
    ) -> None:
        self._graph, tensors = _core.load_onnx_model(
            model.SerializeToString(),
            initializers="weights",
        )
        warn_of_kept_statistics(self._graph)
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._graph.draw_dropout_per_run()
        described = [entry.name for entry in description.inputs]
        self._inputs = [i["name"] for i in self._graph.inputs if i["role"] == "user"]
        for name in self._inputs:
            if name not in described:
                raise InvalidModelError(f"the model has an input '{name}' that model_desc lacks")
        outputs = [o["name"] for o in self._graph.outputs if o["role"] == "user"]
        for name in description.output_names:
            if name not in outputs:
                raise InvalidModelError(
                    f"the model has no output '{name}'; it has {', '.join(outputs)}"
                )
        self._graph.select_outputs(description.output_names)
        if precision is not None:
            precision.apply(self._graph)

    def graph(self, inputs: Tensors, *, training: bool, alone: bool = False) -> StepGraph:
        del inputs, alone
        graph = self._graph if training else self._graph.copy()
        if not training:
            graph.leave_out_training()
        return StepGraph(graph, list(self._inputs), lambda call: True)

    def tensors(self) -> Tensors:
        return self._tensors

    def changed(self) -> bool:
        return False

    def settle(self) -> None:
        """There is nothing that changes."""

    def in_pieces(self, options: Mapping[str, Any]) -> PiecewiseStep | None:
        """A model that is a graph has no pieces."""
        return None

    name = "the ONNX model"
    state = 0

    def keep_states(self, numbers: Iterable[int]) -> None:
        """There is one."""

    def parameters(self) -> dict[str, bool]:
        return {
            i["target"]: i["requires_grad"] for i in self._graph.inputs if i["role"] == "parameter"
        }

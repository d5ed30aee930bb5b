# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a capture gives: a functional ATen graph and what its inputs and outputs stand for."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
import types
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch

from ortrain import devices
from ortrain.capture import recurrent_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.branches import Branch
from ortrain.capture.function_calls import FunctionCalls
from ortrain.capture.guards import Guards
from ortrain.capture.result_views import ResultViews
from ortrain.capture.signature import OutputTree

# Asking for devices would start the driver, which processes made by fork do not survive.
_HAS_COLLECTIVES = torch.distributed.is_available()
_HAS_CUDA = torch.version.cuda is not None or torch.version.hip is not None


# Of transformers; holds where hooks put what layers give.
COLLECTOR_MODULE = "transformers.utils.output_capturing"


class Role(enum.Enum):
    """What a placeholder of the captured graph stands for."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    OUTSIDE = "outside"
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
    NONE = "none"  # of what is made behind the graph


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
        if not torch.is_autocast_enabled("cpu") and not (
            _HAS_CUDA and torch.is_autocast_enabled("cuda")
        ):
            return _NO_AUTOCAST
        kinds = ("cpu", "cuda") if _HAS_CUDA else ("cpu",)
        return AutocastState(
            tuple((d, torch.get_autocast_dtype(d)) for d in kinds if torch.is_autocast_enabled(d))
        )

    @contextlib.contextmanager
    def applied(self, keeps_casts: bool | None = None) -> Iterator[None]:
        """Enter autocast as recorded.

        Args:
          keeps_casts: Whether a weight that is used twice is cast once. By default regions inside decide, and what was
            recorded does not: casts that are kept outlive a trace.
        """
        if not self.enabled and keeps_casts is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(bool(keeps_casts))
            if AutocastState.current() != self:  # torch.autocast leaves what it finds no device for
                for device, dtype in self.enabled:
                    stack.enter_context(torch.autocast(device, dtype=dtype))
            yield

    @contextlib.contextmanager
    def left(self) -> Iterator[None]:
        """Leave autocast, where a graph holds its casts already."""
        with contextlib.ExitStack() as stack:
            for device, _ in self.enabled:
                stack.enter_context(torch.autocast(device, enabled=False))
            yield


_NO_AUTOCAST = AutocastState(())


@dataclasses.dataclass(slots=True)
class CapturedModule:
    """A module as a functional graph of ATen operators, before autograd.

    Attributes:
      graph_module: The graph; parameters, buffers and constants are placeholders.
      placeholders: Inputs of the graph, in order.
      outputs: Outputs of the graph, in order.
      constants: Tensors of the placeholders with role CONSTANT or OUTSIDE, by FX node name. Those of OUTSIDE were
        there before the forward, in no table of a layer, and have other contents at other calls.
      input_names: Names of the flat user inputs.
      output_tree: Rebuilds the module's result from the user outputs.
      guards: Whether the graph holds for inputs of given sizes.
      dims: The dynamic axes, one per symbol.
      training: Training flag per submodule, by qualified name.
      autocast: Autocast state at the capture.
      grad_enabled: Grad mode at the capture.
      dynamic: False where the sizes of the sample are baked in.
      fixed: The sizes of the sample that are baked in since symbols for them take too long, in words.
      seconds: Wall time per stage.
      num_made: How many plain attributes the forward made.
      needs_numbers: Why the sizes cannot be symbols, so that the capture is of no use.
      reached: Of each result, in the order of the output tree, the parameters and arguments to which PyTorch's autograd
        leads from it; None where it wants no gradient.
      views: How results are made of the outputs, where these are not the results.
      branches: How it was told that branches on values go; their conditions are the last of its user outputs.
      ones: Symbols of axes that the guards hold at 1, as the sample had them.
      functions: The autograd functions that stand in the graph as operators.
      autocast_regions: Whether the module turns autocast on or off inside of its forward.
      reads_any_attribute: Whether what it reaches may read attributes by names that no code mentions.
      others: Code of the user's that has run and to which the module does not lead, with its globals.
      classes: Those of the objects to which it leads, and their bases.
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
    num_made: int = 0
    needs_numbers: str = ""
    reached: Sequence[frozenset[str] | None] = ()
    views: ResultViews | None = None
    branches: tuple[Branch, ...] = ()
    ones: frozenset[sympy.Symbol] = frozenset()
    functions: FunctionCalls = dataclasses.field(default_factory=FunctionCalls)
    autocast_regions: bool = False
    fixed: str = ""
    reads_any_attribute: bool = False
    others: Mapping[types.CodeType, dict[str, Any]] = dataclasses.field(default_factory=dict)
    classes: frozenset[type] = frozenset()


def collects_layer_outputs() -> bool:
    """Tell whether a model of transformers around this call takes what layers inside of it give."""
    home = sys.modules.get(COLLECTOR_MODULE)
    collector = getattr(home, "_active_collector", None)
    return collector is not None and collector.get() is not None


def environment_key() -> Hashable:
    """Return what a captured graph depends on besides the call and the module."""
    any_autocast = torch._C._is_any_autocast_enabled()
    return (
        AutocastState.current() if any_autocast else _NO_AUTOCAST,
        # What a forward may ask, whether it is on or off.
        any_autocast,
        any_autocast and torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        recurrent_internals.has_onednn(),  # of which the dtypes of an LSTM under autocast depend
        internals.has_global_module_hooks(),
        collects_layer_outputs(),
        _HAS_COLLECTIVES and torch.distributed.is_initialized(),
        torch.get_deterministic_debug_mode(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.get_float32_matmul_precision(),
        _HAS_CUDA and devices.rounds_to_tf32(),
        _HAS_CUDA and devices.convolutions_round_to_tf32(),
    )

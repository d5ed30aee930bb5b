# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""More names of PyTorch that are not public: what tracing leaves behind, and what checkpoints call.

As in `torch_internals`, a release of PyTorch that moves one of these names is met here. Checked
against 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import itertools
import linecache
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._decomp import decompositions
from torch._subclasses import meta_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files
from torch.utils import _pytree as pytree
from torch.utils import checkpoint

from ortrain.capture.torch_internals import replaced

# Runs before and after the function of a checkpoint that is not reentrant.
CheckpointGenerator = Callable[..., Iterator[None]]


@contextlib.contextmanager
def no_traces_kept() -> Iterator[None]:
    """Drop what tracing would leave in tables of PyTorch for the rest of the process.

    Those are results on tensors without contents, found again by the sizes of one trace alone, and
    the text of generated functions.
    """
    results, sources = FakeTensorMode.cache, graph_module._loader.eval_cache
    held = len(results), len(sources)
    try:
        yield
    finally:
        # Tables keep the order in which they were filled; what other threads add meanwhile is
        # only made again.
        for key in list(itertools.islice(results, held[0], None)):
            results.pop(key, None)
        for name in list(itertools.islice(sources, held[1], None)):
            sources.pop(name, None)
            linecache.cache.pop(name, None)


@contextlib.contextmanager
def gradients_left_out() -> Iterator[None]:
    """Let stand-ins of leaves have no gradient, which no graph reads.

    A gradient is of another shape where somebody has put other memory behind a parameter since.
    """
    original, thread = meta_utils.safe_grad, threading.get_ident()

    def gradient_of(tensor: torch.Tensor) -> torch.Tensor | None:
        return None if threading.get_ident() == thread else original(tensor)

    with replaced([(meta_utils, "safe_grad", gradient_of)]):
        yield


class Tracked(NamedTuple):
    """Which tensors of a call wanted a gradient while it was traced, in the order of the leaves of arguments and results."""

    arguments: tuple[bool, ...]
    results: tuple[bool, ...]


_TRACKED = "ortrain_tracked"


def tracked_by(node: fx.Node) -> Tracked | None:
    """Return what wanted a gradient around a node; None of nodes that are no calls of operators in a trace."""
    return node.meta.get(_TRACKED)


def tracked_tensors_told() -> contextlib.AbstractContextManager[None]:
    """Let nodes of traces that run above autograd tell which of their tensors wanted a gradient."""
    original = proxy_tensor.proxy_call

    def call(mode: Any, operator: Any, is_above: bool, args: Any, kwargs: Any) -> Any:
        graph = mode.tracer.graph
        last = graph._root._prev
        arguments = _tracked((args, kwargs))
        result = original(mode, operator, is_above, args, kwargs)
        if is_above and result is not NotImplemented:
            node = last._next
            while node is not graph._root:
                if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
                    node.meta.setdefault(_TRACKED, Tracked(arguments, _tracked(result)))
                    break
                node = node._next
        return result

    return replaced([(proxy_tensor, "proxy_call", call)])


def _tracked(values: Any) -> tuple[bool, ...]:
    return tuple(
        leaf.requires_grad for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)
    )


class _DeepestForward:
    """Stands for `CapturedTraceback` where nodes are made: of a traceback they keep what forwards are at alone.

    All frames as text, most of them PyTorch's own, would take a twentieth of a capture.
    """

    @classmethod
    def extract(cls) -> _DeepestForward:
        return cls()

    def summary(self) -> traceback.StackSummary:
        """Return the deepest frame of a forward outside of what traces."""
        files = uninteresting_files()
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code.co_name == "forward" and code.co_filename not in files:
                found = traceback.FrameSummary(code.co_filename, frame.f_lineno, "forward")
                return traceback.StackSummary.from_list([found])
            frame = frame.f_back
        return traceback.StackSummary()


def deepest_lines_told() -> contextlib.AbstractContextManager[None]:
    """Let nodes of traces tell the deepest line of a forward that made them, and no more."""
    return replaced([(fx.proxy, "CapturedTraceback", _DeepestForward)])


class _Compiled:
    """An attribute that a graph module has once its graph is compiled, which asking for it does."""

    def __init__(self, name: str, compile_graph: Callable[[fx.GraphModule], object]) -> None:
        self._name, self._compile = name, compile_graph

    def __get__(self, module: fx.GraphModule | None, cls: type) -> Any:
        if module is None:
            return self
        self._compile(module)
        return getattr(module, self._name)


@contextlib.contextmanager
def graphs_compiled_when_called() -> Iterator[None]:
    """Let graph modules generate the code of their graphs when they are called, or somebody asks for it.

    An export changes its graph about fifteen times, and compiles it anew each time for nobody.
    """
    recompile = fx.GraphModule.recompile

    def postpone(module: fx.GraphModule) -> None:
        codegen = module.graph._codegen
        if hasattr(codegen, "pytree_info"):
            module._in_spec = codegen.pytree_info.in_spec
            module._out_spec = codegen.pytree_info.out_spec
        cls = type(module)  # of this module alone
        module.__dict__.pop("_code", None)
        cls._code, cls.forward = _Compiled("_code", recompile), _Compiled("forward", recompile)
        for part in module.children():
            if isinstance(part, fx.GraphModule):
                part.recompile()

    fx.GraphModule.recompile = postpone  # type: ignore[method-assign]
    try:
        yield
    finally:
        fx.GraphModule.recompile = recompile  # type: ignore[method-assign]


def bodies_of(program: torch.export.ExportedProgram) -> list[fx.GraphModule]:
    """Return the graph of a program and those of its regions."""
    return [part for part in program.graph_module.modules() if isinstance(part, fx.GraphModule)]


def nodes_of(program: torch.export.ExportedProgram) -> Iterator[fx.Node]:
    """Return the nodes of a program, those inside of its regions too."""
    return (node for body in bodies_of(program) for node in body.graph.nodes)


def let_go_of_samples(program: torch.export.ExportedProgram) -> None:
    """Let the tensors without contents go once nobody holds the program.

    They have symbolic sizes, which lead to a list of those that came first: a circle through C++
    that Python's collector does not see. Memoized results about sizes hold the rest.
    """
    for node in program.graph.nodes:
        mode = getattr(node.meta.get("val"), "fake_mode", None)
        if mode is not None and mode.shape_env is not None:
            (mode.shape_env.tracked_fakes or []).clear()
            mode.shape_env.fake_tensor_cache.clear()
            break
    for method in vars(ShapeEnv).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()


@contextlib.contextmanager
def linear_scales_as_computed() -> Iterator[None]:
    """Let the parts of linear upsampling leave an axis as it is where its size stays, whatever the scale.

    PyTorch's kernels do; its decomposition goes by the scale (1.1 of 4 elements are 4 others).
    """
    original = decompositions._upsample_linear

    def upsample(x: Any, sizes: Any, align_corners: bool, scales: Any) -> Any:
        kept = [
            1.0 if scale is not None and size == before else scale
            for scale, size, before in zip(scales, sizes, x.shape[2:], strict=True)
        ]
        return original(x, sizes, align_corners, kept)

    decompositions._upsample_linear = upsample
    try:
        yield
    finally:
        decompositions._upsample_linear = original


@contextlib.contextmanager
def checkpoints_by(
    make: Callable[[CheckpointGenerator], CheckpointGenerator],
) -> Iterator[None]:
    """Let checkpoints that are not reentrant run what ``make`` returns for PyTorch's generator."""
    original = checkpoint._checkpoint_without_reentrant_generator
    checkpoint._checkpoint_without_reentrant_generator = make(original)
    try:
        yield
    finally:
        checkpoint._checkpoint_without_reentrant_generator = original


def has_own_contexts(context_fn: Any) -> bool:
    """Tell whether a checkpoint was given contexts, as selective ones are."""
    return context_fn is not checkpoint.noop_context_fn

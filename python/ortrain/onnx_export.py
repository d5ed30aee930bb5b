# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Models as ONNX files that other programs read, by the engine's own capture."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from ortrain.capture.errors import CaptureError
from ortrain.capture.modes import modes_kept
from ortrain.capture.prepare import prepare
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.side_effects import has_hooks
from ortrain.capture.signature import CallSignature
from ortrain.capture.tracing import tracing_alone
from ortrain.errors import UnsupportedError

# The opset that the engine writes.
_OPSET = 23
# Weights beyond this go to a file of their own: a message of protobuf holds 2 GiB.
_MOST_INSIDE = 1 << 30
_LARGE_TENSOR = 1 << 10

Tensors = Mapping[str, torch.Tensor]
PostProcess = Callable[[Any], Any]


def export_module(
    module: nn.Module,
    path: str | Path,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    opset: int = _OPSET,
) -> PreparedGraph:
    """Write a module, as it computes in eval mode, as an ONNX model with its weights.

    Parameters and buffers are initializers under their names in the module; the file says which want gradients
    (``ortrain.trained`` among the graph's metadata). Sizes that the module leaves open are open in the model.

    Args:
      module: The module.
      path: The file.
      args: Positional arguments of a sample call.
      kwargs: Keyword arguments of it.
      opset: Opset of the standard operators.

    Returns:
      What was captured: which tensors of a call are inputs, for which sizes it holds, and how the
      outputs make up the module's result.

    Raises:
      CaptureError: The module cannot be captured whole, or has hooks of its own.
      UnsupportedError: An operator has no form in standard operators, or not in this opset.
      FileError: The file cannot be written.
    """
    kwargs = kwargs or {}
    if has_hooks(module, observers=False):
        raise CaptureError(
            "the module has hooks, which a file would lose", module=type(module).__name__
        )
    with modes_kept(module), torch.no_grad(), tracing_alone() as alone:
        if not alone:
            raise CaptureError("another thread captures for long")
        module.eval()
        call = CallSignature(module.forward).flatten(args, kwargs)
        prepared = prepare(module, call, args, kwargs, {})
    named = (*module.named_parameters(), *module.named_buffers())
    tensors = {name: t.detach() for name, t in named}
    wanting = {name for name, p in module.named_parameters() if p.requires_grad}
    graph = prepared.graph
    parameters = {i["target"]: i["name"] for i in graph.inputs if i["role"] == "parameter"}
    graph.set_requires_grad({n: target in wanting for target, n in parameters.items()})
    save_model(graph, tensors, Path(path), opset=opset)
    return prepared


def save_model(
    graph: Any,
    tensors: Tensors,
    path: Path,
    *,
    outputs: Sequence[str] | None = None,
    opset: int = _OPSET,
    post_process: PostProcess | None = None,
) -> None:
    """Write a graph in standard operators.

    Args:
      graph: The graph of a model in eval mode; not changed.
      tensors: Contents of its parameters and buffers by name.
      path: The file.
      outputs: Names of the outputs that are kept, in order; none for all.
      opset: Opset of the standard operators.
      post_process: Takes the onnx.ModelProto and returns the one that is written.
    """
    graph = graph.copy()
    graph.prepare_for_others(list(outputs or ()))
    if opset == _OPSET and post_process is None:
        save_graph(graph, tensors, path, lists_initializers=False)
        return
    with tempfile.TemporaryDirectory() as folder:
        save_graph(graph, tensors, Path(folder) / path.name, lists_initializers=False)
        model = onnx.load(Path(folder) / path.name)
    if opset != _OPSET:
        model = _converted(model, opset)
    if post_process is not None:
        model = post_process(model)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        onnx.save(model, aside)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def save_graph(
    graph: Any, tensors: Tensors, path: Path, *, lists_initializers: bool = True
) -> None:
    """Write a graph as it is, with the contents of its parameters, buffers and states."""
    targets = {i["target"] for i in graph.inputs if i["role"] in ("parameter", "buffer", "state")}
    values = {name: tensor for name, tensor in tensors.items() if name in targets}
    size = sum(math.prod(t.shape) * t.element_size() for t in values.values())
    threshold = _LARGE_TENSOR if size > _MOST_INSIDE else None
    graph.save(
        path,
        values=values,
        external_data_threshold=threshold,
        lists_initializers=lists_initializers,
    )


def _converted(model: Any, opset: int) -> Any:
    from onnx import version_converter

    try:
        return version_converter.convert_version(model, opset)
    except RuntimeError as error:
        raise UnsupportedError(
            f"the model has no form in opset {opset}: {error}; opset {_OPSET} holds it"
        ) from error

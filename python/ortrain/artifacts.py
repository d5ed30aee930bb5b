# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Files that train a model without its source: from Python (`ortrain.api`), C or C++."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ortrain import _core, optim
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.memory_budget import MemoryBudget
from ortrain.running_statistics import warn_of_kept_statistics


class LossType(enum.IntEnum):
    """Losses that ``generate_artifacts`` adds to a model."""

    MSELoss = 0
    CrossEntropyLoss = 1
    BCEWithLogitsLoss = 2
    L1Loss = 3


class OptimType(enum.IntEnum):
    """Optimizers that ``generate_artifacts`` writes."""

    AdamW = 0
    SGD = 1
    Lamb = 2
    Adagrad = 3


_LOSSES = {
    LossType.MSELoss: "mse",
    LossType.CrossEntropyLoss: "cross_entropy",
    LossType.BCEWithLogitsLoss: "bce_with_logits",
    LossType.L1Loss: "l1",
}


def _config_of(optimizer: Any) -> Any:
    if isinstance(getattr(optimizer, "config", None), optim.config._OptimizerConfig):
        return optimizer.config  # of `ortrain.onnxblock.optim`
    if isinstance(optimizer, optim.config._OptimizerConfig):
        return optimizer
    if optimizer == OptimType.SGD:
        return optim.SGDConfig()
    if optimizer == OptimType.Lamb:
        return optim.LambConfig(do_bias_correction=True, max_norm_clip=0.0)
    if optimizer == OptimType.Adagrad:
        return optim.AdagradConfig()
    if optimizer == OptimType.AdamW:
        mode = optim.AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
        return optim.AdamConfig(epsilon=1e-6, max_norm_clip=0.0, weight_decay_mode=mode)
    raise TypeError(f"optimizer is {optimizer!r}, expected an OptimType or a configuration")


def generate_artifacts(
    model: Any,
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: Any = None,
    optimizer: Any = OptimType.AdamW,
    artifact_directory: str | Path | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | Path | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    *,
    max_grad_norm: float | None = None,
) -> None:
    """Write training_model.onnx, eval_model.onnx, optimizer_model.onnx and a checkpoint.

    Args:
      model: An onnx.ModelProto, or the path of a model.
      requires_grad: Names of the initializers to train; None: those that the file says want gradients
        (`ortrain.onnx_export` writes so), else floats that look trained: of the model, not of the loss, and
        those in ``frozen_params`` aside.
      frozen_params: Names of initializers that are parameters and stay as they are.
      loss: A LossType, which adds an input ``target``; or an onnx.ModelProto with one output, whose
        inputs are outputs of the model, by name or by ``loss_input_names``, and targets; or a block of
        ``ortrain.onnxblock``, called with the outputs or ``loss_input_names``; None: the first output
        is the loss.
      optimizer: An OptimType (AdamW is Hugging Face's former one, with eps 1e-6 and no decay), or a
        configuration of ``ortrain.optim`` with numbers of one's own.
      artifact_directory: Where to; None: the current folder.
      prefix: Of the names of the files.
      ort_format: Not supported: there are ONNX files only.
      custom_op_library: A library of operators that the model has.
      additional_output_names: Values of the model that become outputs of the training model too.
      nominal_checkpoint: Not supported: checkpoints have contents.
      loss_input_names: The outputs that the loss takes, in the order of its inputs; None: the only
        one, or those of the same names.
      max_grad_norm: Norm that all gradients together are clipped to; 0 does not. None: that of the
        configuration, which an OptimType does not have.

    Raises:
      InvalidModelError: A name does not exist, or the loss does not fit.
      UnsupportedError: An argument asks for something that there is not.
      FileError: A file cannot be read or written.
    """
    if ort_format:
        raise UnsupportedError("ort_format=True: there are ONNX files only")
    if nominal_checkpoint:
        raise UnsupportedError("nominal_checkpoint=True: checkpoints have contents")
    if custom_op_library is not None:
        from ortrain.extension import load_library

        load_library(custom_op_library)
    frozen = list(frozen_params or [])
    if requires_grad is None:  # of the model alone: a loss has constants of its own
        values = _core.load_onnx_model(_source(model), initializers="weights")[1]
        missing = [name for name in frozen if name not in values]
        if missing:  # what is not trained anyway may be named
            floats = _core.load_onnx_model(_source(model), initializers="parameters")[1]
            missing = [name for name in missing if name not in floats]
        if missing:
            raise InvalidModelError(f"'{missing[0]}' in frozen_params is no parameter of the model")
        requires_grad = [name for name in values if name not in frozen]
        if not requires_grad:
            raise InvalidModelError("the model has no initializer that looks trained")
    if callable(loss) and hasattr(loss, "build"):
        model, loss = _with_block(model, loss, list(loss_input_names or [])), None
    if hasattr(loss, "SerializeToString"):
        model, loss = _joined(model, loss, list(loss_input_names or [])), None
    both = sorted(set(requires_grad) & set(frozen))
    if both:
        raise InvalidModelError(f"'{both[0]}' stands in requires_grad and in frozen_params")
    names = [*requires_grad, *frozen]
    if not names:
        raise InvalidModelError("requires_grad names no parameter")
    graph, values = _core.load_onnx_model(
        _source(model), initializers="parameters", parameter_names=names
    )
    warn_of_kept_statistics(graph)
    graph.set_requires_grad(dict.fromkeys(frozen, False))
    name = _add_loss(graph, loss, list(loss_input_names or []))
    for value in additional_output_names or ():
        graph.expose_value(value)
    config = _config_of(optimizer)
    options = config.engine_options()
    if max_grad_norm is None:
        max_grad_norm = getattr(optimizer, "max_norm", None)
    if max_grad_norm is not None:
        options["max_norm"] = float(max_grad_norm)
    options |= {"loss": name, "accumulation": 1, "scales_loss": False, "memory_limit": 0}
    options |= MemoryBudget().session_options
    folder = Path(artifact_directory) if artifact_directory is not None else Path()
    _core.write_artifacts(folder, graph, values, options, config.lr, prefix)


def _source(model: Any) -> Path | bytes:
    if isinstance(model, (str, Path)):
        return Path(model)
    serialized: bytes = model.SerializeToString()
    return serialized


def _with_block(model: Any, block: Any, inputs: list[str]) -> Any:
    """Return a model with a block as its loss, which is the first output."""
    import onnx

    from ortrain import onnxblock

    model = onnx.load(model) if isinstance(model, (str, Path)) else model
    outputs = [value.name for value in model.graph.output]
    with onnxblock.base(model) as accessor:
        name = block(*(inputs or outputs))
        if not isinstance(name, str):
            raise TypeError(f"the block of the loss gave {name!r}, expected the name of a value")
        loss = accessor.described(name)
        others = [v for v in accessor.graph.output if v.name != name]
        del accessor.graph.output[:]
        accessor.graph.output.extend([loss, *others])
        return accessor.model


def _joined(model: Any, loss: Any, inputs: list[str]) -> Any:
    """Return a model with a graph of one's own as its loss, which is the first output."""
    import onnx
    import onnx.compose

    model = onnx.load(model) if isinstance(model, (str, Path)) else model
    if len(loss.graph.output) != 1:
        raise InvalidModelError(f"the graph of the loss has {len(loss.graph.output)} outputs")
    outputs = [value.name for value in model.graph.output]
    taken = [value.name for value in loss.graph.input]
    names = inputs or [name for name in taken if name in outputs] or outputs[:1]
    for name in names:
        if name not in outputs:
            raise InvalidModelError(f"there is no output '{name}' for the loss")
    by_name = all(name in taken for name in names)
    pairs = [(n, n) for n in names] if by_name else list(zip(names, taken, strict=False))
    loss_name = loss.graph.output[0].name
    try:
        joined = onnx.compose.merge_models(model, loss, io_map=pairs, outputs=[loss_name, *outputs])
    except ValueError as error:
        raise InvalidModelError(f"the graph of the loss does not fit the model: {error}") from error
    first = [v for v in joined.graph.output if v.name == loss_name]
    others = [v for v in joined.graph.output if v.name != loss_name]
    del joined.graph.output[:]
    joined.graph.output.extend([*first, *others])
    return joined


def _add_loss(graph: Any, loss: LossType | None, inputs: list[str]) -> str:
    outputs = [o["name"] for o in graph.outputs if o["role"] == "user"]
    if loss is None:
        return outputs[0]
    if not isinstance(loss, LossType):
        raise TypeError(
            f"loss is {loss!r}, expected a LossType, an onnx.ModelProto, or None for a model that "
            "computes its loss"
        )
    if len(inputs) > 1:
        raise UnsupportedError("loss_input_names: a loss takes one output")
    graph.add_loss(_LOSSES[loss], inputs[0] if inputs else "", "target", "loss")
    return "loss"

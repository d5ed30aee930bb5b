# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The first form of ORTTrainer, for recipes that were written for it.

Optimizers are named (``"SGDOptimizer"``, ``"AdamOptimizer"``, ``"LambOptimizer"``), their numbers come
from a function of a parameter's name, and each step takes a learning rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ortrain import _core, optim
from ortrain.amp import DynamicLossScaler
from ortrain.amp import LossScaler as _LossScaler
from ortrain.amp.given_loss_scale import FollowedLossScaler, GivenLossScale, UpdatesLossScale
from ortrain.errors import UnsupportedError
from ortrain.trainer import ORTTrainer as _Trainer
from ortrain.trainer import ORTTrainerOptions, state_dicts
from ortrain.trainer.io_description import (
    IODescription,
    ModelDescription,
    described,
    generate_sample,
)

__all__ = [
    "IODescription",
    "LossScaler",
    "ModelDescription",
    "ORTTrainer",
    "generate_sample",
    "load_checkpoint",
    "save_checkpoint",
]

Attributes = Callable[[str], Mapping[str, Any]]

_CONFIGS = {
    "SGDOptimizer": optim.SGDConfig,
    "AdamOptimizer": optim.AdamConfig,
    "LambOptimizer": optim.LambConfig,
    "AdagradOptimizer": optim.AdagradConfig,
}
# Names of the operators' attributes, by those of the configurations.
_ATTRIBUTES = {"lambda": "lambda_coef"}


def _other_name(attribute: str) -> Any:
    return property(
        lambda self: getattr(self, attribute),
        lambda self, value: setattr(self, attribute, value),
        doc=f"``{attribute}``.",
    )


class LossScaler(DynamicLossScaler):
    """Scales the loss; the name is that of the input that once held the scale.

    What ``DynamicLossScaler`` names without, this one has with an underscore behind it too.

    Args:
      loss_scale_input_name: Kept, not used.
      is_dynamic_scale: Whether the scale follows overflows.
      loss_scale: The first one.
      up_scale_window: Steps without overflow after which it is doubled.
      min_loss_scale: Lower bound.
      max_loss_scale: Upper bound.
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(
            is_dynamic_scale, loss_scale, up_scale_window, min_loss_scale, max_loss_scale
        )
        self.loss_scale_input_name_ = loss_scale_input_name
        self.initial_loss_scale_ = loss_scale

    loss_scale_ = _other_name("loss_scale")
    stable_steps_ = _other_name("_stable_steps_count")
    is_dynamic_scale_ = _other_name("automatic_update")
    up_scale_window_ = _other_name("up_scale_window")
    min_loss_scale_ = _other_name("min_loss_scale")
    max_loss_scale_ = _other_name("max_loss_scale")

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Change the scale by whether the gradients of a step were finite."""
        if self.automatic_update:
            self._follow(bool(is_all_finite))

    def update(self, train_step_info: Any) -> float:
        """Return the scale of the next step, by ``update_loss_scale``, which a subclass may replace."""
        self.update_loss_scale(train_step_info.all_finite)
        return self.loss_scale


class ORTTrainer:
    """Trains a model with its loss and optimizer in one graph.

    Args:
      model: A module or an onnx.ModelProto.
      loss_fn: Called with the module's results and the last input; None where it computes the loss.
      model_desc: Inputs and outputs, the loss first.
      training_optimizer_name: ``"SGDOptimizer"``, ``"AdamOptimizer"``, ``"LambOptimizer"`` or
        ``"AdagradOptimizer"``; None trains nothing and allows ``eval_step`` alone.
      map_optimizer_attributes: Returns the numbers of the optimizer for the name of a parameter:
        alpha, beta, lambda, epsilon, ratio_min, ratio_max.
      learning_rate_description: Of the input that once took the rate; train_step may be given it as
        its last argument.
      device: "cpu", or "cuda:0" where this build has a provider for it.
      gradient_accumulation_steps: Batches whose gradients are averaged.
      world_rank: The number of this process.
      world_size: How many processes train together.
      use_mixed_precision: Compute in bfloat16. Without ``loss_scaler`` a step may be given the factor of the loss behind
        the rate, or under ``loss_scale_input_name``, and one that runs the optimizer returns one more tensor, bool of shape
        [1]: whether the gradients were finite. Where they were not, nothing has changed.
      allreduce_post_accumulation: Average gradients once per optimizer step, not once per batch.
      global_step: The step to count from.
      get_lr_this_step: Returns the rate of a step by its number, in place of an argument.
      loss_scaler: Scales the loss in mixed precision: a ``LossScaler``, or any object with ``loss_scale_`` and
        ``update_loss_scale(is_all_finite)``.
      deepspeed_zero_stage: 1 shares out the optimizer's states; 0 does not.
      enable_grad_norm_clip: Clip the norm of all gradients to 1, or the attribute max_norm_clip.
      frozen_weights: Names of parameters that stay.
      _opset_version: Of files.
      _enable_internal_postprocess: True.
      _extra_postprocess: Takes and returns the onnx.ModelProto that is written.
      _use_deterministic_compute: Steps are deterministic in any case.
      use_memory_efficient_gradient: Gradients are given up as soon as they are used in any case.
      run_symbolic_shape_infer: Shapes are inferred with symbols in any case.
      enable_adasum: Put gradients together by Adasum.
      optimized_model_filepath: Where to write the graph of the whole step.

    Raises:
      UnsupportedError: An argument asks for something that there is not, by its name.
    """

    # What a step may be given the factor of the loss under.
    loss_scale_input_name = "default_loss_scale_input_name"

    def __init__(
        self,
        model: Any,
        loss_fn: Any,
        model_desc: ModelDescription,
        training_optimizer_name: str | None,
        map_optimizer_attributes: Attributes | None,
        learning_rate_description: IODescription | None,
        device: torch.device | str = "cpu",
        gradient_accumulation_steps: int = 1,
        world_rank: int = 0,
        world_size: int = 1,
        use_mixed_precision: bool = False,
        allreduce_post_accumulation: bool = False,
        global_step: int = 0,
        get_lr_this_step: Callable[[int], float] | None = None,
        loss_scaler: _LossScaler | UpdatesLossScale | None = None,
        deepspeed_zero_stage: int = 0,
        enable_grad_norm_clip: bool = True,
        frozen_weights: Sequence[str] = (),
        _opset_version: int = 23,
        _enable_internal_postprocess: bool = True,
        _extra_postprocess: Callable[[Any], Any] | None = None,
        _use_deterministic_compute: bool = False,
        use_memory_efficient_gradient: bool = False,
        run_symbolic_shape_infer: bool = False,
        enable_adasum: bool = False,
        optimized_model_filepath: str = "",
    ) -> None:
        if training_optimizer_name is not None and training_optimizer_name not in _CONFIGS:
            raise UnsupportedError(
                f"training_optimizer_name is '{training_optimizer_name}'; there are "
                f"{', '.join(_CONFIGS)}"
            )
        self.model_desc_ = model_desc
        self._learns = training_optimizer_name is not None
        self._learning_rate_description = learning_rate_description
        self._get_lr = get_lr_this_step
        self.is_train = True
        self.loss_scaler_ = loss_scaler
        self._given_scale = (
            GivenLossScale() if use_mixed_precision and loss_scaler is None else None
        )
        scaler = self._given_scale if loss_scaler is None else _followed(loss_scaler)
        options = ORTTrainerOptions(
            {
                "batch": {"gradient_accumulation_steps": gradient_accumulation_steps},
                "device": {"id": str(device)},
                "distributed": {
                    "world_rank": world_rank,
                    "world_size": world_size,
                    "allreduce_post_accumulation": allreduce_post_accumulation,
                    "deepspeed_zero_optimization": {"stage": deepspeed_zero_stage},
                    "enable_adasum": enable_adasum,
                },
                "mixed_precision": {"enabled": use_mixed_precision, "loss_scaler": scaler},
                "utils": {
                    "frozen_weights": list(frozen_weights),
                    "grad_norm_clip": enable_grad_norm_clip,
                    "memory_efficient_gradient": use_memory_efficient_gradient,
                    "run_symbolic_shape_infer": run_symbolic_shape_infer,
                },
                "debug": {
                    "deterministic_compute": _use_deterministic_compute,
                    "graph_save_paths": {
                        "model_with_training_graph_after_optimization_path": (
                            optimized_model_filepath
                        )
                    },
                },
                "_internal_use": {
                    "enable_internal_postprocess": _enable_internal_postprocess,
                    "extra_postprocess": _extra_postprocess,
                    "onnx_opset_version": _opset_version,
                },
            }
        )
        config = _config_of(
            model, training_optimizer_name or "SGDOptimizer", map_optimizer_attributes
        )
        self.trainer = _Trainer(model, described(model_desc), config, loss_fn, options)
        self.trainer.train_step_info.optimization_step = global_step

    @property
    def global_step_(self) -> int:
        """Optimizer steps so far."""
        return self.trainer.train_step_info.optimization_step

    def train(self) -> None:
        """Let ``__call__`` train."""
        self.is_train = True

    def eval(self) -> None:
        """Let ``__call__`` evaluate."""
        self.is_train = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a step of training, or of evaluation after ``eval``."""
        return (self.train_step if self.is_train else self.eval_step)(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch.

        Args:
          *args: The inputs in order, or one list of them; then the learning rate, unless get_lr_this_step gives it; then the
            factor of the loss, where the trainer has no scaler in mixed precision.
          **kwargs: Inputs by name; ``fetches``; the rate under the name of its description, the factor under
            ``loss_scale_input_name``.

        Returns:
          The outputs as described, or those of ``fetches``; see ``use_mixed_precision`` for one more.
        """
        if not self._learns:
            raise UnsupportedError("train_step: training_optimizer_name is None")
        arguments = list(args[0] if len(args) == 1 and isinstance(args[0], list) else args)
        info, given = self.trainer.train_step_info, len(self.model_desc_.inputs_)
        given -= sum(each.name_ in kwargs for each in self.model_desc_.inputs_)
        self._take_loss_scale(arguments, kwargs, given)
        described = self._learning_rate_description
        if described is not None and described.name_ in kwargs:
            self.trainer.optim_config.lr = float(kwargs.pop(described.name_))
        elif len(arguments) == given + 1:
            self.trainer.optim_config.lr = float(arguments.pop())
        elif self._get_lr is not None:
            self.trainer.optim_config.lr = float(self._get_lr(self.global_step_))
        fetches = kwargs.get("fetches")
        results = self.trainer.train_step(*arguments, **kwargs)
        made = self.trainer.engine.state.kept_batches == 0
        if self._given_scale is None or fetches or not made:
            return results
        finite = torch.tensor([bool(info.all_finite)])
        return [*(results if isinstance(results, list) else [results]), finite]

    def _take_loss_scale(self, arguments: list[Any], kwargs: dict[str, Any], given: int) -> None:
        """Take the factor of the loss out of what a step is given."""
        scale = kwargs.pop(self.loss_scale_input_name, None)
        if self._given_scale is None:
            if scale is not None:
                raise TypeError(
                    f"'{self.loss_scale_input_name}' is given, and the trainer does not take it: "
                    "that needs use_mixed_precision and no loss_scaler"
                )
            return
        described = self._learning_rate_description
        named = described is not None and described.name_ in kwargs
        rate_comes_first = self._get_lr is None and not named
        if scale is None and len(arguments) == given + 1 + rate_comes_first:
            scale = arguments.pop()
        if scale is not None:
            self._given_scale.set(float(scale))
        elif self.trainer.engine.state.kept_batches == 0:  # of no step that has begun
            self._given_scale.set(1.0)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without training."""
        return self.trainer.eval_step(*args, **kwargs)

    def state_dict(self, include_optimizer_state: bool = True) -> dict[str, torch.Tensor]:
        """Return copies of parameters and buffers by name, and of the optimizer's states.

        Args:
          include_optimizer_state: With ``Moment_1_NAME``, ``Moment_2_NAME`` and ``Update_Count_NAME`` for each parameter
            (Adam), or with ``Step`` for all (other rules): the number of the step that comes next.
        """
        return state_dicts.flat_state_dict(self.trainer, optimizer=include_optimizer_state)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = False) -> None:
        """Take over parameters and buffers, and the optimizer's states where they are there.

        Args:
          state_dict: Tensors or NumPy arrays by the names that ``state_dict`` gives them.
          strict: All names of the model must be there, and no others.

        Raises:
          InvalidModelError: A name, a shape or a type does not fit; nothing has changed.
        """
        info = self.trainer.train_step_info
        counters = {"optimization_step": info.optimization_step, "step": info.step}
        whole = state_dicts.structured(self.trainer, state_dict)
        self.trainer.load_state_dict({**whole, "train_step_info": counters}, strict)

    def save_as_onnx(self, path: str | Path) -> None:
        """Write the model with its present weights as an ONNX file."""
        self.trainer.save_as_onnx(path)


def save_checkpoint(
    model: ORTTrainer, checkpoint_dir: str | Path, checkpoint_prefix: str = "ORT_checkpoint"
) -> None:
    """Write a checkpoint into the folder ``checkpoint_dir/checkpoint_prefix``."""
    model.trainer.save_checkpoint(Path(checkpoint_dir) / checkpoint_prefix)


def load_checkpoint(
    model: ORTTrainer,
    checkpoint_dir: str | Path,
    checkpoint_prefix: str = "ORT_checkpoint",
    strict: bool = False,
) -> None:
    """Go on from the newest complete checkpoint of ``checkpoint_dir/checkpoint_prefix``."""
    model.trainer.load_checkpoint(Path(checkpoint_dir) / checkpoint_prefix, strict=strict)


def _followed(scaler: _LossScaler | UpdatesLossScale) -> _LossScaler:
    if isinstance(scaler, _LossScaler):
        return scaler
    if isinstance(scaler, UpdatesLossScale):
        return FollowedLossScaler(scaler)
    raise TypeError(
        f"loss_scaler is a {type(scaler).__name__}, expected a LossScaler or an object with "
        "'loss_scale_' and 'update_loss_scale'"
    )


def _config_of(model: Any, name: str, attributes: Attributes | None) -> Any:
    """Return the configuration that gives each parameter the numbers that are asked for."""
    if isinstance(model, torch.nn.Module):
        names = [n for n, _ in model.named_parameters()]
    else:
        names = list(_core.load_onnx_model(model.SerializeToString(), initializers="weights")[1])
    groups: dict[tuple[tuple[str, Any], ...], list[str]] = {}
    for parameter in names if attributes is not None else ():
        given = attributes(parameter) or {}
        numbers = {_ATTRIBUTES.get(key, key): value for key, value in given.items()}
        groups.setdefault(tuple(sorted(numbers.items())), []).append(parameter)
    # Numbers that all share are the common ones; max_norm_clip can be nothing else.
    shared = [dict(key) for key in groups]
    common = {
        key: value
        for key, value in (shared[0].items() if shared else ())
        if all(key in other and other[key] == value for other in shared)
    }
    own = [
        {"params": members, **{k: v for k, v in key if k not in common}}
        for key, members in groups.items()
    ]
    config: Any = _CONFIGS[name]
    return config([group for group in own if len(group) > 1], **common)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer with the model on the engine: the loop, and all else, is transformers'."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import Trainer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ortrain.callbacks import StepMetricsCallback
from ortrain.errors import UnsupportedError
from ortrain.hf.module_with_loss import LossLayer, ModuleWithLoss
from ortrain.hf.training_args import ORTOptimizerNames, ORTTrainingArguments
from ortrain.logs import get_logger
from ortrain.module import ORTModule
from ortrain.onnx_export import export_module
from ortrain.onnx_module import OnnxModule, name_below_adapters
from ortrain.optim import FusedAdamW

_LEVELS = {"VERBOSE": logging.DEBUG, "FATAL": logging.CRITICAL}


def get_ort_optimizer_cls_and_kwargs(args: Any) -> tuple[type, dict[str, Any]]:
    """Return the optimizer's class and options for ``optim="adamw_ort_fused"``.

    Args:
      args: Training arguments.

    Raises:
      ValueError: ``args.optim`` is none of ``ORTOptimizerNames``.
    """
    if args.optim != ORTOptimizerNames.ADAMW_ORT_FUSED.value:
        raise ValueError(f"optim is {args.optim!r}, expected 'adamw_ort_fused'")
    options = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    return FusedAdamW, options


class ORTTrainer(Trainer):
    """Trainer whose model runs on the Ortrain engine, forward and backward.

    Arguments, methods, files and events are those of Trainer. ``trainer.model`` stays the model
    itself; ``trainer.model_wrapped`` is the ORTModule around it, or what distributed training has
    put around that. Targets of ``report_to`` also get what steps take (``StepMetricsCallback``).
    ``evaluate`` and ``predict`` take ``inference_with_ort=True``: the model is
    exported to ONNX and the file is what runs.

    Raises:
      UnsupportedError: FSDP is asked for, which takes parameters apart.
    """

    args: ORTTrainingArguments

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.args.report_to:
            StepMetricsCallback.install(self)

    def create_accelerator_and_postprocess(self) -> None:
        """As Trainer's; what the accelerator prepares is the model on the engine."""
        super().create_accelerator_and_postprocess()
        if self.is_fsdp_enabled:
            raise UnsupportedError(
                "FSDP keeps pieces of parameters, and graphs need them whole; use DeepSpeed ZeRO 1 or "
                "2, or DistributedDataParallel"
            )
        plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
        if plugin is not None and plugin.zero_stage == 3:
            raise UnsupportedError(
                "DeepSpeed ZeRO 3 keeps pieces of parameters, and graphs need them whole; use stage "
                "1 or 2"
            )
        if plugin is not None and getattr(self.args, "use_module_with_loss", False):
            raise UnsupportedError(
                "use_module_with_loss=True with DeepSpeed: its checkpoints would name parameters of "
                "the loss's module, not the model's"
            )
        prepare, prepare_model = self.accelerator.prepare, self.accelerator.prepare_model

        def prepare_on_engine(*objects: Any, **options: Any) -> Any:
            given = [self._on_engine(o) for o in objects]
            for module in given:
                if isinstance(module, ORTModule) and self._evaluates_only:
                    self._forget_preparation(module)
            return prepare(*given, **options)

        def prepare_model_on_engine(
            model: nn.Module, *args: Any, evaluation_mode: bool = False, **options: Any
        ) -> nn.Module:
            self._evaluates_only = evaluation_mode
            return prepare_model(
                self._on_engine(model), *args, evaluation_mode=evaluation_mode, **options
            )

        self._evaluates_only = False
        self.accelerator.prepare = prepare_on_engine
        self.accelerator.prepare_model = prepare_model_on_engine
        level = getattr(self.args, "onnx_log_level", "WARNING")
        if level != "WARNING":
            get_logger("ortrain").setLevel(_LEVELS.get(level, level))

    def _forget_preparation(self, module: ORTModule) -> None:
        """Let a module be prepared again: for evaluation it gets no DistributedDataParallel."""
        models = self.accelerator._models
        models[:] = [m for m in models if m is not module]
        module._is_accelerate_prepared = False
        module.__dict__.pop("_original_forward", None)
        if module._ortrain_forward is not None:
            del module.forward
        self._evaluates_only = False

    def _on_engine(self, prepared: Any) -> Any:
        """Return the model of the trainer as it runs on the engine; anything else as it is."""
        model = getattr(self, "model", None)
        if model is None or prepared is not model or isinstance(model, ORTModule):
            return prepared
        known = self.__dict__.get("_engine_module")
        if known is None or self._engine_model is not model:
            self._engine_model = model
            self._engine_module = known = ORTModule(
                self._with_loss(model), max_memory=getattr(self.args, "max_memory", None)
            )
        return known

    def _with_loss(self, model: nn.Module) -> nn.Module:
        """Return what the engine captures: the model, with a loss behind it where that is asked."""
        if not getattr(self.args, "use_module_with_loss", False):
            return model
        if self.compute_loss_func is not None:
            return ModuleWithLoss(model, LossLayer(self.compute_loss_func))
        if self.label_smoother is not None:
            shifts = name_below_adapters(model) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
            return ModuleWithLoss(model, LossLayer(self.label_smoother, {"shift_labels": shifts}))
        return model

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        state = self.__dict__
        ours = state.get("_engine_module")
        if not training and model is self.model:
            if (file := state.get("_onnx_module")) is not None:
                return file
            if ours is not None and self._engine_model is model and self.accelerator._models:
                return ours  # evaluates what trains, in the precision that it trains in
        if training and isinstance(model, ORTModule) and model is ours:
            model = self.model  # a second training; the accelerator finds the same ORTModule
        return super()._wrap_model(model, training=training, dataloader=dataloader)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As Trainer's; a loss behind the model comes from the graph where it is part of it."""
        inner = self.accelerator.unwrap_model(model)
        loss_in_graph = isinstance(inner, ModuleWithLoss) and inputs.get("labels") is not None
        if not loss_in_graph:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        loss, outputs = model(loss_labels=labels, loss_items=num_items_in_batch, **inputs)
        averages = self.args.average_tokens_across_devices and num_items_in_batch is not None
        if averages and (self.model_accepts_loss_kwargs or self.compute_loss_func):
            loss = loss * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return super()._clip_grad_norm(self._without_loss(model))

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return super()._get_grad_norm(self._without_loss(model), grad_norm)

    def _without_loss(self, model: nn.Module) -> nn.Module:
        """Return the model where parameters of a loss stand beside its own."""
        inner = self.accelerator.unwrap_model(model)
        return self.model if isinstance(inner, ModuleWithLoss) else model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; ``optim="adamw_ort_fused"`` gives FusedAdamW."""
        ours = self.args.optim == ORTOptimizerNames.ADAMW_ORT_FUSED.value
        if not ours or self.optimizer is not None or self.optimizer_cls_and_kwargs is not None:
            return super().create_optimizer(*args, **kwargs)
        self.optimizer_cls_and_kwargs = get_ort_optimizer_cls_and_kwargs(self.args)
        try:
            return super().create_optimizer(*args, **kwargs)
        finally:
            self.optimizer_cls_and_kwargs = None

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; with ``save_onnx`` the graphs that ran are written at the end."""
        result = super().train(*args, **kwargs)
        if getattr(self.args, "save_onnx", False) and self.args.should_save:
            self.save_onnx_graphs()
        return result

    def evaluate(self, *args: Any, inference_with_ort: bool = False, **kwargs: Any) -> Any:
        """As Trainer's.

        Args:
          *args: Trainer's.
          inference_with_ort: Export the model to ONNX, in float32, and evaluate the file.
          **kwargs: Trainer's.
        """
        with self._inference(inference_with_ort):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, inference_with_ort: bool = False, **kwargs: Any) -> Any:
        """As Trainer's.

        Args:
          *args: Trainer's.
          inference_with_ort: Export the model to ONNX, in float32, and predict with the file.
          **kwargs: Trainer's.
        """
        with self._inference(inference_with_ort):
            return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def _inference(self, exports: bool) -> Iterator[None]:
        if not exports:
            yield
            return
        self._onnx_module = OnnxModule(self.model, Path(self.args.output_dir) / "onnx")
        try:
            yield
        finally:
            self._onnx_module = None

    def export_onnx(self, path: str | Path, inputs: Mapping[str, Any] | None = None) -> None:
        """Write the model with its present weights as an ONNX file for inference.

        Args:
          path: The file.
          inputs: A sample batch; by default the first one of the evaluation dataset, or else of the
            training dataset, without its labels.

        Raises:
          CaptureError: The model cannot be captured whole.
          UnsupportedError: An operator has no form in standard operators.
        """
        if inputs is None:
            has_eval = self.eval_dataset is not None
            loader = self.get_eval_dataloader() if has_eval else self.get_train_dataloader()
            batch = self._prepare_inputs(next(iter(loader)))
            inputs = {k: v for k, v in batch.items() if k not in self.label_names}
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        export_module(self.model, path, (), dict(inputs))

    def save_onnx_graphs(self, folder: str | Path | None = None) -> list[Path]:
        """Write the graphs that ran so far, before and after autodiff and rewrites.

        Args:
          folder: Where to; ``output_dir`` by default.

        Returns:
          The files, ``<prefix>_<stage>_<training or inference>.onnx``, the first graph of each kind.
        """
        ours = self.__dict__.get("_engine_module")
        if ours is None:
            return []
        prefix = getattr(self.args, "onnx_prefix", None) or type(self.model).__name__
        return ours.save_graphs(Path(folder or self.args.output_dir), prefix)

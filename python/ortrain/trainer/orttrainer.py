# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer: model, loss and optimizer as one graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ortrain.amp import LossScaler, TorchGradScaler
from ortrain.distributed import Processes
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.logs import get_logger
from ortrain.memory_budget import MemoryBudget
from ortrain.onnx_export import save_graph, save_model
from ortrain.optim.config import _OptimizerConfig
from ortrain.report import ModuleReport
from ortrain.trainer import state_dicts
from ortrain.trainer.export_check import check_outputs
from ortrain.trainer.model_description import ModelDescription
from ortrain.trainer.options import ORTTrainerOptions, with_mixed_precision
from ortrain.trainer.parallel_step_engine import Parallelism, ParallelStepEngine
from ortrain.trainer.sources import LossFunction, ModuleSource, OnnxSource, StepSource, Tensors
from ortrain.trainer.step_engine import StepEngine
from ortrain.trainer.train_step_info import TrainStepInfo

_log = get_logger("ortrain.trainer")


def _scaler_of(given: LossScaler | torch.amp.GradScaler | None) -> LossScaler | None:
    return TorchGradScaler(given) if isinstance(given, torch.amp.GradScaler) else given


class ORTTrainer:
    """Trains a model with its loss and optimizer in one graph and one memory plan.

    A step runs the forward, the loss, the backward, accumulation, clipping, loss scaling and the
    optimizer without leaving the engine. Parameters of a module are trained where they are, so
    that the module can be used, saved and evaluated at any time.

    Args:
      model: A module, or an onnx.ModelProto that has the loss among its outputs. Arguments that a
        module's forward writes to stay as they are; its parameters become contiguous.
      model_desc: ``{"inputs": [(name, shape)], "outputs": [(name, shape[, is_loss])]}``; a shape
        holds numbers, and names for extents that change.
      optim_config: One of the configurations of ``ortrain.optim``.
      loss_fn: Called with the module's results and the last input; its value is the first output.
        None where the module computes the loss.
      options: What differs from the defaults.
      mixed_precision: "bf16", "fp16" or another name of a 16-bit type, which turns mixed precision
        on; "fp16" brings a ``GradScaler`` unless the options name a loss scaler. Or keys of the
        options' group of that name, as a dict, which turns it on unless ``enabled`` is False. What it
        leaves out comes from the options. "no" and None leave all to them.

    Raises:
      TypeError: An argument has another type.
      ValueError: The description has no loss, or a name in it is wrong; or the options contradict
        the process group or launcher, or ``mixed_precision``.
      UnsupportedError: An option asks for something that there is not.
      InvalidModelError: A parameter that is named does not exist.

    Example:
      >>> trainer = ORTTrainer(model, desc, optim.AdamConfig(lr=1e-4), loss_fn)
      >>> loss, predictions = trainer.train_step(data, target)
    """

    def __init__(
        self,
        model: Any,
        model_desc: Mapping[str, Any] | ModelDescription,
        optim_config: _OptimizerConfig,
        loss_fn: LossFunction | None = None,
        options: ORTTrainerOptions | None = None,
        *,
        mixed_precision: str | torch.dtype | Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(optim_config, _OptimizerConfig):
            raise TypeError("optim_config must be one of ortrain.optim's configurations")
        if options is not None and not isinstance(options, ORTTrainerOptions):
            raise TypeError("options must be an ORTTrainerOptions")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError("loss_fn must be callable")
        options = options if options is not None else ORTTrainerOptions()
        self.options = with_mixed_precision(options, mixed_precision)
        self.optim_config = optim_config
        self.loss_fn = loss_fn
        self.model_desc = (
            model_desc if isinstance(model_desc, ModelDescription) else ModelDescription(model_desc)
        )
        self._label = "" if loss_fn is None else self.model_desc.inputs[-1].name
        loss = self.model_desc.loss
        if loss is None:
            raise ValueError("model_desc marks no output as the loss")
        mixed = self.options.mixed_precision
        self._scaler = _scaler_of(mixed.loss_scaler) if mixed.enabled else None
        self._device = torch.device(self.options.device.id)
        if self._device.type == "cuda" and self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        self.model = model
        self._source = self._source_of(model)
        engine_options = optim_config.engine_options()
        if not self.options.utils.grad_norm_clip:
            engine_options["max_norm"] = 0.0
        engine_options |= {
            "loss": loss.name,
            "accumulation": self.options.batch.gradient_accumulation_steps,
            "scales_loss": self._scaler is not None and self._scaler.enabled,
            "memory_limit": self.options.device.mem_limit,
            **(self.options.budget or MemoryBudget()).session_options,
        }
        layers = self.options.graph_transformer
        if layers.transformer_layer_recompute:
            engine_options["recompute_layers"] = layers.number_recompute_layers
        self._world_rank = self.options.distributed.world_rank
        self.engine = self._make_engine(engine_options)
        self._info = TrainStepInfo(optim_config)
        self._info._follow(self.engine.state)
        self._sample: Tensors | None = None
        self._prepared = False
        self._has_types = False  # the entries of the description
        # By the schedule, of the optimizer step that has begun.
        self._step_rate: float | None = None

    def _source_of(self, model: Any) -> StepSource:
        precision = self.options.precision
        if isinstance(model, nn.Module):
            if self._device.type != "cpu":
                model.to(self._device)
            return ModuleSource(model, self.loss_fn, self.model_desc, precision)
        if hasattr(model, "SerializeToString") and hasattr(model, "graph"):
            if self.loss_fn is not None:
                raise ValueError("loss_fn is for modules; an ONNX model brings its loss")
            return OnnxSource(model, self.model_desc, precision, self._device)
        raise TypeError(
            f"model must be a torch.nn.Module or an onnx.ModelProto, got {type(model).__name__}"
        )

    def _make_engine(self, engine_options: dict[str, Any]) -> StepEngine:
        frozen, distributed = list(self.options.utils.frozen_weights), self.options.distributed
        if distributed.world_size == 1:
            if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                _log.warning(
                    "torch.distributed has %d processes, and this trainer trains alone: the option "
                    "'distributed.world_size' makes them train together",
                    dist.get_world_size(),
                )
            return StepEngine(self._source, engine_options, frozen, self._device)
        processes = Processes.start(
            distributed.given("world_rank"),
            distributed.world_size,
            distributed.given("local_rank"),
        )
        self._world_rank = processes.rank
        parallelism = Parallelism(
            reduces_once=distributed.allreduce_post_accumulation,
            shards_states=distributed.deepspeed_zero_optimization.stage == 1,
            adasum=distributed.enable_adasum,
        )
        scaler = self._scaler
        settings = {
            "the precision": repr(self.options.precision),
            "the loss scaler": None if scaler is None else (type(scaler).__name__, scaler._state()),
            "the learning rate": self.optim_config.lr,
            "the learning rate's schedule": type(self.options.lr_scheduler).__name__,
        }
        if self._device.type != "cpu":
            raise UnsupportedError(
                f"several processes train on the CPU, device is '{self._device}'; use "
                "DistributedDataParallel around ORTModule on GPUs"
            )
        return ParallelStepEngine(
            self._source, engine_options, frozen, processes, parallelism, settings
        )

    # --- steps

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Train on a batch, of several processes each on its own part of one.

        The optimizer runs in every ``gradient_accumulation_steps``-th call. A step whose gradients
        are not finite changes nothing where the loss is scaled.

        Args:
          *args: The inputs in the order of the description; one dict, list or tuple of them will do.
          **kwargs: Inputs by name; ``fetches``, a list of the names of the wanted outputs, by default what
            ``train_step_info.fetches`` has.

        Returns:
          The outputs in the order of the description, or of ``fetches``; one alone by itself.

        Raises:
          TypeError: An input is missing, unknown or no tensor.
          ShapeError: An input does not have the shape that is described.
          CaptureError: The model cannot be captured whole, and may not run in pieces (docs/trainer.md).
        """
        fetches = self._fetches(kwargs)
        inputs = self.model_desc.ordered(args, kwargs)
        extents = self.model_desc.check_inputs(inputs)
        info, state = self._info, self.engine.state
        if not self._prepared:
            self._prepare(inputs)
        starts = state.kept_batches == 0
        state.learning_rate = self._rate(starts)
        if self._scaler is not None and starts:
            self._scaler.before_step()
            state.loss_scale = self._scaler.loss_scale
        outcome = self.engine.train_step(inputs)
        info.step += 1
        if state.kept_batches == 0:  # the optimizer's turn
            info.all_finite = outcome.all_finite
            if self._scaler is not None and self._scaler.automatic_update:
                self._scaler.update(info)
        outputs = dict(zip(self.model_desc.output_names, outcome.outputs, strict=True))
        self._check_outputs(inputs, outputs, extents)
        return self._chosen(outputs, fetches)

    def eval_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model without training, as in eval mode.

        Arguments, result and errors are those of ``train_step``; where ``fetches`` leaves the loss out, what the loss
        function alone takes may be left out too.
        """
        fetches = self._fetches(kwargs)
        names = self.model_desc.output_names
        label = self._label if fetches and names[0] not in fetches else ""
        inputs = self.model_desc.ordered(args, kwargs, without=label)
        extents = self.model_desc.check_inputs(inputs)
        is_whole = label == "" or label in inputs
        given = self.engine.eval_step(inputs)
        outputs = dict(zip(names if is_whole else names[1:], given, strict=True))
        if self._sample is None and is_whole:
            self._sample = {name: tensor.detach() for name, tensor in inputs.items()}
        self._check_outputs(inputs, outputs, extents)
        return self._chosen(outputs, fetches)

    @property
    def train_step_info(self) -> TrainStepInfo:
        """The counters, and what became of the latest step."""
        return self._info

    # Programs of 2020 set its fetches.
    _train_step_info = train_step_info

    def report(self) -> ModuleReport:
        """Return what was captured, and what of the model runs in pieces or in PyTorch, and why."""
        return self.engine.report()

    def save_as_onnx(
        self, path: str | Path, *, training: bool = False, include_loss: bool = True
    ) -> None:
        """Write the model with its present weights as an ONNX file.

        Args:
          path: The file. Weights of more than 1 GiB go to a second one beside it.
          training: The whole step, optimizer included, with the optimizer's states, for this engine;
            otherwise the model in eval mode, in standard operators that any ONNX runtime has.
          include_loss: With the loss, and the inputs that only it needs, so that a trainer can be made of the
            file. A model that has no other output keeps it in any case.

        Raises:
          InvalidModelError: No step was made yet, so that shapes are not known.
          CaptureError: The model runs in pieces.
          UnsupportedError: An operator has no form in standard operators, or not in the opset that
            ``_internal_use.onnx_opset_version`` asks for.
          FileError: It cannot be written.
        """
        if self._sample is None:
            raise InvalidModelError("save_as_onnx needs a train_step or eval_step before it")
        self.engine.follow_module()
        if training:
            _, program = self.engine.training_program(self._sample)
            self.engine.make_states(program)
            states = {**self.engine.tensors, **self.engine.state.optimizer}
            save_graph(program.unfused_graph("whole", self.engine.state), states, Path(path))
            return
        names = self.model_desc.output_names
        kept = [n for n in names if n != self.model_desc.loss.name] if not include_loss else names
        post_process = self.options._internal_use.extra_postprocess
        save_model(
            self.engine.model_graph(self._sample),
            self.engine.tensors,
            Path(path),
            outputs=kept or names,
            opset=self.options._internal_use.onnx_opset_version,
            post_process=post_process,
        )

    @property
    def world_rank(self) -> int:
        """The number of this process among those that train together, from 0."""
        return self._world_rank

    @property
    def loss_scaler(self) -> LossScaler | None:
        """What scales the loss; None without mixed precision."""
        return self._scaler

    # --- the state

    def state_dict(self, pytorch_format: bool = False) -> dict[str, Any]:
        """Return copies of the state, whole; of several processes all call it.

        Args:
          pytorch_format: Parameters and buffers alone, named as in ``torch.nn.Module.state_dict``;
            otherwise also the optimizer's states and the counters, in a dict of dicts.
        """
        return (
            state_dicts.pytorch_state_dict(self) if pytorch_format else state_dicts.state_dict(self)
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Take over what ``state_dict`` returned, or the state_dict of a module.

        Args:
          state_dict: Either form.
          strict: Names must be those of the model.

        Raises:
          InvalidModelError: Names, shapes or states do not fit; nothing has changed.
        """
        state_dicts.load_state_dict(self, state_dict, strict=strict)

    def save_checkpoint(
        self,
        path: str | Path,
        user_dict: Mapping[str, Any] | None = None,
        include_optimizer_states: bool = True,
        *,
        keep: int = 2,
    ) -> Path:
        """Write a checkpoint into a folder, whole or not at all.

        Several processes all call it: the first one writes what is needed to go on in any number of
        processes, with the optimizer's states partitioned or not.

        Args:
          path: The folder; made where there is none. Checkpoints in it are numbered.
          user_dict: What the program keeps with it: what JSON holds.
          include_optimizer_states: With the states of the optimizer.
          keep: Checkpoints of the folder that stay, this one among them.

        Returns:
          The checkpoint's own folder.

        Raises:
          FileError: It cannot be written; the checkpoints that were there stay.
          TypeError: ``user_dict`` holds something that would not come back as it is.
        """
        return state_dicts.save_checkpoint(
            self, Path(path), user_dict or {}, optimizer=include_optimizer_states, keep=keep
        )

    def load_checkpoint(self, *paths: str | Path, strict: bool = True) -> dict[str, Any]:
        """Go on from the newest complete checkpoint of a folder, or from the one that it is.

        A damaged one is passed over with a warning. Training goes on as it would have, bit by bit.
        Several processes all call it, and must see the same folder.

        Args:
          *paths: The folder; also those that each process had given ``save_checkpoint``, of which one exists.
          strict: The tensors must be those of the model, the states those of the optimizer and of
            the loss scaler. Otherwise a scaler of another kind keeps its own state.

        Returns:
          The ``user_dict`` of the checkpoint.

        Raises:
          FileError: None is complete.
          UnsupportedError: Several of the folders exist.
          InvalidModelError: It does not fit the model, the optimizer or the kind of loss scaler; or
            it was written inside of an optimizer step that this trainer cannot finish, having
            another number of batches per step or no loss scaler. Nothing has changed.
        """
        folder = state_dicts.the_one_folder(paths)
        kept = state_dicts.load_checkpoint(self, folder, strict=strict)
        self._step_rate = None
        return kept

    def _check_outputs(self, inputs: Tensors, outputs: Tensors, extents: dict[str, int]) -> None:
        self.model_desc.check_outputs(inputs, outputs, extents)
        if not self._has_types and len(outputs) == len(self.model_desc.outputs):
            self._has_types = True
            self.model_desc.note_types(inputs, outputs)

    def _rate(self, starts: bool) -> float:
        """Return the learning rate of the optimizer step that a batch begins, or is part of."""
        scheduler = self.options.lr_scheduler
        if scheduler is None:
            return self.optim_config.lr
        if starts:
            self._step_rate = scheduler._step(self._info)[0]
        elif self._step_rate is None:  # a checkpoint was written within the step
            known = scheduler.get_last_lr() or scheduler._step(self._info)
            self._step_rate = float(known[0])
        return self._step_rate

    def _fetches(self, kwargs: dict[str, Any]) -> list[str]:
        fetches = kwargs.pop("fetches", None) or self._info.fetches
        names = self.model_desc.output_names
        for name in fetches:
            if name not in names:
                raise ValueError(f"'{name}' in fetches is no output: {', '.join(names)}")
        return list(fetches)

    def _chosen(self, outputs: Tensors, fetches: Sequence[str]) -> Any:
        chosen = [outputs[name] for name in fetches or outputs]
        return chosen[0] if len(chosen) == 1 else chosen

    def _prepare(self, inputs: Tensors) -> None:
        """Do what is to be done once a first batch shows the shapes."""
        if self.options.debug.check_model_export:
            self._check_export(inputs)
        self._save_graphs(inputs)
        self._sample = {name: tensor.detach() for name, tensor in inputs.items()}
        self._prepared = True

    def _check_export(self, inputs: Tensors) -> None:
        if not isinstance(self._source, ModuleSource):
            return
        theirs = self._source.run(inputs)
        ours = self.engine.eval_step(inputs)
        check_outputs(self.model_desc.output_names, ours, theirs, self.options.precision)

    def _save_graphs(self, inputs: Tensors) -> None:
        paths = self.options.debug.graph_save_paths
        wanted = any(value for key, value in vars(paths).items() if key != "_given")
        if not wanted or self._world_rank != 0:
            return
        source, program = self.engine.training_program(inputs)
        loss = self.model_desc.output_names.index(self.model_desc.loss.name)
        if paths.model_after_graph_transforms_path:
            source.graph.save(Path(paths.model_after_graph_transforms_path))
        if paths.model_with_gradient_graph_path:
            graph = source.graph.copy()
            graph.build_backward([loss])
            graph.save(Path(paths.model_with_gradient_graph_path))
        if paths.model_with_training_graph_path:
            program.unfused_graph("whole", self.engine.state).save(
                Path(paths.model_with_training_graph_path)
            )
        if paths.model_with_training_graph_after_optimization_path:
            path = Path(paths.model_with_training_graph_after_optimization_path)
            program.graph("whole").save(path)

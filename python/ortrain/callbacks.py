# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What steps take, in the logs of a transformers Trainer.

trainer = transformers.Trainer(model=ORTModule(model), args=args, ...)
StepMetricsCallback.install(trainer)
trainer.train()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ortrain.metrics import StepFigures, StepMetrics, modules_in

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ModuleNotFoundError(
        "ortrain.callbacks needs the Trainer of transformers: pip install transformers"
    ) from error

if TYPE_CHECKING:
    from transformers import Trainer

__all__ = ["StepMetricsCallback"]

# Of evaluation, prediction, and the summary at the end: no steps of training.
_OTHER_LOGS = ("eval_", "test_", "predict_", "train_")


class StepMetricsCallback(TrainerCallback):
    """Adds the scalars of ``StepMetrics`` to what a Trainer logs of its training.

    Every target of ``report_to`` gets them; ``state.log_history`` and with it trainer_state.json
    stay as they are. A scalar is the mean over the steps since the last log where it is a rate or a
    time, else its latest value. Steps are timed from their first batch to their optimizer's step:
    evaluation, saving and waiting for data are not part of them.

    It must stand in front of the callbacks that report, which share one dict of scalars:
    ``StepMetricsCallback.install(trainer)`` puts it there.

    Args:
      model: Where the ORTModule is; None looks at the Trainer's model when training begins.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._given = model
        self._trainer: Trainer | None = None
        self._metrics: StepMetrics | None = None
        self._hooks: list[Any] = []
        self._tokens = 0
        self._counted = False
        self._steps: list[StepFigures] = []
        self._step_tokens: list[int] = []

    @classmethod
    def install(cls, trainer: Trainer) -> StepMetricsCallback:
        """Put a callback in front of those of a Trainer; returns it, the one there is if any.

        Raises:
          TypeError: ``trainer`` is no transformers.Trainer.
        """
        handler = getattr(trainer, "callback_handler", None)
        if handler is None:
            raise TypeError(f"trainer must be a transformers.Trainer, got {type(trainer).__name__}")
        present = [known for known in handler.callbacks if isinstance(known, cls)]
        callback = present[0] if present else cls()
        callback._trainer = trainer
        others = [known for known in handler.callbacks if known is not callback]
        handler.callbacks[:] = [callback, *others]
        return callback

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the steps of an earlier training."""
        self._release()
        self._steps, self._step_tokens = [], []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a step."""
        if self._metrics is None:  # only now has the Trainer wrapped its model
            self._metrics = self._begin(kwargs.get("model"))
        self._tokens, self._counted = 0, False
        self._metrics.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the figures of a step."""
        if self._metrics is None:
            return
        tokens = self._tokens if self._counted else None
        self._steps.append(self._metrics.step(tokens))
        self._step_tokens.append(self._tokens)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Add the scalars of the steps since the last log."""
        if logs is None or not self._steps or any(name.startswith(_OTHER_LOGS) for name in logs):
            return
        seconds = sum(figures.step_time for figures in self._steps)
        scalars = self._steps[-1].scalars()
        scalars["ortrain/step_time"] = seconds / len(self._steps)
        if "ortrain/tokens_per_second" in scalars:
            scalars["ortrain/tokens_per_second"] = sum(self._step_tokens) / max(seconds, 1e-9)
        logs.update(scalars)
        self._steps, self._step_tokens = [], []

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the counter of tokens off the model."""
        self._release()

    def _begin(self, model: Any) -> StepMetrics:
        wrapped = getattr(self._trainer, "model_wrapped", None)
        chosen = self._given if self._given is not None else wrapped
        try:
            modules = modules_in(chosen if chosen is not None else model)
        except TypeError:
            if self._given is not None or model is None or model is chosen:
                raise
            chosen = model
            modules = modules_in(model)
        for module in modules:
            hook = module.register_forward_pre_hook(self._count_tokens, with_kwargs=True)
            self._hooks.append(hook)
        return StepMetrics(chosen if chosen is not None else model, show=False)

    def _count_tokens(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Count what a training call of an ORTModule is given, by the names of transformers."""
        if not (torch.is_grad_enabled() and module.training):
            return
        ids = kwargs.get(getattr(module, "main_input_name", "input_ids"))
        if not isinstance(ids, torch.Tensor):
            ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and not ids.is_floating_point():
            self._tokens += ids.numel()
            self._counted = True
            return
        embedded = kwargs.get("inputs_embeds")
        if isinstance(embedded, torch.Tensor) and embedded.dim() > 1:
            self._tokens += embedded.shape[0] * embedded.shape[1]
            self._counted = True

    _count_tokens.only_observes = True  # type: ignore[attr-defined]  # files may do without it

    def _release(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

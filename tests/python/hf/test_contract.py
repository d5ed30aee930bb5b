# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer against transformers' Trainer, scenario by scenario.

Each runs the same program with both and compares losses, norms, rates, events, files and weights.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from differential import EventRecorder, Outcome, Side, compare, on_engine, outcome, sides
from torch import nn
from trainer_models import (
    Stream,
    classification_data,
    classifier,
    language_data,
    language_model,
    padded,
    question_answering,
    regression,
    regression_data,
    seeded,
    span_data,
    summarizer,
    summary_data,
    token_classifier,
    token_data,
)
from transformers import AutoModelForSequenceClassification, EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SchedulerType

pytestmark = pytest.mark.slow

Scenario = Callable[[Side], Outcome]


def train(side: Side, model: Callable[[], nn.Module], data: Any, **options: Any) -> Outcome:
    """Train, and check that our side ran on the engine."""
    trainer = side.make(model(), data, **options)
    result = trainer.train()
    if side.ours:
        on_engine(trainer)
    return outcome(trainer, train_loss=result.training_loss, steps=result.global_step)


def check(folder: Path, scenario: Scenario, *, seq2seq: bool = False, **bounds: float) -> None:
    theirs, ours = sides(folder, seq2seq=seq2seq)
    compare(scenario(theirs), scenario(ours), **bounds)


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    return {"accuracy": float((logits.argmax(-1) == prediction.label_ids).mean())}


def test_plain(tmp_path: Path) -> None:
    check(tmp_path, lambda side: train(side, classifier, classification_data()))


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_results_of_a_module_of_no_library(tmp_path: Path, form: str) -> None:
    def scenario(side: Side) -> Outcome:
        data = regression_data()
        trainer = side.make(regression(form)(), data, eval_dataset=data[:10])
        trainer.train()
        if side.ours:
            on_engine(trainer)
        predicted = trainer.predict(data[:9])
        return outcome(trainer, predicted=predicted.predictions, labels=predicted.label_ids)

    check(tmp_path, scenario)


def test_loss_function_of_the_trainer(tmp_path: Path) -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        total = nn.functional.mse_loss(outputs, labels, reduction="sum")
        return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)

    check(
        tmp_path,
        lambda side: train(
            side, regression("predictions"), regression_data(), compute_loss_func=loss
        ),
    )


def test_two_label_names(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        # What shifts all places alike has no gradient but rounding, which Adam would blow up.
        options = {"eval_dataset": span_data(10), "adam_epsilon": 1e-4}
        trainer = side.make(question_answering(), span_data(), **options)
        trainer.train()
        metrics = trainer.evaluate()
        return outcome(trainer, names=trainer.label_names, loss=metrics["eval_loss"])

    check(tmp_path, scenario)


@pytest.mark.parametrize("model", [classifier, language_model])
def test_label_smoothing(tmp_path: Path, model: Callable[[], nn.Module]) -> None:
    data = classification_data() if model is classifier else language_data()
    check(tmp_path, lambda side: train(side, model, data, label_smoothing_factor=0.1))


def test_gradient_accumulation_with_items_in_batch(tmp_path: Path) -> None:
    check(
        tmp_path,
        lambda side: train(
            side, language_model, language_data(), gradient_accumulation_steps=4, max_steps=6
        ),
    )


@pytest.mark.parametrize("bound", [0.05, 0.0])
def test_max_grad_norm(tmp_path: Path, bound: float) -> None:
    check(
        tmp_path, lambda side: train(side, classifier, classification_data(), max_grad_norm=bound)
    )


def test_short_last_batch(tmp_path: Path) -> None:
    check(
        tmp_path,
        lambda side: train(
            side, classifier, classification_data(13), num_train_epochs=3, max_steps=-1
        ),
    )


def test_variable_length(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        data = classification_data(48, shortest=3, longest=40)
        trainer = side.make(classifier(), data, train_sampling_strategy="group_by_length")
        trainer.train()
        if side.ours:  # one graph for all lengths
            assert len(on_engine(trainer).report().captures) == 1
        return outcome(trainer)

    check(tmp_path, scenario)


def test_iterable_dataset(tmp_path: Path) -> None:
    check(tmp_path, lambda side: train(side, classifier, Stream(classification_data())))


@pytest.mark.parametrize("when", ["steps", "epoch"])
def test_evaluation_while_training(tmp_path: Path, when: str) -> None:
    check(
        tmp_path,
        lambda side: train(
            side,
            classifier,
            classification_data(16),
            eval_dataset={"first": classification_data(9), "second": classification_data(5)},
            eval_strategy=when,
            eval_steps=3,
            compute_metrics=accuracy,
            max_steps=8,
        ),
    )


class _BatchAccuracy:
    def __init__(self) -> None:
        self.hits: list[bool] = []

    def __call__(self, prediction: Any, compute_result: bool = False) -> dict[str, float]:
        self.hits += (prediction.predictions.argmax(-1) == prediction.label_ids).tolist()
        if not compute_result:
            return {}
        share = float(np.mean(self.hits))
        self.hits = []
        return {"accuracy": share}


def test_metrics_by_batch(tmp_path: Path) -> None:
    check(
        tmp_path,
        lambda side: train(
            side,
            classifier,
            classification_data(),
            eval_dataset=classification_data(21),
            eval_strategy="steps",
            eval_steps=6,
            batch_eval_metrics=True,
            compute_metrics=_BatchAccuracy(),
        ),
    )


def test_predict_two_outputs(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        model = classifier()
        model.config.output_hidden_states = True
        trainer = side.make(model, classification_data(), max_steps=4)
        trainer.train()
        # rows of one length: hidden states of other lengths cannot be joined
        rows = classification_data(10, shortest=9, longest=9)
        predicted = trainer.predict(rows)
        return outcome(trainer, predictions=predicted.predictions, labels=predicted.label_ids)

    check(tmp_path, scenario)


def test_early_stopping(tmp_path: Path) -> None:
    check(
        tmp_path,
        lambda side: train(
            side,
            classifier,
            classification_data(),
            eval_dataset=classification_data(10, seed=9),
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            max_steps=30,
            load_best_model_at_end=True,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # it falls, so that the first one stays the best
            callbacks=[EarlyStoppingCallback(early_stopping_patience=2)],
        ),
    )


def test_best_model_is_loaded(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        result = train(
            side,
            classifier,
            classification_data(),
            eval_dataset=classification_data(10, seed=9),
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            learning_rate=2e-2,
            load_best_model_at_end=True,
        )
        assert result.state["best_global_step"] is not None
        return result

    check(tmp_path, scenario, atol=1e-4)


def test_save_total_limit(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        options = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
        result = train(side, classifier, classification_data(), **options)
        folders = {Path(f).parts[0] for f in result.files}
        assert folders == {"checkpoint-10", "checkpoint-12"}
        assert {Path(f).name for f in result.files} >= {
            "model.safetensors",
            "optimizer.pt",
            "rng_state.pth",
            "scheduler.pt",
            "trainer_state.json",
            "training_args.bin",
        }
        return result

    check(tmp_path, scenario)


@pytest.mark.parametrize(("step", "batch"), [(5, 4), (15, 4), (5, 6)])
def test_resume(tmp_path: Path, step: int, batch: int) -> None:
    options = {"save_strategy": "steps", "save_steps": 5, "max_steps": 20}

    def scenario(side: Side) -> Outcome:
        whole = train(side, classifier, classification_data(24), **options)
        trainer = side.make(
            classifier(),
            classification_data(24),
            **options,
            name="resumed",
            per_device_train_batch_size=batch,
        )
        trainer.train(resume_from_checkpoint=str(side.folder / "run" / f"checkpoint-{step}"))
        again = outcome(trainer)
        if batch == 4:
            for name, tensor in whole.weights.items():
                torch.testing.assert_close(again.weights[name], tensor, rtol=1e-5, atol=1e-6)
        return again

    check(tmp_path, scenario)


def test_events(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        recorder = EventRecorder()
        trainer = side.make(
            classifier(),
            classification_data(12),
            eval_dataset=classification_data(5),
            eval_strategy="epoch",
            save_strategy="epoch",
            max_steps=-1,
            num_train_epochs=2,
            gradient_accumulation_steps=2,
            callbacks=[recorder],
        )
        trainer.train()
        trainer.predict(classification_data(5))
        assert len(recorder.events) > 20
        return outcome(trainer, events=recorder.events)

    check(tmp_path, scenario)


class _StopAt(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            control.should_training_stop = control.should_save = True
            control.should_evaluate = True


def test_callback_stops_the_training(tmp_path: Path) -> None:
    check(
        tmp_path,
        lambda side: train(
            side,
            classifier,
            classification_data(),
            eval_dataset=classification_data(5),
            callbacks=[_StopAt()],
        ),
    )


class _Counter(TrainerCallback, ExportableState):
    def __init__(self, begin: int = 0) -> None:
        self.count = begin

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.count += 1

    def state(self) -> dict[str, Any]:
        return {"args": {"begin": 100}, "attributes": {"count": self.count}}


def test_callback_with_state(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
        train(side, classifier, classification_data(), callbacks=[_Counter()], **options)
        counter = _Counter()
        trainer = side.make(
            classifier(),
            classification_data(),
            callbacks=[counter],
            name="resumed",
            restore_callback_states_from_checkpoint=True,
            **options,
        )
        trainer.train(resume_from_checkpoint=str(side.folder / "run" / "checkpoint-4"))
        counters = [c for c in trainer.callback_handler.callbacks if isinstance(c, _Counter)]
        return outcome(trainer, counts=[c.count for c in counters])

    check(tmp_path, scenario)


def test_optimizers_given(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return train(side, lambda: model, classification_data(), optimizers=(optimizer, scheduler))

    check(tmp_path, scenario)


_SCHEDULER_OPTIONS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


@pytest.mark.parametrize("name", [s.value for s in SchedulerType])
def test_schedulers(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"lr_scheduler_kwargs": _SCHEDULER_OPTIONS.get(name, {})}
    if name in ("reduce_lr_on_plateau", "greedy"):
        options |= {"eval_strategy": "steps", "eval_steps": 3}
        options["eval_dataset"] = regression_data(8)
    check(
        tmp_path,
        lambda side: train(
            side,
            regression("dict"),
            regression_data(),
            lr_scheduler_type=name,
            warmup_steps=2,
            **options,
        ),
    )


def test_frozen_parameters(tmp_path: Path) -> None:
    def frozen() -> nn.Module:
        model = classifier()
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
        return model

    check(tmp_path, lambda side: train(side, frozen, classification_data()))


def test_lora(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def adapted() -> nn.Module:
        config = LoraConfig(
            task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn"]
        )
        model = language_model()
        return seeded(lambda: get_peft_model(model, config))

    def scenario(side: Side) -> Outcome:
        trainer = side.make(
            adapted(),
            language_data(),
            save_strategy="steps",
            save_steps=6,
            eval_dataset=language_data(6),
            eval_strategy="steps",
            eval_steps=6,
            load_best_model_at_end=True,
        )
        trainer.train()
        if side.ours:
            on_engine(trainer)
        return outcome(trainer)

    check(tmp_path, scenario)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    def scenario(side: Side) -> Outcome:
        trainer = side.make(
            classifier(),
            classification_data(),
            gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": reentrant},
        )
        trainer.train()
        return outcome(trainer)

    check(tmp_path, scenario)


def test_bf16_autocast(tmp_path: Path) -> None:
    # Each side rounds where it sums: single results differ in their last of 8 bits.
    check(
        tmp_path,
        lambda side: train(
            side,
            classifier,
            classification_data(),
            eval_dataset=classification_data(10),
            eval_strategy="steps",
            eval_steps=4,
            bf16=True,
            max_steps=8,
        ),
        rtol=2e-2,
        atol=5e-3,
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("bf16", [False, True])
def test_seq2seq_generates(tmp_path: Path, bf16: bool) -> None:
    def scenario(side: Side) -> Outcome:
        trainer = side.make(
            summarizer(),
            summary_data(),
            eval_dataset=summary_data(9),
            predict_with_generate=True,
            generation_max_length=9,
            generation_num_beams=2,
            learning_rate=5e-3,
            bf16=bf16,
        )
        trainer.train()
        metrics = trainer.evaluate()
        predicted = trainer.predict(summary_data(7))
        tokens = predicted.predictions.tolist() if not bf16 else predicted.predictions.shape
        return outcome(trainer, tokens=tokens, loss=metrics["eval_loss"])

    bounds = {"rtol": 3e-2, "atol": 2e-2} if bf16 else {}
    check(tmp_path, scenario, seq2seq=True, **bounds)


class _OutOfMemory:
    """A collator that fails as an allocator does where a batch is larger than 4."""

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        if len(rows) > 4:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return padded(rows)


def test_auto_find_batch_size(tmp_path: Path) -> None:
    check(
        tmp_path,
        lambda side: train(
            side,
            classifier,
            classification_data(),
            per_device_train_batch_size=16,
            auto_find_batch_size=True,
            data_collator=_OutOfMemory(),
        ),
    )


class _Terminate(TrainerCallback):
    """Sends SIGTERM to its process, and waits until the trainer has noticed it."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)


def test_checkpoint_on_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import trainer_jit_checkpoint

    before = trainer_jit_checkpoint.CheckpointManager.__init__
    monkeypatch.setattr(
        trainer_jit_checkpoint.CheckpointManager,
        "__init__",
        lambda self, trainer, kill_wait=0: before(self, trainer, 0),
    )

    def scenario(side: Side) -> Outcome:
        result = train(
            side,
            classifier,
            classification_data(),
            enable_jit_checkpoint=True,
            callbacks=[_Terminate()],
        )
        assert any(f.endswith("model.safetensors") for f in result.files)
        return result

    check(tmp_path, scenario)


def test_saved_model_is_read_by_from_pretrained(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        trainer = side.make(classifier(), classification_data())
        trainer.train()
        trainer.save_model()
        loaded = AutoModelForSequenceClassification.from_pretrained(trainer.args.output_dir)
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                loaded.state_dict().values(), trainer.model.state_dict().values(), strict=True
            )
        )
        return outcome(trainer, kind=type(loaded).__name__, config=loaded.config.to_dict())

    theirs, ours = (scenario(side) for side in sides(tmp_path))
    for side in (theirs, ours):
        side.values["config"].pop("_name_or_path", None)
    compare(theirs, ours)


def test_token_classification(tmp_path: Path) -> None:
    check(tmp_path, lambda side: train(side, token_classifier, token_data()))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import transformers
from transformers import TrainerCallback

from ortrain import ORTModule
from ortrain.callbacks import StepMetricsCallback

LENGTH, BATCH = 16, 2
NAMES = {
    "ortrain/step_time",
    "ortrain/tokens_per_second",
    "ortrain/peak_memory_mib",
    "ortrain/captures",
    "ortrain/escapes",
}


class Target(TrainerCallback):
    """Stands for one of report_to."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def language_model():
    config = transformers.GPT2Config(
        n_layer=1,
        n_embd=32,
        n_head=2,
        vocab_size=64,
        n_positions=32,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def trainer_of(model, tmp_path, **options):
    rows = torch.randint(0, 64, (12, LENGTH), generator=torch.Generator().manual_seed(0))
    data = [{"input_ids": row, "labels": row} for row in rows]
    args = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        **{"max_steps": 4, "logging_steps": 2, "report_to": [], **options},
    )
    target = Target()
    made = transformers.Trainer(
        model=model, args=args, train_dataset=data, eval_dataset=data, callbacks=[target]
    )
    return made, target


def test_logs_get_the_scalars_and_the_history_does_not(tmp_path):
    model = ORTModule(language_model())
    trainer, target = trainer_of(model, tmp_path, eval_strategy="steps", eval_steps=3)
    StepMetricsCallback.install(trainer)
    trainer.train()
    training = [log for log in target.logs if "loss" in log]
    assert len(training) == 2
    for log in training:
        assert set(log) >= NAMES
        assert log["ortrain/step_time"] > 0 and log["ortrain/peak_memory_mib"] > 50
        rate = BATCH * LENGTH / log["ortrain/step_time"]
        assert log["ortrain/tokens_per_second"] == pytest.approx(rate)
    # The second one comes after an evaluation, which has a graph of its own.
    assert [log["ortrain/captures"] for log in training] == [1, 2]
    others = [log for log in target.logs if "loss" not in log]
    assert others and not any(name.startswith("ortrain/") for log in others for name in log)
    assert len(trainer.state.log_history) == len(target.logs)
    for entry in trainer.state.log_history:
        assert not any(name.startswith("ortrain/") for name in entry)


def test_tensorboard_gets_them_from_the_trainer(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "runs"))
    trainer, _ = trainer_of(ORTModule(language_model()), tmp_path, report_to=["tensorboard"])
    StepMetricsCallback.install(trainer)
    trainer.train()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    assert {f"train/{name}" for name in NAMES} <= set(events.Tags()["scalars"])


def test_accumulated_batches_are_one_step(tmp_path):
    options = {"gradient_accumulation_steps": 3, "max_steps": 2, "logging_steps": 1}
    trainer, target = trainer_of(ORTModule(language_model()), tmp_path, **options)
    StepMetricsCallback.install(trainer)
    trainer.train()
    log = next(log for log in target.logs if "loss" in log)
    rate = 3 * BATCH * LENGTH / log["ortrain/step_time"]
    assert log["ortrain/tokens_per_second"] == pytest.approx(rate)


def test_training_twice_leaves_no_hooks(tmp_path):
    model = ORTModule(language_model())
    trainer, target = trainer_of(model, tmp_path)
    callback = StepMetricsCallback.install(trainer)
    assert StepMetricsCallback.install(trainer) is callback
    assert trainer.callback_handler.callbacks[0] is callback
    assert sum(c is callback for c in trainer.callback_handler.callbacks) == 1
    for _ in range(2):
        trainer.train()
        assert len(model._forward_pre_hooks) == 0
    rates = [log["ortrain/tokens_per_second"] for log in target.logs if "loss" in log]
    assert len(rates) == 4


def test_losses_are_those_without_it(tmp_path):
    losses = []
    for install in (False, True):
        torch.manual_seed(0)
        trainer, target = trainer_of(ORTModule(language_model().eval()), tmp_path)
        if install:
            StepMetricsCallback.install(trainer)
        trainer.train()
        losses.append([log["loss"] for log in target.logs if "loss" in log])
    assert losses[0] == losses[1]


def test_refusals(tmp_path):
    with pytest.raises(TypeError, match="trainer must be a transformers.Trainer, got str"):
        StepMetricsCallback.install("trainer")
    trainer, _ = trainer_of(language_model(), tmp_path)
    StepMetricsCallback.install(trainer)
    with pytest.raises(TypeError, match="there is no ORTModule in this GPT2LMHeadModel"):
        trainer.train()

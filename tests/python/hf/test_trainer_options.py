# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What ORTTrainer has beside Trainer: its options, ONNX files, what it refuses."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from differential import Outcome, Side, compare, on_engine, outcome, sides
from torch import nn
from trainer_models import (
    classification_data,
    classifier,
    language_data,
    language_model,
    padded,
    regression,
    regression_data,
    seeded,
    summarizer,
    summary_data,
    token_classifier,
    token_data,
)
from transformers import TrainerCallback, TrainingArguments

from ortrain import CaptureError, ORTModule
from ortrain.hf import (
    LossLayer,
    ModuleWithLoss,
    ORTOptimizerNames,
    ORTTrainer,
    ORTTrainingArguments,
    get_ort_optimizer_cls_and_kwargs,
)
from ortrain.optim import FusedAdamW

_TASKS: dict[str, tuple[Callable[[], nn.Module], Callable[..., list[Any]], bool]] = {
    "sequence classification": (classifier, classification_data, False),
    "token classification": (token_classifier, token_data, False),
    "language modelling": (language_model, language_data, False),
    "summarization": (summarizer, summary_data, True),
}
_FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "bfloat16": {"bf16": True},
}


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", _FORMS)
@pytest.mark.parametrize("task", _TASKS)
def test_tasks(tmp_path: Path, task: str, form: str) -> None:
    """Trains with the fused optimizer, saves, evaluates and predicts as Trainer does."""
    model, data, seq2seq = _TASKS[task]

    def scenario(side: Side) -> Outcome:
        options = dict(_FORMS[form])
        if side.ours:
            options |= {"optim": "adamw_ort_fused", "use_module_with_loss": True}
        trainer = side.make(
            model(), data(), eval_dataset=data(9), save_strategy="steps", save_steps=6, **options
        )
        trainer.train()
        if side.ours:
            on_engine(trainer)
        metrics = trainer.evaluate()
        predicted = trainer.predict(data(5))
        predictions = predicted.predictions
        first = predictions[0] if isinstance(predictions, tuple) else predictions
        return outcome(trainer, loss=metrics["eval_loss"], first=first)

    theirs, ours = (scenario(side) for side in sides(tmp_path, seq2seq=seq2seq))
    if form == "bfloat16":
        compare(theirs, ours, rtol=3e-2, atol=2e-2)
    else:
        compare(theirs, ours, rtol=2e-5, atol=2e-5)


def test_fused_optimizer_stands_in_groups_as_trainers_does(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(
        classifier(),
        classification_data(),
        optim=ORTOptimizerNames.ADAMW_ORT_FUSED,
        weight_decay=0.3,
        adam_beta1=0.8,
    )
    optimizer = trainer.create_optimizer()
    assert isinstance(optimizer, FusedAdamW)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.3, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.999)
    assert trainer.args.optim == "adamw_ort_fused"
    assert "adamw_ort_fused" in trainer.args.to_json_string()


def test_fused_optimizer_class() -> None:
    args = ORTTrainingArguments(output_dir="x", optim="adamw_ort_fused", learning_rate=0.5)
    kind, options = get_ort_optimizer_cls_and_kwargs(args)
    assert kind is FusedAdamW
    assert options["lr"] == 0.5
    with pytest.raises(ValueError, match="adamw_ort_fused"):
        get_ort_optimizer_cls_and_kwargs(TrainingArguments(output_dir="x"))


def test_checkpoints_of_the_fused_optimizer_resume(tmp_path: Path) -> None:
    side = sides(tmp_path)[1]
    options = {"save_strategy": "steps", "save_steps": 4, "optim": "adamw_ort_fused"}
    whole = side.make(regression("dict")(), regression_data(), **options)
    whole.train()
    again = side.make(regression("dict")(), regression_data(), name="again", **options)
    again.train(resume_from_checkpoint=str(side.folder / "run" / "checkpoint-8"))
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, again.model.state_dict()[name]), name


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="adam_of_mine"):
        ORTTrainingArguments(output_dir="x", optim="adam_of_mine")
    with pytest.raises(ValueError, match="onnx_log_level is 'LOUD'"):
        ORTTrainingArguments(output_dir="x", onnx_log_level="LOUD")
    with pytest.raises(ValueError, match="torch_compile"):
        ORTTrainingArguments(output_dir="x", torch_compile=True)
    with pytest.raises(ValueError, match="max_memory is '2 apples'"):
        ORTTrainingArguments(output_dir="x", max_memory="2 apples")


def test_a_budget_of_memory_reaches_the_module(tmp_path: Path) -> None:
    model = regression("dict")()
    trainer = sides(tmp_path)[1].make(
        model, regression_data(), max_steps=2, max_memory="1073741824"
    )
    trainer.train()
    plan = trainer.model_wrapped.memory_plan()
    assert plan.recomputation.budget_bytes == 1 << 30


def test_model_of_the_trainer_stays_the_users(tmp_path: Path) -> None:
    model = regression("dict")()
    trainer = sides(tmp_path)[1].make(model, regression_data(), max_steps=2)
    trainer.train()
    assert trainer.model is model
    assert isinstance(trainer.model_wrapped, ORTModule)
    assert trainer.model_wrapped.module is model


def test_second_training_keeps_the_graphs(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(regression("dict")(), regression_data(), max_steps=2)
    trainer.train()
    first = on_engine(trainer)
    trainer.train()
    assert on_engine(trainer) is first
    assert len(first.report().captures) == 1


def test_evaluation_before_training_runs_on_the_engine(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(
        regression("dict")(), regression_data(), eval_dataset=regression_data(16), max_steps=2
    )
    trainer.evaluate()
    assert len(on_engine(trainer).report().captures) == 1
    trainer.train()
    trainer.evaluate()
    assert len(on_engine(trainer).report().captures) == 2


def test_two_trainers_of_one_model_under_bf16(tmp_path: Path) -> None:
    """The second one must not take the first one's preparation for its own."""
    model, rows = regression("dict")(), regression_data()
    side = sides(tmp_path)[1]
    for name in ("first", "second"):
        trainer = side.make(model, rows, bf16=True, max_steps=2, name=name)
        trainer.train()
        graph = next(iter(on_engine(trainer)._ortrain_engine.graphs()))
        casts = [n for n in graph.captured.graph.nodes() if n["op"] == "Cast"]
        assert casts, name


def test_loss_behind_the_model_is_part_of_the_graph(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(
        classifier(),
        classification_data(),
        label_smoothing_factor=0.2,
        use_module_with_loss=True,
        max_steps=2,
    )
    trainer.train()
    module = on_engine(trainer)
    assert isinstance(module.module, ModuleWithLoss)
    entry = next(iter(module._ortrain_engine.graphs()))
    assert any("oft" in n["op"] for n in entry.captured.graph.nodes())  # LogSoftmax
    assert module.module.model is trainer.model


class _Scaled(nn.Module):
    """A loss with a parameter, and a factor that a callback changes."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.factor = 1.0

    def forward(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        error = nn.functional.mse_loss(outputs, labels)
        return self.factor * error * torch.exp(-self.log_scale) + self.log_scale


class _Anneal(TrainerCallback):
    def __init__(self, loss: _Scaled) -> None:
        self.loss = loss

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.loss.factor = 1.0 + state.global_step // 2


def test_loss_with_parameters_and_attributes_that_change(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        model, loss = regression("predictions")(), _Scaled()
        optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.05)
        trainer = side.make(
            model,
            regression_data(),
            compute_loss_func=loss,
            optimizers=(optimizer, None),
            callbacks=[_Anneal(loss)],
            max_steps=6,
            **({"use_module_with_loss": True} if side.ours else {}),
        )
        trainer.train()
        return outcome(trainer, scale=loss.log_scale.detach().clone())

    theirs, ours = (scenario(side) for side in sides(tmp_path))
    assert theirs.values["scale"] != 0
    compare(theirs, ours)


def test_changes_of_the_model_behind_a_loss_are_seen(tmp_path: Path) -> None:
    def scenario(side: Side) -> Outcome:
        trainer = side.make(
            language_model(),
            language_data(),
            eval_dataset=language_data(6),
            label_smoothing_factor=0.1,
            max_steps=2,
            **({"use_module_with_loss": True} if side.ours else {}),
        )
        losses = [trainer.evaluate()["eval_loss"]]
        trainer.label_smoother.epsilon = 0.9
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.model.lm_head.register_forward_hook(lambda layer, args, result: 2 * result)
        losses.append(trainer.evaluate()["eval_loss"])
        trainer.train()
        return outcome(trainer, losses=losses)

    theirs, ours = (scenario(side) for side in sides(tmp_path))
    assert len({round(x, 4) for x in theirs.values["losses"]}) == 3
    compare(theirs, ours)


def test_copy_of_a_module_with_loss_has_weights_of_its_own() -> None:
    module = ModuleWithLoss(regression("predictions")(), LossLayer(nn.functional.mse_loss))
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    x = torch.ones(2, 6)
    assert torch.equal(other(x), torch.zeros(2))
    assert not torch.equal(module(x), torch.zeros(2))


@pytest.mark.slow
def test_adapters_with_label_smoothing(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    def scenario(side: Side) -> Outcome:
        config = LoraConfig(target_modules=["query"], r=2, modules_to_save=["classifier"])
        model = classifier()
        adapted = seeded(lambda: get_peft_model(model, config))
        trainer = side.make(
            adapted,
            classification_data(),
            eval_dataset=classification_data(6),
            label_names=["labels"],
            label_smoothing_factor=0.1,
            max_steps=4,
            **({"use_module_with_loss": True} if side.ours else {}),
        )
        trainer.train()
        values = {"loss": trainer.evaluate()["eval_loss"]}
        if side.ours:
            file = trainer.evaluate(inference_with_ort=True)["eval_loss"]
            np.testing.assert_allclose(file, values["loss"], rtol=1e-5)
        return outcome(trainer, **values)

    theirs, ours = (scenario(side) for side in sides(tmp_path))
    ours.log = ours.log[:-1]  # the evaluation of the file
    ours.files = [f for f in ours.files if not f.startswith("onnx")]
    compare(theirs, ours)


def test_label_smoothing_with_the_onnx_file(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(
        language_model(),
        language_data(),
        eval_dataset=language_data(6),
        label_smoothing_factor=0.1,
    )
    own = trainer.evaluate()["eval_loss"]
    np.testing.assert_allclose(
        trainer.evaluate(inference_with_ort=True)["eval_loss"], own, rtol=1e-5
    )


def test_hooks_of_the_model_are_not_lost_in_a_file(tmp_path: Path) -> None:
    model = regression("dict")()
    model.register_forward_hook(lambda layer, args, result: result)
    trainer = sides(tmp_path)[1].make(model, regression_data(), eval_dataset=regression_data(8))
    with pytest.raises(CaptureError, match="hooks"):
        trainer.evaluate(inference_with_ort=True)
    with pytest.raises(CaptureError, match="hooks"):
        trainer.export_onnx(tmp_path / "m.onnx")


def test_optimizer_is_set_by_name() -> None:
    args = ORTTrainingArguments(output_dir="x")
    args.set_optimizer("adamw_ort_fused", learning_rate=0.25)
    assert args.optim == "adamw_ort_fused"
    assert args.learning_rate == 0.25


def test_plain_arguments_will_do(tmp_path: Path) -> None:
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = ORTTrainer(
        model=regression("dict")(), args=args, train_dataset=regression_data(), data_collator=padded
    )
    trainer.train()
    assert len(trainer.save_onnx_graphs()) == 4


def test_graphs_are_written(tmp_path: Path) -> None:
    trainer = sides(tmp_path)[1].make(
        regression("dict")(), regression_data(), save_onnx=True, onnx_prefix="net", max_steps=2
    )
    trainer.train()
    names = sorted(p.name for p in Path(trainer.args.output_dir).glob("*.onnx"))
    stages = ("execution_model", "optimized_pre_grad", "optimized", "torch_exported")
    assert names == sorted(f"net_{stage}_training.onnx" for stage in stages)
    for name in names:
        onnx.load(Path(trainer.args.output_dir) / name)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("task", ["sequence classification", "language modelling"])
def test_evaluation_of_the_onnx_file(tmp_path: Path, task: str) -> None:
    model, data, _ = _TASKS[task]
    trainer = sides(tmp_path)[1].make(model(), data(), eval_dataset=data(19), max_steps=4)
    trainer.train()
    own = trainer.evaluate()
    files = Path(trainer.args.output_dir) / "onnx"
    assert not files.exists()
    exported = trainer.evaluate(inference_with_ort=True)
    np.testing.assert_allclose(exported["eval_loss"], own["eval_loss"], rtol=1e-5)
    onnx.checker.check_model(onnx.load(files / "model.onnx"), full_check=True)
    a, b = trainer.predict(data(5)), trainer.predict(data(5), inference_with_ort=True)
    np.testing.assert_allclose(b.predictions, a.predictions, rtol=1e-4, atol=1e-5)


def test_export_of_the_trained_model(tmp_path: Path) -> None:
    import onnxruntime

    trainer = sides(tmp_path)[1].make(regression("dict")(), regression_data(), max_steps=4)
    trainer.train()
    trainer.export_onnx(tmp_path / "out" / "m.onnx")
    x = torch.stack([row["x"] for row in regression_data(7)])
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "m.onnx"))
    (given,) = session.get_inputs()
    found = session.run(None, {given.name: x.numpy()})
    expected = trainer.model.eval()(x)
    np.testing.assert_allclose(found[0], expected["y"].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_hyperparameter_search(tmp_path: Path) -> None:
    def search(side: Side) -> Any:
        trainer = side.make(
            None,
            regression_data(),
            model_init=lambda trial: regression("dict")(),
            eval_dataset=regression_data(9),
            eval_strategy="steps",
            eval_steps=6,
        )
        best = trainer.hyperparameter_search(
            direction="minimize",
            backend="optuna",
            n_trials=3,
            hp_space=lambda trial: {
                "learning_rate": trial.suggest_categorical("learning_rate", [1e-4, 1e-3, 1e-2])
            },
            sampler=_seeded_sampler(),
        )
        return best

    theirs, ours = (search(side) for side in sides(tmp_path))
    assert theirs.hyperparameters == ours.hyperparameters
    np.testing.assert_allclose(ours.objective, theirs.objective, rtol=1e-5)


def _seeded_sampler() -> Any:
    import optuna

    return optuna.samplers.RandomSampler(seed=1)


def test_fsdp_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    before = Accelerator.__init__

    def with_fsdp(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        self.state.__dict__["fsdp_plugin"] = types.SimpleNamespace(activation_checkpointing=False)

    monkeypatch.setattr(Accelerator, "__init__", with_fsdp)
    args = ORTTrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(Exception, match="FSDP keeps pieces of parameters"):
        try:
            ORTTrainer(model=regression("dict")(), args=args)
        finally:
            from accelerate.state import AcceleratorState

            AcceleratorState._reset_state(reset_partial_state=True)

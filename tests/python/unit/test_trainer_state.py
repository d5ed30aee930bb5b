# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, state dicts and ONNX files of ORTTrainer."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
import safetensors.torch
import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, optim
from ortrain.amp import DynamicLossScaler, GradScaler, LossScaler
from ortrain.errors import FileError, InvalidModelError, UnsupportedError
from ortrain.onnx_export import export_module

DESCRIPTION = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("predictions", ["batch", 4])],
}


def net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4)
    )


def make(seed: int, config: Any = None, **groups: Any) -> ORTTrainer:
    torch.manual_seed(seed)
    schedule = optim.lr_scheduler.LinearWarmupLRScheduler(50, warmup=0.2)
    options = {
        "lr_scheduler": schedule,
        "batch": {"gradient_accumulation_steps": 2},
        **groups,
    }
    return ORTTrainer(
        net(),
        DESCRIPTION,
        config or optim.AdamConfig(lr=0.01),
        nn.CrossEntropyLoss(),
        ORTTrainerOptions(options),
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 6, generator=generator)
    return x, torch.randint(0, 4, (5,), generator=generator)


def train(trainer: ORTTrainer, steps: int) -> list[float]:
    return [
        trainer.train_step(*batch(trainer.train_step_info.step))[0].item() for _ in range(steps)
    ]


@pytest.mark.parametrize("steps", [4, 5])  # between optimizer steps, and inside of one
def test_training_goes_on_bit_by_bit(tmp_path: Path, steps: int) -> None:
    trainer = make(1)
    train(trainer, steps)
    path = trainer.save_checkpoint(tmp_path, {"epoch": 3, "names": ["a", "b"]})
    assert path == tmp_path / "checkpoint-00000001"
    expected = train(trainer, 7)
    other = make(2)
    assert other.load_checkpoint(tmp_path) == {"epoch": 3, "names": ["a", "b"]}
    assert train(other, 7) == expected
    for a, b in zip(
        trainer.model.state_dict().values(), other.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b)
    assert other.optim_config.lr == trainer.optim_config.lr


def test_loss_scaler_is_kept(tmp_path: Path) -> None:
    def scaler() -> DynamicLossScaler:
        return DynamicLossScaler(loss_scale=64.0, up_scale_window=3)

    trainer = make(1, mixed_precision={"enabled": True, "loss_scaler": scaler()})
    train(trainer, 4)
    trainer.save_checkpoint(tmp_path)
    expected = train(trainer, 6)
    other = make(2, mixed_precision={"enabled": True, "loss_scaler": scaler()})
    other.load_checkpoint(tmp_path)
    assert train(other, 6) == expected
    assert other.loss_scaler.loss_scale == trainer.loss_scaler.loss_scale == 128.0


def scaled(scaler: Any, seed: int = 1, **groups: Any) -> ORTTrainer:
    mixed = {"enabled": True, "dtype": "float16", "loss_scaler": scaler}
    return make(seed, mixed_precision=mixed, **groups)


def assert_refused_unchanged(trainer: ORTTrainer, folder: Path, text: str) -> None:
    train(trainer, 2)
    info, scaler = trainer.train_step_info, trainer.loss_scaler
    before = trainer.state_dict()["model"]["full_precision"]
    held = (info.step, trainer.optim_config.lr, None if scaler is None else dict(vars(scaler)))
    with pytest.raises(InvalidModelError, match=text):
        trainer.load_checkpoint(folder)
    for name, tensor in trainer.state_dict(pytorch_format=True).items():
        assert torch.equal(tensor, before[name])
    now = (info.step, trainer.optim_config.lr, None if scaler is None else dict(vars(scaler)))
    assert now == held


KINDS = {
    "LossScaler": lambda: LossScaler(512.0),
    "DynamicLossScaler": lambda: DynamicLossScaler(loss_scale=512.0),
    "GradScaler": lambda: GradScaler(512.0),
}


@pytest.mark.parametrize("other", KINDS)
@pytest.mark.parametrize("kind", KINDS)
def test_states_of_other_scalers_are_refused(tmp_path: Path, kind: str, other: str) -> None:
    trainer = scaled(KINDS[kind]())
    train(trainer, 2)
    trainer.save_checkpoint(tmp_path)
    second = scaled(KINDS[other]())
    if kind == other:
        second.load_checkpoint(tmp_path)
        assert vars(second.loss_scaler) == vars(trainer.loss_scaler)
        return
    text = f"the state of a {kind}, the trainer's loss scaler is a {other}"
    assert_refused_unchanged(second, tmp_path, text)
    own = dict(vars(second.loss_scaler))
    second.load_checkpoint(tmp_path, strict=False)
    assert vars(second.loss_scaler) == own


def test_scaler_goes_back_to_its_first_scale_after_a_checkpoint(tmp_path: Path) -> None:
    trainer = scaled(GradScaler(64.0, growth_interval=1))
    train(trainer, 4)
    trainer.save_checkpoint(tmp_path)
    other = scaled(GradScaler(2.0))
    other.load_checkpoint(tmp_path)
    assert other.loss_scaler.loss_scale == 256.0
    other.loss_scaler.reset()
    assert other.loss_scaler.loss_scale == 64.0


def test_gradients_that_hold_a_loss_scale_are_not_loaded_without_one(tmp_path: Path) -> None:
    trainer = scaled(GradScaler(512.0))
    train(trainer, 3)
    trainer.save_checkpoint(tmp_path)
    text = "after 1 of 2 batches of a step, whose gradients hold the loss scale 512"
    for scaler in (None, GradScaler(enabled=False)):
        assert_refused_unchanged(scaled(scaler), tmp_path, text)
    # Another scale to begin with is none: the checkpoint's goes on.
    other = scaled(GradScaler(4.0), 2)
    other.load_checkpoint(tmp_path)
    assert train(other, 5) == train(trainer, 5)
    # Between two steps nothing holds the scale.
    trainer.save_checkpoint(tmp_path)
    scaled(None).load_checkpoint(tmp_path)


def test_gradients_without_a_loss_scale_go_on_under_a_scaler(tmp_path: Path) -> None:
    trainer = scaled(None)
    train(trainer, 1)
    trainer.save_checkpoint(tmp_path)
    train(trainer, 1)
    other = scaled(GradScaler(512.0), 2)
    train(other, 2)  # with a scale of its own
    other.load_checkpoint(tmp_path)
    train(other, 1)
    for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("steps", [1, 3])
def test_a_step_is_not_finished_with_another_number_of_batches(tmp_path: Path, steps: int) -> None:
    def of(batches: int) -> ORTTrainer:
        return make(1, batch={"gradient_accumulation_steps": batches})

    trainer = of(4)
    train(trainer, steps)
    trainer.save_checkpoint(tmp_path)
    text = rf"after {steps} of 4 batches of a step, and .*gradient_accumulation_steps' is 2"
    assert_refused_unchanged(of(2), tmp_path, text)
    train(trainer, 4 - steps)
    trainer.save_checkpoint(tmp_path)
    of(2).load_checkpoint(tmp_path)


def test_files_are_those_of_safetensors(tmp_path: Path) -> None:
    trainer = make(1)
    train(trainer, 2)
    path = trainer.save_checkpoint(tmp_path)
    loaded = safetensors.torch.load_file(path / "parameters.safetensors")
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(loaded[name], tensor)
    states = safetensors.torch.load_file(path / "optimizer.safetensors")
    assert sorted(states) == sorted(
        f"{name}:{kind}"
        for name, _ in trainer.model.named_parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    )


def test_without_optimizer_states(tmp_path: Path) -> None:
    trainer = make(1)
    train(trainer, 2)
    path = trainer.save_checkpoint(tmp_path, include_optimizer_states=False)
    assert not (path / "optimizer.safetensors").exists()
    other = make(2)
    other.load_checkpoint(tmp_path)
    assert other.engine.state.optimizer == {}
    assert other.train_step_info.optimization_step == 1
    assert other.engine.state.steps == 0  # the averages start anew, and so does their correction


def test_damaged_checkpoint_is_passed_over_with_one_warning(tmp_path: Path) -> None:
    trainer = make(1)
    for _ in range(2):
        train(trainer, 2)
        newest = trainer.save_checkpoint(tmp_path)
    whole = (newest / "parameters.safetensors").read_bytes()
    (newest / "parameters.safetensors").write_bytes(whole[:-1])
    other = make(2)
    with pytest.warns(UserWarning, match="parameters.safetensors") as seen:
        other.load_checkpoint(tmp_path)
    assert len(seen) == 1
    assert other.train_step_info.step == 2
    shutil.rmtree(tmp_path / "checkpoint-00000001")
    with pytest.raises(FileError, match="no complete checkpoint"):
        other.load_checkpoint(tmp_path)
    assert other.train_step_info.step == 2


def test_checkpoints_of_other_models_are_refused(tmp_path: Path) -> None:
    trainer = make(1)
    train(trainer, 2)
    trainer.save_checkpoint(tmp_path)
    wider = ORTTrainer(
        nn.Linear(6, 4), DESCRIPTION, optim.AdamConfig(), nn.CrossEntropyLoss(), None
    )
    with pytest.raises(InvalidModelError, match="the checkpoint has '0.bias'"):
        wider.load_checkpoint(tmp_path)
    with pytest.raises(InvalidModelError, match="the states of AdamOptimizer"):
        make(2, optim.LambConfig()).load_checkpoint(tmp_path)
    with pytest.raises(TypeError, match=r"user_dict\['t'\] is a Tensor"):
        trainer.save_checkpoint(tmp_path, {"t": torch.zeros(1)})
    with pytest.raises(TypeError, match=r"user_dict\['k'\] is a dict"):
        trainer.save_checkpoint(tmp_path, {"k": {1: 2}})
    assert len(list(tmp_path.iterdir())) == 1


def test_state_dict_of_pytorch_goes_both_ways(tmp_path: Path) -> None:
    trainer = make(1)
    train(trainer, 2)
    given = trainer.state_dict(pytorch_format=True)
    torch.save(given, tmp_path / "weights.pt")
    module = net()
    module.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    other = make(2)
    other.load_state_dict(module.state_dict())
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, given[name])
    before = given["0.weight"].clone()
    train(trainer, 2)
    assert torch.equal(given["0.weight"], before), "it is a copy"


def test_whole_state_dict() -> None:
    trainer = make(1)
    train(trainer, 4)
    given = copy.deepcopy(trainer.state_dict())
    assert given["train_step_info"] == {"optimization_step": 2, "step": 4}
    assert set(given["optimizer"]["0.weight"]) >= {"Moment_1", "Moment_2", "Update_Count"}
    # Of the step that comes next, as onnxruntime.training counted.
    assert given["optimizer"]["0.weight"]["Update_Count"].tolist() == [3]
    expected = train(trainer, 0)
    other = make(2)
    other.load_state_dict(given)
    other.engine.state.seed = trainer.engine.state.seed
    other.engine.state.runs = trainer.engine.state.runs
    expected = train(trainer, 4)
    assert train(other, 4) == expected


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: s["model"]["full_precision"].pop("0.weight"), "the model has '0.weight'"),
        (lambda s: s["model"]["full_precision"].update(more=torch.zeros(1)), "has 'more'"),
        (
            lambda s: s["model"]["full_precision"].update({"0.bias": torch.zeros(3)}),
            r"'0.bias' has shape \[3\]",
        ),
        (lambda s: s["model"]["full_precision"].update({"0.bias": 3}), "expected a tensor"),
        (lambda s: s["optimizer"].update(other={}), "'other', which is no parameter"),
        (lambda s: s["optimizer"]["0.bias"].update(Moment_3=torch.zeros(8)), "'Moment_3'"),
        (lambda s: s["optimizer"]["0.bias"].update(Momentum=torch.zeros(8)), "'Momentum'"),
        (
            lambda s: s["optimizer"]["0.bias"].update(Moment_1=torch.zeros(8, dtype=torch.int64)),
            "no tensor of floats",
        ),
        (
            lambda s: s["optimizer"]["0.bias"].update(Moment_1=torch.zeros(3)),
            r"'Moment_1' of '0.bias' has shape \[3\]",
        ),
        (
            lambda s: (
                s["optimizer"]["0.bias"].update(Update_Count=torch.tensor([7])),
                s["optimizer"].update(shared_optimizer_state={"Step": np.array([2])}),
            ),
            "'Update_Count' of '0.bias' is 7, 'Step' of all is 2",
        ),
        (
            lambda s: s["optimizer"].update(shared_optimizer_state={"Step": np.array([0])}),
            "'Step' is 0, expected 1",
        ),
        (
            lambda s: s["optimizer"].update(shared_optimizer_state={"Step": torch.tensor([1.0])}),
            "'Step' is no single integer",
        ),
        (
            lambda s: s["model"]["full_precision"].update({"0.bias": np.array(["a"] * 8)}),
            "'0.bias' is an array of <U1",
        ),
    ],
)
def test_state_dicts_that_do_not_fit_change_nothing(change: Any, text: str) -> None:
    trainer = make(1)
    train(trainer, 2)
    given = trainer.state_dict()
    change(given)
    other = make(2)
    before = other.state_dict(pytorch_format=True)
    with pytest.raises(InvalidModelError, match=text):
        other.load_state_dict(given)
    for name, tensor in other.state_dict(pytorch_format=True).items():
        assert torch.equal(tensor, before[name])


def arrays_of(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: arrays_of(value) for key, value in state.items()}
    return state.numpy() if isinstance(state, torch.Tensor) else state


def test_states_of_numpy_arrays_and_of_the_optimizer_alone() -> None:
    trainer = make(1)
    train(trainer, 4)
    given = trainer.state_dict()
    alone = {"optimizer": arrays_of(given["optimizer"])}
    arrays = arrays_of(given)
    other = make(2)
    mine = other.state_dict(pytorch_format=True)
    other.load_state_dict(alone)
    for name, tensor in other.state_dict(pytorch_format=True).items():
        assert torch.equal(tensor, mine[name]), "parameters stay"
    assert other.engine.state.steps == 2
    third = make(3)
    third.load_state_dict(arrays)
    other.load_state_dict(given["model"]["full_precision"])
    for one in (other, third):
        one.train_step_info.step = 4
        for name in ("seed", "runs"):
            setattr(one.engine.state, name, getattr(trainer.engine.state, name))
    expected = train(trainer, 4)
    assert train(other, 4) == expected
    assert train(third, 4) == expected


def test_early_state_starts_the_averages_anew() -> None:
    trainer, other = make(1), make(1)
    start = trainer.state_dict()
    train(trainer, 20)
    trainer.load_state_dict(start)
    assert trainer.engine.state.optimizer == {}
    other.load_state_dict(start)
    for name in ("seed", "runs"):
        setattr(other.engine.state, name, getattr(trainer.engine.state, name))
    assert train(trainer, 4) == train(other, 4)


def test_tensors_of_the_loss_function_are_kept() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(()))

        def forward(self, scores: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(scores * self.w, label)

    def trainer() -> ORTTrainer:
        return ORTTrainer(nn.Linear(6, 4), DESCRIPTION, optim.AdamConfig(), Weighted())

    first = trainer()
    train(first, 3)
    given = first.state_dict()
    assert given["model"]["full_precision"]["loss_fn.w"] != 1
    second = trainer()
    second.load_state_dict(given)
    assert second.loss_fn.w == first.loss_fn.w


def test_kills_and_damage() -> None:
    command = [sys.executable, "-m", "ortrain.tools.checkpoint_torture", "--kills", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    out = " ".join(done.stdout.split())
    assert done.returncode == 0, out + done.stderr
    assert "3 of 3 resumed" in out
    assert "none silent, nothing lost" in out


# --- ONNX files


def run_file(path: Path, inputs: dict[str, torch.Tensor]) -> list[Any]:
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    names = {i.name for i in model.graph.input}
    given = {n: t.detach().numpy() for n, t in inputs.items() if n in names}
    assert set(given) == names
    return onnx.reference.ReferenceEvaluator(model).run(None, given)


def test_inference_file_has_the_trained_weights(tmp_path: Path) -> None:
    trainer = make(1)
    with pytest.raises(InvalidModelError, match="needs a train_step"):
        trainer.save_as_onnx(tmp_path / "m.onnx")
    train(trainer, 4)
    trainer.save_as_onnx(tmp_path / "m.onnx", include_loss=False)
    x, label = batch(9)
    trainer.model.eval()
    (predictions,) = run_file(tmp_path / "m.onnx", {"x": x})
    np.testing.assert_allclose(predictions, trainer.model(x).detach(), atol=1e-5)
    weights = {t.name: t for t in onnx.load(tmp_path / "m.onnx").graph.initializer}
    for name, parameter in trainer.model.named_parameters():
        assert np.array_equal(onnx.numpy_helper.to_array(weights[name]), parameter.detach())
    trainer.save_as_onnx(tmp_path / "l.onnx")
    loss, _ = run_file(tmp_path / "l.onnx", {"x": x, "label": label})
    np.testing.assert_allclose(loss, trainer.eval_step(x, label)[0], atol=1e-5)
    again = ORTTrainer(onnx.load(tmp_path / "l.onnx"), trainer.model_desc, optim.SGDConfig())
    for one, other in zip(again.eval_step(x, label), trainer.eval_step(x, label), strict=True):
        torch.testing.assert_close(one, other)


def test_inference_file_of_another_opset(tmp_path: Path) -> None:
    trainer = make(1, _internal_use={"onnx_opset_version": 17})
    train(trainer, 2)
    trainer.save_as_onnx(tmp_path / "m.onnx", include_loss=False)
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 17
    x, _ = batch(9)
    trainer.model.eval()
    (predictions,) = run_file(tmp_path / "m.onnx", {"x": x})
    np.testing.assert_allclose(predictions, trainer.model(x).detach(), atol=1e-5)


def test_inference_file_is_post_processed(tmp_path: Path) -> None:
    def rename(model: onnx.ModelProto) -> onnx.ModelProto:
        model.producer_name = "mine"
        return model

    trainer = make(1, _internal_use={"extra_postprocess": rename})
    train(trainer, 2)
    trainer.save_as_onnx(tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx").producer_name == "mine"


def test_training_file_holds_optimizer_and_states(tmp_path: Path) -> None:
    trainer = make(1)
    train(trainer, 2)
    trainer.save_as_onnx(tmp_path / "t.onnx", training=True)
    model = onnx.load(tmp_path / "t.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert "AdamStep" in {node.op_type for node in model.graph.node}
    names = {t.name for t in model.graph.initializer}
    assert {"0.weight", "0.weight:exp_avg", "0.weight:exp_avg_sq"} <= names


@pytest.mark.parametrize(
    "module",
    [
        nn.InstanceNorm2d(3, affine=True),
        nn.InstanceNorm2d(3),
        nn.BatchNorm2d(3, track_running_stats=False),
        nn.BatchNorm2d(3),
        nn.GroupNorm(3, 3),
        nn.AdaptiveAvgPool2d(1),
    ],
    ids=["instance-affine", "instance", "batch-own", "batch", "group", "pool"],
)
def test_layers_export_as_they_compute(tmp_path: Path, module: nn.Module) -> None:
    torch.manual_seed(0)
    module.train()
    module(torch.randn(4, 3, 5, 5) * 3 + 2)  # running statistics of their own
    x = torch.randn(2, 3, 5, 5) * 3 + 2
    export_module(module, tmp_path / "m.onnx", (x,))
    assert module.training
    (result,) = run_file(tmp_path / "m.onnx", {"x": x, "input": x})
    np.testing.assert_allclose(result, module.eval()(x).detach(), atol=1e-5)


def test_failed_conversion_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")
    with pytest.raises(UnsupportedError, match="no form in opset 12"):
        export_module(nn.GELU(), path, (torch.randn(3),), opset=12)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


def test_module_that_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cumprod(x, 0)

    with pytest.raises(UnsupportedError, match="no form in standard ONNX operators"):
        export_module(Odd(), tmp_path / "m.onnx", (torch.randn(3),))
    assert not (tmp_path / "m.onnx").exists()

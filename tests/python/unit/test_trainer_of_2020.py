# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The first form of ORTTrainer, its checkpoint functions, FusedAdam."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import ortrain
from ortrain import checkpoint, optim, orttrainer
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.ort_trainer import (
    IODescription,
    LossScaler,
    ModelDescription,
    ORTTrainer,
    generate_sample,
    load_checkpoint,
    save_checkpoint,
)


def description() -> ModelDescription:
    x = IODescription("x", ["batch", 6], torch.float32)
    label = IODescription("label", ["batch"], torch.int64, num_classes=4)
    loss, scores = IODescription("loss", []), IODescription("scores", ["batch", 4])
    return ModelDescription([x, label], [loss, scores])


def attributes(name: str) -> dict[str, Any]:
    decay = 0.0 if "bias" in name else 0.1
    return {
        "alpha": 0.8,
        "beta": 0.95,
        "lambda": decay,
        "epsilon": 1e-6,
        "do_bias_correction": True,
    }


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=g), torch.randint(0, 4, (5,), generator=g)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make(name: str = "LambOptimizer", **arguments: Any) -> ORTTrainer:
    rate = IODescription("Learning_Rate", [1], torch.float32)
    loss = nn.CrossEntropyLoss()
    numbers = None if name == "SGDOptimizer" else attributes
    return ORTTrainer(net(), loss, description(), name, numbers, rate, "cpu", **arguments)


def test_lamb_by_attributes_of_names_and_a_rate_per_step() -> None:
    trainer, other = make(enable_grad_norm_clip=False), net()
    weights = [p for n, p in other.named_parameters() if "bias" not in n]
    biases = [p for n, p in other.named_parameters() if "bias" in n]
    optimizer = optim.FusedLAMB(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}],
        betas=(0.8, 0.95),
        eps=1e-6,
    )
    for step in range(5):
        x, label = batch(step)
        rate = 0.01 * (step + 1)
        loss, _ = trainer.train_step(x, label, torch.tensor([rate]))
        for group in optimizer.param_groups:
            group["lr"] = rate
        expected = nn.functional.cross_entropy(other(x), label)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach())
    for name, value in other.state_dict().items():
        torch.testing.assert_close(trainer.state_dict()[name], value)
    assert trainer.global_step_ == 5
    x, label = batch(9)
    assert len(trainer.train_step(x, label, Learning_Rate=0.5)) == 2
    assert trainer.trainer.optim_config.lr == 0.5


def test_rate_by_function_and_scaler() -> None:
    scaler = LossScaler("loss_scale", True, 256.0, up_scale_window=2)
    trainer = make(
        "AdamOptimizer",
        get_lr_this_step=lambda step: 0.1 / (step + 1),
        use_mixed_precision=True,
        loss_scaler=scaler,
    )
    for step in range(3):
        trainer.train_step(*batch(step))
    assert trainer.trainer.optim_config.lr == pytest.approx(0.1 / 3)
    assert scaler.loss_scale == 512.0


@pytest.mark.parametrize("name", ["LambOptimizer", "AdamOptimizer", "SGDOptimizer"])
def test_a_run_goes_on_from_its_state_dict(name: str) -> None:
    trainer, other = make(name), make(name)
    for step in range(3):
        trainer.train_step(*batch(step), 0.1)
    state = trainer.state_dict()
    weights = {f"{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")}
    moments = {f"Moment_{i}_{w}" for i in (1, 2) for w in weights}
    counts = {f"Update_Count_{w}" for w in weights}
    expected = {
        "LambOptimizer": weights | moments | {"Step"},
        "AdamOptimizer": weights | moments | counts,
        "SGDOptimizer": weights | {"Step"},
    }
    assert state.keys() == expected[name]
    assert all(state[n].tolist() == [4] for n in state if n.startswith(("Step", "Update_")))
    assert trainer.state_dict(include_optimizer_state=False).keys() == weights
    other.load_state_dict({n: t.numpy() for n, t in state.items()}, strict=True)
    assert other.global_step_ == 0, "which step it is, the state does not say"
    for step in range(3, 6):
        ours, theirs = (t.train_step(*batch(step), 0.1)[0] for t in (trainer, other))
        assert torch.equal(ours, theirs)
    for n, tensor in trainer.state_dict().items():
        assert torch.equal(other.state_dict()[n], tensor)
    # Without the moments they stay as they are.
    other.load_state_dict(trainer.state_dict(include_optimizer_state=False))
    assert other.state_dict().keys() == state.keys()
    with pytest.raises(InvalidModelError, match="'other'"):
        other.load_state_dict(state | {"other": torch.zeros(1)}, strict=True)
    other.load_state_dict(state | {"other": torch.zeros(1)})


def test_modes_lists_and_samples() -> None:
    trainer = make()
    x, label = batch(0)
    before = trainer.state_dict(include_optimizer_state=False)
    trainer.eval()
    loss, _ = trainer(x, label)
    assert torch.equal(trainer.state_dict()["0.weight"], before["0.weight"])
    trainer.train()
    trained, _ = trainer([x, label, torch.tensor([0.1])])
    torch.testing.assert_close(trained, loss)
    assert not torch.equal(trainer.state_dict()["0.weight"], before["0.weight"])
    of_x, of_label = (generate_sample(d) for d in description().inputs_)
    assert of_x.shape == (1, 6) and of_x.dtype == torch.float32
    assert of_label.shape == (1,) and 0 <= int(of_label) < 4


class Halving:
    """A scaler of nobody's class."""

    def __init__(self) -> None:
        self.loss_scale_ = 64.0
        self.told: list[bool] = []

    def update_loss_scale(self, is_all_finite: bool) -> None:
        self.told.append(is_all_finite)
        self.loss_scale_ /= 2


class CountingScaler(LossScaler):
    def update_loss_scale(self, is_all_finite: bool) -> None:
        self.stable_steps_ += 10
        super().update_loss_scale(is_all_finite)


def test_scalers_of_other_classes() -> None:
    scaler = Halving()
    trainer = make("AdamOptimizer", use_mixed_precision=True, loss_scaler=scaler)
    trainer.train_step(*batch(0), 0.1)
    assert trainer.trainer.engine.state.loss_scale == 64.0
    trainer.train_step(*batch(1), 0.1)
    assert trainer.trainer.engine.state.loss_scale == 32.0
    assert scaler.told == [True, True] and scaler.loss_scale_ == 16.0
    counting = CountingScaler("loss_scale", True, 256.0, up_scale_window=22)
    trainer = make("AdamOptimizer", use_mixed_precision=True, loss_scaler=counting)
    trainer.train_step(*batch(0), 0.1)
    assert (counting.stable_steps_, counting.loss_scale_) == (11, 256.0)
    trainer.train_step(*batch(0), 0.1)
    assert (counting.stable_steps_, counting.loss_scale_) == (0, 512.0)
    with pytest.raises(TypeError, match="loss_scaler is a dict"):
        make(use_mixed_precision=True, loss_scaler={})


def test_the_scale_of_the_loss_as_an_argument() -> None:
    trainer = make("AdamOptimizer", use_mixed_precision=True, gradient_accumulation_steps=2)
    name = trainer.loss_scale_input_name
    assert len(trainer.train_step(*batch(0), torch.tensor([0.1]), torch.tensor([8.0]))) == 2
    loss, scores, finite = trainer.train_step(*batch(0), 0.1, **{name: 8.0})
    assert (loss.shape, scores.shape) == ((), (5, 4)) and finite.tolist() == [True]
    before = trainer.state_dict()
    x, label = batch(1)
    x[0, 0] = torch.inf
    trainer.train_step(x, label, Learning_Rate=0.1, **{name: 1e38})
    assert trainer.trainer.engine.state.loss_scale == 1e38
    *_, finite = trainer.train_step(x, label, 0.1, 1e38)
    assert finite.tolist() == [False] and trainer.global_step_ == 1
    for n, tensor in trainer.state_dict().items():
        assert torch.equal(tensor, before[n]), n
    assert len(trainer.train_step(*batch(1), 0.1, 1.0, fetches=["loss", "scores"])) == 2
    trainer.train_step(*batch(1), 0.1, 1.0)
    trainer.train_step(*batch(1), 0.1, 4.0)
    trainer.train_step(*batch(1), 0.1)  # the rest of that step
    assert trainer.trainer.engine.state.loss_scale == 4.0
    trainer.train_step(*batch(1), 0.1)
    assert trainer.trainer.engine.state.loss_scale == 1.0
    trainer.train_step(*batch(1), 0.1)
    with pytest.raises(ValueError, match="loss_scale is 0.0"):
        trainer.train_step(*batch(1), 0.1, 0.0)
    with pytest.raises(TypeError, match="needs use_mixed_precision"):
        make().train_step(*batch(0), 0.1, **{name: 8.0})


def test_checkpoints_of_the_first_form(tmp_path: Path) -> None:
    trainer = make()
    trainer.train_step(*batch(0), 0.1)
    save_checkpoint(trainer, tmp_path)
    assert (tmp_path / "ORT_checkpoint" / "checkpoint-00000001").is_dir()
    expected = trainer.train_step(*batch(1), 0.1)[0]
    other = make()
    load_checkpoint(other, tmp_path)
    assert torch.equal(other.train_step(*batch(1), 0.1)[0], expected)


def test_evaluation_alone_and_files(tmp_path: Path) -> None:
    trainer = ORTTrainer(net(), nn.CrossEntropyLoss(), description(), None, None, None)
    loss, scores = trainer.eval_step(*batch(0))
    torch.testing.assert_close(scores, net()(batch(0)[0]).detach())
    trainer.save_as_onnx(tmp_path / "m.onnx")
    trainer.load_state_dict({n: torch.zeros_like(p) for n, p in net().state_dict().items()})
    assert trainer.eval_step(*batch(0))[1].abs().max() == 0
    with pytest.raises(UnsupportedError, match="training_optimizer_name is None"):
        trainer.train_step(*batch(0), 0.1)


def test_onnx_models_by_attributes_of_names() -> None:
    helper = onnx.helper
    nodes = [
        helper.make_node("Reshape", ["x", "sizes"], ["r"]),
        helper.make_node("Gemm", ["r", "weight", "bias"], ["scores"]),
        helper.make_node("SoftmaxCrossEntropyLoss", ["scores", "label"], ["loss"]),
    ]
    weight = torch.randn(6, 4).numpy()
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("x", 1, ["batch", 6]),
            helper.make_tensor_value_info("label", 7, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("loss", 1, []),
            helper.make_tensor_value_info("scores", 1, ["batch", 4]),
        ],
        [
            onnx.numpy_helper.from_array(weight, "weight"),
            onnx.numpy_helper.from_array(weight[0] * 0, "bias"),
            helper.make_tensor("sizes", 7, [2], [-1, 6]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    asked: list[str] = []

    def of_name(name: str) -> dict[str, Any]:
        asked.append(name)
        return attributes(name)

    trainer = ORTTrainer(model, None, description(), "LambOptimizer", of_name, None)
    losses = [trainer.train_step(*batch(0))[0].item() for _ in range(5)]
    assert losses[-1] < losses[0]
    assert sorted(asked) == ["bias", "weight"]


def test_what_there_is_not_is_named() -> None:
    with pytest.raises(UnsupportedError, match="'Other'; there are SGDOptimizer"):
        make("Other")
    with pytest.raises(ValueError, match="world_size' is 2, but torch.distributed is not init"):
        make(world_size=2)
    with pytest.raises(UnsupportedError, match="stage"):
        make(deepspeed_zero_stage=2)


def test_functions_for_checkpoints(tmp_path: Path) -> None:
    def trainer() -> orttrainer.ORTTrainer:
        given = {
            "inputs": [("x", ["b", 6]), ("label", ["b"])],
            "outputs": [("loss", [], True), ("scores", ["b", 4])],
        }
        return orttrainer.ORTTrainer(net(), given, optim.AdamConfig(), nn.CrossEntropyLoss())

    first, second = trainer(), trainer()
    first.train_step(*batch(0))
    checkpoint.experimental_save_checkpoint(first, tmp_path)
    checkpoint.experimental_load_checkpoint(second, tmp_path)
    third = trainer()
    checkpoint.experimental_load_state_dict(third, checkpoint.experimental_state_dict(first))
    expected = first.train_step(*batch(1))[0]
    assert torch.equal(second.train_step(*batch(1))[0], expected)
    assert torch.equal(third.train_step(*batch(1))[0], expected)
    joined = checkpoint.aggregate_checkpoints([tmp_path / "ORT_checkpoint"])
    assert joined.keys() == net().state_dict().keys()
    whole = checkpoint.aggregate_checkpoints([tmp_path / "ORT_checkpoint"], pytorch_format=False)
    fourth = trainer()
    fourth.load_state_dict(whole)
    assert torch.equal(fourth.train_step(*batch(1))[0], expected)
    of_ranks = [tmp_path / "ORT_checkpoint", tmp_path / "what_the_second_process_named"]
    assert checkpoint.aggregate_checkpoints(of_ranks).keys() == joined.keys()
    fifth = trainer()
    fifth.load_checkpoint(*of_ranks, strict=True)
    assert torch.equal(fifth.train_step(*batch(1))[0], expected)
    of_ranks[1].mkdir()
    with pytest.raises(UnsupportedError, match="2 folders of checkpoints"):
        checkpoint.aggregate_checkpoints(of_ranks)
    with pytest.raises(TypeError, match="is missing"):
        trainer().load_checkpoint()


def test_names_of_2020_are_there() -> None:
    for name in ("ORTTrainer", "ORTTrainerOptions", "TrainStepInfo", "amp", "checkpoint", "optim"):
        assert getattr(ortrain, name) is not None
    assert ortrain.api.Module and ortrain.artifacts.generate_artifacts


@pytest.mark.parametrize("mode", list(optim.AdamWMode))
@pytest.mark.parametrize("corrected", [True, False])
def test_fused_adam(mode: optim.AdamWMode, corrected: bool) -> None:
    ours, theirs = net(), net()
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6, "betas": (0.8, 0.95)}
    fused = optim.FusedAdam(
        ours.parameters(), adam_w_mode=mode, bias_correction=corrected, **options
    )
    means = {n: torch.zeros_like(p) for n, p in theirs.named_parameters()}
    squares = copy.deepcopy(means)
    for step in range(1, 5):
        x, label = batch(step)
        for module in (ours, theirs):
            module.zero_grad()
            nn.functional.cross_entropy(module(x), label).backward()
        fused.step()
        fused.zero_grad()
        assert ours[0].weight.grad is None
        bias1 = 1 - 0.8**step if corrected else 1.0
        bias2 = 1 - 0.95**step if corrected else 1.0
        with torch.no_grad():
            for name, p in theirs.named_parameters():
                g = p.grad + 0.1 * p if mode == 0 else p.grad
                means[name] = 0.8 * means[name] + 0.2 * g
                squares[name] = 0.95 * squares[name] + 0.05 * g * g
                if mode == 2:
                    p.mul_(1 - 0.01 * 0.1)
                if mode == 1:
                    p.sub_(0.01 * bias2**0.5 / bias1 * means[name] / (squares[name].sqrt() + 1e-6))
                    p.sub_(0.01 * 0.1 * p)
                else:
                    divisor = (squares[name] / bias2).sqrt() + 1e-6
                    p.sub_(0.01 / bias1 * means[name] / divisor)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"lr": -1}, "learning rate"), ({"betas": (1, 0)}, "beta"), ({"eps": -1}, "epsilon")],
)
def test_fused_adam_refuses(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        optim.FusedAdam(net().parameters(), **arguments)

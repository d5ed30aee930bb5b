# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Blocks that build losses and training models, trained and compared with PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from ortrain import api, artifacts, onnxblock, optim
from ortrain.errors import InvalidModelError
from ortrain.onnx_export import export_module

blocks, losses = onnxblock.blocks, onnxblock.loss


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2 = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.fc2(torch.relu(self.fc1(x)))}


NAMES = [name for name, _ in Net().named_parameters()]


@pytest.fixture
def model(tmp_path: Path) -> onnx.ModelProto:
    export_module(Net(), tmp_path / "net.onnx", (torch.randn(2, 5),))
    return onnx.load(str(tmp_path / "net.onnx"))


def batch(step: int, labels: bool) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(4, 5, generator=g)
    return x, torch.randint(0, 3, (4,), generator=g) if labels else torch.rand(4, 3, generator=g)


WEIGHT, POSITIVE = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([3.0, 1.0, 0.5])
LOSSES: dict[str, tuple[Callable[[], Any], Callable[..., torch.Tensor]]] = {
    "mse": (losses.MSELoss, nn.MSELoss()),
    "mse sum": (lambda: losses.MSELoss("sum"), nn.MSELoss(reduction="sum")),
    "l1": (losses.L1Loss, nn.L1Loss()),
    "bce": (losses.BCEWithLogitsLoss, nn.BCEWithLogitsLoss()),
    "bce weights": (
        lambda: losses.BCEWithLogitsLoss(WEIGHT.numpy(), "sum", POSITIVE.numpy()),
        nn.BCEWithLogitsLoss(WEIGHT, reduction="sum", pos_weight=POSITIVE),
    ),
    "cross entropy": (losses.CrossEntropyLoss, nn.CrossEntropyLoss()),
    "cross entropy weights": (
        lambda: losses.CrossEntropyLoss(WEIGHT.numpy(), ignore_index=1),
        nn.CrossEntropyLoss(WEIGHT, ignore_index=1),
    ),
}


class Training(onnxblock.TrainingBlock):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def build(self, scores: str) -> tuple[str, str]:
        return self.loss(scores), scores


def trained(folder: Path) -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    return state, module, api.Optimizer(folder / "optimizer_model.onnx", module)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("by_artifacts", [False, True])
def test_losses_train_as_pytorchs(
    name: str, by_artifacts: bool, model: onnx.ModelProto, tmp_path: Path
) -> None:
    make, theirs = LOSSES[name]
    size = len(model.graph.node)
    if by_artifacts:
        artifacts.generate_artifacts(
            model, NAMES, loss=make(), optimizer=onnxblock.optim.SGD(), artifact_directory=tmp_path
        )
    else:
        block = Training(make())
        for parameter in NAMES:
            block.requires_grad(parameter)
        with onnxblock.base(model):
            assert block("scores")[1] == "scores"
        for kind, made in zip(("training", "eval"), block.to_model_proto(), strict=True):
            onnx.save(made, str(tmp_path / f"{kind}_model.onnx"))
        with onnxblock.empty_base() as accessor:
            onnxblock.optim.SGD()(block.parameters())
            onnx.save(accessor.model, str(tmp_path / "optimizer_model.onnx"))
        onnxblock.save_checkpoint(block.parameters(), tmp_path / "checkpoint")
        assert [p.name for p in block.parameters()[0]] == NAMES
    assert len(model.graph.node) == size, "the model stays as it is"
    state, module, optimizer = trained(tmp_path)
    optimizer.set_learning_rate(0.1)
    net = Net()
    reference = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        x, target = batch(step, "entropy" in name)
        loss, *_ = module(x.numpy(), target.numpy())
        expected = theirs(net(x)["scores"], target)
        np.testing.assert_allclose(loss, expected.detach().numpy(), rtol=1e-5)
        reference.zero_grad()
        expected.backward()
        reference.step()
        optimizer.step()
        module.lazy_reset_grad()
    for parameter, value in net.named_parameters():
        np.testing.assert_allclose(
            state.parameters[parameter].data, value.detach().numpy(), rtol=1e-4, atol=1e-6
        )
    onnxblock.load_checkpoint_to_model(tmp_path / "checkpoint", model)


def test_adamw_with_clipping_and_frozen_parameters(model: onnx.ModelProto, tmp_path: Path) -> None:
    clip = onnxblock.optim.ClipGradNorm(0.1)
    adamw = onnxblock.optim.AdamW(betas=(0.8, 0.9), weight_decay=0.1, clip_grad=clip)
    for folder, optimizer in (
        ("a", adamw),
        ("b", optim.AdamConfig(**{k: v for k, v in adamw.config.defaults.items() if k != "lr"})),
    ):
        artifacts.generate_artifacts(
            model,
            NAMES[1:],
            NAMES[:1],
            loss=losses.MSELoss(),
            optimizer=optimizer,
            artifact_directory=tmp_path / folder,
        )
    results = []
    for folder in ("a", "b"):
        state, module, optimizer = trained(tmp_path / folder)
        optimizer.set_learning_rate(0.1)
        for step in range(3):
            module(*(t.numpy() for t in batch(step, False)))
            optimizer.step()
            module.lazy_reset_grad()
        results.append({name: p.data for name, p in state.parameters.items()})
    np.testing.assert_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0][NAMES[0]], Net().fc1.weight.detach().numpy())


def test_a_forward_of_ones_own(model: onnx.ModelProto) -> None:
    class Margin(onnxblock.ForwardBlock):
        def build(self, name: str) -> str:
            half = blocks.Constant(0.5)()
            shifted = blocks.Sub()(blocks.Abs()(name), half)
            clipped = blocks.Clip(0.0, 1.0)(shifted)
            bounded = blocks.Clip(clip_max=0.75)(clipped)
            parts = blocks.Add()(blocks.Pow(2.0)(bounded), blocks.Sigmoid()(blocks.Neg()(name)))
            same = blocks.PassThrough()(blocks.Div()(parts, blocks.InputLike(name)("scale")))
            return blocks.ReduceSum()(blocks.Cast(onnx.TensorProto.FLOAT)(same))

    block = Margin()
    with pytest.raises(RuntimeError, match="not called yet"):
        block.to_model_proto()
    with onnxblock.base(model):
        block("scores")
    made = block.to_model_proto()
    assert [i.name for i in made.graph.input] == ["x", "scale"]
    x, scale = torch.randn(4, 5), torch.rand(4, 3) + 1
    (result,) = onnx.reference.ReferenceEvaluator(made).run(
        None, {"x": x.numpy(), "scale": scale.numpy()}
    )
    scores = Net()(x)["scores"]
    expected = ((scores.abs() - 0.5).clamp(0, 1).clamp(max=0.75) ** 2 + (-scores).sigmoid()) / scale
    np.testing.assert_allclose(result, expected.sum().detach().numpy(), rtol=1e-5)


def test_what_does_not_fit_is_refused(model: onnx.ModelProto) -> None:
    with pytest.raises(RuntimeError, match=r"inside of `with onnxblock\.base"):
        blocks.Add()("a", "b")
    with pytest.raises(TypeError, match="expected an onnx.ModelProto"), onnxblock.base(3):
        pass
    with pytest.raises(ValueError, match="reduction is 'most'"):
        losses.MSELoss("most")
    with onnxblock.base(model):
        with pytest.raises(RuntimeError, match="a base model already"), onnxblock.empty_base():
            pass
        with pytest.raises(InvalidModelError, match="Add"):
            blocks.Add()("nothing", "scores")
    with onnxblock.base(model), pytest.raises(LookupError, match="no value 'nothing'"):
        blocks.InputLike("nothing")()
    block = Training(losses.MSELoss())
    block.requires_grad("other")
    with onnxblock.base(model), pytest.raises(InvalidModelError, match="'other' in requires_grad"):
        block("scores")
    with pytest.raises(RuntimeError, match="not called yet"):
        block.parameters()

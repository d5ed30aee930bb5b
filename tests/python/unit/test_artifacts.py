# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Artifacts and training from them, against PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from ortrain import api, artifacts, optim
from ortrain.errors import DeviceError, FileError, InvalidModelError, UnsupportedError
from ortrain.onnx_export import export_module
from ortrain.tools.command import app

LOSSES = {
    artifacts.LossType.MSELoss: nn.MSELoss(),
    artifacts.LossType.L1Loss: nn.L1Loss(),
    artifacts.LossType.BCEWithLogitsLoss: nn.BCEWithLogitsLoss(),
    artifacts.LossType.CrossEntropyLoss: nn.CrossEntropyLoss(),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(5, 7)
        self.fc2 = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": self.fc2(torch.relu(self.fc1(x)))}


@pytest.fixture
def model(tmp_path: Path) -> tuple[Net, Path]:
    torch.manual_seed(0)
    net = Net()
    export_module(net, tmp_path / "net.onnx", (torch.randn(2, 5),))
    return net, tmp_path / "net.onnx"


def load(folder: Path, prefix: str = "") -> tuple[api.CheckpointState, api.Module, api.Optimizer]:
    state = api.CheckpointState.load_checkpoint(folder / f"{prefix}checkpoint")
    module = api.Module(
        folder / f"{prefix}training_model.onnx", state, folder / f"{prefix}eval_model.onnx"
    )
    return state, module, api.Optimizer(folder / f"{prefix}optimizer_model.onnx", module)


def batch(step: int, loss: artifacts.LossType) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(step)
    x = torch.randn(4, 5, generator=g)
    if loss == artifacts.LossType.CrossEntropyLoss:
        return x, torch.randint(0, 3, (4,), generator=g)
    return x, torch.rand(4, 3, generator=g)


@pytest.mark.parametrize("loss", LOSSES)
def test_follows_pytorch(model: tuple[Net, Path], tmp_path: Path, loss: Any) -> None:
    net, path = model
    artifacts.generate_artifacts(
        onnx.load(path),
        loss=loss,
        optimizer=optim.AdamConfig(lr=0.01, lambda_coef=0.1),
        artifact_directory=tmp_path,
        max_grad_norm=0.5,
    )
    _, module, optimizer = load(tmp_path)
    theirs = torch.optim.AdamW(net.parameters(), 0.01, weight_decay=0.1)
    assert module.input_names() == ["x", "target"]
    assert module.output_names() == ["loss", "scores"]
    for step in range(5):
        x, target = batch(step, loss)
        got, scores = module(x.numpy(), target)
        expected = net(x)["scores"]
        value = LOSSES[loss](expected, target)
        np.testing.assert_allclose(got, value.detach(), atol=1e-5)
        np.testing.assert_allclose(scores, expected.detach(), atol=1e-5)
        theirs.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        theirs.step()
        optimizer.step()
        module.lazy_reset_grad()
    x, target = batch(9, loss)
    with torch.no_grad():
        np.testing.assert_allclose(module.eval()(x, target)[1], net(x)["scores"], atol=1e-5)
    module.export_model_for_inferencing(tmp_path / "out.onnx", ["scores"])
    exported = onnx.load(tmp_path / "out.onnx")
    onnx.checker.check_model(exported, full_check=True)
    (result,) = onnx.reference.ReferenceEvaluator(exported).run(None, {"x": x.numpy()})
    np.testing.assert_allclose(result, net(x)["scores"].detach(), atol=1e-5)


def test_gradients_add_up_until_they_are_reset(model: tuple[Net, Path], tmp_path: Path) -> None:
    net, path = model
    loss = artifacts.LossType.MSELoss
    artifacts.generate_artifacts(
        path, loss=loss, optimizer=artifacts.OptimType.SGD, artifact_directory=tmp_path
    )
    state, module, optimizer = load(tmp_path)
    optimizer.set_learning_rate(0.1)
    assert optimizer.get_learning_rate() == 0.1
    theirs = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(4):
        x, target = batch(step, loss)
        module(x, target)
        LOSSES[loss](net(x)["scores"], target).backward()
        if step % 2:
            optimizer.step()
            module.lazy_reset_grad()
            theirs.step()
            theirs.zero_grad()
    for name, parameter in net.named_parameters():
        np.testing.assert_allclose(state.parameters[name].data, parameter.detach(), atol=1e-6)


def test_frozen_and_trained_parameters(model: tuple[Net, Path], tmp_path: Path) -> None:
    net, path = model
    artifacts.generate_artifacts(
        path,
        requires_grad=["fc2.weight"],
        frozen_params=["fc1.weight", "fc2.bias"],
        loss=artifacts.LossType.MSELoss,
        artifact_directory=tmp_path,
        prefix="net_",
    )
    state, module, optimizer = load(tmp_path, "net_")
    assert sorted(state.parameters) == ["fc1.weight", "fc2.bias", "fc2.weight"]
    assert module.get_parameters_size() == 21
    assert module.get_parameters_size(trainable_only=False) == 21 + 35 + 3
    module(*batch(0, artifacts.LossType.MSELoss))
    optimizer.step()
    before = dict(net.named_parameters())
    changed = {
        n for n, p in state.parameters.items() if not np.array_equal(p.data, before[n].detach())
    }
    assert changed == {"fc2.weight"}


def test_parameters_as_one_row(model: tuple[Net, Path], tmp_path: Path) -> None:
    _, path = model
    artifacts.generate_artifacts(path, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    state, module, _ = load(tmp_path)
    row = module.get_contiguous_parameters(trainable_only=True)
    assert row.shape == (module.get_parameters_size(),)
    module.copy_buffer_to_parameters(row * 2)
    np.testing.assert_array_equal(module.get_contiguous_parameters(), row * 2)
    with pytest.raises(ValueError, match="the buffer has 3 numbers"):
        module.copy_buffer_to_parameters(row[:3])
    state.parameters["fc2.bias"].data = np.ones(3, np.float32)
    assert (state.parameters["fc2.bias"].data == 1).all()
    with pytest.raises(ValueError, match="has shape"):
        state.parameters["fc2.bias"].data = np.ones(4, np.float32)


def test_checkpoints_go_on(model: tuple[Net, Path], tmp_path: Path) -> None:
    _, path = model
    loss = artifacts.LossType.MSELoss
    artifacts.generate_artifacts(path, loss=loss, artifact_directory=tmp_path)
    state, module, optimizer = load(tmp_path)

    def train(module: api.Module, optimizer: api.Optimizer, steps: range) -> list[float]:
        losses = []
        for step in steps:
            losses.append(float(module(*batch(step, loss))[0]))
            optimizer.step()
            module.lazy_reset_grad()
        return losses

    train(module, optimizer, range(3))
    state.properties["epoch"] = 3
    state.properties["name"] = "a"
    state.properties["rate"] = 0.5
    api.CheckpointState.save_checkpoint(state, tmp_path / "later", include_optimizer_state=True)
    expected = train(module, optimizer, range(3, 6))
    again = api.CheckpointState.load_checkpoint(tmp_path / "later")
    assert dict(again.properties) == {"epoch": 3, "name": "a", "rate": 0.5}
    other = api.Module(tmp_path / "training_model.onnx", again)
    assert (
        train(other, api.Optimizer(tmp_path / "optimizer_model.onnx", other), range(3, 6))
        == expected
    )


def test_linear_schedule(model: tuple[Net, Path], tmp_path: Path) -> None:
    _, path = model
    artifacts.generate_artifacts(path, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path)
    state, module, optimizer = load(tmp_path)
    scheduler = api.LinearLRScheduler(optimizer, 1.0, 2, 4)
    rates = [optimizer.get_learning_rate()]
    for step in range(5):
        module(*batch(step, artifacts.LossType.MSELoss))
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.get_learning_rate())
    assert rates == [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    api.CheckpointState.save_checkpoint(state, tmp_path / "later", include_optimizer_state=True)
    again = api.CheckpointState.load_checkpoint(tmp_path / "later")
    other = api.Module(tmp_path / "training_model.onnx", again)
    later = api.Optimizer(tmp_path / "optimizer_model.onnx", other)
    api.LinearLRScheduler(later, 1.0, 2, 10)
    assert later.get_learning_rate() == (10 - 5) / (10 - 2)
    with pytest.raises(ValueError, match="warmup_step_count is 5"):
        api.LinearLRScheduler(optimizer, 1.0, 5, 4)


def test_dropout_draws_anew_and_is_left_out(tmp_path: Path) -> None:
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["h"]),
            helper.make_node("Dropout", ["h", "ratio", "mode"], ["y"]),
        ],
        "g",
        [helper.make_tensor_value_info("x", 1, ["n", 16])],
        [helper.make_tensor_value_info("y", 1, ["n", 16])],
        [
            onnx.numpy_helper.from_array(np.eye(16, dtype=np.float32), "w"),
            helper.make_tensor("ratio", 1, [], [0.5]),
            helper.make_tensor("mode", onnx.TensorProto.BOOL, [], [True]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    artifacts.generate_artifacts(
        model, loss=artifacts.LossType.MSELoss, artifact_directory=tmp_path
    )
    _, module, _ = load(tmp_path)
    x = np.ones((4, 16), np.float32)
    first, second = module(x, x)[1], module(x, x)[1]
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(module.eval()(x, x)[1], x)


@pytest.mark.parametrize(
    ("optimizer", "given", "expected"),
    [
        (optim.AdamConfig(max_norm_clip=5.0), None, 5.0),
        (optim.AdamConfig(max_norm_clip=5.0), 2.0, 2.0),
        (optim.AdamConfig(max_norm_clip=0.0), 2.0, 2.0),
        (optim.AdamConfig(max_norm_clip=5.0), 0.0, None),
        (artifacts.OptimType.AdamW, None, None),
        (artifacts.OptimType.SGD, None, None),
    ],
)
def test_norm_that_is_clipped_to(
    model: tuple[Net, Path], tmp_path: Path, optimizer: Any, given: Any, expected: Any
) -> None:
    _, path = model
    artifacts.generate_artifacts(
        path,
        loss=artifacts.LossType.MSELoss,
        optimizer=optimizer,
        artifact_directory=tmp_path,
        max_grad_norm=given,
    )
    nodes = onnx.load(tmp_path / "optimizer_model.onnx").graph.node
    clips = [a.f for n in nodes if n.op_type == "ClipFactor" for a in n.attribute]
    assert clips == ([] if expected is None else [expected])


def huber() -> onnx.ModelProto:
    """Return mean(|d| - 0.5 where |d| > 1, else 0.5 d^2) of d = scores - wanted."""
    helper = onnx.helper
    nodes = [
        helper.make_node("Sub", ["scores", "wanted"], ["d"]),
        helper.make_node("Abs", ["d"], ["a"]),
        helper.make_node("Mul", ["d", "d"], ["s"]),
        helper.make_node("Mul", ["s", "half"], ["small"]),
        helper.make_node("Sub", ["a", "half"], ["large"]),
        helper.make_node("Greater", ["a", "one"], ["far"]),
        helper.make_node("Where", ["far", "large", "small"], ["each"]),
        helper.make_node("ReduceMean", ["each"], ["huber"], keepdims=0),
    ]
    values = [helper.make_tensor_value_info(n, 1, ["n", 3]) for n in ("scores", "wanted")]
    constants = [helper.make_tensor("half", 1, [], [0.5]), helper.make_tensor("one", 1, [], [1.0])]
    result = helper.make_tensor_value_info("huber", 1, [])
    graph = helper.make_graph(nodes, "huber", values, [result], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def test_graph_of_ones_own_as_the_loss(model: tuple[Net, Path], tmp_path: Path) -> None:
    net, path = model
    artifacts.generate_artifacts(
        path,
        loss=huber(),
        optimizer=optim.SGDConfig(lr=0.1),
        artifact_directory=tmp_path,
    )
    _, module, optimizer = load(tmp_path)
    assert module.input_names() == ["x", "wanted"]
    assert module.output_names() == ["huber", "scores"]
    theirs = torch.optim.SGD(net.parameters(), 0.1)
    for step in range(3):
        x, target = batch(step, artifacts.LossType.MSELoss)
        got = module(x, target * 4)[0]
        value = nn.functional.huber_loss(net(x)["scores"], target * 4)
        np.testing.assert_allclose(got, value.detach(), atol=1e-6)
        theirs.zero_grad()
        value.backward()
        theirs.step()
        optimizer.step()
        module.lazy_reset_grad()
    with pytest.raises(InvalidModelError, match="no output 'z' for the loss"):
        artifacts.generate_artifacts(path, loss=huber(), loss_input_names=["z"])


def test_wrong_arguments(model: tuple[Net, Path], tmp_path: Path) -> None:
    _, path = model
    generate = artifacts.generate_artifacts
    loss = artifacts.LossType.MSELoss
    with pytest.raises(UnsupportedError, match="ort_format"):
        generate(path, loss=loss, ort_format=True)
    with pytest.raises(UnsupportedError, match="nominal_checkpoint"):
        generate(path, loss=loss, nominal_checkpoint=True)
    with pytest.raises(TypeError, match="loss is 'mse'"):
        generate(path, loss="mse")
    with pytest.raises(TypeError, match="optimizer is 'adam'"):
        generate(path, loss=loss, optimizer="adam", artifact_directory=tmp_path / "a")
    with pytest.raises(InvalidModelError, match="'w' in frozen_params"):
        generate(path, loss=loss, frozen_params=["w"])
    with pytest.raises(InvalidModelError, match="stands in requires_grad and in frozen_params"):
        generate(path, ["fc1.bias"], ["fc1.bias"], loss=loss)
    with pytest.raises(InvalidModelError, match="no output 'z'"):
        generate(path, loss=loss, loss_input_names=["z"])
    with pytest.raises(InvalidModelError, match="no value 'z'"):
        generate(path, loss=loss, additional_output_names=["z"])
    assert not (tmp_path / "a" / "checkpoint").exists()
    generate(path, loss=loss, artifact_directory=tmp_path)
    state, module, optimizer = load(tmp_path)
    with pytest.raises(DeviceError, match="'cuda'"):
        api.Module(tmp_path / "training_model.onnx", state, device="cuda")
    with pytest.raises(InvalidModelError, match="needs the gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match="learning_rate is -1"):
        optimizer.set_learning_rate(-1.0)
    with pytest.raises(TypeError, match="property 'x'"):
        state.properties["x"] = [1]
    with pytest.raises(InvalidModelError, match="eval_model_uri"):
        api.Module(tmp_path / "training_model.onnx", state).eval()
    with pytest.raises(FileError):
        api.CheckpointState.load_checkpoint(tmp_path / "none")


def test_command_line(model: tuple[Net, Path], tmp_path: Path) -> None:
    _, path = model
    folder = tmp_path / "made"
    arguments = ["artifacts", str(path), "--loss", "cross_entropy", "-o", str(folder)]
    done = CliRunner().invoke(app, [*arguments, "--optimizer", "sgd", "--lr", "0.25"])
    assert done.exit_code == 0, done.output
    _, module, optimizer = load(folder)
    assert optimizer.get_learning_rate() == 0.25
    assert module(*batch(0, artifacts.LossType.CrossEntropyLoss))[0] > 0
    done = CliRunner().invoke(app, [*arguments, "--train", "w"])
    assert done.exit_code == 1
    assert '"w"' in done.output
    done = CliRunner().invoke(app, [*arguments, "--train", "[/red] [bold]w"])
    assert done.exit_code == 1
    assert "[/red] [bold]w" in done.output

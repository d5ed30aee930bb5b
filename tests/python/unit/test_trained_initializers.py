# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What of an ONNX model is trained where nobody names it, and how its losses begin."""

import warnings

import numpy
import onnx
import onnx.helper as make
import pytest
import torch
from torch import nn

from ortrain import api, artifacts, onnxblock
from ortrain.artifacts import LossType, OptimType
from ortrain.onnx_export import export_module

LOSSES = {
    "bce": (LossType.BCEWithLogitsLoss, nn.BCEWithLogitsLoss()),
    "mse": (LossType.MSELoss, nn.MSELoss()),
    "l1": (LossType.L1Loss, nn.L1Loss()),
    "block bce": (onnxblock.loss.BCEWithLogitsLoss, nn.BCEWithLogitsLoss()),
}


class Net(nn.Module):
    """With a buffer and a frozen parameter, a scale without axes, and scores that begin at 0."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 7), nn.Linear(7, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)
        self.register_buffer("positions", torch.arange(7.0))

    def forward(self, x):
        h = torch.relu(self.first(x)) * self.frozen + self.positions * 0.1
        return {"scores": self.last(h) * self.scale}


def trained(folder, net, loss, **options):
    """Return the state, module and optimizer of artifacts of a module."""
    export_module(net, folder / "net.onnx", (torch.randn(2, 5),))
    artifacts.generate_artifacts(
        folder / "net.onnx",
        loss=loss,
        optimizer=OptimType.SGD,
        artifact_directory=folder,
        **options,
    )
    state = api.CheckpointState.load_checkpoint(folder / "checkpoint")
    module = api.Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = api.Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(0.1)
    return state, module, optimizer


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_begin_at_zero_as_pytorchs(tmp_path, kind):
    net = Net()
    loss, reference = LOSSES[kind]
    made = loss if isinstance(loss, LossType) else loss()
    state, module, optimizer = trained(tmp_path, net, made)
    plain = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], 0.1)
    x, target = torch.randn(4, 5), torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    for _ in range(4):
        found = module(x.numpy(), target.numpy())
        optimizer.step()
        module.lazy_reset_grad()
        expected = reference(net(x)["scores"], target)
        plain.zero_grad()
        expected.backward()
        plain.step()
        value = found[0] if isinstance(found, (tuple, list)) else found
        torch.testing.assert_close(float(value), float(expected), rtol=1e-6, atol=1e-7)
    # The frozen one and the buffer are none: the file says what wants a gradient.
    assert set(state.parameters) == {name for name, p in net.named_parameters() if p.requires_grad}
    for name, parameter in net.named_parameters():
        if parameter.requires_grad:
            numpy.testing.assert_allclose(
                state.parameters[name].data, parameter.detach(), rtol=1e-5, atol=1e-6
            )


def test_extreme_logits_have_finite_losses(tmp_path):
    net = Net()
    _, module, _ = trained(tmp_path, net, LossType.BCEWithLogitsLoss)
    x, target = torch.randn(4, 5) * 1e4, torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    found = module(x.numpy(), target.numpy())
    value = found[0] if isinstance(found, (tuple, list)) else found
    assert numpy.isfinite(float(value))


def test_constants_of_a_loss_are_not_trained(tmp_path):
    net = Net()
    loss = onnxblock.loss.BCEWithLogitsLoss(
        weight=numpy.array([2.0], dtype=numpy.float32),
        pos_weight=numpy.array([3.0], dtype=numpy.float32),
    )
    state, _, _ = trained(tmp_path, net, loss)
    assert set(state.parameters) == {name for name, p in net.named_parameters() if p.requires_grad}


def test_frozen_initializers_may_be_named(tmp_path):
    net = Net()
    state, _, _ = trained(tmp_path, net, LossType.MSELoss, frozen_params=["frozen", "first.bias"])
    names = set(state.parameters)
    assert {"frozen", "first.bias", "scale"} <= names and "positions" not in names


def test_kept_statistics_are_told(tmp_path):
    names = ["scale", "bias", "mean", "var"]
    values = [
        onnx.numpy_helper.from_array(numpy.ones(3, dtype=numpy.float32), name) for name in names
    ]
    node = make.make_node(
        "BatchNormalization", ["x", *names], ["y", "m", "v"], name="norm", training_mode=1
    )
    tensor = onnx.TensorProto.FLOAT
    graph = make.make_graph(
        [node],
        "g",
        [make.make_tensor_value_info("x", tensor, ["n", 3])],
        [make.make_tensor_value_info("y", tensor, ["n", 3])],
        values,
    )
    model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
    with pytest.warns(RuntimeWarning, match="running statistics of 'norm' stay"):
        artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        node.attribute[0].i = 0
        del node.output[1:]
        graph.node[0].CopyFrom(node)
        model = make.make_model(graph, opset_imports=[make.make_opsetid("", 17)], ir_version=8)
        artifacts.generate_artifacts(model, loss=LossType.MSELoss, artifact_directory=tmp_path)

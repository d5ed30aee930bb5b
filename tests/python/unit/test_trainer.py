# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTTrainer against PyTorch's own steps."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import nn

from ortrain import optim
from ortrain.amp import DynamicLossScaler, LossScaler
from ortrain.errors import (
    InvalidModelError,
    OutOfMemoryError,
    ShapeError,
    UnsupportedError,
)
from ortrain.trainer import ORTTrainer, ORTTrainerOptions, TrainStepInfo

DESCRIPTION = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("predictions", ["batch", 4])],
}
OPTIMIZERS: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (lambda: optim.SGDConfig(lr=0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "nesterov": (
        lambda: optim.SGDConfig(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    ),
    "adamw": (
        lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    "adam": (
        lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1, weight_decay_mode=2),
        lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    ),
    "adagrad": (
        lambda: optim.AdagradConfig(lr=0.05, lr_decay=0.1),
        lambda p: torch.optim.Adagrad(p, 0.05, lr_decay=0.1),
    ),
    "lamb": (
        lambda: optim.LambConfig(lr=0.01, lambda_coef=0.1),
        lambda p: _lamb(p),
    ),
}


def _lamb(parameters: Any) -> torch.optim.Optimizer:
    return optim.FusedLAMB(parameters, 0.01, weight_decay=0.1, bias_correction=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.second = nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def options(**groups: Any) -> ORTTrainerOptions:
    groups.setdefault("utils", {"grad_norm_clip": False})
    return ORTTrainerOptions(groups)


def batch(size: int = 5, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator)
    return x, torch.randint(0, 4, (size,), generator=generator)


def assert_same_parameters(a: nn.Module, b: nn.Module, tolerance: float = 1e-5) -> None:
    for (name, x), y in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, msg=name)


_CLIPPING = [
    (n, c)
    for n in OPTIMIZERS
    for c in (None, 0.1)
    if c is None or "max_norm_clip" in OPTIMIZERS[n][0]().defaults
]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize(("name", "clip"), _CLIPPING)
def test_follows_pytorch(name: str, clip: float | None, accumulation: int) -> None:
    torch.manual_seed(1)
    make_config, make_optimizer = OPTIMIZERS[name]
    model = Net()
    other = copy.deepcopy(model)
    config = make_config()
    if clip is not None:
        config.defaults["max_norm_clip"] = clip
    trainer = ORTTrainer(
        model,
        DESCRIPTION,
        config,
        nn.CrossEntropyLoss(),
        options(
            utils={"grad_norm_clip": clip is not None},
            batch={"gradient_accumulation_steps": accumulation},
        ),
    )
    optimizer = make_optimizer(other.parameters())
    for step in range(6):
        optimizer.zero_grad()
        for part in range(accumulation):
            x, label = batch(5 + part, seed=step * 10 + part)
            loss, predictions = trainer.train_step(x, label)
            expected = other(x)
            expected_loss = nn.functional.cross_entropy(expected, label)
            (expected_loss / accumulation).backward()
            torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(predictions, expected.detach(), rtol=1e-4, atol=1e-4)
        if clip is not None:
            nn.utils.clip_grad_norm_(other.parameters(), clip)
        optimizer.step()
        assert_same_parameters(model, other)
    assert trainer.train_step_info.optimization_step == 6
    assert trainer.train_step_info.step == 6 * accumulation


def test_groups_by_name() -> None:
    torch.manual_seed(1)
    model = Net()
    other = copy.deepcopy(model)
    weights = ["first.weight", "second.weight"]
    groups = [{"params": weights, "lambda_coef": 0.5, "lr": 0.02}]
    trainer = ORTTrainer(
        model, DESCRIPTION, optim.AdamConfig(groups, lr=0.01), nn.CrossEntropyLoss(), options()
    )
    named = dict(other.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [named[n] for n in weights], "weight_decay": 0.5, "lr": 0.02},
            {"params": [p for n, p in named.items() if n not in weights], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for step in range(4):
        x, label = batch(seed=step)
        trainer.train_step(x, label)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), label).backward()
        optimizer.step()
    assert_same_parameters(model, other)


def test_frozen_parameters_stay() -> None:
    model = Net()
    model.second.bias.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    trainer = ORTTrainer(
        model,
        DESCRIPTION,
        optim.SGDConfig(lr=0.1),
        nn.CrossEntropyLoss(),
        options(utils={"grad_norm_clip": False, "frozen_weights": ["first.weight"]}),
    )
    trainer.train_step(*batch())
    after = model.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["first.bias", "second.weight"]


def test_buffers_and_dropout_follow_the_mode() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 4))
    other = copy.deepcopy(model)
    trainer = ORTTrainer(
        model, DESCRIPTION, optim.SGDConfig(lr=0.0), nn.CrossEntropyLoss(), options()
    )
    x, label = batch(64)
    first, second = (trainer.train_step(x, label)[1] for _ in range(2))
    assert not torch.equal(first, second)
    other.train()(x), other(x)
    torch.testing.assert_close(model[1].running_mean, other[1].running_mean)
    torch.testing.assert_close(model[1].running_var, other[1].running_var)
    assert model[1].num_batches_tracked == 2
    torch.testing.assert_close(trainer.eval_step(x, label)[1], other.eval()(x))
    assert model.training
    assert model[1].num_batches_tracked == 2


def test_seed_gives_the_same_masks() -> None:
    def losses() -> list[float]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))
        config = optim.AdamConfig(lr=0.01)
        trainer = ORTTrainer(model, DESCRIPTION, config, nn.CrossEntropyLoss(), options())
        return [trainer.train_step(*batch(seed=i))[0].item() for i in range(4)]

    assert losses() == losses()


def test_model_with_its_own_loss() -> None:
    class WithLoss(Net):
        def forward(self, x: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
            logits = super().forward(x)
            return {"loss": nn.functional.cross_entropy(logits, label), "logits": logits}

    model = WithLoss()
    other = copy.deepcopy(model)
    trainer = ORTTrainer(model, DESCRIPTION, optim.SGDConfig(lr=0.1), options=options())
    x, label = batch()
    loss, _ = trainer.train_step(label=label, x=x)
    expected = other(x, label)["loss"]
    expected.backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    torch.testing.assert_close(loss, expected.detach())
    assert_same_parameters(model, other)
    # One output is enough, and inputs may come as a dict or a list.
    short = {"inputs": DESCRIPTION["inputs"], "outputs": [("loss", [], True)]}
    alone = ORTTrainer(model, short, optim.SGDConfig(lr=0.1), options=options())
    assert isinstance(alone.train_step({"x": x, "label": label}), torch.Tensor)
    assert isinstance(alone.eval_step([x, label]), torch.Tensor)


def test_loss_function_with_tensors_of_its_own() -> None:
    model = Net()
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    trainer = ORTTrainer(
        model, DESCRIPTION, optim.SGDConfig(lr=0.1), nn.CrossEntropyLoss(weights), options()
    )
    x, label = batch()
    expected = nn.functional.cross_entropy(model(x), label, weights).detach()
    torch.testing.assert_close(trainer.train_step(x, label)[0], expected)
    assert "loss_fn" not in dict(model.named_children())


def test_fetches() -> None:
    trainer = ORTTrainer(
        Net(), DESCRIPTION, optim.SGDConfig(lr=0.1), nn.CrossEntropyLoss(), options()
    )
    x, label = batch()
    predictions = trainer.train_step(x, label, fetches=["predictions"])
    assert predictions.shape == (5, 4)
    trainer.train_step_info.fetches = ["predictions"]
    for step in (trainer.train_step, trainer.eval_step):
        assert step(x, label).shape == (5, 4)
        assert step(x, label, fetches=["loss"]).shape == ()
    trainer.train_step_info.fetches = []
    loss = trainer.eval_step(x, label, fetches=["loss"])
    assert loss.shape == ()
    with pytest.raises(ValueError, match="'other' in fetches is no output"):
        trainer.train_step(x, label, fetches=["other"])


def test_learning_rate_by_scheduler() -> None:
    model = nn.Linear(6, 4)
    other = copy.deepcopy(model)
    scheduler = optim.lr_scheduler.LinearWarmupLRScheduler(total_steps=10, warmup=0.3)
    trainer = ORTTrainer(
        model,
        DESCRIPTION,
        optim.SGDConfig(lr=0.5),
        nn.CrossEntropyLoss(),
        options(lr_scheduler=scheduler),
    )
    optimizer = torch.optim.SGD(other.parameters(), 0.5)
    for step in range(10):
        x, label = batch(seed=step)
        trainer.train_step(x, label)
        factor = step / 3 if step < 3 else (10 - step) / (10 - 3)
        optimizer.param_groups[0]["lr"] = 0.5 * factor
        assert scheduler.get_last_lr() == [pytest.approx(0.5 * factor)]
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(x), label).backward()
        optimizer.step()
    assert_same_parameters(model, other)


def test_mixed_precision_trains_in_float32() -> None:
    torch.manual_seed(2)
    model = Net()
    other = copy.deepcopy(model)
    trainer = ORTTrainer(
        model,
        DESCRIPTION,
        optim.AdamConfig(lr=0.01),
        nn.CrossEntropyLoss(),
        options(mixed_precision={"enabled": True, "loss_scaler": LossScaler(1024.0)}),
    )
    optimizer = torch.optim.AdamW(other.parameters(), 0.01, weight_decay=0.0)
    for step in range(5):
        x, label = batch(seed=step)
        loss, predictions = trainer.train_step(x, label)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            expected = nn.functional.cross_entropy(other(x), label)
        expected.backward()
        optimizer.step()
        assert predictions.dtype == torch.bfloat16
        torch.testing.assert_close(loss.float(), expected.detach().float(), rtol=0.02, atol=0.02)
    assert model.first.weight.dtype == torch.float32
    assert_same_parameters(model, other, 0.03)


def test_loss_scaler_halves_and_the_step_is_left_out() -> None:
    model = Net()
    scaler = DynamicLossScaler(loss_scale=8.0, up_scale_window=2)
    trainer = ORTTrainer(
        model,
        DESCRIPTION,
        optim.SGDConfig(lr=0.1),
        nn.CrossEntropyLoss(),
        options(mixed_precision={"enabled": True, "loss_scaler": scaler}),
    )
    x, label = batch()
    before = copy.deepcopy(model.state_dict())
    trainer.train_step(x * float("inf"), label)
    info = trainer.train_step_info
    assert (info.all_finite, info.optimization_step, info.step) == (False, 0, 1)
    assert scaler.loss_scale == 4.0
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    for _ in range(2):
        trainer.train_step(x, label)
    assert (info.all_finite, info.optimization_step, scaler.loss_scale) == (True, 2, 8.0)


def test_new_sizes_and_conditions_on_sizes() -> None:
    class Branching(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result = super().forward(x)
            return result * 2 if x.shape[0] > 8 else result

    torch.manual_seed(1)
    model = Branching()
    other = copy.deepcopy(model)
    trainer = ORTTrainer(
        model, DESCRIPTION, optim.AdamConfig(lr=0.01), nn.CrossEntropyLoss(), options()
    )
    optimizer = torch.optim.AdamW(other.parameters(), 0.01, weight_decay=0.0)
    for step, size in enumerate([4, 12, 5, 9, 4]):
        x, label = batch(size, seed=step)
        loss, _ = trainer.train_step(x, label)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(other(x), label)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    assert_same_parameters(model, other)


def test_tied_parameters_are_trained_once() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(12, 8)
            self.head = nn.Linear(8, 12, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(tokens)).flatten(0, 1)

    torch.manual_seed(1)
    model = Tied()
    other = copy.deepcopy(model)
    description = {
        "inputs": [("tokens", ["b", "s"]), ("label", ["n"])],
        "outputs": [("loss", [], True), ("logits", ["n", 12])],
    }
    trainer = ORTTrainer(
        model, description, optim.AdamConfig(lr=0.01), nn.CrossEntropyLoss(), options()
    )
    optimizer = torch.optim.AdamW(other.parameters(), 0.01, weight_decay=0.0)
    for step in range(4):
        tokens = torch.randint(0, 12, (2, 5), generator=torch.Generator().manual_seed(step))
        label = tokens.roll(-1, 1).flatten()
        trainer.train_step(tokens, label)
        optimizer.zero_grad()
        nn.functional.cross_entropy(other(tokens), label).backward()
        optimizer.step()
    assert_same_parameters(model, other)


def test_onnx_model_is_trained() -> None:
    model = Net()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = ORTTrainer(_onnx_of(weights), DESCRIPTION, optim.SGDConfig(lr=0.1), options=options())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        x, label = batch(seed=step)
        loss, predictions = trainer.train_step(x, label)
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(model(x), label)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(predictions, model(x).detach())
        optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(trainer.engine.tensors[name], value.detach())
    x, label = batch(3)
    torch.testing.assert_close(trainer.eval_step(x, label)[1], model(x).detach())


def _onnx_of(weights: dict[str, torch.Tensor]) -> onnx.ModelProto:
    helper = onnx.helper
    float_, int_ = onnx.TensorProto.FLOAT, onnx.TensorProto.INT64
    nodes = [
        helper.make_node("Gemm", ["x", "first.weight", "first.bias"], ["h"], transB=1),
        helper.make_node("Tanh", ["h"], ["t"]),
        helper.make_node("Dropout", ["t", "ratio", "training"], ["d"]),
        helper.make_node("Gemm", ["d", "second.weight", "second.bias"], ["predictions"], transB=1),
        helper.make_node("SoftmaxCrossEntropyLoss", ["predictions", "label"], ["loss"]),
    ]
    initializers = [onnx.numpy_helper.from_array(v.numpy(), n) for n, v in weights.items()]
    initializers += [
        helper.make_tensor("ratio", float_, [], [0.0]),
        helper.make_tensor("training", onnx.TensorProto.BOOL, [], [True]),
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info("x", float_, ["batch", 6]),
            helper.make_tensor_value_info("label", int_, ["batch"]),
        ],
        [
            helper.make_tensor_value_info("predictions", float_, ["batch", 4]),
            helper.make_tensor_value_info("loss", float_, []),
        ],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_memory_limit_refuses_and_changes_nothing() -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    trainer = ORTTrainer(
        model,
        DESCRIPTION,
        optim.SGDConfig(lr=0.1),
        nn.CrossEntropyLoss(),
        options(device={"id": "cpu", "mem_limit": 16}),
    )
    with pytest.raises(OutOfMemoryError, match="the limit is 16"):
        trainer.train_step(*batch())
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())
    assert trainer.train_step_info.step == 0


def test_graphs_are_saved_and_the_export_is_checked(tmp_path: Any) -> None:
    paths = {
        f"model_{name}_path": str(tmp_path / f"{name}.onnx")
        for name in (
            "after_graph_transforms",
            "with_gradient_graph",
            "with_training_graph",
            "with_training_graph_after_optimization",
        )
    }
    trainer = ORTTrainer(
        Net(),
        DESCRIPTION,
        optim.AdamConfig(lr=0.1),
        nn.CrossEntropyLoss(),
        options(debug={"check_model_export": True, "graph_save_paths": paths}),
    )
    trainer.train_step(*batch())
    operators = [{n.op_type for n in onnx.load(path).graph.node} for path in paths.values()]
    assert ["AdamStep" in ops for ops in operators] == [False, False, True, True]
    assert ["LinearWeightGrad" in ops for ops in operators] == [False, True, True, True]


def _sgd(model: nn.Module, description: Any = None, **groups: Any) -> ORTTrainer:
    config = optim.SGDConfig(lr=0.1)
    given = description or {
        "inputs": [("x", ["b", 6]), ("y", ["b", 6])],
        "outputs": [("loss", [], True)],
    }
    return ORTTrainer(model, given, config, nn.MSELoss(), options(**groups))


def test_replaced_parameters_and_flags_are_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    trainer = _sgd(model)
    x, y = torch.randn(2, 5, 6)
    trainer.train_step(x, y)
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)
    before = model[0].weight.detach().clone()
    trainer.train_step(x, y)
    assert not torch.equal(before, model[0].weight)
    model[0].weight.requires_grad_(False)
    model[1].eval()
    before, mean = model[0].weight.detach().clone(), model[1].running_mean.clone()
    other = copy.deepcopy(model)
    trainer.train_step(x, y)
    assert torch.equal(before, model[0].weight)
    assert torch.equal(mean, model[1].running_mean)
    nn.functional.mse_loss(other(x), y).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    assert_same_parameters(model, other)
    model.double()
    loss = trainer.train_step(x.double(), y.double())
    assert loss.dtype == torch.float64


def test_replaced_layers_and_numbers_are_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.9))
    trainer = ORTTrainer(
        model,
        {"inputs": [("x", ["b", 6]), ("y", ["b", 6])], "outputs": [("loss", [], True)]},
        optim.AdamConfig(lr=0.01),
        nn.MSELoss(),
        options(),
    )
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    trainer.train_step(x, y)
    model[1].p = 0.0
    model[0] = nn.Linear(6, 6)
    before = model[0].weight.detach().clone()
    expected = nn.functional.mse_loss(model(x), y).detach()
    torch.testing.assert_close(trainer.train_step(x, y), expected)
    assert not torch.equal(before, model[0].weight)
    model.double()
    expected = nn.functional.mse_loss(model(x.double()), y.double()).detach()
    torch.testing.assert_close(trainer.train_step(x.double(), y.double()), expected)
    assert trainer.engine.state.optimizer["0.weight:exp_avg"].dtype == torch.float64
    del model[0].bias
    model[0].register_parameter("bias", None)
    trainer.train_step(x.double(), y.double())
    assert sorted(trainer.engine.tensors) == ["0.weight"]
    assert "0.bias:exp_avg" not in trainer.engine.state.optimizer


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3 * ctx.saved_tensors[0] ** 2


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Cube.apply(torch.tanh(self.a(x))))


class WithCheckpoint(WithFunction):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.Sequential(self.a, nn.GELU())
        return self.b(torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False))


@pytest.mark.parametrize("kind", [WithFunction, WithCheckpoint])
def test_functions_and_checkpoints_inside(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    other = copy.deepcopy(model)
    trainer = _sgd(model)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(3):
        x, y = torch.randn(5, 6), torch.randn(5, 6)
        trainer.train_step(x, y)
        optimizer.zero_grad()
        nn.functional.mse_loss(other(x), y).backward()
        optimizer.step()
    assert_same_parameters(model, other)


def test_memory_that_is_shared_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    trainer = _sgd(model)
    with pytest.raises(UnsupportedError, match=r"input 'x' lies in the memory of '1.weight'"):
        trainer.train_step(model[1].weight.detach(), torch.randn(6, 6))
    model[1].weight = nn.Parameter(model[0].weight.data.t())
    with pytest.raises(UnsupportedError, match=r"'0.weight' and '1.weight' lie in the same memory"):
        _sgd(model)


def test_accumulation_over_branches_that_train_different_parameters_is_refused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) if x.shape[0] == 2 else self.b(x)

    trainer = _sgd(Branches(), batch={"gradient_accumulation_steps": 2})
    trainer.train_step(*torch.randn(2, 3, 6))
    with pytest.raises(UnsupportedError, match="train different parameters"):
        trainer.train_step(*torch.randn(2, 2, 6))


def test_gradients_that_are_made_of_each_other() -> None:
    class Differences(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.q, self.r = (nn.Parameter(torch.randn(6)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sigmoid(-(self.p - self.q - self.r)) * x + (self.p - self.q)

    torch.manual_seed(0)
    model = Differences()
    other = copy.deepcopy(model)
    trainer = _sgd(model, batch={"gradient_accumulation_steps": 2})
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for _ in range(4):
        x, y = torch.randn(2, 5, 6)
        trainer.train_step(x, y)
        (nn.functional.mse_loss(other(x), y) / 2).backward()
        if trainer.train_step_info.step % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(model, other)


def test_buffers_that_are_only_written() -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("last", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.last.copy_(x.mean(0))
            return self.layer(x)

    model = Remembers()
    trainer = _sgd(model)
    x, y = torch.randn(2, 5, 6)
    trainer.train_step(x, y)
    torch.testing.assert_close(model.last, x.mean(0))
    trainer.eval_step(x + 1, y)
    torch.testing.assert_close(model.last, (x + 1).mean(0))


def test_arguments_stay_as_they_are() -> None:
    trainer = _sgd(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)))
    x, y = torch.randn(5, 6), torch.randn(5, 6)
    before = x.clone()
    trainer.eval_step(x, y)
    trainer.train_step(x, y)
    assert torch.equal(x, before)


def test_wrong_arguments() -> None:
    model, config, loss_fn = Net(), optim.SGDConfig(lr=0.1), nn.CrossEntropyLoss()
    with pytest.raises(TypeError, match="model must be"):
        ORTTrainer(3, DESCRIPTION, config)
    with pytest.raises(TypeError, match="optim_config must be"):
        ORTTrainer(model, DESCRIPTION, torch.optim.SGD)
    with pytest.raises(TypeError, match="options must be"):
        ORTTrainer(model, DESCRIPTION, config, loss_fn, {})
    without_loss = {"inputs": DESCRIPTION["inputs"], "outputs": [("predictions", ["b", 4])]}
    with pytest.raises(ValueError, match="no output as the loss"):
        ORTTrainer(model, without_loss, config, loss_fn)
    with pytest.raises(InvalidModelError, match="'third' is no parameter"):
        ORTTrainer(model, DESCRIPTION, optim.SGDConfig([{"params": ["third"]}]), loss_fn)
    with pytest.raises(InvalidModelError, match="'third' is no parameter"):
        ORTTrainer(
            model, DESCRIPTION, config, loss_fn, options(utils={"frozen_weights": ["third"]})
        )
    trainer = ORTTrainer(model, DESCRIPTION, config, loss_fn, options())
    x, label = batch()
    with pytest.raises(TypeError, match="'label' is missing"):
        trainer.train_step(x)
    with pytest.raises(TypeError, match="'labels' is no input of model_desc: x, label"):
        trainer.train_step(x, labels=label)
    with pytest.raises(TypeError, match="'x' is given twice"):
        trainer.train_step(x, label, x=x)
    with pytest.raises(TypeError, match="there are 3 inputs"):
        trainer.train_step(x, label, label)
    with pytest.raises(TypeError, match="'label' is a int, expected a tensor"):
        trainer.train_step(x, 3)
    with pytest.raises(IndexError, match="is outside of"):
        trainer.train_step(x, label + 7)
    trainer.eval_step(x, label)
    with pytest.raises(ShapeError, match=r"input 'x' has shape \[5, 5\], model_desc says"):
        trainer.train_step(x[:, :5], label)
    with pytest.raises(ShapeError, match="'batch' is 5 elsewhere"):
        trainer.train_step(x, label[:3])
    assert trainer.train_step_info.step == 0
    trainer.train_step(x, label)


def test_outputs_that_differ_from_their_description(caplog: pytest.LogCaptureFixture) -> None:
    trainer = ORTTrainer(Net(), DESCRIPTION, optim.SGDConfig(), nn.CrossEntropyLoss(), options())
    trainer.eval_step(*batch())
    trainer.model.second = nn.Linear(trainer.model.second.in_features, 5)
    with pytest.raises(ShapeError, match="output 'predictions' has shape"):
        trainer.eval_step(*batch())
    assert not caplog.messages
    many = {"inputs": DESCRIPTION["inputs"], "outputs": [("loss", [], True), ("p", []), ("q", [])]}
    trainer = ORTTrainer(Net(), many, optim.SGDConfig(), nn.CrossEntropyLoss(), options())
    with pytest.raises(InvalidModelError, match="describes 3 outputs, the model has 2"):
        trainer.eval_step(*batch())


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"bach": {}}, ValueError, "unknown option 'bach'"),
        ({"batch": {"steps": 1}}, ValueError, "unknown option 'batch.steps'"),
        ({"batch": 3}, TypeError, "must be a dict"),
        ({"batch": {"gradient_accumulation_steps": 0}}, ValueError, "expected 1 or more"),
        ({"batch": {"gradient_accumulation_steps": True}}, TypeError, "expected int"),
        ({"device": {"id": "cuda"}}, UnsupportedError, "'device.id' is 'cuda'"),
        ({"distributed": {"world_rank": 2, "world_size": 2}}, ValueError, "world_rank' is 2"),
        ({"distributed": {"local_rank": 3}}, ValueError, "local_rank' is 3, expected less"),
        (
            {"distributed": {"world_size": 4, "data_parallel_size": 2}},
            ValueError,
            "data_parallel_size' is 2, expected 'distributed.world_size', 4",
        ),
        (
            {"distributed": {"world_size": 3, "enable_adasum": True}},
            UnsupportedError,
            "enable_adasum.*world_size is 3, expected a power of two",
        ),
        (
            {"distributed": {"deepspeed_zero_optimization": {"stage": 2}}},
            UnsupportedError,
            "stage' is 2: .*DeepSpeed around ORTModule",
        ),
        (
            {"distributed": {"horizontal_parallel_size": 2}},
            UnsupportedError,
            "horizontal_parallel_size' is 2: there is no tensor parallelism",
        ),
        (
            {"distributed": {"pipeline_parallel": {"pipeline_parallel_size": 2}}},
            UnsupportedError,
            "pipeline",
        ),
        ({"mixed_precision": {"loss_scaler": 3}}, TypeError, "mixed_precision.loss_scaler"),
        ({"provider_options": 1}, TypeError, "provider_options"),
        ({"utils": {"frozen_weights": [1]}}, TypeError, "names of parameters"),
        ({"graph_transformer": {"number_recompute_layers": -2}}, ValueError, "number_recompute"),
    ],
)
def test_options_are_refused_by_name(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ORTTrainerOptions(given)


def test_options_have_defaults() -> None:
    made = ORTTrainerOptions()
    assert made.batch.gradient_accumulation_steps == 1
    assert made.utils.grad_norm_clip
    assert made.utils.frozen_weights == []
    assert ORTTrainerOptions().utils.frozen_weights is not made.utils.frozen_weights
    assert made.distributed.deepspeed_zero_optimization.stage == 0
    assert made.distributed.world_size == made.distributed.data_parallel_size == 1
    assert ORTTrainerOptions({"distributed": {"world_size": 3}}).distributed.data_parallel_size == 3


@pytest.mark.parametrize(
    ("description", "error", "text"),
    [
        ([], TypeError, "must be a dict"),
        ({"inputs": []}, ValueError, "no 'outputs'"),
        ({"inputs": [], "outputs": [], "other": []}, ValueError, "unknown keys: 'other'"),
        ({"inputs": [("x",)], "outputs": []}, TypeError, r"\['inputs'\]\[0\]"),
        ({"inputs": [("x", 3)], "outputs": []}, TypeError, "must be a list"),
        ({"inputs": [("x", [2.5])], "outputs": []}, TypeError, "holds 2.5"),
        ({"inputs": [("x", [-1])], "outputs": []}, ValueError, "holds -1"),
        ({"inputs": [("x", []), ("x", [])], "outputs": []}, ValueError, "two entries named 'x'"),
        ({"inputs": [], "outputs": [("a", [], 1)]}, TypeError, "is_loss"),
        (
            {"inputs": [], "outputs": [("a", [], True), ("b", [], True)]},
            ValueError,
            "more than one",
        ),
    ],
)
def test_descriptions_are_checked(description: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ORTTrainer(Net(), description, optim.SGDConfig())


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: optim.AdamConfig(lr=-1.0), ValueError, "lr is -1.0"),
        (lambda: optim.AdamConfig(alpha=1.0), ValueError, "alpha is 1.0"),
        (lambda: optim.AdamConfig([{"lambda_coef": 1.0}]), ValueError, "'params'"),
        (lambda: optim.AdamConfig([{"params": ["a"], "eps": 1.0}]), ValueError, "'eps'"),
        (lambda: optim.AdamConfig([{"params": "a"}]), TypeError, "a list of names"),
        (lambda: optim.AdamConfig("a"), TypeError, "list of dicts"),
        (lambda: optim.AdamConfig([{"params": ["a"], "lr": 1.0}], lr=0.0), ValueError, "lr"),
        (lambda: optim.LambConfig(ratio_min=2.0, ratio_max=1.0), ValueError, "ratio_min"),
        (lambda: optim.SGDConfig(nesterov=True), ValueError, "Nesterov"),
        (lambda: DynamicLossScaler(min_loss_scale=2.0, max_loss_scale=1.0), ValueError, "greater"),
        (lambda: LossScaler(0.0), ValueError, "above 0"),
        (lambda: TrainStepInfo(None), TypeError, "optimizer_config"),
        (lambda: TrainStepInfo(optim.SGDConfig(), step=-1), ValueError, "step is -1"),
        (lambda: optim.lr_scheduler.LinearWarmupLRScheduler(0), ValueError, "total_steps"),
        (lambda: optim.lr_scheduler.LinearWarmupLRScheduler(5, 1.0), ValueError, "warmup"),
        (lambda: optim.lr_scheduler.CosineWarmupLRScheduler(5, 0.0), ValueError, "cycles"),
        (lambda: optim.lr_scheduler.PolyWarmupLRScheduler(5, power=-1.0), ValueError, "power"),
    ],
)
def test_numbers_are_checked(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


def test_options_without_effect_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    casts = {"strategy": "INSERT_AND_REDUCE", "level": 2, "allow": ["ReLU"]}
    given = options(
        graph_transformer={"propagate_cast_ops_config": casts},
        session_options=object(),
        provider_options={"CPUExecutionProvider": {}},
    )
    assert given.graph_transformer.propagate_cast_ops_config.level == 2
    said = [record.getMessage() for record in caplog.records]
    for name in ("session_options", "provider_options"):
        assert any(f"option '{name}' has no effect" in line for line in said)
    options(session_options=None, provider_options={})
    assert len(caplog.records) == len(said)


def test_descriptions_and_configurations_are_read_as_in_2020() -> None:
    trainer = ORTTrainer(Net(), DESCRIPTION, optim.AdamConfig(lr=0.1), nn.CrossEntropyLoss())
    described = trainer.model_desc
    name, shape = described.inputs[0]
    assert (name, shape) == (described.inputs[0].name, list(DESCRIPTION["inputs"][0][1]))
    assert isinstance(shape, list) and described.outputs[0][2] is True
    assert described.learning_rate.shape == [1]
    assert described.learning_rate.dtype == torch.float32
    config = optim.LambConfig([{"params": ["a"], "lambda": 0.5}], alpha=0.8, epsilon=1e-3)
    assert config.params[0]["lambda_coef"] == 0.5
    assert (config.alpha, config.beta, config.epsilon) == (0.8, 0.999, 1e-3)
    assert (config.lambda_coef, config.max_norm_clip) == (0.0, 1.0)
    assert config.do_bias_correction is False and config.ratio_max == math.inf
    with pytest.raises(AttributeError, match="alpha is decided when a LambConfig is made"):
        config.alpha = 0.5
    with pytest.raises(AttributeError, match="no attribute 'gamma'"):
        config.gamma  # noqa: B018
    assert pickle.loads(pickle.dumps(copy.deepcopy(config))).alpha == 0.8
    with pytest.raises(ValueError, match="'lambda' and 'lambda_coef'"):
        optim.LambConfig([{"params": ["a"], "lambda": 0.5, "lambda_coef": 0.1}])
    assert issubclass(optim.LinearWarmupLRScheduler, optim._LRScheduler)
    assert isinstance(config, optim._OptimizerConfig)


def test_copies_of_the_counters_stay_as_they_are() -> None:
    trainer = ORTTrainer(Net(), DESCRIPTION, optim.SGDConfig(lr=0.1), nn.CrossEntropyLoss())
    trainer.train_step(*batch(seed=0))
    info = trainer.train_step_info
    copies = [copy.copy(info), copy.deepcopy(info), pickle.loads(pickle.dumps(info))]
    trainer.train_step(*batch(seed=1))
    assert [each.optimization_step for each in copies] == [1, 1, 1]
    assert info.optimization_step == 2
    info.optimization_step = 10
    trainer.train_step(*batch(seed=2))
    assert "optimization_step=11, step=3" in repr(info)


@pytest.mark.parametrize("total, warmup", [(10, 0.3), (7, 0.0), (20, 0.25)])
def test_schedules_are_those_of_transformers(total: int, warmup: float) -> None:
    schedulers = optim.lr_scheduler
    steps = warmup * total
    pairs = [
        (
            schedulers.ConstantWarmupLRScheduler(total, warmup),
            lambda o: transformers.get_constant_schedule_with_warmup(o, steps),
        ),
        (
            schedulers.LinearWarmupLRScheduler(total, warmup),
            lambda o: transformers.get_linear_schedule_with_warmup(o, steps, total),
        ),
        (
            schedulers.CosineWarmupLRScheduler(total, 0.5, warmup),
            lambda o: transformers.get_cosine_schedule_with_warmup(o, steps, total),
        ),
        (
            schedulers.PolyWarmupLRScheduler(total, 1e-3, 2.0, warmup),
            lambda o: transformers.get_polynomial_decay_schedule_with_warmup(
                o, steps, total, lr_end=1e-3, power=2.0
            ),
        ),
    ]
    for ours, theirs in pairs:
        info = TrainStepInfo(optim.SGDConfig(lr=0.5))
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.5)
        schedule = theirs(optimizer)
        for step in range(total + 2):
            info.optimization_step = step
            assert ours._step(info) == [pytest.approx(optimizer.param_groups[0]["lr"])]
            assert info.optimizer_config.lr == 0.5
            optimizer.step()
            schedule.step()


def test_schedules() -> None:
    def rates(scheduler: Any, steps: int = 10) -> list[float]:
        info = TrainStepInfo(optim.SGDConfig(lr=1.0))
        result = []
        for step in range(steps):
            info.optimization_step = step
            result += scheduler._step(info)
        return result

    schedulers = optim.lr_scheduler
    assert rates(schedulers.ConstantWarmupLRScheduler(10, 0.5)) == [
        pytest.approx(min(1.0, i / 5)) for i in range(10)
    ]
    # Less than one step of warm-up, as the default is in short runs: the first rate is 0 all the same.
    assert rates(schedulers.ConstantWarmupLRScheduler(10)) == [0.0] + [1.0] * 9
    assert rates(schedulers.LinearWarmupLRScheduler(10, 0.25), 12) == pytest.approx(
        [0, 1 / 2.5, 2 / 2.5, 7 / 7.5, 6 / 7.5, 5 / 7.5, 4 / 7.5, 3 / 7.5, 2 / 7.5, 1 / 7.5, 0, 0]
    )
    cosine = rates(schedulers.CosineWarmupLRScheduler(10, warmup=0.0), 11)
    assert cosine == pytest.approx([0.5 * (1 + math.cos(math.pi * i / 10)) for i in range(11)])
    poly = rates(schedulers.PolyWarmupLRScheduler(10, lr_end=0.1, power=2.0, warmup=0.2), 12)
    assert poly[:2] == [0.0, 0.5] and poly[10:] == pytest.approx([0.1, 0.1])
    assert poly[2:10] == pytest.approx([0.9 * (1 - i / 8) ** 2 + 0.1 for i in range(8)])
    # A rate that is set in between is the base from then on.
    info = TrainStepInfo(optim.SGDConfig(lr=1.0))
    scheduler = schedulers.ConstantWarmupLRScheduler(10, 0.0)
    scheduler._step(info)
    info.optimizer_config.lr = 0.25
    assert scheduler._step(info) == [0.25]

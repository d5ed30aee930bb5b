# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Mixed precision of ORTTrainer: ONNX models and modules, lists of operators, refusals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

from ortrain import ORTTrainer, ORTTrainerOptions, optim
from ortrain.amp import DynamicLossScaler, GradScaler
from ortrain.errors import InvalidModelError, UnsupportedError
from ortrain.trainer.sources import ModuleSource

DESCRIPTION = {
    "inputs": [("x", ["batch", 3, 6, 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("predictions", ["batch", 4])],
}
TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.006}


class Net(nn.Module):
    """A convolution, a product with a bias behind it, a norm and a softmax in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Parameter(torch.randn(16, 16) / 4)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.conv(x)).flatten(2).transpose(1, 2)
        h = self.norm(h) @ torch.softmax(self.mix, -1)
        return self.head(torch.tanh(h * 4).mean(1))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 3, 6, 6, generator=generator)
    return x, torch.randint(0, 4, (5,), generator=generator)


def trainer_of(model: Any, **options: Any) -> ORTTrainer:
    options.setdefault("utils", {"grad_norm_clip": False})
    loss = nn.CrossEntropyLoss() if isinstance(model, nn.Module) else None
    return ORTTrainer(
        model, DESCRIPTION, optim.AdamConfig(lr=0.01), loss, ORTTrainerOptions(options)
    )


@pytest.fixture
def net() -> Net:
    torch.manual_seed(4)
    return Net()


@pytest.fixture
def onnx_net(net: Net, tmp_path: Path) -> onnx.ModelProto:
    trainer = trainer_of(copy.deepcopy(net))
    trainer.eval_step(*batch(0))
    trainer.save_as_onnx(tmp_path / "net.onnx")
    return onnx.load(tmp_path / "net.onnx")


def losses_of_pytorch(model: nn.Module, steps: int, dtype: torch.dtype | None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=0.0)
    losses = []
    for step in range(steps):
        x, label = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(model(x), label)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(trainer: ORTTrainer, steps: int) -> list[float]:
    return [trainer.train_step(*batch(step))[0].item() for step in range(steps)]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_onnx_model_trains_with_parameters_in_float32(
    net: Net, onnx_net: onnx.ModelProto, dtype: str, scaled: bool
) -> None:
    scaler = GradScaler(init_scale=256.0, growth_interval=4) if scaled else None
    trainer = trainer_of(
        onnx_net, mixed_precision={"enabled": True, "dtype": dtype, "loss_scaler": scaler}
    )
    got = losses_of(trainer, 8)
    half = getattr(torch, dtype)
    assert got == pytest.approx(losses_of_pytorch(net, 8, None), abs=TOLERANCE[half])
    loss, predictions = trainer.eval_step(*batch(0))
    assert loss.dtype == predictions.dtype == torch.float32
    for tensor in trainer.engine.tensors.values():
        assert tensor.dtype == torch.float32
    # It is 16 bits that were computed in.
    exact = trainer_of(onnx_net)
    assert got != losses_of(exact, 8)
    if scaled:
        assert scaler.loss_scale == 1024.0


def count_of_casts(trainer: ORTTrainer) -> int:
    """Return how many casts stand in the graph before autodiff."""
    source, _ = trainer.engine.training_program(dict(zip(("x", "label"), batch(0), strict=True)))
    return source.graph.text().count("Cast <")


def test_lists_of_operators(onnx_net: onnx.ModelProto) -> None:
    def casts(**lists: Any) -> int:
        trainer = trainer_of(onnx_net, mixed_precision={"enabled": True, **lists})
        losses_of(trainer, 1)
        return count_of_casts(trainer)

    products = ["MatMul", "Gemm", "Conv", "ortrain::Linear"]
    assert casts() > 4
    assert casts(deny=products) == 0
    exact = losses_of(trainer_of(onnx_net), 5)
    denied = trainer_of(onnx_net, mixed_precision={"enabled": True, "deny": products})
    assert losses_of(denied, 5) == exact


def test_module_by_lists(net: Net) -> None:
    expected = losses_of_pytorch(copy.deepcopy(net), 8, None)
    trainer = trainer_of(
        copy.deepcopy(net), mixed_precision={"enabled": True, "deny": ["Conv"], "allow": ["Tanh"]}
    )
    got = losses_of(trainer, 8)
    assert got == pytest.approx(expected, abs=TOLERANCE[torch.bfloat16])
    assert trainer.model.head.weight.dtype == torch.float32
    assert trainer.train_step(*batch(0))[1].dtype == torch.float32  # autocast gives bfloat16
    nothing = trainer_of(
        copy.deepcopy(net),
        mixed_precision={"enabled": True, "deny": ["Conv", "MatMul", "Linear", "Gemm"]},
    )
    assert losses_of(nothing, 8) == losses_of(trainer_of(copy.deepcopy(net)), 8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("enabled", [False, True])
@pytest.mark.parametrize("key", ["allow", "deny", "promote"])
def test_lists_refuse_a_module_with_autocast_regions(net: Net, key: str, enabled: bool) -> None:
    inner = net.head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return inner(x.float()).float()

    net.head.forward = forward
    trainer = trainer_of(net, mixed_precision={"enabled": True, key: ["Tanh"]})
    text = f"'mixed_precision.{key}' replaces torch.autocast by lists"
    with pytest.raises(UnsupportedError, match=text):
        trainer.train_step(*batch(0))
    with pytest.raises(UnsupportedError, match=text):
        trainer.eval_step(*batch(0))
    trainer_of(net, mixed_precision={"enabled": True}).train_step(*batch(0))


def deep(dtype: str | None, **lists: Any) -> ORTTrainer:
    """Return a trainer of a deep model with large outputs that checks its export."""
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 128)]
    for _ in range(4):
        layers += [nn.GELU(), nn.Linear(128, 128)]
    model = nn.Sequential(*layers, nn.Linear(128, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    mixed = {} if dtype is None else {"enabled": True, "dtype": dtype, **lists}
    return trainer_of(model, mixed_precision=mixed, debug={"check_model_export": True})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("lists", [{}, {"deny": ["ReduceMax"]}])
@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_export_is_checked_by_the_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: str | None, lists: Any
) -> None:
    x, label = batch(0)
    deep(dtype, **lists).train_step(x * 20, label)

    run = ModuleSource.run
    # PyTorch's are others then, by more than rounding.
    monkeypatch.setattr(
        ModuleSource, "run", lambda self, inputs: [1.3 * t for t in run(self, inputs)]
    )
    with pytest.raises(InvalidModelError, match="output 'loss' of the exported graph differs"):
        deep(dtype, **lists).train_step(x * 20, label)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("given", ["bf16", "bfloat16", torch.bfloat16, {"enabled": True}])
def test_argument(net: Net, given: Any) -> None:
    def make(**arguments: Any) -> ORTTrainer:
        options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}, **arguments.pop("o", {})})
        return ORTTrainer(
            copy.deepcopy(net),
            DESCRIPTION,
            optim.AdamConfig(lr=0.01),
            nn.CrossEntropyLoss(),
            options,
            **arguments,
        )

    expected = losses_of(make(o={"mixed_precision": {"enabled": True}}), 3)
    assert losses_of(make(mixed_precision=given), 3) == expected
    assert losses_of(make(mixed_precision="no"), 3) == losses_of(make(), 3)
    half = make(mixed_precision="fp16")
    assert isinstance(half.loss_scaler, GradScaler)
    assert half.options.mixed_precision.dtype == torch.float16
    with pytest.raises(ValueError, match="in the options too"):
        make(mixed_precision=given, o={"mixed_precision": {"enabled": True}})


def merged(options: dict[str, Any], given: Any) -> ORTTrainer:
    torch.manual_seed(4)
    groups = ORTTrainerOptions({"mixed_precision": options})
    loss = nn.CrossEntropyLoss()
    return ORTTrainer(
        Net(), DESCRIPTION, optim.AdamConfig(lr=0.01), loss, groups, mixed_precision=given
    )


def test_argument_and_options_are_put_together() -> None:
    scaler = GradScaler(128.0)
    half = {"dtype": "float16", "loss_scaler": scaler}
    for options, given in (
        ({**half, "deny": ["Softmax"]}, "fp16"),
        ({"deny": ["Softmax"]}, half),
        ({"dtype": "fp16", "deny": ["Softmax"]}, {"loss_scaler": scaler, "deny": ["Softmax"]}),
        ({"enabled": True, **half, "deny": ["Softmax"]}, None),
        ({"enabled": True, **half, "deny": ["Softmax"]}, "no"),
    ):
        trainer = merged(options, given)
        mixed = trainer.options.mixed_precision
        assert (mixed.enabled, mixed.dtype, mixed.deny) == (True, torch.float16, ["Softmax"])
        assert trainer.loss_scaler is scaler
    assert merged({"loss_scaler": None}, "fp16").loss_scaler is None
    assert merged({"dtype": "bfloat16"}, None).loss_scaler is None
    off = merged({"deny": ["Softmax"]}, {"enabled": False, "dtype": "float16"})
    assert losses_of(off, 2) == losses_of(merged({}, None), 2)


def test_a_dict_turns_mixed_precision_on() -> None:
    expected = losses_of(merged({"enabled": True, "dtype": "float16"}, None), 3)
    for given in ({"dtype": "float16"}, {"dtype": "fp16"}, {"dtype": torch.float16}):
        assert losses_of(merged({}, given), 3) == expected
    assert expected != losses_of(merged({}, None), 3)


@pytest.mark.parametrize(
    ("options", "given", "text"),
    [
        ({"dtype": "bfloat16"}, "fp16", "'dtype' torch.float16, the option .* is torch.bfloat16"),
        ({"dtype": "fp16"}, {"dtype": "bf16"}, "'mixed_precision.dtype' is torch.float16"),
        (
            {"loss_scaler": GradScaler()},
            {"loss_scaler": GradScaler()},
            "the argument mixed_precision has 'loss_scaler'",
        ),
        ({"deny": ["Softmax"]}, {"deny": ["Tanh"]}, r"'mixed_precision.deny' is \['Softmax'\]"),
        ({"enabled": False}, "bf16", "'enabled' True, the option 'mixed_precision.enabled' is Fal"),
        ({"enabled": True}, {"deny": ["Tanh"]}, "enabled in the options too"),
        ({"dtype": "float16"}, None, "'mixed_precision.dtype' is given and 'mixed_precision.enab"),
        ({"loss_scaler": GradScaler()}, "no", "'mixed_precision.loss_scaler' is given and"),
        ({"promote": ["Tanh"]}, None, "'mixed_precision.promote' is given and"),
    ],
)
def test_what_would_be_lost_is_refused(options: Any, given: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        merged(options, given)


def test_options_of_the_caller_stay_as_they_are() -> None:
    options = ORTTrainerOptions({"mixed_precision": {"dtype": "float16"}})
    loss = nn.CrossEntropyLoss()
    for _ in range(2):
        trainer = ORTTrainer(
            Net(), DESCRIPTION, optim.AdamConfig(), loss, options, mixed_precision="fp16"
        )
        assert trainer.options.mixed_precision.enabled and trainer.loss_scaler is not None
        assert not options.mixed_precision.enabled and options.mixed_precision.loss_scaler is None


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ("fp8", UnsupportedError, "'mixed_precision.dtype' is 'fp8': expected 'bfloat16'"),
        (torch.float32, UnsupportedError, "expected 'bfloat16' or 'float16'"),
        (True, TypeError, "mixed_precision is True, expected the name of a 16-bit type"),
        ({"enable": True}, ValueError, "unknown option 'mixed_precision.enable'"),
        ({"enabled": True, "allow": "MatMul"}, TypeError, "'mixed_precision.allow' is 'MatMul'"),
        ({"enabled": True, "deny": [1]}, TypeError, "'mixed_precision.deny' must hold names"),
    ],
)
def test_refusals(net: Net, given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ORTTrainer(
            net, DESCRIPTION, optim.SGDConfig(), nn.CrossEntropyLoss(), mixed_precision=given
        )


def test_unknown_operators_are_refused(net: Net, onnx_net: onnx.ModelProto) -> None:
    lists = {"enabled": True, "allow": ["MatMull"]}
    with pytest.raises(InvalidModelError, match="'MatMull' in the list 'allow' is no operator"):
        trainer_of(onnx_net, mixed_precision=lists)
    trainer = trainer_of(net, mixed_precision=lists)
    with pytest.raises(InvalidModelError, match="'MatMull' in the list 'allow' is no operator"):
        trainer.train_step(*batch(0))


def test_overflow_of_an_onnx_model_leaves_the_step_out(onnx_net: onnx.ModelProto) -> None:
    scaler = DynamicLossScaler(loss_scale=2.0**20, up_scale_window=100)
    trainer = trainer_of(
        onnx_net, mixed_precision={"enabled": True, "dtype": "float16", "loss_scaler": scaler}
    )
    before = {n: t.clone() for n, t in trainer.engine.tensors.items()}
    trainer.train_step(*batch(0))
    assert not trainer.train_step_info.all_finite
    for name, tensor in trainer.engine.tensors.items():
        assert torch.equal(tensor, before[name])
    for step in range(20):
        trainer.train_step(*batch(step))
    assert trainer.train_step_info.all_finite and scaler.loss_scale < 2.0**20

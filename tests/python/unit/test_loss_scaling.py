# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Loss scaling against torch.amp.GradScaler: the same scales, the same steps left out."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, ORTTrainerOptions, optim
from ortrain.amp import GradScaler, LossScaler, TorchGradScaler

DESCRIPTION = {
    "inputs": [("x", ["batch", 6]), ("target", ["batch", 4])],
    "outputs": [("loss", [], True), ("predictions", ["batch", 4])],
}


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A script: what comes with each batch, 'i' infinity, 'n' NaN, '.' neither.

    Attributes:
      batches: One character per batch.
      scaler: Arguments of the scaler.
      accumulation: Batches per optimizer step.
      clip: The norm to clip to after unscale_.
      split: With two optimizers, 'i' and 'n' meet the first, 'I' the second one alone.
      loads: At these steps the scaler takes over a state.
      half: Under autocast in float16, which overflows by itself.
    """

    batches: str
    scaler: dict[str, Any]
    accumulation: int = 1
    clip: float | None = None
    split: bool = False
    loads: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    half: bool = False


def numbers(
    init: float = 1024.0, growth: float = 2.0, backoff: float = 0.5, interval: int = 3
) -> dict[str, Any]:
    return {
        "init_scale": init,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
    }


LOADED = {
    "scale": 640.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 4,
    "_growth_tracker": 2,
}
PATTERNS = {
    "no overflow": Pattern("." * 10, numbers()),
    "infinities": Pattern("i....i..i....", numbers()),
    "nan": Pattern("..n....n.....", numbers(interval=2)),
    "in a row": Pattern("iiini.......", numbers(2.0**20, interval=2)),
    "when it would have grown": Pattern("..i..i...i...", numbers(interval=3)),
    "right after growing": Pattern("...i...n...i", numbers(interval=3)),
    "odd factors": Pattern("..i...n......", numbers(1000.0, 1.7, 0.3, 2)),
    "grows at every step": Pattern("....i....n..", numbers(1.0, 4.0, 0.1, 1)),
    "too large to grow": Pattern("......i....", numbers(2.0**126, 8.0, 0.5, 1)),
    "accumulation": Pattern("..i....ni.....i.", numbers(interval=2), accumulation=2),
    "clipping": Pattern("..i..n......", numbers(interval=2), clip=0.05),
    "accumulation and clipping": Pattern(
        ".i....n......ii.", numbers(4096.0, interval=2), accumulation=2, clip=0.05
    ),
    "two optimizers": Pattern("..i..I.ni....", numbers(interval=2), split=True),
    "state loaded": Pattern("..i.....i....", numbers(), loads={4: LOADED, 9: LOADED}),
    "disabled": Pattern("..i...", {"init_scale": 1024.0, "enabled": False}),
    "overflow of float16": Pattern("." * 16, numbers(2.0**30, 2.0, 0.25, 3), half=True),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.second = nn.Linear(40, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def batches(pattern: Pattern) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for event in pattern.batches:
        x = torch.randn(5, 6, generator=generator)
        target = torch.randn(5, 4, generator=generator)
        if event in "in" and not pattern.split:
            target[1, 2] = math.inf if event == "i" else math.nan
        yield event, x, target


def states(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [
        t.clone()
        for optimizer in optimizers
        for state in optimizer.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor)
    ]


def same_bits(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
        for x, y in zip((t.reshape(-1) for t in a), (t.reshape(-1) for t in b), strict=True)
    )


@dataclasses.dataclass
class Trace:
    """What a run showed: scale and growth after each step, and which optimizers changed something."""

    scales: list[float] = dataclasses.field(default_factory=list)
    growth: list[int] = dataclasses.field(default_factory=list)
    changed: list[list[bool]] = dataclasses.field(default_factory=list)
    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)


def loop(model: nn.Module, pattern: Pattern, make: Callable[[Any], torch.optim.Optimizer]) -> Trace:
    """Train as a program of PyTorch does."""
    layers = [model.first, model.second] if pattern.split else [model]
    optimizers = [make(layer.parameters()) for layer in layers]
    scaler = torch.amp.GradScaler("cpu", **pattern.scaler)
    trace = Trace()
    for index, (event, x, target) in enumerate(batches(pattern)):
        if index % pattern.accumulation == 0:
            for optimizer in optimizers:
                optimizer.zero_grad()
        step = index // pattern.accumulation
        if step in pattern.loads and index % pattern.accumulation == 0:
            scaler.load_state_dict(pattern.loads[step])
        with torch.autocast("cpu", torch.float16, enabled=pattern.half):
            loss = nn.functional.mse_loss(model(x).float(), target) / pattern.accumulation
        scaler.scale(loss).backward()
        if pattern.split and event in "inI":
            layer = layers["inI".index(event) // 2]
            layer.weight.grad[0, 1] = math.nan if event == "n" else -math.inf
        if (index + 1) % pattern.accumulation:
            continue
        changed = []
        for optimizer, layer in zip(optimizers, layers, strict=True):
            if pattern.clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(layer.parameters(), pattern.clip)
            before = [p.detach().clone() for p in layer.parameters()], states([optimizer])
            scaler.step(optimizer)
            after = [p.detach() for p in layer.parameters()], states([optimizer])
            changed.append(not all(map(same_bits, before, after)))
        scaler.update()
        trace.scales.append(scaler.get_scale())
        trace.growth.append(scaler.state_dict().get("_growth_tracker", 0))
        trace.changed.append(changed)
    trace.parameters = [p.detach() for p in model.parameters()]
    return trace


def check_same(ours: Trace, theirs: Trace, pattern: Pattern) -> None:
    assert ours.scales == theirs.scales
    assert ours.growth == theirs.growth
    if pattern.scaler.get("enabled", True):  # otherwise NaN replaces NaN
        assert ours.changed == theirs.changed
    tolerance = 1e-2 if pattern.half else 1e-5
    for a, b in zip(ours.parameters, theirs.parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


LOOP_OPTIMIZERS = {
    "adamw": (
        lambda p: optim.FusedAdamW(p, 0.01, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1),
    ),
    "sgd": (
        lambda p: optim.FusedSGD(p, 0.01, momentum=0.9),
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9),
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("optimizer", LOOP_OPTIMIZERS)
@pytest.mark.parametrize("name", PATTERNS)
def test_module_under_a_grad_scaler(name: str, optimizer: str) -> None:
    pattern = PATTERNS[name]
    torch.manual_seed(0)
    plain = Net()
    ours, theirs = LOOP_OPTIMIZERS[optimizer]
    mine = loop(ORTModule(copy.deepcopy(plain)), pattern, ours)
    expected = loop(plain, pattern, theirs)
    check_same(mine, expected, pattern)
    # The script does what its name says.
    left_out = [i for i, changed in enumerate(expected.changed) if not all(changed)]
    if name != "disabled":  # where NaN stays NaN
        assert bool(left_out) == (name != "no overflow")


TRAINER_OPTIMIZERS = {
    "adamw": (
        lambda: optim.AdamConfig(lr=0.01, lambda_coef=0.1),
        LOOP_OPTIMIZERS["adamw"][1],
    ),
    "sgd": (lambda: optim.SGDConfig(lr=0.01, momentum=0.9), LOOP_OPTIMIZERS["sgd"][1]),
}


def make_trainer(
    model: nn.Module, scaler: Any, pattern: Pattern, config: Any, **options: Any
) -> ORTTrainer:
    if pattern.clip is not None:
        config.defaults["max_norm_clip"] = pattern.clip
    groups = {
        "batch": {"gradient_accumulation_steps": pattern.accumulation},
        "mixed_precision": {"enabled": True, "loss_scaler": scaler, "dtype": "float16"},
        "utils": {"grad_norm_clip": pattern.clip is not None},
        **options,
    }
    return ORTTrainer(model, DESCRIPTION, config, _loss, ORTTrainerOptions(groups))


def _loss(predictions: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(predictions.float(), target)


def train(trainer: ORTTrainer, pattern: Pattern, scaler: Any) -> Trace:
    """Train with a scaler: one of ours, or PyTorch's."""
    trace = Trace()
    model, state = trainer.model, trainer.engine.state
    for index, (_, x, target) in enumerate(batches(pattern)):
        step, position = divmod(index, pattern.accumulation)
        if step in pattern.loads and position == 0:
            scaler.load_state_dict(pattern.loads[step])
        before = [p.detach().clone() for p in model.parameters()]
        held = [t.clone() for n, t in state.optimizer.items() if not n.endswith(":grad")]
        steps = state.steps
        trainer.train_step(x, target)
        if position + 1 < pattern.accumulation:
            continue
        after = [t for n, t in state.optimizer.items() if not n.endswith(":grad")]
        same = same_bits(before, [p.detach() for p in model.parameters()])
        if trainer.loss_scaler.enabled:  # otherwise NaN stays NaN, and is the same
            assert same == (state.steps == steps)
            if same:
                assert same_bits(held, after) if held else not any(t.any() for t in after)
        trace.changed.append([not same])
        trace.scales.append(scaler.get_scale())
        trace.growth.append(scaler.state_dict().get("_growth_tracker", 0))
    trace.parameters = [p.detach() for p in model.parameters()]
    return trace


def _wide(model: nn.Module) -> nn.Module:
    """Return a model whose forward stays in float32 under autocast."""
    inner = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return inner(x)

    model.forward = forward
    return model


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch's"])
@pytest.mark.parametrize("optimizer", TRAINER_OPTIMIZERS)
@pytest.mark.parametrize("name", [n for n, p in PATTERNS.items() if not p.split])
def test_trainer(name: str, optimizer: str, kind: Any) -> None:
    pattern = PATTERNS[name]
    torch.manual_seed(0)
    plain = Net()
    config, theirs = TRAINER_OPTIMIZERS[optimizer]
    model = copy.deepcopy(plain)
    if not pattern.half:
        model = _wide(model)
    scaler = kind(**pattern.scaler) if kind is GradScaler else kind("cpu", **pattern.scaler)
    trainer = make_trainer(model, scaler, pattern, config())
    check_same(train(trainer, pattern, scaler), loop(plain, pattern, theirs), pattern)


@pytest.mark.parametrize("kind", [GradScaler, torch.amp.GradScaler], ids=["ours", "torch's"])
def test_scaler_is_kept_in_checkpoints(kind: Any, tmp_path: Path) -> None:
    pattern = Pattern("..i....", numbers(interval=2))

    def make(**arguments: Any) -> tuple[ORTTrainer, Any]:
        torch.manual_seed(0)
        scaler = kind(**arguments) if kind is GradScaler else kind("cpu", **arguments)
        return make_trainer(_wide(Net()), scaler, pattern, optim.SGDConfig(lr=0.01)), scaler

    trainer, scaler = make(**pattern.scaler)
    train(trainer, pattern, scaler)
    trainer.save_checkpoint(tmp_path)
    other, restored = make()
    other.load_checkpoint(tmp_path)
    assert restored.state_dict() == scaler.state_dict()
    rest = Pattern("....i...", {})
    assert train(other, rest, restored).scales == train(trainer, rest, scaler).scales
    for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_states_are_those_of_pytorch() -> None:
    theirs, ours = torch.amp.GradScaler("cpu", **numbers()), GradScaler(**numbers())
    assert ours.state_dict() == theirs.state_dict()
    ours.load_state_dict(LOADED)
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state_dict() == ours.state_dict() == LOADED
    ours.reset()
    assert (ours.loss_scale, ours.state_dict()["_growth_tracker"]) == (640.0, 0)
    assert GradScaler(enabled=False).state_dict() == {}
    GradScaler(enabled=False).load_state_dict({})


def test_torch_scaler_is_followed_in_both_directions() -> None:
    scaler = torch.amp.GradScaler("cpu", **numbers())
    pattern = Pattern("", {})
    trainer = make_trainer(_wide(Net()), scaler, pattern, optim.SGDConfig(lr=0.01))
    assert isinstance(trainer.loss_scaler, TorchGradScaler)
    x, target = torch.randn(3, 6), torch.randn(3, 4)
    trainer.train_step(x, target)
    assert scaler.state_dict()["_growth_tracker"] == 1
    scaler.load_state_dict({**scaler.state_dict(), "scale": 96.0})
    trainer.train_step(x, target * math.inf)
    assert scaler.get_scale() == trainer.loss_scaler.loss_scale == 48.0


def torch_scaled(accumulation: int = 1, interval: int = 100) -> tuple[ORTTrainer, Any]:
    scaler = torch.amp.GradScaler("cpu", **numbers(interval=interval))
    pattern = Pattern("", {}, accumulation=accumulation)
    return make_trainer(_wide(Net()), scaler, pattern, optim.SGDConfig(lr=0.01)), scaler


def test_torch_scaler_takes_a_scale_before_the_first_step() -> None:
    trainer, scaler = torch_scaled()
    scaler.update(64.0)
    trainer.train_step(torch.randn(3, 6), torch.randn(3, 4))
    assert scaler.get_scale() == trainer.loss_scaler.loss_scale == 64.0


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 64.0), (math.inf, 32.0)])
def test_scale_that_is_set_inside_of_a_step_holds_after_it(factor: float, expected: float) -> None:
    trainer, scaler = torch_scaled(accumulation=2)
    other, _ = torch_scaled(accumulation=2)
    other.load_state_dict(trainer.state_dict())
    x, target = torch.randn(3, 6), torch.randn(3, 4)
    trainer.train_step(x, target)
    scaler.update(64.0)
    trainer.train_step(x, target * factor)
    assert scaler.get_scale() == expected
    # Both batches of the step had the scale of the first.
    for _ in range(2):
        other.train_step(x, target * factor)
    if factor == 1.0:
        for a, b in zip(trainer.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(a, b)
    trainer.train_step(x, target)
    assert trainer.engine.state.loss_scale == expected


def test_torch_scaler_is_told_of_a_reset() -> None:
    trainer, scaler = torch_scaled(interval=1)
    for _ in range(3):
        trainer.train_step(torch.randn(3, 6), torch.randn(3, 4))
    assert scaler.get_scale() == 8192.0
    trainer.loss_scaler.reset()
    assert scaler.get_scale() == trainer.loss_scaler.loss_scale == 1024.0
    trainer.train_step(torch.randn(3, 6), torch.randn(3, 4))
    assert scaler.get_scale() == 2048.0


def test_refusals() -> None:
    for arguments, text in (
        ({"growth_factor": 1.0}, "growth_factor is 1.0, expected a number above 1"),
        ({"backoff_factor": 1.0}, r"backoff_factor is 1.0, expected a number in \(0, 1\)"),
        ({"growth_interval": 0}, "growth_interval is 0, expected 1 or more"),
        ({"init_scale": 0.0}, "loss_scale is 0.0, expected a number above 0"),
    ):
        with pytest.raises(ValueError, match=text):
            GradScaler(**arguments)
    scaler = GradScaler(**numbers())
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="state_dict has no 'scale'"):
        scaler.load_state_dict({})
    with pytest.raises(ValueError, match=r"state_dict\['scale'\] is -1.0, expected above 0"):
        scaler.load_state_dict({**LOADED, "scale": -1.0})
    assert scaler.state_dict() == before


def test_scale_that_falls_to_nothing_is_an_error() -> None:
    scaler = GradScaler(init_scale=2.0**-148)

    class Step:
        all_finite = False

    assert scaler.update(Step()) == 2.0**-149
    with pytest.raises(FloatingPointError, match="not finite at any loss scale"):
        scaler.update(Step())
    assert isinstance(scaler, LossScaler)

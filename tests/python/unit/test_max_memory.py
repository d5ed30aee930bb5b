# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A budget of memory: plans stay within it, and numbers are those without it."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule, optim
from ortrain.errors import OutOfMemoryError, UnsupportedError
from ortrain.memory_budget import MemoryBudget
from ortrain.testing.models import CASES
from ortrain.tools import recompute
from ortrain.trainer import ORTTrainer, ORTTrainerOptions


class Block(nn.Module):
    """A residual block that keeps much for its backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks, some of them checkpointed."""

    def __init__(self, checkpointed: int = 0, depth: int = 6, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            inside = index < self.checkpointed
            x = checkpoint(block, x, use_reentrant=False) if inside else block(x)
        return x.square().mean()


def gradients(model: nn.Module, *args: Any, seed: int = 0, **kwargs: Any) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    result = model(*args, **kwargs)
    if not isinstance(result, torch.Tensor):
        named = result if isinstance(result, dict) else {}
        result = named["loss"] if "loss" in named else result[0]
    result.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [result.detach(), *grads]


def assert_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def pair(max_memory: int | str, **kwargs: Any) -> tuple[ORTModule, ORTModule]:
    torch.manual_seed(0)
    model = Stack(**kwargs)
    return ORTModule(copy.deepcopy(model)), ORTModule(model, max_memory=max_memory)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (4096, MemoryBudget(bytes=4096)),
        ("4096", MemoryBudget(bytes=4096)),
        ("2GiB", MemoryBudget(bytes=2 << 30)),
        ("800MB", MemoryBudget(bytes=800_000_000)),
        (" 1.5 gib ", MemoryBudget(bytes=3 << 29)),
        ("0.3x", MemoryBudget(share=0.3)),
        ("1x", MemoryBudget(share=1.0)),
        (None, None),
    ],
)
def test_values_are_read(value: Any, expected: MemoryBudget | None) -> None:
    assert MemoryBudget.parse(value) == expected


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (True, TypeError, "max_memory is True"),
        (0.3, TypeError, "max_memory is 0.3, expected a number of bytes"),
        (0, ValueError, "max_memory is 0, expected at least one byte"),
        (-5, ValueError, "max_memory is -5"),
        ("0B", ValueError, "at least one byte"),
        ("2 apples", ValueError, "'2 apples', expected a number of bytes"),
        ("GiB", ValueError, "'GiB'"),
        ("", ValueError, "''"),
        ("0x", ValueError, "expected a share above 0, up to 1"),
        ("1.5x", ValueError, "expected a share above 0, up to 1"),
        ("-0.5x", ValueError, "'-0.5x'"),
        ("99999999TiB", ValueError, "less than 2"),
    ],
)
def test_other_values_are_refused(value: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ORTModule(nn.Linear(1, 1), max_memory=value)


def test_a_smaller_batch_may_take_what_a_larger_one_did() -> None:
    _, ours = pair("0.5x")
    gradients(ours, torch.randn(64, 16))
    budget = ours.memory_plan().recomputation.budget_bytes
    # Its gradients alone are more than half of what it takes.
    gradients(ours, torch.randn(2, 16))
    assert ours.memory_plan().recomputation.budget_bytes == budget
    _, alone = pair("0.5x")
    with pytest.raises(MemoryError, match="cannot be reached"):
        alone(torch.randn(2, 16))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["encoder", "bert", "gpt2", "llama", "lstm", "convnet"])
def test_models_give_the_same_numbers(name: str) -> None:
    case = CASES[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"needs {case.needs}")
    torch.manual_seed(0)
    module = case.build()
    for layer in module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.2
    free = ORTModule(copy.deepcopy(module))
    sizes = [(6, 16), (6, 24)]
    wanted = [gradients(free, **case.batch(*size, 1)) for size in sizes]
    shares = [0.9] if name in ("lstm", "convnet") else [0.8, 0.6]
    for share in shares:
        ours = ORTModule(copy.deepcopy(module), max_memory=f"{share}x")
        for size, expected in zip(sizes, wanted, strict=True):
            assert_equal(gradients(ours, **case.batch(*size, 1)), expected)
            plan = ours.memory_plan()
            assert plan is not None
            assert plan.recomputation is not None
            assert plan.recomputation.num_nodes > 0
            assert plan.total_bytes <= plan.recomputation.budget_bytes
            assert plan.total_bytes <= share * plan.recomputation.total_bytes_without


def test_a_budget_in_bytes_holds_for_every_batch_size() -> None:
    free, _ = pair("1x")
    gradients(free, torch.randn(64, 16))
    limit = free.memory_plan().total_bytes
    free, ours = pair(limit)
    for rows in (64, 96, 20, 110):
        x = torch.randn(rows, 16)
        assert_equal(gradients(ours, x), gradients(free, x))
        plan = ours.memory_plan()
        assert plan.total_bytes <= limit
        assert bool(plan.recomputation.nodes) == (rows > 64)
        assert plan.recomputation.total_bytes_without == free.memory_plan().total_bytes
    assert len(ours.report().captures) == 1


def test_retained_graphs_and_late_backwards() -> None:
    free, ours = pair("0.5x")
    x = torch.randn(40, 16)
    results = []
    for model in (free, ours):
        torch.manual_seed(3)
        first, second = model(x), model(2 * x)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert_equal(results[1], results[0])


def test_marks_and_a_budget_together() -> None:
    free, _ = pair("1x")
    x = torch.randn(64, 16)
    expected = gradients(free, x)
    marked, both = pair("0.8x", checkpointed=3)
    assert_equal(gradients(marked, x), expected)
    assert_equal(gradients(both, x), expected)
    assert both.memory_plan().total_bytes <= 0.8 * marked.memory_plan().total_bytes
    assert both.memory_plan().recomputation.num_nodes > 0


def test_what_the_backward_computes_again_must_not_change_meanwhile() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 64), nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for _ in range(24):
                x = self.second(x).tanh().softmax(-1)
            return x.square().sum()

    torch.manual_seed(0)
    net = Net()
    x = torch.randn(256, 8)
    for max_memory, refused in ((None, False), ("0.4x", True)):
        model = ORTModule(copy.deepcopy(net), max_memory=max_memory)
        loss = model(x)
        with torch.no_grad():
            model.second.bias.add_(1)  # only a forward reads it
        if refused:
            with pytest.raises(RuntimeError, match=r"second\.bias.*modified by an inplace"):
                loss.backward()
        else:
            loss.backward()


def test_buffers_are_updated_once() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(5))
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x.square().mean()

    torch.manual_seed(0)
    net = Net()
    free, ours = ORTModule(copy.deepcopy(net)), ORTModule(net, max_memory="0.8x")
    for step in range(3):
        x = torch.randn(4, 4, 12, 12)
        assert_equal(gradients(ours, x, seed=step), gradients(free, x, seed=step))
    assert ours.memory_plan().recomputation.num_nodes > 0
    for a, b in zip(ours.buffers(), free.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_what_runs_in_pytorch_runs_once() -> None:
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, torch._subclasses.FakeTensor):
                calls.append(1)
            return x * 3

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy * 3

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = Counted.apply(self.linear(x).tanh().softmax(-1)).sin().softmax(-1)
            return x.square().mean()

    torch.manual_seed(0)
    net = Net()
    x = torch.randn(64, 16)
    expected = gradients(ORTModule(copy.deepcopy(net)), x)
    ours = ORTModule(net, max_memory="0.8x")
    gradients(ours, x)
    calls.clear()
    assert_equal(gradients(ours, x), expected)
    assert len(calls) == 3
    assert ours.memory_plan().recomputation.num_nodes > 0


def test_the_report_tells() -> None:
    free, ours = pair("0.5x")
    x = torch.randn(64, 16)
    gradients(free, x)
    gradients(ours, x)
    plan = ours.memory_plan()
    made = plan.recomputation
    assert made.total_bytes_without == free.memory_plan().total_bytes
    assert made.arena_bytes_without == free.memory_plan().arena_bytes
    assert made.bytes > 0
    assert made.time_share > 0.9
    assert "MatMul" in made.nodes or "Linear" in made.nodes or "Gemm" in made.nodes
    text = str(ours.report())
    assert f"{made.num_nodes} nodes" in text
    assert "without recomputation" in text
    assert free.memory_plan().recomputation is None
    assert "memory:" not in str(free.report())


def test_a_budget_out_of_reach_is_refused() -> None:
    _, ours = pair(3000)
    with pytest.raises(
        OutOfMemoryError, match="max_memory of 3000 bytes cannot be reached"
    ) as error:
        ours(torch.randn(64, 16))
    assert isinstance(error.value, MemoryError)
    for part in ("without recomputation the step takes", "the least that", "gradients of"):
        assert part in str(error.value)
    _, shared = pair("0.001x")
    with pytest.raises(MemoryError, match=r"\(0.001x\) cannot be reached"):
        shared(torch.randn(64, 16))
    # A share is one of a training step.
    with torch.no_grad():
        shared(torch.randn(64, 16))
        with pytest.raises(MemoryError, match="the forward alone takes"):
            ours(torch.randn(64, 16))


def test_the_rewrite_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_DISABLE_PASSES", "recompute_for_memory")
    _, ours = pair("0.5x")
    with pytest.raises(MemoryError, match="ORTRAIN_DISABLE_PASSES names recompute_for_memory"):
        ours(torch.randn(64, 16))


def test_what_is_no_graph_is_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return x.sum() if x.sum() > 0 else x.mean()

    with pytest.raises(UnsupportedError, match="max_memory holds for what is one graph"):
        ORTModule(Branching(), max_memory="1GiB")(torch.randn(2, 4))


def test_copies_keep_the_budget() -> None:
    _, ours = pair("0.5x")
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        gradients(again, torch.randn(64, 16))
        assert again.memory_plan().recomputation.num_nodes > 0


def _trainer(model: nn.Module, max_memory: Any, clip: bool) -> ORTTrainer:
    return ORTTrainer(
        model,
        {
            "inputs": [("x", ["batch", 16])],
            "outputs": [("loss", [], True)],
        },
        optim.AdamConfig(lr=0.01),
        options=ORTTrainerOptions(
            {
                "device": {"id": "cpu", "max_memory": max_memory},
                "utils": {"grad_norm_clip": clip},
                "batch": {"gradient_accumulation_steps": 2},
            }
        ),
    )


@pytest.mark.parametrize("clip", [False, True])
def test_trainers_step_alike(clip: bool) -> None:
    torch.manual_seed(0)
    model = Stack()
    trainers = []
    for max_memory in (None, "0.6x"):
        torch.manual_seed(1)
        trainers.append(_trainer(copy.deepcopy(model), max_memory, clip))
    free, ours = trainers
    for step in range(6):
        x = torch.randn(60 + 20 * (step % 2), 16)
        torch.testing.assert_close(ours.train_step(x), free.train_step(x))
        plans = [t.engine.memory_plan for t in trainers]
        assert plans[1]["total_bytes"] <= 0.6 * plans[0]["total_bytes"]
        assert plans[1]["recomputation"]["nodes"]
    for a, b in zip(ours.model.parameters(), free.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_trainers_refuse_what_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"option 'device\.max_memory' is '3 pounds'"):
        ORTTrainerOptions({"device": {"max_memory": "3 pounds"}})
    with pytest.raises(TypeError, match=r"option 'device\.max_memory' is 0\.5"):
        ORTTrainerOptions({"device": {"max_memory": 0.5}})
    model = Stack()
    before = copy.deepcopy(model.state_dict())
    trainer = _trainer(model, 1000, False)
    with pytest.raises(OutOfMemoryError, match="max_memory of 1000 bytes"):
        trainer.train_step(torch.randn(8, 16))
    assert all(torch.equal(v, before[n]) for n, v in model.state_dict().items())


@pytest.mark.long
@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    arguments = ["--model", "tiny-gpt2", "--tokens", "4x32"]
    assert recompute.main([*arguments, "--max-memory", "0.6x", "--measure", "1"]) == 0
    shown = capsys.readouterr().out
    for part in ("plan, all", "gradients", "computed again", "LayerNormalization", "time per step"):
        assert part in shown
    assert recompute.main([*arguments, "--max-memory", "1000"]) == 1
    assert "max_memory of 1000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny-none"], "--model is 'tiny-none'"),
        (["--model", "tiny-gpt2", "--tokens", "8"], "--tokens is '8'"),
        (["--model", "tiny-gpt2", "--max-memory", "2 apples"], "--max-memory is '2 apples'"),
        (["--model", "tiny-gpt2", "--measure", "-1"], "--measure is -1"),
    ],
)
def test_the_command_refuses(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        recompute.main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err

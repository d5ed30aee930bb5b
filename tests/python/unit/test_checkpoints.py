# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""torch.utils.checkpoint is honoured: what stands inside is computed again in the backward."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ortrain import ORTModule


class Block(nn.Module):
    """A residual block with dropout, of a kind that keeps much for its backward."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x))).sin()))


class Stack(nn.Module):
    """Blocks, checkpointed or not."""

    def __init__(self, checkpointed: bool, depth: int = 6, width: int = 32, dropout: float = 0.0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if self.checkpointed:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return x.square().mean()


def gradients(model: nn.Module, x: torch.Tensor, seed: int = 0) -> list[torch.Tensor]:
    model.zero_grad()
    torch.manual_seed(seed)
    loss = model(x)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def pair(dropout: float = 0.0) -> tuple[ORTModule, ORTModule]:
    torch.manual_seed(0)
    kept = Stack(False, dropout=dropout)
    again = Stack(True, dropout=dropout)
    again.load_state_dict(kept.state_dict())
    return ORTModule(kept), ORTModule(again)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_numbers_are_those_without_checkpoints(dropout: float) -> None:
    kept, again = pair(dropout)
    for rows in (16, 5):
        x = torch.randn(rows, 32)
        for a, b in zip(gradients(kept, x), gradients(again, x), strict=True):
            assert torch.equal(a, b)
    (record,) = again.report().captures
    assert not record.fallback and not record.escapes


def test_memory_of_the_inside_is_not_kept() -> None:
    kept, again = pair()
    x = torch.randn(512, 32)
    gradients(kept, x)
    gradients(again, x)
    assert again.memory_plan().arena_bytes < 0.5 * kept.memory_plan().arena_bytes


def test_follows_pytorch() -> None:
    torch.manual_seed(0)
    plain = Stack(True)
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(7, 32)
    for a, b in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(a, b)


def test_nested_and_sequential_checkpoints() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block(16) for _ in range(4)))

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.blocks[0], x, use_reentrant=False).relu()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(self.inner, x, use_reentrant=False)
            return checkpoint_sequential(self.blocks, 2, x, use_reentrant=False).sum()

    plain = Nested()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(3, 16)
    for a, b in zip(gradients(ours, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(a, b)
    assert not ours.report().captures[0].fallback


def test_retained_graphs_and_late_backwards() -> None:
    kept, again = pair(0.2)
    x = torch.randn(4, 32)
    results = []
    for model in (kept, again):
        torch.manual_seed(3)
        first, second = model(x), model(2 * x)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_escaped_operators_run_once() -> None:
    calls = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if not isinstance(x, torch._subclasses.FakeTensor):
                calls.append(1)
            return x * 3

        @staticmethod
        def backward(ctx, dy):
            return dy * 3

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def inside(self, x: torch.Tensor) -> torch.Tensor:
            return Counted.apply(self.linear(x).sin()).cos()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inside, x, use_reentrant=False).sum()

    plain = Module()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(3, 4)
    mine, theirs = gradients(ours, x), gradients(plain, x)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert not ours.report().captures[0].fallback
    calls.clear()
    gradients(ours, x)
    assert len(calls) == 1


def test_an_error_inside_leaves_nothing_behind() -> None:
    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.fails = True

        def inside(self, x: torch.Tensor) -> torch.Tensor:
            if self.fails:
                raise KeyError("inside")
            return self.linear(x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.inside, x, use_reentrant=False).sum()

    from torch.utils import checkpoint as module

    original = module._checkpoint_without_reentrant_generator
    ours = ORTModule(Failing())
    with pytest.raises(KeyError, match="inside"):
        ours(torch.randn(2, 4))
    assert module._checkpoint_without_reentrant_generator is original
    assert "custom" not in torch.fx.traceback.current_meta
    plain, wrapped = pair()
    assert torch.equal(plain(torch.ones(2, 32)), wrapped(torch.ones(2, 32)))


def test_checkpoints_of_other_threads_are_pytorchs() -> None:
    from ortrain.capture.checkpoints import MarkedCheckpoints

    model = Stack(True, depth=2)
    expected = gradients(model, torch.ones(3, 32))
    found: list[list[torch.Tensor]] = []
    with MarkedCheckpoints(nn.Module()).marked():
        thread = threading.Thread(target=lambda: found.append(gradients(model, torch.ones(3, 32))))
        thread.start()
        thread.join()
    for a, b in zip(found[0], expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_gradient_checkpointing_of_transformers() -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = transformers.BertForSequenceClassification(config).train()
    again = copy.deepcopy(plain)
    again.gradient_checkpointing_enable()
    ours = ORTModule(again)
    batch = {"input_ids": torch.randint(0, 50, (4, 24)), "labels": torch.tensor([0, 1, 1, 0])}
    for model in (plain, ours):
        model(**batch).loss.backward()
    for (name, a), b in zip(plain.named_parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-4, atol=1e-6, msg=name)
    (record,) = ours.report().captures
    assert not record.fallback and not record.escapes
    kept = ORTModule(copy.deepcopy(plain))
    kept(**batch).loss.backward()
    assert ours.memory_plan().arena_bytes < kept.memory_plan().arena_bytes


class Counted(nn.Module):
    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.inside = inside
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside:
            return checkpoint(self.norm, x, use_reentrant=False).sin()
        return self.norm(x).sin()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.filterwarnings("ignore")
def test_buffers_are_written_again_where_pytorch_runs_again(inside: bool) -> None:
    torch.manual_seed(0)
    plain = Counted(inside)
    ours, x = ORTModule(copy.deepcopy(plain)), torch.randn(3, 4)
    for step in range(1, 3):
        for module in (plain, ours):
            y = x.clone().requires_grad_()
            result = module(y) if inside else checkpoint(module, y, use_reentrant=False)
            result.sum().backward()
        assert ours.norm.num_batches_tracked == plain.norm.num_batches_tracked == 2 * step
        torch.testing.assert_close(ours.norm.running_mean, plain.norm.running_mean)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Storages that are resized, and moved by that, between forward and backward, as sharded trainers and offloading do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, optim
from ortrain.errors import DeviceError
from ortrain.optim import FusedAdamW

ROWS = 4096


def move(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor, and give it the same contents elsewhere."""
    kept, storage = tensor.detach().clone(), tensor.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    junk = torch.full((2 * size,), 7, dtype=torch.uint8)  # takes the place
    storage.resize_(size)
    with torch.no_grad():
        storage.copy_(kept.untyped_storage())
    del junk


def grow(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(2 * tensor.untyped_storage().nbytes())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def gradients(
    wrap: Callable[[nn.Module], nn.Module], change: Callable[[torch.Tensor], None], which: str
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = Two()
    model = wrap(module)
    x = torch.randn(ROWS, 64, requires_grad=True)
    model(x).sum().backward()
    module.zero_grad()
    x.grad = None
    y = model(x)
    change(x if which == "input" else module.second.weight)
    y.square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("which", ["input", "weight"])
@pytest.mark.parametrize("change", [move, grow])
def test_a_backward_reads_what_is_there(change: Callable[[torch.Tensor], None], which: str) -> None:
    expected = gradients(lambda module: module, change, which)
    got = gradients(ORTModule, change, which)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_memory_that_moves_between_parts_of_a_backward() -> None:
    def run(model: nn.Module, module: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
        model(x).sum().backward()
        module.zero_grad()
        weights = [layer.weight for layer in module]
        # Behind the last layer's gradient an earlier layer's weight moves. It is asked for before the
        # forward, whose backward comes in parts then.
        handle = weights[-1].register_post_accumulate_grad_hook(lambda _: move(weights[1]))
        y = model(x)
        y.square().sum().backward()
        handle.remove()
        return [p.grad.clone() for p in module.parameters()]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))

    stock, ours = made(), made()
    for a, b in zip(run(ORTModule(ours), ours), run(stock, stock), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_memory_that_was_read_may_go_before_the_backward_is_over() -> None:
    """As sharded trainers free a layer's weights behind its part of the backward."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    stock = copy.deepcopy(module)
    model, x = ORTModule(module), torch.randn(64, 512)
    last = module[-1].weight

    def free_last(_: torch.Tensor) -> None:
        last.untyped_storage().resize_(0)

    for step in range(2):
        for each in (model, stock):
            each.zero_grad()
        if step == 1:  # before the forward, whose backward comes in parts then
            # Behind the last layer's own part nothing reads its weight.
            module[1].weight.register_post_accumulate_grad_hook(free_last)
        y = model(x)
        y.sum().backward()
        stock(x).sum().backward()
    for a, b in zip(module.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["input", "weight"])
def test_memory_that_is_gone_is_named(which: str) -> None:
    def free(tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(0)

    with pytest.raises(DeviceError, match="has no memory: its storage has been freed"):
        gradients(ORTModule, free, which)


def test_what_a_backward_does_not_read_may_be_gone() -> None:
    torch.manual_seed(0)
    model = ORTModule(nn.Linear(64, 64))
    y = model(torch.randn(ROWS, 64))
    model.bias.untyped_storage().resize_(0)
    y.sum().backward()
    assert model.weight.grad.isfinite().all()


DESCRIPTION = {"inputs": [("x", ["b", 64])], "outputs": [("loss", [], True)]}


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean()


def trainer() -> ORTTrainer:
    torch.manual_seed(0)
    made = ORTTrainer(Loss(), DESCRIPTION, optim.AdamConfig(lr=1e-2))
    made.train_step(torch.ones(2, 64))
    return made


def replace(model: nn.Module, how: str) -> None:
    weight = model.linear.weight
    if how == "moved":
        move(weight)
        with torch.no_grad():
            weight.fill_(7.0)
    elif how == "data":
        weight.data = torch.full((64, 64), 7.0)
    elif how == "assigned":
        state = {"linear.weight": torch.full((64, 64), 7.0), "linear.bias": torch.zeros(64)}
        model.load_state_dict(state, assign=True)
    else:
        model.linear.weight = nn.Parameter(torch.full((64, 64), 7.0))


@pytest.mark.parametrize("how", ["moved", "data", "assigned", "parameter"])
def test_checkpoints_are_of_the_tensors_that_the_model_has(how: str, tmp_path: Path) -> None:
    made = trainer()
    good = made.model.linear.weight.detach().clone()
    made.save_checkpoint(tmp_path / "before")
    replace(made.model, how)
    assert bool((made.state_dict()["model"]["full_precision"]["linear.weight"] == 7).all())
    made.save_checkpoint(tmp_path / "after")
    made.load_checkpoint(tmp_path / "before")
    assert torch.equal(made.model.linear.weight.detach(), good)
    made.load_checkpoint(tmp_path / "after")
    assert bool((made.model.linear.weight == 7).all())
    replace(made.model, how)
    made.load_state_dict({"linear.weight": good, "linear.bias": torch.zeros(64)})
    assert torch.equal(made.model.linear.weight.detach(), good)


def test_freed_memory_is_not_written_to(tmp_path: Path) -> None:
    made = trainer()
    made.save_checkpoint(tmp_path)
    made.model.linear.weight.untyped_storage().resize_(0)
    for action in (made.load_checkpoint, made.save_checkpoint):
        with pytest.raises(DeviceError, match="'linear.weight' has no memory"):
            action(tmp_path)


def test_optimizers_refuse_repeated_elements_before_they_write() -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1).expand(4, 4))
    optimizer = FusedAdamW([first, second], lr=0.1)
    first.grad, second.grad = torch.ones(3), torch.ones(4, 4)
    with pytest.raises(RuntimeError, match=r"parameter 1\].*several elements in one place"):
        optimizer.step()
    assert not first.any()
    second = nn.Parameter(torch.zeros(4, 4))
    optimizer = FusedAdamW([second], lr=0.1)
    second.grad = torch.ones(4, 4)
    optimizer.step()
    optimizer.state[second]["exp_avg"] = torch.zeros(1).expand(4, 4)
    before = second.detach().clone()
    with pytest.raises(RuntimeError, match="several elements in one place"):
        optimizer.step()
    assert torch.equal(second.detach(), before)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""An ORTModule in PyTorch's autograd: gradients, several runs, writes in place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_modules import Scaled, assert_same_gradients, batch, compare, pair

from ortrain import ORTModule


def test_gradients_accumulate_into_grad() -> None:
    ours, plain = pair()
    for seed in range(3):
        for model in (ours, plain):
            model(**batch(seed=seed))["loss"].backward()
    assert_same_gradients(ours, plain)


def test_frozen_parameters_get_no_gradient_and_no_work() -> None:
    ours, plain = pair()
    for model in (ours, plain):
        model.embed.requires_grad_(False)
        model.hidden.requires_grad_(False)
        model(**batch())["loss"].backward()
    assert_same_gradients(ours, plain)
    frozen = ours.report().native_nodes
    ours.embed.requires_grad_(True)
    ours.hidden.requires_grad_(True)
    ours(**batch())["loss"].backward()
    assert ours.report().captures[-1].native_nodes > frozen


def test_several_forwards_before_a_backward() -> None:
    ours, plain = pair()
    totals = []
    for model in (ours, plain):
        losses = [model(**batch(3 + i, 4 + i, i))["loss"] for i in range(3)]
        totals.append(sum(losses))
        totals[-1].backward()
    torch.testing.assert_close(totals[0], totals[1])
    assert_same_gradients(ours, plain)


def test_backward_from_another_output() -> None:
    ours, plain = pair()
    for model in (ours, plain):
        out = model(**batch())
        (out["loss"] + out["logits"].pow(2).sum()).backward()
    assert_same_gradients(ours, plain)


def test_backward_twice_with_retained_graph() -> None:
    ours, plain = pair(0.0)
    for model in (ours, plain):
        loss = model(**batch())["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(ours, plain)


def test_input_gradient() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 6)
    grads = []
    for model in (ours, plain):
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_noncontiguous_input_and_gradient() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 3)
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(6, 5).t()
    torch.testing.assert_close(ours(x), plain(x))
    ours(x).sum().backward()  # the gradient comes in expanded, with strides of zero
    plain(x).sum().backward()
    assert_same_gradients(ours, plain)


def test_outputs_that_no_loss_uses_get_no_zeros() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])

    def heads(m: Any, x: torch.Tensor) -> Any:
        h = x * m.w
        return h, h.log(), h.sqrt()

    compare(heads, lambda m, x: m(x)[0].sum().backward(), x, steps=2)

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    model = ORTModule(TwoHeads())
    model(torch.ones(1, 3))[0].sum().backward()
    assert model.b.weight.grad is None and model.a.weight.grad is not None


def test_second_backward_without_retain_graph_is_refused() -> None:
    ours, _ = pair()
    loss = ours(**batch())["loss"]
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_changed_parameter_before_backward_is_refused() -> None:
    ours, _ = pair()
    loss = ours(**batch())["loss"]
    with torch.no_grad():
        ours.head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"head\.weight.*modified by an inplace operation"):
        loss.backward()
    ours(**batch())["loss"].backward()


def test_output_changed_in_place_counts_only_where_backward_reads_it() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x @ self.w
            return y, y.square().sum()

    x = torch.randn(3, 2)
    plain, ours = TwoOutputs(), ORTModule(TwoOutputs())
    for model in (plain, ours):
        _, total = model(x)
        total.add_(1)
        total.backward()
    assert_same_gradients(ours, plain)
    for model in (plain, ours):
        y, total = model(x)
        with torch.no_grad():
            y.zero_()  # PyTorch's backward reads it, whatever the engine's has copied
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            total.backward()


def test_memory_of_a_replaced_storage_stays_until_backward() -> None:
    def use(model: nn.Module, x: torch.Tensor) -> None:
        leaf = x.requires_grad_()
        loss = (model(leaf) * 2).sum()
        model.w.data = torch.zeros(3)
        loss.backward()
        torch.testing.assert_close(leaf.grad, torch.tensor([4.0, 6.0, 8.0]))

    plain = ORTModule(Scaled(lambda m, x: x * m.w))
    use(plain, torch.ones(3))


def test_batch_norm_updates_its_buffers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    ours = ORTModule(copy.deepcopy(plain))
    for step in range(3):
        x = torch.randn(5 + step, 6)
        for model in (ours, plain):
            model(x).square().sum().backward()
        for (name, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    assert_same_gradients(ours, plain)
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(x), plain(x))


def test_batch_norm_runs_twice_before_a_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ours = ORTModule(copy.deepcopy(plain))
    x, y = torch.randn(5, 3), torch.randn(6, 3)
    for model in (ours, plain):
        (model(x).sum() + model(y).square().sum()).backward()
    assert_same_gradients(ours, plain)


@pytest.mark.filterwarnings("ignore:Scaled runs in PyTorch")
def test_buffers_written_in_forward() -> None:
    def in_place(m: Any, x: torch.Tensor) -> Any:
        m.b.mul_(2)
        y = x * m.w * m.b
        return y.sum(), y

    def assigned(m: Any, x: torch.Tensor) -> Any:
        m.b = m.b * 2
        return (x * m.w * m.b).sum()

    x = torch.ones(3)
    compare(in_place, lambda m, x: m(x)[1].square().sum().backward(), x, steps=3)
    compare(in_place, lambda m, x: m(x)[0].backward(), x, steps=3)
    compare(assigned, lambda m, x: m(x).backward(), x, steps=3)

    def twice(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x)[0]
        loss.backward(retain_graph=True)
        loss.backward()

    compare(in_place, twice, x, steps=2)


@pytest.mark.filterwarnings("ignore:Scaled runs in PyTorch")
def test_an_argument_written_in_place() -> None:
    def use(model: nn.Module, x: torch.Tensor) -> None:
        h = x.requires_grad_() * 1
        y = model(h)
        (y + (h * h).sum()).backward()

    compare(lambda m, x: (x.mul_(3) * m.w).sum(), use, torch.ones(3))


class FrozenBranch(nn.Module):
    """A layer under no_grad, whose result meets one that learns; autocast around or within."""

    def __init__(self, nesting: str) -> None:
        super().__init__()
        self.nesting = nesting
        self.frozen = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def autocast() -> torch.autocast:
            return torch.autocast("cpu", dtype=torch.bfloat16)

        if self.nesting == "autocast inside":
            with torch.no_grad(), autocast():
                t = self.frozen(x)
            h = self.head(x)
        elif self.nesting == "no_grad inside":
            with autocast():
                h = self.head(x)
                with torch.no_grad():
                    t = self.frozen(x)
        else:
            with torch.no_grad():
                t = self.frozen(x)
            h = self.head(x)
        return h.float() * t.float()


@pytest.mark.parametrize("nesting", ["autocast around", "autocast inside", "no_grad inside"])
@pytest.mark.filterwarnings("ignore:FrozenBranch runs in PyTorch")
def test_no_grad_holds_under_autocast(nesting: str) -> None:
    plain = FrozenBranch(nesting)
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(3, 4)
    for model in (ours, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=nesting == "autocast around"):
            out = model(x)
        out.sum().backward()
    assert ours.frozen.weight.grad is None
    torch.testing.assert_close(ours.head.weight.grad, plain.head.weight.grad, rtol=2e-2, atol=1e-2)
    native = ours.report().native_share
    assert native == (0 if nesting == "no_grad inside" else 1)

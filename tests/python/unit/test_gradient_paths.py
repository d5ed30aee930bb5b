# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A parameter has a gradient, zeros or not, where PyTorch's autograd leads to it, and none elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.builder import Value
from ortrain.capture.convert import registry
from ortrain.capture.convert.emitter import Emitter, Tensor

Forward = Callable[[torch.Tensor, torch.Tensor], Any]


def _overwritten(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> Forward:
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        write(y, w)
        return y

    return forward


ZEROS: dict[str, Forward] = {
    "copy": _overwritten(lambda y, w: y.copy_(w)),
    "fill": _overwritten(lambda y, w: y.fill_(w[0])),
    "all rows set": _overwritten(lambda y, w: y.__setitem__(slice(None), w)),
    "a view of all": _overwritten(lambda y, w: y.view(3, 1).copy_(w[:, None])),
    "select_scatter": lambda x, w: torch.select_scatter(x[None], w, 0, 0),
    "slice_scatter": lambda x, w: torch.slice_scatter(x, w),
    "beta of 0": lambda x, w: torch.addmm(x[:, None], w[:, None], w[None, :1], beta=0),
    "a number": lambda x, w: _overwritten(lambda y, v: y.fill_(v))(x.sum(), w[1]),
    "in half precision": lambda x, w: _overwritten(lambda y, v: y.copy_(v))(x.half(), w),
    "one of two results": lambda x, w: (
        _overwritten(lambda y, v: y.copy_(v))(x, w),
        x.detach() * w,
    ),
    "a result that is looked at": lambda x, w: _overwritten(lambda y, v: y.copy_(v))(x, w)[1:],
}
NONE: dict[str, Forward] = {
    "detached": lambda x, w: x.detach() * w,
    "extents": lambda x, w: w * x.shape[0],
    "made like it": lambda x, w: torch.ones_like(x) * w,
    "compared": lambda x, w: w * (x > 0),
    "whole numbers": lambda x, w: x.int().float() + w,
    "positions": lambda x, w: torch.sort(x)[1] * w,
}


class TwoWeights(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.tensor([0.3, -0.7, 1.4]))
        self.w = nn.Parameter(torch.tensor([1.3, 0.7, -1.4]))
        self.run = run

    def forward(self, shift: torch.Tensor) -> Any:
        return self.run(self.x + shift, self.w)


def _trained(module: nn.Module) -> list[torch.Tensor | None]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        results = module(torch.ones(3))
        results = results if isinstance(results, tuple) else (results,)
        sum(r.sum() for r in results if r.requires_grad).backward()
        optimizer.step()
    return [*(p.grad for p in module.parameters()), *module.parameters()]


@pytest.mark.parametrize("case", [*ZEROS, *NONE])
def test_optimizers_see_the_gradients_that_pytorch_gives(case: str) -> None:
    plain = TwoWeights((ZEROS | NONE)[case])
    ours = ORTModule(copy.deepcopy(plain))
    expected, found = _trained(plain), _trained(ours)
    assert (expected[0] is None) == (case in NONE)
    for a, b in zip(expected, found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(b, a)
    assert [r.fallback for r in ours.report().captures] == [""]


def test_a_backward_from_one_of_the_results_gives_its_gradients_alone() -> None:
    module = ORTModule(TwoWeights(lambda x, w: (ZEROS["copy"](x, w), w * 2)))
    copied, doubled = module(torch.ones(3))
    doubled.sum().backward(retain_graph=True)
    assert module.x.grad is None
    copied.sum().backward()
    assert module.x.grad.tolist() == [0, 0, 0]
    assert module.w.grad.tolist() == [3, 3, 3]


def _raises_of_its_own(module: nn.Module, reason: str) -> None:
    ours = ORTModule(copy.deepcopy(module))
    with pytest.warns(RuntimeWarning, match=reason):
        assert ours(torch.ones(3)).sum().item() == module(torch.ones(3)).sum().item()
    ours.zero_grad()
    ours(torch.ones(3)).sum().backward()
    module(torch.ones(3)).sum().backward()
    for a, b in zip(module.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)


def test_a_graph_that_leads_to_what_pytorch_does_not_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(registry._conversions, "aten.detach.default", lambda e, x: x.value)
    _raises_of_its_own(
        TwoWeights(lambda x, w: x.detach() * w), "gives 'x' no gradient, which its operators"
    )


def test_zeros_are_not_put_where_an_operator_knows_no_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounded(e: Emitter, x: Tensor) -> Value:
        return e.cast(e.cast(x.value, torch.int64), x.dtype)

    monkeypatch.setitem(registry._conversions, "aten.trunc.default", rounded)
    _raises_of_its_own(
        TwoWeights(lambda x, w: x.trunc() * w), "gives 'x' a gradient, which its operators"
    )


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("h", torch.zeros(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x) + self.h)
        self.h.copy_(y)
        return y * 2


@pytest.mark.filterwarnings("ignore")
def test_a_buffer_carries_the_history_that_is_written_to_it() -> None:
    torch.manual_seed(0)
    plain = Carried()
    ours = ORTModule(copy.deepcopy(plain))
    for module in (plain, ours):
        x = torch.ones(3, 4)
        module(x)
        module(x + 1).sum().backward()
        assert module.h.requires_grad
    torch.testing.assert_close(ours.linear.weight.grad, plain.linear.weight.grad)


def test_a_buffer_that_wants_a_gradient_gets_one() -> None:
    module = Carried()
    module.forward = lambda x: module.linear(x) * module.h  # type: ignore[method-assign]
    ours = ORTModule(module)
    ours(torch.ones(3, 4)).sum().backward()
    module.h.requires_grad_()
    ours(torch.ones(3, 4)).sum().backward()
    torch.testing.assert_close(module.h.grad, module.linear(torch.ones(3, 4)))
    source = torch.ones(3, 4, requires_grad=True)
    module.h = source * 2
    ours(torch.ones(3, 4)).sum().backward()
    torch.testing.assert_close(source.grad, 2 * module.linear(torch.ones(3, 4)))


class Layered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.first(x))
        return self.second(hidden).pow(2).sum(), hidden


def test_gradients_do_not_pass_results_in_silence() -> None:
    ours, x = ORTModule(Layered()), torch.ones(2, 4)
    loss, hidden = ours(x)
    hidden.retain_grad()
    with pytest.warns(RuntimeWarning, match=r"'output.0' is computed from 'output.1' inside"):
        loss.backward()
    loss, hidden = ours(x)
    hidden.retain_grad()
    hidden.sum().backward()  # nothing passes it
    assert hidden.grad.tolist() == torch.ones(2, 4).tolist()


class Guided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        goal = self.teacher(x)
        return goal, (self.student(x) - goal.detach()).pow(2).mean()


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_no_gradient_passes() -> None:
    goal, loss = ORTModule(Guided())(torch.ones(2, 4))
    goal.retain_grad()
    (goal.sum() + loss).backward()
    assert goal.grad.tolist() == torch.ones(2, 4).tolist()


def test_zeros_without_memory_are_gradients() -> None:
    ours = ORTModule(nn.Linear(3, 3))
    ours(torch.ones(2, 3)).sgn().sum().backward()
    assert ours.weight.grad.abs().sum() == 0


SCALE = nn.Parameter(torch.ones(4))
HELD: dict[str, torch.Tensor] = {}


class UsesOutside(nn.Module):
    """Parameters that belong to nobody's table: of a global, of a list, of another module, computed from one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.how, self.held = how, [nn.Linear(4, 4)]
        self.plain = [torch.full((4,), 0.5, requires_grad=True)]

    def forward(self, x: torch.Tensor) -> Any:
        h = self.linear(x)
        if self.how == "global":
            return h * SCALE
        if self.how == "list":
            return self.held[0](h)
        if self.how == "tensor":
            return h * self.plain[0]
        if self.how == "computed":
            return h * HELD["computed"]
        if self.how == "result":
            return h, SCALE
        with torch.no_grad():
            return h * self.held[0](x) * SCALE

    def outside(self) -> list[torch.Tensor]:
        return [SCALE, *self.plain, *self.held[0].parameters()]


@pytest.mark.parametrize("how", ["global", "list", "tensor", "computed", "result", "no_grad"])
def test_what_lies_outside_of_the_module_gets_its_gradient(how: str) -> None:
    seen = []
    for wrap in (lambda module: module, ORTModule):
        net = UsesOutside(how)
        HELD["computed"] = SCALE * 3
        for tensor in net.outside():
            tensor.grad = None
        result = wrap(net)(torch.ones(2, 4))
        loss = sum(r.square().sum() for r in result) if how == "result" else result.square().sum()
        if how != "no_grad":
            loss.backward()
        seen.append([p.grad for p in (*net.parameters(), *net.outside())])
    torch.testing.assert_close(seen[1], seen[0])
    assert any(g is not None for g in seen[0][2:]) == (how != "no_grad")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules that no graph holds whole run in pieces, and do what they do in PyTorch."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule
from ortrain.capture import dynamo_misreads, tracing

pytestmark = pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Network(nn.Module):
    """Two layers, and between them what `between` does with the module and its values."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.first, self.second, self.last = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("positive", torch.zeros(1))
        self.calls = 0
        self.seen: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.norm(self.first(x)))
        return self.last(self.between(self, h))


def pair(between: Callable[[Any, torch.Tensor], torch.Tensor]) -> tuple[Any, Any]:
    plain = Network(between)
    return ORTModule(copy.deepcopy(plain)), plain


def assert_same_steps(ours: nn.Module, plain: nn.Module, steps: int = 4) -> None:
    for step in range(steps):
        x = torch.randn(5 + step % 2, 4)
        for sign in (1, -1):
            results = [model(x * sign) for model in (ours, plain)]
            torch.testing.assert_close(*results)
            for result in results:
                result.square().sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None
        else:
            torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(plain.named_buffers()))


def test_nothing_runs_in_pieces_where_dynamo_misses_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it does in PyTorch 2.11."""
    monkeypatch.setattr(dynamo_misreads, "_MISSES_CHANGES", True)
    ours, plain = pair(branch)
    assert_same_steps(ours, plain)
    assert all(c.pieces == 0 for c in ours.report().captures)


def branch(m: Any, h: torch.Tensor) -> torch.Tensor:
    return m.second(h) if h.sum() > 0 else h


def loop(m: Any, h: torch.Tensor) -> torch.Tensor:
    steps = 0
    while h.norm() > 1 and steps < 3:
        h = m.second(h) * 0.5
        steps += 1
    return h


def read_value(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.seen.append(float(h.detach().mean()))
    return m.second(h) * (1 + m.seen[-1])


def through_numpy(m: Any, h: torch.Tensor) -> torch.Tensor:
    scale = torch.from_numpy(h.detach().numpy().copy()).abs().mean()
    return m.second(h) * scale


def counted(m: Any, h: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return m.second(h) / m.calls


def selected(m: Any, h: torch.Tensor) -> torch.Tensor:
    rows = h.sum(1) > 0
    return torch.cat([m.second(h[rows]), h[~rows]])


def written(m: Any, h: torch.Tensor) -> torch.Tensor:
    h = h * 2
    if h.sum() > 0:
        h[:, 0] = 0
    v = h[1]
    torch._dynamo.graph_break()
    v.mul_(2)
    return m.second(h)


def written_at_last(m: Any, h: torch.Tensor) -> torch.Tensor:
    h = m.second(h) * 2
    if h.sum() > 0:
        h[:, 0] = 0
    return h


def counted_at_last(m: Any, h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        m.positive.add_(1)
    return m.second(h)


def filled(m: Any, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(h.shape[0], 8)
    torch._dynamo.graph_break()
    out[:, :4] = m.second(h)[:, :4]
    if h.sum() > 0:
        out[:, 4:] = h[:, 4:]
    return out


def tensor_hook(m: Any, h: torch.Tensor) -> torch.Tensor:
    if h.sum() > 0:
        h.register_hook(lambda gradient: gradient * 2)
    return m.second(h)


def frozen(m: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = m.second(h).abs().mean()
        if scale > 0:
            scale = scale * 2
    return m.second(h) * scale


@pytest.mark.sampled(4)
@pytest.mark.since_torch(2, 12)
@pytest.mark.parametrize(
    "between",
    [
        branch,
        loop,
        read_value,
        through_numpy,
        counted,
        selected,
        written,
        written_at_last,
        counted_at_last,
        filled,
        tensor_hook,
        frozen,
    ],
)
def test_follows_pytorch(between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    ours, plain = pair(between)
    assert_same_steps(ours, plain)
    assert ours.module.calls == plain.calls
    assert ours.module.seen == pytest.approx(plain.seen, abs=1e-5)
    report = ours.report()
    assert report.captures[0].pieces >= 1, report
    assert "pieces" in str(report)


@pytest.mark.since_torch(2, 12)
def test_the_report_says_where_it_was_cut() -> None:
    ours, _ = pair(branch)
    ours(torch.randn(5, 4))
    (record,) = ours.report().captures
    assert record.pieces == 3 and record.fallback
    assert any("test_pieces.py" in cause for cause in record.breaks)
    assert all(piece.native_nodes and not piece.fallback for piece in ours.report().pieces)


@pytest.mark.since_torch(2, 12)
def test_the_report_is_a_page() -> None:
    class Unusual(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.lgamma(x)

    ours, _ = pair(branch)
    empty = ours.report().to_html()
    assert "not been called" in empty
    ours(torch.randn(5, 4))
    page = ours.report().to_html("A <model>")
    assert "A &lt;model&gt;" in page and "<script" not in page and "http" not in page
    assert "3 pieces" in page and "test_pieces.py" in page and "capture" in page
    whole = ORTModule(Unusual())
    whole(torch.rand(3))
    assert "aten.lgamma.default" in whole.report().to_html()


def test_without_gradients_and_in_eval_mode() -> None:
    ours, plain = pair(branch)
    x = torch.randn(5, 4)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), plain(x))
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(x), plain(x))
    with torch.inference_mode():
        torch.testing.assert_close(ours(x), plain(x))


def test_parameters_replaced_between_calls() -> None:
    ours, plain = pair(branch)
    x = torch.randn(5, 4).abs()
    for _ in range(3):
        weight = torch.randn(8, 8)
        for model in (ours, plain):
            model.second.weight = nn.Parameter(weight.clone())
            model(x).sum().backward()
        torch.testing.assert_close(ours.second.weight.grad, plain.second.weight.grad)
    ours.double()
    plain.double()
    torch.testing.assert_close(ours(x.double()), plain(x.double()))


@pytest.mark.since_torch(2, 12)
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_hooks_of_layers_come_and_go(kind: str) -> None:
    ours, plain = pair(lambda m, h: m.second(h))
    assert_same_steps(ours, plain, 1)
    counts = [0, 0]

    def hook_of(i: int) -> Callable[..., Any]:
        def hook(module: nn.Module, *values: Any) -> Any:
            counts[i] += 1
            if kind == "forward":
                return values[1] * 3
            if kind == "forward_pre":
                return (values[0][0] * 3,)
            return tuple(None if g is None else g * 3 for g in values[0])

        return hook

    for _ in range(2):
        handles = [
            getattr(model.second, f"register_{kind}_hook")(hook_of(i))
            for i, model in enumerate((ours, plain))
        ]
        assert_same_steps(ours, plain, 2)
        for handle in handles:
            handle.remove()
        assert_same_steps(ours, plain, 1)
    assert counts[0] == counts[1] > 0
    assert [c.pieces > 0 for c in ours.report().captures].count(True) >= 1


def test_hooks_of_layers_are_exchanged() -> None:
    ours, plain = pair(lambda m, h: m.second(h))
    for factor in (2.0, 3.0, 4.0):
        handles = [
            model.second.register_forward_hook(lambda m, args, out, f=factor: out * f)
            for model in (ours, plain)
        ]
        assert_same_steps(ours, plain, 1)
        for handle in handles:
            handle.remove()


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 3

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 5


def test_autograd_functions_under_autocast() -> None:
    ours, plain = pair(lambda m, h: Tripled.apply(m.second(h)))
    x = torch.randn(5, 4)
    for model in (ours, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
        y.float().square().sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=5e-2, atol=1e-2)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    ours, plain = pair(lambda m, h: checkpoint(m.second, h, use_reentrant=reentrant))
    assert_same_steps(ours, plain)


def test_copies_and_pickles_after_a_call() -> None:
    module = BranchingLayer()
    ours = ORTModule(module)
    x = torch.randn(5, 4)
    expected = ours(x)
    torch.testing.assert_close(copy.deepcopy(ours)(x), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(ours))(x), expected)


class BranchingLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * 2 if y.sum() > 0 else -y


def test_an_ortmodule_within_another() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), BranchingLayer(), nn.Linear(4, 2))
    inner = copy.deepcopy(plain)
    inner[1] = ORTModule(inner[1])
    ours = ORTModule(inner)
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        results = [model(x) for model in (ours, plain)]
        torch.testing.assert_close(*results)
        for result in results:
            result.sum().backward()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_an_ortmodule_within_one_that_is_captured_whole() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4)))
    inner = copy.deepcopy(plain)
    inner[1] = ORTModule(inner[1])
    ours = ORTModule(inner)
    x = torch.randn(5, 4)
    for _ in range(2):
        torch.testing.assert_close(ours(x), plain(x))
    assert ours.report().native_share == 1.0 and not inner[1].report().captures
    torch.testing.assert_close(inner[1](x), plain[1](x))
    assert inner[1].report().native_share == 1.0


def test_modules_captured_by_several_threads() -> None:
    plains = [nn.Sequential(nn.Linear(4, n), nn.Tanh()) for n in range(3, 11)]
    x = torch.randn(5, 4)
    with futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda plain: ORTModule(plain)(x).detach(), plains))
    for plain, result in zip(plains, results, strict=True):
        torch.testing.assert_close(result, plain(x).detach())


def test_threads_run_the_pieces_together() -> None:
    plain = BranchingLayer()
    ours = ORTModule(copy.deepcopy(plain))
    inputs = [torch.randn(5, 4) for _ in range(8)]
    with futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda x: ours(x).detach(), inputs))
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, plain(x).detach())


def test_another_forward_put_in_its_place() -> None:
    plain = BranchingLayer()
    ours = ORTModule(plain)
    x = torch.randn(5, 4)
    ours(x)
    forward = plain.forward
    plain.forward = lambda x: forward(x) + 1
    torch.testing.assert_close(ours(x), plain(x))
    del plain.forward
    torch.testing.assert_close(ours(x), plain(x))


@pytest.mark.since_torch(2, 12)
def test_what_was_cut_is_freed_with_the_module() -> None:
    plain = BranchingLayer()
    ours = ORTModule(plain)
    ours(torch.randn(5, 4)).sum().backward()
    engines = [weakref.ref(engine) for engine in ours._ortrain_engine.piece_engines]
    module = weakref.ref(plain)
    assert engines
    del plain, ours
    gc.collect()
    assert module() is None
    assert not any(engine() for engine in engines)


def test_other_tracers_see_the_module_itself() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), BranchingLayer())
    x = torch.randn(5, 4)
    traced = torch.jit.trace(ORTModule(plain), x)
    torch.testing.assert_close(traced(x), plain(x))


def test_layers_run_by_threads_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "_LONGEST_WAIT", 5.0)  # they wait for a thread that waits for them

    class Parallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([ORTModule(nn.Linear(4, 4)) for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with futures.ThreadPoolExecutor(3) as pool:
                return sum(pool.map(lambda part: part(x).detach(), self.parts)) + x

    module = Parallel()
    x = torch.randn(5, 4)
    expected = sum(part.module(x) for part in module.parts).detach() + x
    torch.testing.assert_close(ORTModule(module)(x), expected)


def test_transforms_of_functions_are_left_to_pytorch() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    ours = ORTModule(plain)
    x = torch.randn(3, 4)
    with pytest.warns(RuntimeWarning, match=r"inside of a transform of torch.func"):
        torch.testing.assert_close(torch.func.vmap(ours)(x), plain(x))
    jacobian = torch.func.jacrev(lambda y: ours(y))(x[0])
    torch.testing.assert_close(jacobian, torch.func.jacrev(lambda y: plain(y))(x[0]))
    torch.testing.assert_close(ours(x), plain(x))
    assert ours.report().captures[-1].native_nodes > 0


@pytest.mark.long
def test_many_modules_of_one_class() -> None:
    x = torch.randn(5, 4)
    for _ in range(12):  # more than Dynamo compiles of one function
        plain = BranchingLayer()
        ours = ORTModule(plain)
        torch.testing.assert_close(ours(x), plain(x))
        assert ours.report().captures[0].pieces == 2

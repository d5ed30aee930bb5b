# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A wrapped module that changes: what needs another graph, and what does not."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from concurrent import futures
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_modules import ODD_TENSORS, Scaled, assert_same_gradients, batch, pair

import ortrain
from ortrain import ORTModule, attempts


class AttributeScaled(nn.Module):
    """Multiplies by attributes that a capture bakes in; counts its calls if told to."""

    def __init__(self, count: bool = False) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.times = 1
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "offset"):
            self.offset = 1
        if self.count:
            self.times += 1
        return x * self.w * self.times + self.offset


def test_integer_attributes_are_part_of_the_graph() -> None:
    plain, ours = AttributeScaled(), ORTModule(AttributeScaled())
    x = torch.arange(3.0)
    for times in (1, 2, 2, 1):
        plain.times = ours.module.times = times
        torch.testing.assert_close(ours(x), plain(x))
    assert ours.report().native_share == 1.0
    # The attribute made at the first call is no reason to capture again.
    assert len(ours.report().captures) == 2


def test_counting_calls_in_forward_runs_in_pytorch() -> None:
    plain, ours = AttributeScaled(count=True), ORTModule(AttributeScaled(count=True))
    x = torch.arange(3.0)
    with pytest.warns(RuntimeWarning, match=r"changes 'times'"):
        torch.testing.assert_close(ours(x), plain(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        for _ in range(3):
            torch.testing.assert_close(ours(x), plain(x))
    assert ours.module.times == plain.times == 5


def test_default_dtype_is_part_of_the_graph() -> None:
    class Ones(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ones(x.shape[0]) + 1

    ours = ORTModule(Ones())
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert ours(torch.zeros(2)).dtype == dtype
    finally:
        torch.set_default_dtype(torch.float32)


def test_parameter_replaced_after_the_first_call() -> None:
    ours, plain = pair()
    ours(**batch())
    with torch.no_grad():
        plain.head.weight.mul_(3.0)
    ours.head.weight = nn.Parameter(plain.head.weight.detach().clone())
    torch.testing.assert_close(ours(**batch())["logits"], plain(**batch())["logits"])
    ours(**batch())["loss"].backward()
    assert ours.head.weight.grad is not None


def test_moved_to_another_dtype_after_the_first_call() -> None:
    ours, plain = pair()
    ours(**batch())
    ours.double()
    plain.double()
    torch.testing.assert_close(ours(**batch())["logits"], plain(**batch())["logits"])
    assert ours(**batch())["logits"].dtype == torch.float64


def test_changed_attributes_ties_and_shapes_are_seen() -> None:
    ours = ORTModule(Scaled(lambda m, x: x * m.w * m.t))
    x = torch.ones(3)
    ours(x)
    ours.t = 3.0
    torch.testing.assert_close(ours(x), torch.tensor([6.0, 9.0, 12.0]))
    ours.w = nn.Parameter(torch.tensor([1.0]))
    torch.testing.assert_close(ours(x), torch.full((3,), 3.0))

    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    wrapped = ORTModule(tied)
    wrapped(x)
    tied[1].weight = nn.Parameter(torch.eye(3))
    torch.testing.assert_close(wrapped(x), x @ tied[0].weight.T)


@pytest.mark.parametrize(
    ("kind", "declared"),
    [*((k, False) for k in ("tensor", "buffer", "parameter", "layer"))]
    + [("number", True), ("tensor", True)],
)
def test_what_a_forward_makes_at_its_first_call_is_real(kind: str, declared: bool) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))
            if declared:
                self.made = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if getattr(self, "made", None) is None:
                if kind == "number":
                    self.made = 3.0
                elif kind == "tensor":
                    self.made = torch.arange(4.0)
                elif kind == "buffer":
                    self.register_buffer("made", torch.arange(4.0))
                elif kind == "parameter":
                    self.made = nn.Parameter(torch.arange(4.0))
                else:
                    self.made = nn.ReLU()
            return x * self.w * (self.made(x) if kind == "layer" else self.made)

    plain, ours = Lazy(), ORTModule(Lazy())
    x = torch.randn(3, 4)
    for _ in range(3):
        torch.testing.assert_close(ours(x), plain(x))
    *others, last = ours.report().captures
    assert last.native_nodes > 0 and ours.report().native_share == 1.0
    if kind == "number":  # a call that finds it computes the same
        assert not others
    else:
        assert others[0].first_call and "makes" in others[0].fallback
    torch.testing.assert_close(ours.module(x), plain(x))


def captures(model: ORTModule) -> int:
    return len(model.report().captures)


def collected(reference: weakref.ref[Any]) -> bool:
    gc.collect()
    return reference() is None


class Block(nn.Module):
    """Layers with tensors of all sorts: a batch norm's buffers, an LSTM's list of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.lstm = nn.LSTM(3, 4, batch_first=True)
        self.head = nn.Linear(4, 2)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.norm(x).unsqueeze(1))[0]) * self.scale


def test_states_seen_before_need_no_new_capture() -> None:
    ours, plain = ORTModule(Block()), Block()
    plain.load_state_dict(ours.state_dict())
    x = torch.randn(4, 3)
    for scale in (2.0, 3.0, 2.0, 3.0):
        ours.scale = plain.scale = scale
        for training in (True, False):
            ours.train(training)
            plain.train(training)
            torch.testing.assert_close(ours(x), plain(x))
    assert captures(ours) == 4


def test_a_layer_put_back_needs_no_new_capture() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
    x = torch.randn(4, 3)
    tanh, relu = ours.module[1], nn.ReLU()
    for layer in (tanh, relu, tanh, relu):
        ours.module[1] = layer
        torch.testing.assert_close(ours(x), layer(ours.module[0](x)))
    assert captures(ours) == 2


def test_replaced_tensors_of_the_same_kind_need_no_new_capture() -> None:
    ours, plain = ORTModule(Block()), Block()
    x = torch.randn(4, 3)
    ours(x).sum().backward()
    gone = [weakref.ref(t) for t in ours.state_dict(keep_vars=True).values()]
    for seed in range(2):
        torch.manual_seed(seed)
        state = Block().state_dict()
        plain.load_state_dict(state)
        ours.load_state_dict({name: t.clone() for name, t in state.items()}, assign=True)
        results = [model(x) for model in (ours, plain)]
        torch.testing.assert_close(*results)
        for model, result in zip((ours, plain), results, strict=True):
            model.zero_grad()
            result.square().sum().backward()
        assert_same_gradients(ours, plain)
        torch.testing.assert_close(ours.norm.running_mean, plain.norm.running_mean)
    del results, result
    assert captures(ours) == 1
    assert all(map(collected, gone))


def test_tensors_replaced_in_another_state_are_let_go() -> None:
    ours = ORTModule(Block())
    x = torch.randn(4, 3)
    for training in (True, False):
        ours.train(training)
        ours(x)
    gone = weakref.ref(ours.head.weight)
    ours.load_state_dict({n: t.clone() for n, t in ours.state_dict().items()}, assign=True)
    ours(x)
    assert collected(gone)
    ours.train()
    ours(x).sum().backward()
    assert ours.head.weight.grad is not None
    assert captures(ours) == 2


def test_how_tensors_are_tied_is_part_of_the_state() -> None:
    layers = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    ours = ORTModule(layers)
    x = torch.randn(2, 3)

    def check(expected: int) -> None:
        for p in layers.parameters():
            p.grad = None
        ours(x).square().sum().backward()
        ours_grads = [p.grad.clone() for p in layers.parameters()]
        for p in layers.parameters():
            p.grad = None
        layers(x).square().sum().backward()
        for got, p in zip(ours_grads, layers.parameters(), strict=True):
            torch.testing.assert_close(got, p.grad)
        assert captures(ours) == expected

    apart = layers[1].weight
    check(1)
    layers[1].weight = layers[0].weight
    check(2)
    layers[0].weight = layers[1].weight = nn.Parameter(torch.randn(3, 3))
    check(2)
    layers[1].weight = apart
    check(2)


def test_a_kind_of_tensor_is_part_of_the_state() -> None:
    ours = ORTModule(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    bias = ours.bias
    ours(x)
    for number, other in enumerate((None, nn.Parameter(torch.ones(3), requires_grad=False)), 2):
        ours.bias = other
        torch.testing.assert_close(ours(x), ours.module(x))
        assert captures(ours) == number
    ours.bias = bias
    ours(x).sum().backward()
    assert captures(ours) == 3 and bias.grad is not None


def test_replaced_layers_go_with_their_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_CALLS_PER_DROPPED", 0)  # each is captured
    ours = ORTModule(nn.Sequential(nn.Linear(3, 3)))
    ours._ortrain_engine._graphs._most = 2
    x = torch.randn(2, 3)
    gone = []
    for _ in range(4):
        ours(x).sum().backward()
        gone.append(weakref.ref(ours.module[0]))
        ours.module[0] = nn.Linear(3, 3)
    assert [collected(layer) for layer in gone] == [True, True, False, False]


def test_wrapped_modules_are_freed() -> None:
    ours = ORTModule(Block())
    ours(torch.randn(4, 3)).sum().backward()
    ours.itself = ours
    gone = [weakref.ref(ours), weakref.ref(ours.module), weakref.ref(ours.head.weight)]
    del ours
    assert all(map(collected, gone))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("registered", [False, True])
@pytest.mark.parametrize("name", ODD_TENSORS)
def test_modules_with_tensors_that_the_engine_does_not_hold(name: str, registered: bool) -> None:
    model = nn.Linear(3, 3)
    if registered:
        model.register_buffer("odd", ODD_TENSORS[name]())
    else:
        model.odd = ODD_TENSORS[name]()
    ours = ORTModule(model)
    x = torch.randn(2, 3)
    for _ in range(3):
        torch.testing.assert_close(ours(x), model(x))
    assert captures(ours) == 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layer", ["scripted", "lazy"])
def test_layers_whose_tensors_cannot_be_seen(layer: str) -> None:
    special = torch.jit.script(nn.Linear(3, 3)) if layer == "scripted" else nn.LazyLinear(3)
    ours = ORTModule(nn.Sequential(special, nn.Tanh()))
    x = torch.randn(2, 3)
    for _ in range(3):
        torch.testing.assert_close(ours(x), ours.module(x))
    assert captures(ours) == (1 if layer == "scripted" else 2)


def test_module_on_another_device_can_be_moved_back() -> None:
    ours = ORTModule(nn.Linear(3, 3, device="meta"))
    x = torch.randn(2, 3)
    for _ in range(2):
        with pytest.raises(ortrain.ShapeError, match="meta"):
            ours(x)
    ours.to_empty(device="cpu")
    with torch.no_grad():
        ours.weight.fill_(1.0)
        ours.bias.zero_()
    torch.testing.assert_close(ours(x), x.sum(1, keepdim=True).expand(2, 3))
    assert ours.report().native_share == 1.0


def test_a_buffer_that_is_written_and_never_read() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.register_buffer("last", torch.zeros(2, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            self.last.copy_(y.detach())
            return y

    module = ORTModule(Keeps())
    for training in (True, False):
        x = torch.randn(2, 3)
        with torch.set_grad_enabled(training):
            y = module(x)
        if training:
            y.sum().backward()
        torch.testing.assert_close(module.last, y.detach())
    assert module.report().native_share == 1.0


def test_spectral_norm_follows_pytorch() -> None:
    torch.manual_seed(0)
    plain = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).train()
    ours = ORTModule(copy.deepcopy(plain))
    for _ in range(3):
        x = torch.randn(2, 4)
        for model in (ours, plain):
            model.zero_grad()
            model(x).square().sum().backward()
        assert_same_gradients(ours, plain)
    for p, q in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.filterwarnings("ignore:Counts runs in PyTorch")
def test_a_module_refused_in_ever_other_states_is_left_to_pytorch() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n += 1
            return x * 2 if x.sum() > 0 else x

    module = ORTModule(Counts())
    for _ in range(30):
        module(torch.ones(2))
    assert len(module.report().captures) <= 10


def test_threads_may_make_the_first_call_together() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    module = ORTModule(plain)
    x = torch.randn(5, 4)
    with futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: module(x).detach(), range(8)))
    for result in results:
        torch.testing.assert_close(result, plain(x).detach())
    assert len(module.report().captures) == 1


def test_a_zero_of_the_other_sign_is_another_number() -> None:
    class Fills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.value = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 1 / torch.full_like(x, self.value)

    module = ORTModule(Fills())
    assert module(torch.ones(2)).tolist() == [torch.inf] * 2
    module.module.value = -0.0
    assert module(torch.ones(2)).tolist() == [-torch.inf] * 2

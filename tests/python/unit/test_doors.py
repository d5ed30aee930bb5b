# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Ways to use a module that PyTorch offers, through ORTModule: each does what it does there."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from ortrain import ORTModule, program
from ortrain.capture.errors import CaptureError

Use = Callable[[nn.Module, int], Any]


def network(*, norm: bool = False, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(6))
    if dropout:
        layers.insert(2, nn.Dropout(dropout))
    return nn.Sequential(*layers)


def points(step: int = 0) -> torch.Tensor:
    return torch.linspace(-1.0, 1.5, 12).reshape(3, 4) * (1 + step / 4)


def same_in_each_step(model: nn.Module, use: Use, steps: int = 3, **options: Any) -> ORTModule:
    """Train with ``use``; what it returns, gradients and buffers must be PyTorch's in each step."""
    plain, ours = model, ORTModule(copy.deepcopy(model), **options)
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (plain, ours)]
    for step in range(steps):
        seen = []
        for m, optimizer in zip((plain, ours), optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            result = use(m, step)
            gradients = [p.grad for p in m.parameters()]
            seen.append([result, gradients, [b.clone() for b in m.buffers()]])
            optimizer.step()
        torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)
    return ours


def ran_whole(ours: ORTModule) -> None:
    assert [record.fallback for record in ours.report().captures] == [""]


def penalty(m: nn.Module, step: int) -> torch.Tensor:
    x = points(step).to(next(m.parameters()).dtype).requires_grad_()
    y = m(x * 1.5)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (y.mean() + (slope.norm(dim=1) - 1).square().sum()).backward()
    return slope.detach()


# --- gradients of gradients


@pytest.mark.parametrize("norm", [False, True])
def test_gradient_penalty(norm: bool) -> None:
    # In float64: a bias in front of the normalization has no gradient but rounding.
    ran_whole(same_in_each_step(network(norm=norm).double(), penalty))


def test_gradient_penalty_under_autocast() -> None:
    def use(m: nn.Module, step: int) -> torch.Tensor:
        x = points(step).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = m(x)
        (slope,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach()

    plain, ours = network(), ORTModule(network())
    slopes = [use(m, 0) for m in (plain, ours)]
    assert torch.equal(slopes[1], slopes[0])
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


def test_gradient_penalty_where_gradients_are_handed_over_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(program, "_LEAST_PART", 64)
    model = network()

    def use(m: nn.Module, step: int) -> torch.Tensor:
        hooks = [p.register_post_accumulate_grad_hook(lambda p: None) for p in m.parameters()]
        slope = penalty(m, step)
        for hook in hooks:
            hook.remove()
        return slope

    same_in_each_step(model, use)


def test_history_of_the_input_counts_once() -> None:
    def use(m: nn.Module, step: int) -> list[torch.Tensor]:
        x = points(step).requires_grad_()
        h = m[0](x)[:, :4].sin()  # of weights that the module uses again
        gradients = torch.autograd.grad(m(h).sum(), [x, *m.parameters()], create_graph=True)
        sum(g.square().sum() for g in gradients).backward()
        return [g.detach() for g in gradients]

    same_in_each_step(network(), use)


def test_third_derivative() -> None:
    def use(m: nn.Module, step: int) -> list[torch.Tensor]:
        x = points(step).requires_grad_()
        found = [m(x).sum()]
        for _ in range(3):
            found += torch.autograd.grad(found[-1].sum(), x, create_graph=True)
        found[-1].sum().backward()
        return [f.detach() for f in found]

    same_in_each_step(network(), use)


def test_derivatives_by_parameters() -> None:
    def use(m: nn.Module, step: int) -> None:
        loss = m(points(step)).square().sum()
        loss.backward(create_graph=True)
        gradients = [p.grad for p in m.parameters()]
        m.zero_grad()
        sum((g * g.detach()).sum() for g in gradients).backward()

    same_in_each_step(network(), use)


class _Forces(nn.Module):
    """Energy of positions, and forces that forward derives from it."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = network()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            energy = self.energy(x).sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=self.training)
        return energy, -slope


@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
def test_forces_in_forward_in_training_and_evaluation() -> None:
    def use(m: nn.Module, step: int) -> list[torch.Tensor]:
        energy, forces = m.train()(points(step))
        (energy + forces.square().sum()).backward()
        with torch.no_grad():
            evaluated = m.eval()(points(step))
        return [energy.detach(), forces.detach(), *(e.detach() for e in evaluated)]

    same_in_each_step(_Forces(), use)


@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
def test_forces_of_a_wrapped_energy() -> None:
    plain = _Forces()
    ours = copy.deepcopy(plain)
    ours.energy = ORTModule(ours.energy)
    for step in range(3):
        for m in (plain, ours):
            m.zero_grad()
            energy, forces = m(points(step))
            (energy + forces.square().sum()).backward()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("vectorize", [False, True])
def test_functional_derivatives(vectorize: bool) -> None:
    plain, ours = network(), ORTModule(network())
    x = points()[0]
    functional = torch.autograd.functional
    for take in (
        lambda m: functional.hessian(lambda v: m(v).sum(), x, vectorize=vectorize),
        lambda m: functional.jacobian(m, points(), vectorize=vectorize),
        lambda m: functional.jacobian(m, points(), create_graph=True),
        lambda m: functional.hvp(lambda v: m(v).sum(), x, torch.ones(4)),
        lambda m: functional.vhp(lambda v: m(v).sum(), x, torch.ones(4)),
        lambda m: functional.jvp(m, x, torch.ones(4)),
    ):
        torch.testing.assert_close(take(ours), take(plain), rtol=1e-4, atol=1e-5)


def test_batch_of_gradients_is_not_differentiated() -> None:
    with pytest.raises(RuntimeError, match="vectorize=False"):
        torch.autograd.functional.jacobian(
            ORTModule(network()), points(), vectorize=True, create_graph=True
        )


def test_weights_of_the_call_are_differentiated() -> None:
    def use(m: nn.Module, step: int) -> list[torch.Tensor]:
        weights = {name: p * 2 for name, p in m.named_parameters()}
        x = points(step).requires_grad_()
        y = functional_call(m, weights, (x,))
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        slope.square().sum().backward()
        return [slope.detach()]

    same_in_each_step(network(), use)


class _Halves(nn.Module):
    """Results that are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x).tanh().chunk(2, dim=1)


def test_gradients_through_results_that_share_memory() -> None:
    def use(m: nn.Module, step: int) -> torch.Tensor:
        x = points(step).requires_grad_()
        left, right = m(x)
        (slope,) = torch.autograd.grad((left * right).sum(), x, create_graph=True)
        slope.square().sum().backward()
        return slope.detach()

    same_in_each_step(_Halves(), use)


def test_dropout_of_the_engine_cannot_be_drawn_again() -> None:
    ours = ORTModule(network(dropout=0.5))
    x = points().requires_grad_()
    (slope,) = torch.autograd.grad(ours(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match='random="pytorch"'):
        slope.sum().backward()


def test_dropout_of_pytorch_is_drawn_again() -> None:
    same_in_each_step(network(dropout=0.5), penalty, random="pytorch")


def test_second_derivative_of_a_module_in_another_mode_is_refused() -> None:
    ours = ORTModule(network(norm=True))
    x = points().requires_grad_()
    loss = ours(x).sum()
    ours.eval()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="have changed since its forward"):
        slope.sum().backward()


def test_second_derivative_after_a_change_of_weights_is_refused() -> None:
    ours = ORTModule(network())
    x = points().requires_grad_()
    loss = ours(x).sum()
    with torch.no_grad():
        ours[0].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"0\.weight.*modified by an inplace operation"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_without_create_graph_gradients_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ORTModule(network())
    x = points().requires_grad_()
    ours(x).sum().backward()

    def forward(*args: Any) -> Any:
        raise AssertionError("the forward ran again")

    loss = ours(x).sum()
    monkeypatch.setattr(nn.Linear, "forward", forward)
    assert torch.autograd.grad(loss, x)[0].grad_fn is None


def test_written_results_leave_no_cycle() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def residual() -> weakref.ref[torch.Tensor]:
        x = points().requires_grad_() * 2
        x += ours(x)
        return weakref.ref(x)

    residual()
    gc.disable()
    try:
        assert residual()() is None
    finally:
        gc.enable()


def test_buffers_are_written_once() -> None:
    ours = ORTModule(network(norm=True))
    penalty(ours, 0)
    assert ours[1].num_batches_tracked.item() == 1


# --- inside of torch.compile


@pytest.fixture
def _dynamo_starts_anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_dynamo_starts_anew")
def test_compiled_module_runs_on_the_engine() -> None:
    compiled: dict[int, Any] = {}

    def use(m: nn.Module, step: int) -> torch.Tensor:
        called = compiled.setdefault(id(m), torch.compile(m, backend="eager"))
        y = called(points(step))
        y.square().sum().backward()
        return y.detach()

    ran_whole(same_in_each_step(network(), use))


@pytest.mark.usefixtures("_dynamo_starts_anew")
def test_compiled_train_step_runs_on_the_engine() -> None:
    def train(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m(x * 2) + 1
        loss = (y * y).mean()
        loss.backward()
        return loss.detach()

    compiled = torch.compile(train, backend="aot_eager")
    ours = same_in_each_step(network(norm=True), lambda m, step: compiled(m, points(step)))
    ran_whole(ours)


@pytest.mark.usefixtures("_dynamo_starts_anew")
def test_module_compiled_in_place_runs_on_the_engine() -> None:
    def use(m: nn.Module, step: int) -> torch.Tensor:
        if step == 1:
            m.compile(backend="eager")
        return penalty(m, step)

    ours = same_in_each_step(network(), use)
    assert not any(record.fallback for record in ours.report().captures)


class _Branching(nn.Module):
    """No capture of the whole holds: it runs in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(x))
        return self.last(h) if h.sum() > 0 else self.last(h * 2)


@pytest.mark.since_torch(2, 12)
@pytest.mark.usefixtures("_dynamo_starts_anew")
@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
def test_module_in_pieces_inside_of_compiled_code() -> None:
    def train(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m(x * 2).square().sum()
        y.backward()
        return y.detach()

    compiled = torch.compile(train, backend="eager")
    ours = same_in_each_step(_Branching(), lambda m, step: compiled(m, points(step)))
    assert any(record.native_nodes for record in ours.report().pieces)


# --- a backward for each of several results


class _Heads(nn.Module):
    """Two heads, each with a weight of its own, on a trunk given as a function of (module, x)."""

    def __init__(self, trunk: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.actor, self.critic = nn.Linear(4, 3), nn.Linear(4, 1)
        self.through = trunk

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.through(self, x)
        return self.actor(h).softmax(-1), self.critic(h).tanh()


# Whether the heads share a node that saves something is for PyTorch to say.
_TRUNKS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "none": lambda m, x: x,
    "trained": lambda m, x: m.trunk(x),
    "detached": lambda m, x: m.trunk(x).detach(),
    "no_grad": lambda m, x: torch.no_grad()(m.trunk)(x).tanh(),
    "sum of a weight": lambda m, x: x + m.scale,
    "product with a weight": lambda m, x: x * m.scale,
    "product with a number": lambda m, x: ((x + m.scale) * 3).reshape(3, 2, 2).flatten(1) - 1,
    "halves": lambda m, x: torch.cat(torch.split(x + m.trunk.bias, 2, dim=1), 1).mT.mT,
    "tanh": lambda m, x: (x + m.scale).tanh(),
}


def one_after_the_other(m: nn.Module, x: torch.Tensor, roots: list[int], keep: list[bool]) -> Any:
    """Return what each backward left in gradients, or that it was refused."""
    outputs = m(x)
    seen: list[Any] = []
    for root, kept in zip(roots, keep, strict=True):
        m.zero_grad()
        x.grad = None
        try:
            outputs[root].square().sum().backward(retain_graph=kept)
        except RuntimeError as error:
            assert "second time" in str(error)
            seen.append("refused")
        else:
            seen.append([x.grad, *(p.grad for p in m.parameters())])
    return seen


@pytest.mark.parametrize("trunk", _TRUNKS)
def test_results_are_differentiated_one_after_the_other(trunk: str) -> None:
    plain = _Heads(_TRUNKS[trunk])
    ours = ORTModule(copy.deepcopy(plain))
    for roots, keep in (
        ([0, 1], [False, False]),
        ([1, 0, 1], [False, True, False]),
        ([0, 1, 1], [False, True, False]),
        ([0, 0, 1, 0], [True, False, False, False]),
    ):
        for with_gradient in (False, True):
            x = points().requires_grad_(with_gradient)
            expected = one_after_the_other(plain, x, roots, keep)
            actual = one_after_the_other(ours, x, roots, keep)
            assert [one == "refused" for one in actual] == [e == "refused" for e in expected]
            for ours_saw, pytorch_saw in zip(actual, expected, strict=True):
                if pytorch_saw == "refused":
                    continue
                torch.testing.assert_close(ours_saw, pytorch_saw, rtol=1e-4, atol=1e-6)
    assert not any(record.fallback for record in ours.report().captures)


def test_optimizers_step_between_the_backwards_of_two_parts() -> None:
    plain = _Heads(_TRUNKS["detached"])
    ours = ORTModule(copy.deepcopy(plain))
    for m in (plain, ours):
        parts = [torch.optim.SGD(part.parameters(), 0.1) for part in (m.actor, m.critic)]
        for step in range(4):
            outputs = m(points(step))
            for optimizer, output in zip(parts, outputs, strict=True):
                optimizer.zero_grad()
                output.square().sum().backward()
                optimizer.step()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_optimizer_of_a_shared_part_between_two_backwards_is_refused() -> None:
    for m in (_Heads(_TRUNKS["trained"]), ORTModule(_Heads(_TRUNKS["trained"]))):
        actor, critic = m(points().requires_grad_())
        actor.square().sum().backward(retain_graph=True)
        torch.optim.SGD(m.parameters(), 0.1).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            critic.square().sum().backward()


def test_common_saves_come_from_the_graph_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        ours = ORTModule(_SeparateHeads())
        left, right = ours(points())
        left.sum().backward()
        right.sum().backward()
        left, right = ours(points())
        left.sum().backward()
        with pytest.raises(RuntimeError, match="second time"):
            left.sum().backward()
    assert ours.report().captures[0].from_disk


class _SeparateHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x).tanh(), self.right(x).tanh()


# --- being the wrapped module


def fit(m: nn.Module, steps: int = 3) -> list[torch.Tensor]:
    """Return the losses of some steps of training."""
    optimizer = torch.optim.SGD(m.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = m(points()).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def same_story(story: Callable[[Callable[[Any], Any]], list[torch.Tensor]]) -> None:
    """Tell a story with a plain module and with a wrapped one; both must give the same tensors."""
    seen = []
    for wrap in (lambda m: m, ORTModule):
        torch.manual_seed(0)
        seen.append(story(wrap))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


_REGISTERED: dict[str, type] = {}


class _Registering(nn.Module):
    def __init_subclass__(cls, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        assert key not in _REGISTERED
        _REGISTERED[key] = cls


class _Registered(_Registering, key="registered"):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)
        self.width = width

    def another(self) -> _Registered:
        made = type(self)(self.width)
        made.load_state_dict(self.state_dict())
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


def test_registries_of_classes_and_modules_that_make_their_like() -> None:
    def story(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        m = wrap(_Registered())
        first = fit(m)
        other = m.another()
        assert type(other) is _Registered
        assert {"registered": _Registered} == _REGISTERED
        return [*first, *fit(other), *fit(m)]

    same_story(story)


def test_slices_of_a_sequential() -> None:
    def story(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        m = wrap(network())
        first = fit(m)
        part = m[:2]
        assert type(part) is nn.Sequential
        return [*first, *fit(part), *fit(m)]

    same_story(story)


def test_forward_is_replaced_and_comes_back() -> None:
    def story(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        m = wrap(network())
        first, forward = fit(m), m.forward
        m.forward = lambda x: forward(x) * 2
        doubled = fit(m)
        del m.forward
        return [*first, *doubled, *fit(m)]

    same_story(story)


class _Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


class _Negative(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return -x

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return -x


@pytest.mark.filterwarnings("ignore:.*runs in:RuntimeWarning")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_norms_of_the_weight_of_a_wrapped_layer(norm: Callable[[nn.Module], nn.Module]) -> None:
    def story(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        m = norm(wrap(nn.Linear(4, 2)))
        first = fit(m)
        state = [value.clone() for value in m.state_dict().values()]
        parametrize.remove_parametrizations(m, "weight")
        assert isinstance(m.weight, nn.Parameter)
        return [*first, *state, *fit(m), m.weight.detach()]

    same_story(story)


def test_parametrizations_of_a_wrapped_layer_come_and_go() -> None:
    def story(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        m = wrap(nn.Linear(4, 4))
        told = fit(m)
        parametrize.register_parametrization(m, "weight", _Symmetric())
        parametrize.register_parametrization(m, "bias", _Negative())
        assert type(m).__name__ == "ParametrizedLinear"
        told += fit(m)
        m.bias = torch.ones(4)
        told += fit(m)
        again = copy.deepcopy(m)
        told += fit(again)
        for name in ("weight", "bias"):
            parametrize.remove_parametrizations(m, name)
            told += fit(m)
        assert type(m).__name__ == "Linear"
        assert type(again).__name__ == "ParametrizedLinear"
        return told

    same_story(story)


def test_layer_is_parametrized_before_it_is_wrapped() -> None:
    def story(wrap: Callable[[Any], Any]) -> list[torch.Tensor]:
        layer = nn.Linear(4, 4)
        parametrize.register_parametrization(layer, "weight", _Symmetric())
        m = wrap(layer)
        told = fit(m)
        parametrize.remove_parametrizations(m, "weight")
        assert type(layer) is nn.Linear
        return [*told, *fit(m)]

    same_story(story)


# --- key-value caches


def language_model() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def test_generation_runs_in_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    plain = language_model()
    ours = ORTModule(copy.deepcopy(plain))
    ids = torch.arange(1, 9)[None]
    with caplog.at_level("INFO", logger="ortrain"):
        made = [m.generate(ids, max_new_tokens=5, do_sample=False) for m in (ours, plain)]
    assert torch.equal(*made)
    assert [record.aten_nodes for record in ours.report().captures] == [0]
    assert sum("key-value cache" in record.message for record in caplog.records) == 1


def test_cache_that_is_asked_for_comes() -> None:
    plain = language_model()
    ours = ORTModule(copy.deepcopy(plain))
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        for m in (plain, ours):
            cached = m(ids[:, :5], use_cache=True).past_key_values
            assert cached.get_seq_length() == 5
            rest = m(ids[:, 5:], past_key_values=cached).logits
            torch.testing.assert_close(rest, m(ids).logits[:, 5:], rtol=1e-4, atol=1e-5)


def test_cache_under_strict_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    with pytest.raises(CaptureError, match="key-value cache"):
        ORTModule(language_model())(torch.arange(1, 9)[None], use_cache=True)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Random numbers of a forward are PyTorch's: the same bits, and the same state of its generator."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ortrain import ORTModule, step
from ortrain.errors import UnsupportedError
from ortrain.random_numbers import GeneratorStates, draw_seed

pytestmark = pytest.mark.filterwarnings("ignore:.*run in PyTorch:RuntimeWarning")

Function = Callable[[torch.Tensor], Any]


class Scaled(nn.Module):
    """A function of the input times a parameter."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x * self.scale)


class NoisyGradient(torch.autograd.Function):
    """Draws in its forward, and needs what it drew in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.saved_tensors[0]


class Doubled(torch.autograd.Function):
    """Draws nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient


def column_of_a_matrix(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(20, 3)
    made[:, 1].normal_()
    return made


def several_dtypes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kinds = (torch.float64, torch.bfloat16, torch.float16)
    return tuple(torch.rand(x.shape[0], dtype=kind) for kind in kinds)


DRAWS: dict[str, Function] = {
    "rand": lambda x: torch.rand(x.shape[0], 3),
    "randn": lambda x: torch.randn(x.shape[0], 5),
    "randn of many": lambda x: torch.randn(x.shape[0], 40),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(-3, 9, (x.shape[0],)),
    "randint_like": lambda x: torch.randint_like(x, 7),
    "randperm": lambda x: torch.randperm(x.shape[0]),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x.detach())),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "multinomial": lambda x: torch.multinomial(x.detach().abs() + 0.1, 3),
    "normal": lambda x: torch.normal(x.detach(), 2.0),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: x.detach().clone().uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "log_normal_": lambda x: torch.empty_like(x).log_normal_(),
    "cauchy_": lambda x: torch.empty_like(x).cauchy_(),
    "geometric_": lambda x: torch.empty_like(x).geometric_(0.3),
    "random_": lambda x: torch.empty_like(x).random_(100),
    "poisson": lambda x: torch.poisson(x.detach().abs()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3, True),
    "dropout of channels": lambda x: F.dropout1d(x[None], 0.5, True),
    "alpha dropout of channels": lambda x: F.feature_alpha_dropout(x[None], 0.5, True),
    "in the order of the memory": lambda x: torch.rand_like(x.t()),
    "written to the order of the memory": lambda x: torch.empty(5, x.shape[0]).t().uniform_(),
    "with gaps in the memory": column_of_a_matrix,
    "initial values": lambda x: nn.init.kaiming_uniform_(torch.empty(4, 6)),
    "several dtypes": several_dtypes,
    "gamma": lambda x: torch._standard_gamma(x.detach().abs() + 1),
    "distribution": lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(),
}


def drawing(draw: Function) -> Function:
    """Return what the draws give, and something with a gradient that depends on them."""

    def function(x: torch.Tensor) -> Any:
        drawn = draw(x)
        drawn = drawn if isinstance(drawn, tuple) else (drawn,)
        return (x.sum() * sum(d.double().sum() for d in drawn), *drawn)

    return function


def pair(module: nn.Module, random: str = "engine") -> tuple[nn.Module, nn.Module]:
    return module, ORTModule(copy.deepcopy(module), random=random)


def seeded(seed: int, run: Callable[..., Any], *args: Any) -> tuple[Any, torch.Tensor]:
    """Return the result of a run from a seed, and the state of the generator behind it."""
    torch.manual_seed(seed)
    return run(*args), torch.get_rng_state()


def assert_one_graph(module: nn.Module) -> None:
    assert [r.fallback for r in module.report().captures if r.fallback] == []


def assert_close_gradients(plain: nn.Module, ours: nn.Module) -> None:
    for (name, p), (_, q) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert p.grad is not None and q.grad is not None, name
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5, msg=name)


LIKE = (torch.rand_like, torch.randn_like, lambda x: torch.randint_like(x, 9), torch.bernoulli)


@pytest.mark.parametrize("order", [(1, 0, 2, 3), (0, 2, 3, 1), (3, 2, 1, 0)])
def test_what_is_made_like_an_argument_lies_like_it(order: tuple[int, ...]) -> None:
    def made(x: torch.Tensor) -> torch.Tensor:
        return 2 * x + sum(draw(x).to(x.dtype) for draw in LIKE)

    class Made(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return made(x)

    back = [order.index(axis) for axis in range(4)]
    plain, ours = pair(Made())
    for seed, rows in enumerate((4, 4, 3)):
        shape = (rows, 5, 2, 3)
        x = torch.rand([shape[axis] for axis in order]).permute(back)
        for given in (x, x.contiguous()):
            expected, state = seeded(seed, plain, given)
            actual, left = seeded(seed, ours, given)
            assert torch.equal(state, left)
            torch.testing.assert_close(actual, expected)
    assert_one_graph(ours)


def test_what_is_made_like_a_weight_lies_like_it() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(40, 3).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ (self.weight + torch.randn_like(self.weight))

    plain, ours = pair(Noisy())
    expected, state = seeded(0, plain, torch.ones(2, 3))
    actual, left = seeded(0, ours, torch.ones(2, 3))
    assert torch.equal(state, left)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_those_of_pytorch(name: str) -> None:
    plain, ours = pair(Scaled(drawing(DRAWS[name])))
    calls = [(rows, training) for training in (True, False) for rows in (8, 8, 6)]
    for seed, (rows, training) in enumerate(calls):
        x = torch.rand(rows, 5, generator=torch.Generator().manual_seed(seed)) - 0.3
        with torch.set_grad_enabled(training):
            expected, state = seeded(seed, plain, x)
            found, our_state = seeded(seed, ours, x)
        for a, b in zip(expected[1:], found[1:], strict=True):
            assert torch.equal(a, b), (rows, training)
        assert torch.equal(state, our_state), (rows, training)
        if training:
            plain.zero_grad()
            ours.zero_grad()
            expected[0].backward()
            found[0].backward()
            assert torch.equal(torch.get_rng_state(), state)
            assert_close_gradients(plain, ours)
    assert_one_graph(ours)


def test_draws_that_nobody_reads() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        torch.randn(3)
        x.new_empty(7).normal_()
        with torch.no_grad():
            torch.bernoulli(x.sigmoid())
        NoisyGradient.apply(x)
        drawn = torch.rand_like(x)
        torch.randperm(4)
        return x * drawn

    plain, ours = pair(Scaled(function))
    for rows in (4, 4, 7):
        expected, state = seeded(rows, plain, torch.ones(rows, 5))
        found, our_state = seeded(rows, ours, torch.ones(rows, 5))
        assert torch.equal(expected, found)
        assert torch.equal(state, our_state)
    assert_one_graph(ours)


def test_a_forward_of_draws_alone() -> None:
    plain, ours = pair(Scaled(lambda x: (torch.rand(3), x.sum())))
    with torch.no_grad():
        expected, state = seeded(1, plain, torch.ones(2, 5))
        found, our_state = seeded(1, ours, torch.ones(2, 5))
    assert torch.equal(expected[0], found[0])
    assert torch.equal(state, our_state)


def test_draws_inside_of_a_checkpoint() -> None:
    def inside(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x * torch.rand_like(x)) * torch.bernoulli(torch.full_like(x, 0.5))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(inside, x, use_reentrant=False) + torch.randn_like(x)
        return checkpoint(inside, y, use_reentrant=False).sum()

    plain, ours = pair(Scaled(function))
    for rows in (4, 4, 7):
        plain.zero_grad()
        ours.zero_grad()
        seeded(rows, lambda rows=rows: plain(torch.ones(rows, 5)).backward())
        state = torch.get_rng_state()
        seeded(rows, lambda rows=rows: ours(torch.ones(rows, 5)).backward())
        assert torch.equal(torch.get_rng_state(), state)
        assert_close_gradients(plain, ours)
    assert_one_graph(ours)


def test_autograd_functions_draw_in_their_turn() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = NoisyGradient.apply(x)
        return NoisyGradient.apply(Doubled.apply(first) * torch.rand_like(first))

    plain, ours = pair(Scaled(function))
    for rows in (4, 4, 7):
        plain.zero_grad()
        ours.zero_grad()
        expected, state = seeded(rows, plain, torch.ones(rows, 5))
        found, our_state = seeded(rows, ours, torch.ones(rows, 5))
        assert torch.equal(expected, found)
        assert torch.equal(state, our_state)
        expected.sum().backward()
        found.sum().backward()
        assert_close_gradients(plain, ours)
    assert_one_graph(ours)


def test_autograd_functions_that_draw_nothing_move_no_generator() -> None:
    ours = ORTModule(Scaled(lambda x: Doubled.apply(Doubled.apply(x))))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for rows in (4, 4, 7):
        ours(torch.ones(rows, 5)).sum().backward()
        assert torch.equal(torch.get_rng_state(), state)


def test_a_capture_moves_no_generator() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5)).eval())
    state = torch.get_rng_state()
    ours(torch.ones(2, 5))
    assert torch.equal(torch.get_rng_state(), state)


def test_backwards_from_other_outputs_draw_the_same_again() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * torch.rand_like(x)
        return y.sum(), y.exp()

    plain, ours = pair(Scaled(function))
    for _ in range(2):
        (_, y), state = seeded(0, plain, torch.ones(4, 5))
        plain.zero_grad()
        y.sum().backward()
        (loss, z), _ = seeded(0, ours, torch.ones(4, 5))
        ours.zero_grad()
        z.sum().backward()  # not from the scalar, which the engine expects
        assert torch.equal(torch.get_rng_state(), state)
        assert_close_gradients(plain, ours)


def test_backward_twice_uses_what_was_drawn_once() -> None:
    plain, ours = pair(Scaled(lambda x: (x * torch.rand_like(x)).exp().sum()))
    for module in (plain, ours):
        loss, state = seeded(0, module, torch.ones(4, 5))
        loss.backward(retain_graph=True)
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
    assert_close_gradients(plain, ours)


def seeding(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(7)
    return x * torch.rand(5)


def forking(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return x * torch.rand(5)


def putting_back(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    y = x * torch.rand(5)
    torch.set_rng_state(state)
    return y


def asking(x: torch.Tensor) -> torch.Tensor:
    return x * torch.initial_seed()


@pytest.mark.filterwarnings("ignore:.*PyTorch's generator:RuntimeWarning")
@pytest.mark.parametrize(
    ("function", "reason"),
    [
        *((function, "sets PyTorch's generator") for function in (seeding, forking, putting_back)),
        (asking, "reads torch.initial_seed"),
    ],
)
def test_a_forward_that_uses_the_generator_runs_in_pytorch(function: Function, reason: str) -> None:
    plain, ours = pair(Scaled(function))
    for seed in range(2):
        expected, state = seeded(seed, plain, torch.ones(4, 5))
        found, our_state = seeded(seed, ours, torch.ones(4, 5))
        assert torch.equal(expected, found)
        assert torch.equal(state, our_state)
    assert reason in ours.report().captures[0].fallback


def test_branches_draw_in_their_turn() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        first = torch.rand_like(x)
        y = torch.cond(x.sum() > 0, lambda x: x * torch.rand_like(x), lambda x: x - 1, (x,))
        return y * first + torch.rand_like(x)

    plain, ours = pair(Scaled(function))
    with torch.no_grad():
        for sign in (1.0, -1.0):
            expected, state = seeded(1, plain, torch.full((4, 5), sign))
            found, our_state = seeded(1, ours, torch.full((4, 5), sign))
            torch.testing.assert_close(found, expected)
            assert torch.equal(state, our_state)


# --- dropout of the engine


def noisy_dropout(p: float) -> Function:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.rand_like(x)
        dropped = F.dropout(x * first, p, True)
        return dropped, first, torch.randn_like(x)

    return function


def test_draws_beside_the_engines_dropout() -> None:
    """They are those of a model that drops nothing; behind the forward one seed more is drawn."""
    plain, ours = Scaled(noisy_dropout(0.0)), ORTModule(Scaled(noisy_dropout(0.5)))
    dropped = []
    for seed in (0, 0, 1):
        expected, _ = seeded(seed, plain, torch.ones(4, 5))
        draw_seed(torch.device("cpu"))
        state = torch.get_rng_state()
        found, our_state = seeded(seed, ours, torch.ones(4, 5))
        assert torch.equal(expected[1], found[1])
        assert torch.equal(expected[2], found[2])
        assert torch.equal(state, our_state)
        kept = found[0] != 0
        torch.testing.assert_close(found[0][kept], 2 * expected[0][kept])
        dropped.append(~kept)
    assert torch.equal(dropped[0], dropped[1])
    assert not torch.equal(dropped[1], dropped[2])


def test_the_engines_dropout_takes_one_seed_per_forward() -> None:
    ours = ORTModule(nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 5), nn.Dropout(0.5)))
    x = torch.ones(8, 5)
    torch.manual_seed(5)
    draw_seed(torch.device("cpu"))
    state = torch.get_rng_state()
    first, our_state = seeded(5, ours, x)
    assert torch.equal(our_state, state)
    assert not torch.equal(ours(x), first)
    assert torch.equal(seeded(5, ours, x)[0], first)
    ours.eval()
    assert torch.equal(seeded(5, ours, x)[1], seeded(5, lambda: None)[1])


@pytest.mark.filterwarnings("ignore:.*no kernel:RuntimeWarning")
def test_a_refused_call_draws_in_pytorch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, ours = pair(Scaled(noisy_dropout(0.5)))

    def refuse(*args: Any) -> None:
        raise UnsupportedError("no kernel takes these shapes")

    monkeypatch.setattr(step, "_run_forward", refuse)
    expected, state = seeded(3, plain, torch.ones(4, 5))
    found, our_state = seeded(3, ours, torch.ones(4, 5))
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(state, our_state)


def test_states_are_put_back() -> None:
    states = GeneratorStates(torch.device("cpu"))
    drawn = torch.rand(3)
    behind = torch.get_rng_state()
    with states.replayed():
        assert torch.equal(torch.rand(3), drawn)
    seed = states.seed()
    assert torch.equal(torch.get_rng_state(), behind)
    states.restore()
    assert torch.equal(torch.rand(3), drawn)
    states.restore()
    assert draw_seed(torch.device("cpu")) == seed


# --- dropout of PyTorch


class Attention(nn.Module):
    """Self-attention with dropout, by nn.MultiheadAttention."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=self.need_weights)[0]


class Recurrent(nn.Module):
    """Layers with dropout between them."""

    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(8, 6, num_layers=3, dropout=0.4, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)[0]


class Grouped(nn.Module):
    """Attention of few key heads, with a mask of its own kind."""

    def __init__(self, mask: str, groups: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 4 if groups else 8)
        self.mask, self.groups = mask, groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length = x.shape[:2]
        q = self.query(x).view(rows, length, 4, 2).transpose(1, 2)
        k = self.key(x).view(rows, length, -1, 2).transpose(1, 2)
        steps = torch.arange(length)
        masks = {
            "bool": steps[:, None] > steps,  # hides all from the first row
            "float": -0.1 * (steps[:, None] - steps).abs().float(),
        }
        return F.scaled_dot_product_attention(
            q,
            k,
            k,
            attn_mask=masks.get(self.mask),
            is_causal=self.mask == "causal",
            dropout_p=0.25,
            scale=0.6,
            enable_gqa=self.groups,
        )


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=17,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=12,
        hidden_dropout_prob=0.2,
        attention_probs_dropout_prob=0.3,
    )
    return Tokens(transformers.BertForSequenceClassification(config))


class Tokens(nn.Module):
    """A model of ids behind the interface of the others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[..., 0].abs() * 31).long() % 17
        return self.model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.1)
    ),
    "alpha": lambda: nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.3), nn.SELU()),
    "channels": lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout1d(0.3)),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    "encoder of columns": lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2),
    "attention": lambda: Attention(False),
    "attention with weights": lambda: Attention(True),
    "causal attention": lambda: Grouped("causal", False),
    "masked attention": lambda: Grouped("bool", False),
    "grouped attention": lambda: Grouped("float", True),
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm both ways": lambda: Recurrent(nn.LSTM, bidirectional=True),
    "gru": lambda: Recurrent(nn.GRU),
    "rnn": lambda: Recurrent(nn.RNN, batch_first=True),
    "bert": bert,
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "bert" else ()) for n in DROPPING]
)
def test_training_with_the_masks_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    plain, ours = pair(DROPPING[name](), random="pytorch")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (plain, ours)]
    for seed, (rows, length) in enumerate([(3, 4), (3, 4), (2, 7), (3, 4)]):
        x = torch.randn(rows, length, 8, generator=torch.Generator().manual_seed(seed))
        losses = []
        for module, optimizer in zip((plain, ours), optimizers, strict=True):
            y, state = seeded(seed, module, x)
            loss = y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            losses.append((y, loss, state))
        (expected, first, state), (found, second, our_state) = losses
        assert torch.equal(state, our_state)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(second, first, rtol=1e-4, atol=1e-6)
        assert_close_gradients(plain, ours)
        for optimizer in optimizers:
            optimizer.step()
    assert_one_graph(ours)
    plain.eval()
    ours.eval()
    expected, state = seeded(0, plain, x)
    found, our_state = seeded(0, ours, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(state, our_state)


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_masks_of_pytorch_are_the_same_bits(p: float) -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept, mask = torch.native_dropout(x, p, True)
        return F.dropout(x, p), F.dropout(x.t(), p), kept, mask, torch.rand(2)

    plain, ours = pair(Scaled(function), random="pytorch")
    for rows in (4, 4, 7):
        expected, state = seeded(rows, plain, torch.rand(rows, 5))
        found, our_state = seeded(rows, ours, torch.rand(rows, 5))
        assert torch.equal(state, our_state)
        torch.manual_seed(rows)
        x = torch.rand(rows, 5)
        expected, found = seeded(1, plain, x)[0], seeded(1, ours, x)[0]
        for a, b in zip(expected, found, strict=True):
            assert torch.equal(a, b)
    assert_one_graph(ours)


def test_masks_of_pytorch_under_a_budget_of_memory() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))
    plain = nn.Sequential(*(copy.deepcopy(block) for _ in range(4)))
    ours = ORTModule(copy.deepcopy(plain), max_memory="0.8x", random="pytorch")
    x = torch.randn(64, 8)
    for module in (plain, ours):
        seeded(3, lambda module=module: module(x).square().sum().backward())
    assert_close_gradients(plain, ours)


def test_copies_draw_as_the_module_does() -> None:
    ours = ORTModule(nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)), random="pytorch")
    x = torch.ones(4, 5)
    expected, _ = seeded(2, ours.module, x)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(seeded(2, other, x)[0], expected)


def test_pieces_draw_as_the_module_does() -> None:
    class Cut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.dropout(self.first(x), 0.5)
            if h.sum() > 1e9:  # a value decides: cut here
                h = -h
            return F.dropout(self.last(h), 0.5)

    torch.manual_seed(0)
    plain, ours = pair(Cut(), random="pytorch")
    for seed in range(2):
        expected, state = seeded(seed, plain, torch.ones(4, 5))
        found, our_state = seeded(seed, ours, torch.ones(4, 5))
        torch.testing.assert_close(found, expected)
        assert torch.equal(state, our_state)


@pytest.fixture
def graph_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "graphs"))
    yield tmp_path / "graphs"


def test_kept_graphs_are_for_one_source_of_masks(graph_cache: Path) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5))
    x = torch.ones(4, 5)
    first, state = seeded(1, ORTModule(module), x)
    assert list(graph_cache.iterdir())
    again = ORTModule(module)
    second, our_state = seeded(1, again, x)
    assert again.report().captures[0].from_disk
    assert torch.equal(first, second)
    assert torch.equal(state, our_state)
    by_pytorch = ORTModule(module, random="pytorch")
    torch.testing.assert_close(seeded(1, by_pytorch, x)[0], seeded(1, module, x)[0])


@pytest.mark.parametrize("value", ["torch", "", None, 3])
def test_other_sources_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^random is .*, expected 'engine' or 'pytorch'$"):
        ORTModule(nn.Linear(2, 2), random=value)

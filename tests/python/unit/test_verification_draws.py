# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Verified steps of modules that draw random numbers, or return views of what they compute."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from verified_models import wrapped

from ortrain import ORTModule, VerificationError, engine, step
from ortrain.capture.signature import flatten_outputs
from ortrain.random_numbers import DropoutSource
from ortrain.verification.draws import DrawsOfRun, RepeatedDraws

pytestmark = pytest.mark.filterwarnings("ignore:.*of its operators? runs? in PyTorch")
SOURCES = pytest.mark.parametrize("source", ["engine", "pytorch"])


class ManyDraws(nn.Module):
    """Dropout between other draws, some of which look like dropout."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.lstm = nn.LSTM(6, 6, 2, dropout=0.3)

    def forward(self, x):
        torch.rand(3)  # nobody reads it
        x = F.dropout(self.fc(x), 0.3) + torch.randn(6)
        x = F.dropout1d(x[None], 0.3)[0] * torch.bernoulli(torch.full((6,), 0.5))
        x = self.lstm(x)[0]
        x = F.rrelu(x, training=True) + F.alpha_dropout(x, 0.5, True)
        x = x[torch.randperm(3)] * torch.rand_like(x)
        return F.gumbel_softmax(F.dropout(x, 0.5))


class Rerun(nn.Module):
    """Layers that a checkpoint runs again, with draws of both kinds inside and behind."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def inner(self, x):
        return F.dropout(self.fc(x) * torch.rand_like(x), 0.5).tanh() + torch.randn(6)

    def forward(self, x):
        x = checkpoint(self.inner, x, use_reentrant=False) + torch.rand(6)
        return checkpoint(self.inner, x, use_reentrant=False) * torch.rand(6)


def train(model, steps=2):
    for _ in range(steps):
        x = torch.randn(3, 6, requires_grad=True)
        model(x).square().sum().backward()


@SOURCES
@pytest.mark.parametrize("kind", [ManyDraws, Rerun])
def test_all_numbers_are_drawn_again(kind, source):
    torch.manual_seed(5)
    model = ORTModule(kind(), verify=2, random=source)
    train(model)
    assert model.report().verified.startswith("1-2; gradients of 1-2; ")


@SOURCES
def test_verifying_leaves_the_generator_alone(source):
    left = []
    for verify in (2, 0):
        torch.manual_seed(5)
        train(ORTModule(ManyDraws(), verify=verify, random=source))
        left.append(torch.get_rng_state())
    assert torch.equal(*left)


def test_in_float64_the_numbers_of_the_other_run_are_drawn():
    draws = DrawsOfRun(None, DropoutSource.PYTORCH)
    made = []
    for wide in (False, True):
        torch.manual_seed(5)
        repeated = RepeatedDraws(draws, wide=wide)
        repeated.begin()
        x = torch.ones(4, 4, dtype=torch.float64 if wide else torch.float32)
        with repeated.repeating():
            made.append([torch.rand_like(x), x.clone().normal_(), torch.randn(3)])
    for narrow, wide in zip(*made, strict=True):
        assert torch.equal(narrow.double(), wide.double())
    assert [t.dtype for t in made[1]] == [torch.float64, torch.float64, torch.float32]


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        x = self.fc(x) + torch.randn(6)
        some = torch.cond(x.sum() > 0, lambda x: 2 * x, lambda x: x - torch.rand_like(x), (x,))
        return some + torch.randn(6)


def test_of_branches_that_draw_results_are_compared():
    model = ORTModule(Branching(), verify=1)
    with torch.no_grad():
        model(-torch.ones(3, 6))
    assert model.report().verified.startswith("without gradients 1; ")


class Views(nn.Module):
    """Results that share memory: with each other, with the argument, with a parameter."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        y = self.fc(x).tanh()
        z = self.fc(y)
        shown = z.unsqueeze(0).expand(4, -1, -1)
        return y, y.t(), y[1:].flatten()[::2], x.view(-1), shown, self.fc.weight.t(), len(x), z[0]


def test_gradients_of_results_that_are_views():
    model = wrapped(2, Views)
    for _ in range(2):
        x = torch.randn(3, 6, requires_grad=True)
        results = [r for r in model(x) if isinstance(r, torch.Tensor)]
        sum((r * torch.randn(r.shape)).sum() for r in results).backward()
    assert next(model._ortrain_engine.graphs()).captured.views is not None
    assert model.report().verified.startswith("1-2; gradients of 1-2; ")


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 6)

    def forward(self, x):
        return self.fc(x) + torch.rand_like(x) * F.dropout(x, 0.5)


def test_noise_hides_no_difference(monkeypatch):
    def nearly(*args):
        outputs = step.execute(*args)
        outputs[0].data.mul_(1.001)
        return outputs

    monkeypatch.setattr(engine, "execute", nearly)
    with pytest.raises(VerificationError, match="rounding explains"):
        wrapped(1, Noisy)(torch.randn(3, 6))


def test_structure_of_a_result_keeps_none_of_its_tensors():
    result = {"loss": torch.ones(2), "rest": [torch.zeros(3), (1, "name")]}
    gone = weakref.ref(result["loss"])
    tensors, _ = flatten_outputs(result)
    gc.disable()
    try:
        del tensors, result
        assert gone() is None
    finally:
        gc.enable()

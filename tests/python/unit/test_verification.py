# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule(verify=...): steps that run in PyTorch too, and what is said of those that differ."""

import logging
import pickle
import random
import threading
import weakref

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from verified_models import Block, Counting, Model, batch, wrapped

from ortrain import ORTModule
from ortrain.verification.schedule import Schedule, parse


def due_steps(verify, count=20):
    schedule = Schedule(parse(verify))
    found = []
    for _ in range(count):
        if schedule.advance():
            found.append(schedule.step)
            schedule.done()
    return found


# --- which steps


@pytest.mark.parametrize(
    ("verify", "expected"),
    [("first", [1]), ("sampled", [1, 2, 4, 8, 16]), (3, [1, 2, 3]), (0, [])],
)
def test_schedule_is_by_count(verify, expected):
    assert due_steps(verify) == expected


def test_environment_gives_the_schedule_and_the_argument_wins(monkeypatch):
    monkeypatch.setenv("ORTRAIN_VERIFY_STEPS", "Sampled")
    assert parse(None) == "sampled"
    assert parse("first") == 1
    assert parse(0) == 0
    monkeypatch.setenv("ORTRAIN_VERIFY_STEPS", " 3 ")
    assert parse(None) == 3
    for off in ("", "0", "off"):
        monkeypatch.setenv("ORTRAIN_VERIFY_STEPS", off)
        assert parse(None) == 0
    monkeypatch.delenv("ORTRAIN_VERIFY_STEPS")
    assert parse(None) == 0


@pytest.mark.parametrize("verify", ["often", -1, True, 1.5, "3", ""])
def test_other_values_are_refused(verify):
    with pytest.raises(ValueError, match=r"verify=.*'first', 'sampled' or a number"):
        ORTModule(nn.Linear(2, 2), verify=verify)


def test_other_values_of_the_environment_are_refused(monkeypatch):
    monkeypatch.setenv("ORTRAIN_VERIFY_STEPS", "often")
    with pytest.raises(ValueError, match="ORTRAIN_VERIFY_STEPS=often"):
        ORTModule(nn.Linear(2, 2))


def test_calls_that_pytorch_runs_hand_their_turn_on():
    schedule = Schedule(parse("first"))
    assert schedule.advance()
    assert schedule.postpone()
    assert schedule.advance()
    assert [schedule.postpone() for _ in range(7) if schedule.advance() or True][-1] is False
    assert not schedule.advance()


# --- right models


def steps(verify):
    """Make five steps; return everything that they leave behind."""
    model = wrapped(verify)
    random.seed(0)
    numpy.random.seed(0)
    left = []
    for i in range(5):
        x, labels = batch(4 + i % 2)
        x.requires_grad_()
        made = model(x, labels)
        if i == 1:  # two backwards, of other outputs
            made["loss"].backward(retain_graph=True)
            made["scores"].square().sum().backward()
        else:
            (made["loss"] + made["scores"].mean()).backward()
        left += [made["loss"].detach(), made["scores"].detach(), x.grad]
        left += [p.grad.clone() for p in model.parameters()]
        left += [b.clone() for b in model.buffers()]
    with torch.no_grad():
        left.append(model(batch()[0])["scores"])
    left.append(torch.get_rng_state())
    return left, random.getstate(), numpy.random.get_state()[1].tolist(), model.report()


def test_right_model_passes_and_its_numbers_are_those_without_verification():
    tensors, python, numbers, report = steps("sampled")
    plain, plain_python, plain_numbers, plain_report = steps(0)
    assert len(tensors) == len(plain)
    assert all(torch.equal(a, b) for a, b in zip(tensors, plain, strict=True))
    assert (python, numbers) == (plain_python, plain_numbers)
    assert report.verified.startswith("1-2, 4; gradients of 1-2, 4; without gradients 1; ")
    assert "verified steps: 1-2, 4;" in str(report)
    assert plain_report.verified == ""
    assert "verified" not in str(plain_report)
    kinds = [[r.fallback for r in kept.captures] for kept in (report, plain_report)]
    assert kinds == [["", ""], ["", ""]]  # nothing is captured again


def test_each_verified_step_is_logged_with_its_price(caplog):
    model = wrapped("first")
    with caplog.at_level(logging.INFO, logger="ortrain"):
        model(*batch())["loss"].backward()
        model(*batch())["loss"].backward()
    told = [r.getMessage() for r in caplog.records if "as in PyTorch" in r.getMessage()]
    assert len(told) == 2
    assert told[0].startswith(
        "Model: step 1 is as in PyTorch, gradients are awaited; the check took "
    )
    assert told[1].startswith("Model: gradients of step 1 are as in PyTorch; the check took ")
    assert all(line.endswith(" s") for line in told)


def test_environment_switches_it_on(monkeypatch):
    monkeypatch.setenv("ORTRAIN_VERIFY_STEPS", "first")
    model = wrapped(None)
    model(*batch())["loss"].backward()
    assert model.report().verified.startswith("1; gradients of 1; ")


def test_option_survives_pickling():
    model = pickle.loads(pickle.dumps(wrapped(2, lambda: nn.Linear(3, 3))))
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
    assert model.report().verified.startswith("1-2; gradients of 1-2; ")


class EveryDraw(nn.Module):
    """Draws by every way that a graph has."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, 2, dropout=0.3, batch_first=True)
        self.channels = nn.Dropout1d(0.3)

    def forward(self, x):
        x = self.channels(self.lstm(x)[0])
        q = x.unflatten(-1, (2, 2)).transpose(1, 2)
        seen = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
        return seen, x + 0.1 * torch.randn_like(x)


@pytest.mark.filterwarnings("ignore:EveryDraw. 2 of its operators run in PyTorch")
def test_pytorch_gets_the_random_numbers_of_the_engine():
    model = wrapped(2, EveryDraw)
    for _ in range(2):
        x = torch.randn(3, 5, 4, requires_grad=True)
        sum(made.square().sum() for made in model(x)).backward()
    assert model.report().verified.startswith("1-2; gradients of 1-2; ")


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.block.norm = nn.LayerNorm(
            6
        )  # which writes no statistics, as a graph may not in a checkpoint

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_checkpoint_runs_again_with_the_same_numbers():
    left = []
    for verify in (2, 0):
        model = wrapped(verify, Checkpointed)
        for _ in range(2):
            model(torch.randn(5, 6)).square().sum().backward()
        left.append([p.grad for p in model.parameters()])
        if verify:
            assert model.report().verified.startswith("1-2; gradients of 1-2; ")
    assert all(torch.equal(a, b) for a, b in zip(*left, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_pass(dtype):
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16)
    model = wrapped(2, lambda: Model().double() if dtype is torch.float64 else Model())
    for _ in range(2):
        x, labels = batch(16)
        with autocast:
            made = model(x.double() if dtype is torch.float64 else x, labels)
        made["loss"].backward()
    assert model.report().verified.startswith("1-2; gradients of 1-2; ")


def test_hooks_of_parameters_see_one_backward():
    model = wrapped("first", lambda: nn.Linear(3, 3))
    seen = []
    model.weight.register_hook(lambda gradient: seen.append(1) or gradient * 2)
    model.bias.register_post_accumulate_grad_hook(lambda bias: seen.append(2))
    x = torch.randn(2, 3)
    model(x).sum().backward()
    assert sorted(seen) == [1, 2]
    assert torch.allclose(model.weight.grad, 2 * x.sum(0).expand(3, 3))
    assert model.report().verified.startswith("1; gradients of 1; ")


@pytest.mark.since_torch(2, 12)
@pytest.mark.filterwarnings("ignore:Counting runs in pieces")
def test_pieces_are_compared_and_attributes_change_once():
    model = wrapped(2, Counting)
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
    assert model.report().verified.startswith("1-2; gradients of 1-2; ")
    assert model.seen == [0, 1, 2]


def test_parameter_may_be_overwritten_where_no_gradient_needs_it():
    model = wrapped("first", lambda: nn.Linear(3, 3))
    made = model(torch.randn(2, 3))
    with torch.no_grad():
        model.weight.add_(1)
    made.sum().backward()
    assert model.report().verified.startswith("1; gradients of 1; ")


def test_other_threads_are_not_watched():
    model = wrapped("first")
    other = wrapped(0)
    other(*batch())
    done = []
    thread = threading.Thread(target=lambda: done.append(other(*batch())))
    thread.start()
    model(*batch())["loss"].backward()
    thread.join()
    assert len(done) == 1
    assert model.report().verified.startswith("1; gradients of 1; ")
    assert other.report().verified == ""


def test_what_a_verified_step_kept_is_freed_with_its_graph():
    model = wrapped(2)
    for _ in range(2):
        made = model(*batch())
        step = weakref.ref(made["loss"].grad_fn.step)
        made["loss"].backward()
        assert step().witness is not None
        del made
        assert step() is None  # without a collection of garbage

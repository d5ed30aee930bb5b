# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule(verify=...): steps that run in PyTorch too, and what is said of those that differ."""

import logging
import pickle
import random
import threading

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import ortrain
from ortrain import ORTModule, VerificationError
from ortrain.capture.convert import registry
from ortrain.entry import Entry
from ortrain.module_states import ModuleStates
from ortrain.verification.schedule import Schedule, parse


class Block(nn.Module):
    """A layer with dropout, normalization and an activation that tests plant errors into."""

    def __init__(self, activation=torch.tanh):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.dropout, self.activation = nn.Dropout(0.25), activation

    def forward(self, x):
        return self.dropout(self.activation(self.norm(self.linear(x))))


class Model(nn.Module):
    """Returns a loss and scores; the second block is the one whose activation differs."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(torch.relu), Block(torch.tanh), Block(torch.relu)])
        self.head = nn.Linear(6, 3)

    def forward(self, x, labels=None):
        for block in self.blocks:
            x = block(x)
        scores = self.head(x)
        loss = F.cross_entropy(scores, labels) if labels is not None else scores.square().mean()
        return {"loss": loss, "scores": scores}


def batch(size=5):
    return torch.randn(size, 6), torch.randint(0, 3, (size,))


def wrapped(verify, make=Model):
    torch.manual_seed(0)
    return ORTModule(make(), verify=verify)


def tanh_with_gradient_of_half(e, x):
    """Return tanh(x), whose gradient is that of x / 2."""
    half = e.node("Mul", x, e.scalar(0.5, x.dtype))
    apart = e.node("Sub", e.node("Tanh", x), half)
    return e.node("Add", e.node("StopGradient", apart, domain="ortrain"), half)


def tanh_too_large(e, x):
    return e.node("Mul", e.node("Tanh", x), e.scalar(1.2, x.dtype))


@pytest.fixture
def planted(monkeypatch):
    """Plant another conversion of torch.tanh."""
    registry.targets()  # so that all are loaded

    def plant(conversion):
        monkeypatch.setitem(registry._conversions, "aten.tanh.default", conversion)

    return plant


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

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def test_checkpoint_runs_again_with_the_same_numbers_and_leaves_buffers_alone():
    left = []
    for verify in (2, 0):
        model = wrapped(verify, Checkpointed)
        for _ in range(2):
            model(torch.randn(5, 6)).square().sum().backward()
        left.append([*model.buffers(), *(p.grad for p in model.parameters())])
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


class Counting(nn.Module):
    """Counts in an attribute, prints nothing, and breaks the graph at a number."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.seen = []

    def forward(self, x):
        x = torch.tanh(self.first(x))
        if float(x.detach().sum()) > 1e9:
            x = -x
        self.seen.append(len(self.seen))
        return self.second(x)


@pytest.mark.filterwarnings("ignore:Counting runs in pieces")
def test_pieces_are_compared_and_attributes_change_once():
    model = wrapped(2, Counting)
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
    assert model.report().verified.startswith("1-2; gradients of 1-2; ")
    assert model.seen == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:Counting runs in pieces")
def test_error_in_a_piece_is_found(planted):
    planted(tanh_too_large)
    model = wrapped("first", Counting)
    with pytest.raises(VerificationError, match="output #0"):
        model(torch.randn(2, 3))


# --- wrong ones


def test_error_of_an_inner_layer_is_named(planted):
    planted(tanh_too_large)
    model = wrapped("first")
    with pytest.raises(VerificationError) as caught:
        model(*batch())
    error = caught.value
    assert isinstance(error, ortrain.OrtrainError)
    assert (error.layer, error.what, error.step) == ("blocks.1", "output #0", 1)
    assert 0.1 < error.difference < 1
    assert str(error).startswith(
        "Model, step 1: layer 'blocks.1' is the first that differs from PyTorch: output #0 by 0."
    )
    # The next normalization takes the factor out of everything but its statistics.
    assert "seen from outside, buffer 'blocks.2.norm.running_mean' differs by" in str(error)


def test_error_in_a_gradient_is_named(planted):
    planted(tanh_with_gradient_of_half)
    model = wrapped("first")
    made = model(*batch())
    with pytest.raises(VerificationError) as caught:
        made["loss"].backward()
    error = caught.value
    assert error.layer == "blocks.1"
    assert error.what in (
        "gradient of argument 'x'",
        "gradient of parameter 'blocks.1.linear.weight'",
    )
    assert all(p.grad is None for p in model.blocks[0].parameters())


def test_error_is_found_at_a_later_step_and_the_steps_between_are_left_alone(planted):
    model = wrapped("sampled")
    for _ in range(2):
        model(*batch())["loss"].backward()
    planted(tanh_too_large)
    model.eval()  # which is captured anew
    model(*batch())
    with pytest.raises(VerificationError, match="step 4: layer 'blocks.1' is the first"):
        model(*batch())


def test_missing_gradient_is_found(planted):
    planted(lambda e, x: e.node("StopGradient", e.node("Tanh", x), domain="ortrain"))
    model = wrapped("first")
    made = model(*batch())
    with pytest.raises(VerificationError, match="only PyTorch has one") as caught:
        made["loss"].backward()
    assert caught.value.layer == "blocks.1"


def test_wrong_buffer_is_found(monkeypatch):
    right = Entry.apply_updates

    def twice(self, targets, outputs):
        right(self, targets, outputs)
        if targets:
            targets[0].add_(0.01)

    monkeypatch.setattr(Entry, "apply_updates", twice)
    model = wrapped("first", lambda: nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    with pytest.raises(VerificationError) as caught:
        model(batch()[0])
    assert caught.value.layer == "1"
    assert caught.value.what == "buffer '1.running_mean'"
    assert abs(caught.value.difference - 0.01) < 1e-4


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.inner.scale = 2.0

    def forward(self, x):
        return self.outer(self.inner(x) * self.inner.scale)


def test_graph_out_of_date_is_told_apart(monkeypatch):
    model = wrapped(2, Scaled)
    model(torch.randn(2, 3)).sum().backward()
    engine = model.__dict__["_ortrain_engine"]
    look = ModuleStates.look

    def blind(self):
        return (self.tensors, False) if self is engine._states else look(self)

    monkeypatch.setattr(ModuleStates, "look", blind)
    model.inner.scale = 3.0
    with pytest.raises(
        VerificationError, match="its graph is out of date: captured anew it agrees"
    ):
        model(torch.randn(2, 3))


class Remembering(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.linear, self.count = nn.Linear(3, 3), count

    def forward(self, x):
        return self.linear(x) * self.count


def test_attributes_are_compared(monkeypatch):
    model = wrapped("first", lambda: Remembering(2))
    engine = model.__dict__["_ortrain_engine"]
    run = type(engine).run

    def forgetful(self, args, kwargs):
        result = run(self, args, kwargs)
        if self is engine:
            self.module.left_over = 7
        return result

    monkeypatch.setattr(type(engine), "run", forgetful)
    with pytest.raises(VerificationError, match="attribute '.*left_over'") as caught:
        model(torch.randn(2, 3))
    assert caught.value.difference == float("inf")
    assert model.module.left_over == 7  # as the engine's run left it


def test_not_a_number_is_equal_to_itself_and_to_nothing_else(planted):
    model = wrapped("first", lambda: nn.Sequential(nn.Tanh()))
    model(torch.tensor([1.0, float("nan"), float("inf")]))
    planted(lambda e, x: e.node("Div", e.node("Tanh", x), e.scalar(0.0, x.dtype)))
    model = wrapped("first", lambda: nn.Sequential(nn.Tanh()))
    with pytest.raises(VerificationError) as caught:
        model(torch.tensor([0.0, 1.0]))
    assert caught.value.difference == float("inf")
    assert caught.value.layer == "0"


def test_integers_are_compared_exactly(monkeypatch):
    registry.targets()
    right = registry._conversions["aten.argmax.default"]

    def next_one(e, *args, **kwargs):
        return e.node("Add", right(e, *args, **kwargs), e.scalar(1, torch.int64))

    class Best(nn.Module):
        def forward(self, x):
            return x.argmax(-1)

    assert ORTModule(Best(), verify="first")(torch.eye(3)).tolist() == [0, 1, 2]
    monkeypatch.setitem(registry._conversions, "aten.argmax.default", next_one)
    with pytest.raises(VerificationError, match="1 on the engine, 0 in PyTorch"):
        ORTModule(Best(), verify="first")(torch.eye(3))


def test_parameter_overwritten_before_backward_is_told(caplog):
    model = wrapped("first", lambda: nn.Linear(3, 3))
    made = model(torch.randn(2, 3))
    with torch.no_grad():
        model.weight.add_(1)
    with caplog.at_level(logging.WARNING, logger="ortrain"):
        made.sum().backward()  # its gradient needs no weight
    assert model.report().verified.startswith("1; ")


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

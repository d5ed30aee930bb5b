# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose update rule is a Python function."""

import copy
import math

import numpy
import pytest
import torch
from torch import nn

from ortrain.errors import DTypeError, ShapeError, UnsupportedError
from ortrain.optim import GraphOptimizer


class Momentum(GraphOptimizer):
    """SGD with momentum as torch.optim.SGD has it, and with Nesterov's."""

    state_names = ("momentum_buffer",)

    def __init__(self, params, lr=0.1, momentum=0.9, nesterov=False):
        super().__init__(params, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    def update(self, g, param, grad, state, options):
        buffer = options["momentum"] * state["momentum_buffer"] + grad
        step = grad + options["momentum"] * buffer if options["nesterov"] else buffer
        return param - options["lr"] * step, {"momentum_buffer": buffer}


class Adam(GraphOptimizer):
    """AdamW's formula, with the bias corrections from the number of the step."""

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1):
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def update(self, g, param, grad, state, options):
        beta1, beta2 = options["betas"]
        first = beta1 * state["exp_avg"] + (1.0 - beta1) * grad
        second = beta2 * state["exp_avg_sq"] + (1.0 - beta2) * grad * grad
        corrected = first / (1.0 - beta1 ** options["step"])
        scale = g.sqrt(second / (1.0 - beta2 ** options["step"])) + options["eps"]
        decayed = param * (1.0 - options["lr"] * options["weight_decay"])
        return decayed - options["lr"] * corrected / scale, {
            "exp_avg": first,
            "exp_avg_sq": second,
        }


def models(dtype=torch.float64):
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 5), nn.PReLU(), nn.Linear(5, 1)
    ).to(dtype)
    return module, copy.deepcopy(module)


def train(module, optimizer, steps=6, dtype=torch.float64, scheduler=None):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(4, 2, 4, 4, dtype=dtype, generator=generator)
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()
        if scheduler:
            scheduler.step()


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_follows_pytorch(nesterov):
    mine, theirs = models()
    ours = Momentum(mine.parameters(), nesterov=nesterov)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9, nesterov=nesterov)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, reference)]
    train(mine, ours, scheduler=schedules[0])
    train(theirs, reference, scheduler=schedules[1])
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    # One graph per rank, none per learning rate.
    assert len(ours._sessions) == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adamw_follows_pytorch(dtype):
    mine, theirs = models(dtype)
    ours = Adam(mine.parameters())
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    train(mine, ours, dtype=dtype)
    train(theirs, reference, dtype=dtype)
    tolerance = 1e-11 if dtype == torch.float64 else 1e-5
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_state_moves_to_pytorch_and_back():
    mine, theirs = models()
    ours = Adam(mine.parameters())
    train(mine, ours)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    theirs.load_state_dict(mine.state_dict())
    kept = ours.state_dict()
    for group in kept["param_groups"]:
        group.update({k: v for k, v in reference.param_groups[0].items() if k not in group})
    reference.load_state_dict(copy.deepcopy(kept))
    train(mine, ours)
    train(theirs, reference)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_copies_and_groups():
    mine, _ = models()
    first, *rest = mine.parameters()
    ours = Momentum([{"params": [first], "lr": 0.0}, {"params": rest, "nesterov": True}])
    before = first.detach().clone()
    train(mine, ours)
    assert torch.equal(first, before)
    again = copy.deepcopy(ours)
    assert again.state_dict()["state"].keys() == ours.state_dict()["state"].keys()
    again.step()


def test_strided_parameters_and_missing_gradients():
    weight = nn.Parameter(torch.randn(4, 3).t())
    unused = nn.Parameter(torch.randn(2))
    expected = weight.detach() - 0.1 * torch.ones(3, 4)
    ours = Momentum([weight, unused])
    weight.grad = torch.ones(3, 4)
    ours.step()
    torch.testing.assert_close(weight.detach(), expected)
    assert unused not in ours.state


def test_what_cannot_be_updated_is_refused_before_anything_changes():
    good = nn.Parameter(torch.ones(2))
    good.grad = torch.ones(2)
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    ours = Momentum([good, table.weight])
    with pytest.raises(UnsupportedError, match="parameter 1 is sparse"):
        ours.step()
    assert torch.equal(good, torch.ones(2)) and not ours.state
    number = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    number.grad = torch.ones(2, dtype=torch.complex64)
    with pytest.raises(DTypeError, match="complex64"):
        Momentum([number]).step()


def test_rules_are_checked():
    class Forgetful(Momentum):
        def update(self, g, param, grad, state, options):
            return param, {}

    class Branching(Momentum):
        def update(self, g, param, grad, state, options):
            return (param if grad else grad), state

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    with pytest.raises(ValueError, match="momentum_buffer"):
        Forgetful([weight]).step()
    with pytest.raises(UnsupportedError, match="branch"):
        Branching([weight]).step()


def test_norms_over_the_whole_tensor():
    class Normalized(GraphOptimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.5})

        def update(self, g, param, grad, state, options):
            return param - options["lr"] * grad / g.norm(grad), {}

    weight = nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.full((3, 4), 2.0)
    Normalized([weight]).step()
    torch.testing.assert_close(weight.detach(), torch.full((3, 4), -0.5 / math.sqrt(12)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits_are_computed_in_32(dtype):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 4).to(dtype))
    wide = nn.Parameter(weight.detach().float())
    ours = Adam([weight], betas=(0.9, 0.999))
    reference = Adam([wide], betas=(0.9, 0.999))
    for step in range(4):
        grad = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        weight.grad, wide.grad = grad, grad.float()
        ours.step()
        reference.step()
    torch.testing.assert_close(weight.detach().float(), wide.detach(), rtol=2e-2, atol=2e-2)


def test_a_rule_that_fails_changes_nothing():
    class Reducing(Momentum):
        def update(self, g, param, grad, state, options):
            return options["lr"] * g.norm(grad), state

    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    ours = Reducing([weight])
    with pytest.raises(ShapeError, match="'param' of shape"):
        ours.step()
    assert torch.equal(weight, torch.ones(2)) and not ours.state
    with pytest.raises(UnsupportedError, match="'lr' is a tensor"):
        Momentum([weight], lr=torch.ones(3)).step()


def test_whole_numbers_are_known_to_the_rule():
    class Repeated(GraphOptimizer):
        def __init__(self, params, times):
            super().__init__(params, {"times": times})

        def update(self, g, param, grad, state, options):
            for _ in range(options["times"]):
                param = param - grad
            return param, {}

    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    ours = Repeated([weight], 3)
    ours.step()
    ours.param_groups[0]["times"] = 1
    ours.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), -4.0))


class Settings:
    scale = 1.0


def follower(read):
    """Return an optimizer that subtracts the gradient times what `read` gives, and a call for what is closed over."""
    held = [1.0]

    class Follower(GraphOptimizer):
        factor = 1.0
        shared = 1.0

        def __init__(self, params, **defaults):
            super().__init__(params, defaults)
            self.table = {"k": [1.0]}

        def update(self, g, param, grad, state, options):
            return param - self._scale(options) * grad, {}

        def _scale(self, options):
            return float(
                {
                    "array": lambda: options["array"][500],
                    "object": lambda: options["object"].scale,
                    "tuple": lambda: options["tuple"][0]["a"],
                    "attribute": lambda: self.factor,
                    "class": lambda: self.shared,
                    "table": lambda: self.table["k"][0],
                    "closure": lambda: held[0],
                }[read]()
            )

    class ByName(Follower):  # by which anything may be read
        def _scale(self, options):
            return getattr(self, "made", 1.0)

    return ByName if read == "made" else Follower, held


@pytest.mark.parametrize(
    "read", ["array", "object", "tuple", "attribute", "class", "table", "closure", "made"]
)
def test_what_a_rule_has_read_is_followed(read):
    kind, held = follower(read)
    param = nn.Parameter(torch.zeros(1))
    settings = Settings()
    optimizer = kind([param], array=numpy.ones(2000), object=settings, tuple=({"a": 1.0},))
    group = optimizer.param_groups[0]

    def put(value):
        {
            "array": lambda: group["array"].__setitem__(500, value),
            "object": lambda: setattr(settings, "scale", value),
            "tuple": lambda: group["tuple"][0].__setitem__("a", value),
            "attribute": lambda: setattr(optimizer, "factor", value),
            "class": lambda: setattr(kind, "shared", value),
            "table": lambda: optimizer.table["k"].__setitem__(0, value),
            "closure": lambda: held.__setitem__(0, value),
            "made": lambda: setattr(optimizer, "made", value),
        }[read]()

    for value in (None, 2.0, 1.0, 3.0, 2.0):
        if value is not None:
            put(value)
        with torch.no_grad():
            param.zero_()
        param.grad = torch.ones(1)
        optimizer.step()
        assert param.item() == -(value or 1.0)


class Scaled(GraphOptimizer):
    """Subtracts the gradient times `scale`, upwards where a group maximizes."""

    def __init__(self, params, **defaults):
        super().__init__(params, {"maximize": False, **defaults})
        self.scale = 1.0

    def update(self, g, param, grad, state, options):
        return param + (1 if options["maximize"] else -1) * self.scale * grad, {}


def step_of(optimizer, *params):
    for param in params:
        with torch.no_grad():
            param.zero_()
        param.grad = torch.ones(1)
    optimizer.step()
    return [param.item() for param in params]


def test_groups_have_options_of_their_own():
    params = [nn.Parameter(torch.zeros(1)) for _ in range(40)]
    optimizer = Scaled([{"params": [p], "maximize": i % 3 == 0} for i, p in enumerate(params)])
    expected = [1.0 if i % 3 == 0 else -1.0 for i in range(40)]
    assert step_of(optimizer, *params) == expected
    assert step_of(optimizer, *params) == expected
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.param_groups[3]["maximize"] = False
    expected[3] = -1.0
    assert step_of(optimizer, *params) == expected
    assert len(optimizer._sessions) <= 40


def scale_of(optimizer):
    return optimizer.scale


def decorated(rule):
    def call(*args):
        return rule(*args)

    return call


class Inherits(Scaled):
    def update(self, g, param, grad, state, options):
        return super().update(g, param, grad, state, options)


class CallsFunction(Scaled):
    def update(self, g, param, grad, state, options):
        return param - scale_of(self) * grad, {}


class Decorated(Scaled):
    @decorated
    def update(self, g, param, grad, state, options):
        return param - self.scale * grad, {}


@pytest.mark.parametrize("kind", [Scaled, Inherits, CallsFunction, Decorated])
def test_attributes_that_other_code_reads_are_followed(kind):
    param = nn.Parameter(torch.zeros(1))
    optimizer = kind([param])
    for scale in (1.0, 2.0, 0.5):
        optimizer.scale = scale
        assert step_of(optimizer, param) == [-scale]
    optimizer.update = lambda g, param, grad, state, options: (param - 7.0 * grad, {})
    assert step_of(optimizer, param) == [-7.0]
    del optimizer.update
    assert step_of(optimizer, param) == [-0.5]


def test_a_rule_is_compiled_once(monkeypatch):
    compiled = []
    compile_rule = GraphOptimizer._compile
    monkeypatch.setattr(
        GraphOptimizer, "_compile", lambda *args: compiled.append(1) or compile_rule(*args)
    )
    mine, _ = models()
    ours = Momentum(mine.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(ours, 2)
    train(mine, ours, scheduler=scheduler)
    assert len(compiled) == len({p.dim() for p in mine.parameters()})


def test_tensors_within_options_are_refused():
    param = nn.Parameter(torch.zeros(1))
    param.grad = torch.ones(1)
    ours = Momentum([param])
    ours.param_groups[0]["masks"] = ({"a": torch.ones(3)},)
    with pytest.raises(UnsupportedError, match="option 'masks' is a tensor"):
        ours.step()

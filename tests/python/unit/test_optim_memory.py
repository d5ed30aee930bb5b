# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What programs do between the steps of an optimizer: states that they drop, memory that parameters share."""

import collections
import copy
import random

import pytest
import torch
from torch import nn

from ortrain.optim import FusedAdam, FusedAdamW, FusedLAMB, FusedSGD

PAIRS = {
    "adamw": (FusedAdamW, torch.optim.AdamW, {"lr": 0.1}),
    "sgd": (FusedSGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
}


def clear(optimizer, params):
    optimizer.state.clear()


def pop(optimizer, params):
    optimizer.state.pop(params[-1], None)


def replace(optimizer, params):
    optimizer.state = collections.defaultdict(dict)


def exchange(optimizer, params):
    entry = optimizer.state.pop(params[0], None)
    if entry is not None:
        optimizer.state[params[0]] = copy.deepcopy(entry)


def empty(optimizer, params):
    optimizer.state[params[0]].clear()


CHANGES = [clear, pop, replace, exchange, empty]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("seed", range(30))
def test_states_that_are_dropped_between_steps_start_anew(kind, seed):
    ours, theirs, options = PAIRS[kind]
    draws = random.Random(seed)
    shapes = [(3,), (2, 2), (5,)]
    lists = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(2)]
    optimizers = [
        make(params, **options) for make, params in zip((ours, theirs), lists, strict=True)
    ]
    for _ in range(12):
        change = draws.choice([None, *CHANGES])
        grads = [torch.randn(shape) if draws.random() < 0.7 else None for shape in shapes]
        for optimizer, params in zip(optimizers, lists, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = None if grad is None else grad.clone()
            optimizer.step()
            if change:
                change(optimizer, params)
        torch.testing.assert_close(*lists)
        held = [optimizer.state_dict()["state"] for optimizer in optimizers]
        # PyTorch's SGD also has an entry where it has no buffer.
        assert {n for n, s in held[0].items() if s} == {n for n, s in held[1].items() if s}


def test_a_state_that_a_failed_step_has_made_may_be_dropped():
    first, second = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = FusedAdamW([first, second], lr=0.1)
    first.grad, second.grad = torch.ones(2), torch.ones(2).to_sparse()
    with pytest.raises(Exception, match="sparse"):
        optimizer.step()
    optimizer.state.clear()
    second.grad = None
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def two_on_one(size):
    memory = torch.zeros(size)
    return memory, [nn.Parameter(memory), nn.Parameter(memory)]


def overlapping(size):
    memory = torch.zeros(size)
    return memory, [nn.Parameter(memory[: size // 2 + 9]), nn.Parameter(memory[size // 2 - 9 :])]


def interleaved(size):
    memory = torch.zeros(size // 4, 4)
    return memory, [nn.Parameter(memory[:, :3]), nn.Parameter(memory[:, 1:])]


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("make", [two_on_one, overlapping, interleaved])
@pytest.mark.parametrize("clips", [False, True])
def test_parameters_in_the_same_memory_are_updated_one_after_the_other(kind, make, clips):
    found = []
    for position in range(2):
        memory, params = make(1 << 18)
        optimizer = PAIRS[kind][position](params, **PAIRS[kind][2])
        if clips and position == 0:
            optimizer.max_grad_norm = 1.0
        for step in range(4):
            for param in params:
                param.grad = torch.full(param.shape, 1.0 + step)
            if clips and position == 1:
                nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
        found.append(memory)
    torch.testing.assert_close(*found)


def test_a_gradient_in_the_memory_of_another_parameter_is_read_in_order():
    found = []
    for make in (FusedSGD, torch.optim.SGD):
        first, second = (nn.Parameter(torch.ones(1 << 18)) for _ in range(2))
        optimizer = make([first, second], lr=0.5)
        first.grad, second.grad = torch.ones(1 << 18), first.data
        optimizer.step()
        optimizer.step()
        found.append((first.data, second.data))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beta1", [0.0, 0.1, 0.5, 0.51, 0.9])
def test_means_follow_gradients_that_become_small(dtype, beta1):
    found = []
    for make in (FusedAdamW, torch.optim.AdamW):
        param = nn.Parameter(torch.zeros(37, dtype=dtype))
        optimizer = make([param], lr=1e-2, betas=(beta1, 0.9), eps=1e-12, fused=True)
        for scale in (1e4, 1e-4, 1e-4, 1e3, 1e-5):
            param.grad = (torch.arange(37.0) - 10).to(dtype) * scale
            optimizer.step()
        found.append((param.detach(), optimizer.state[param]["exp_avg"]))
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 0.0}
    if beta1 == 0:  # the gradient itself
        torch.testing.assert_close(found[0][1], param.grad, rtol=0, atol=0)
    torch.testing.assert_close(*found, **({"rtol": 1e-3, "atol": 1e-9} if beta1 else tolerance))


@pytest.mark.parametrize("make", [FusedAdamW, FusedSGD])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_unscaled_behind_a_scaled_step(make, dtype):
    params = [nn.Parameter(torch.ones(2, dtype=dtype)), nn.Parameter(torch.ones(3, dtype=dtype))]
    optimizer = make(params, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    shared = torch.full((2,), 2048.0, dtype=dtype)
    params[0].grad, params[1].grad = shared, torch.full((3,), 1024.0, dtype=dtype)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    assert params[0].grad is shared
    assert shared.tolist() == [2.0, 2.0] and params[1].grad.tolist() == [1.0, 1.0, 1.0]
    shared.fill_(float("inf"))
    scaler.update()
    scaler.step(optimizer)
    assert shared.isinf().all() and params[1].grad.tolist() == [1.0, 1.0, 1.0]


def test_what_pytorch_takes():
    params = [nn.Parameter(torch.ones(2))]
    for make in (FusedAdam, FusedAdamW, FusedLAMB, FusedSGD):
        optimizer = copy.deepcopy(make(params))
        optimizer.param_groups[0]["params"] = tuple(optimizer.param_groups[0]["params"])
        optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.param_groups[0]["params"][0].grad is None

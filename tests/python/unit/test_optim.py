# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The multi-tensor optimizers against torch.optim, step by step, and LAMB against its formula."""

import copy
import gc
import io
import math
import pickle
import weakref

import pytest
import torch

import ortrain
from ortrain.errors import (
    DeviceError,
    DTypeError,
    InvalidModelError,
    ShapeError,
    UnsupportedError,
)
from ortrain.optim import FusedAdamW, FusedLAMB, FusedSGD

# A scalar, empty, shorter and longer than a vector, and more than one block for the threads.
SHAPES = [(), (1,), (0, 3), (7,), (17,), (4, 5, 6), (300, 257)]
STEPS = 24


def make_params(dtype=torch.float32, shapes=SHAPES, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes
    ]


def set_grads(*lists, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    for params in zip(*lists, strict=True):
        grad = torch.randn(params[0].shape, generator=generator) * scale
        for param in params:
            param.grad = grad.to(param.dtype, copy=True)


def tolerance(dtype):
    if dtype == torch.float64:
        return {"rtol": 1e-12, "atol": 1e-14}
    if dtype == torch.float32:
        return {"rtol": 1e-6, "atol": 5e-7}
    return {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}


def check_equal(ours, theirs, params, other_params, dtype=torch.float32):
    torch.testing.assert_close(params, other_params, **tolerance(dtype))
    for param, other in zip(params, other_params, strict=True):
        mine, expected = ours.state.get(param, {}), theirs.state.get(other, {})
        assert list(mine) == list(expected)
        for key, value in expected.items():
            assert mine[key].dtype == value.dtype
            torch.testing.assert_close(mine[key], value, **tolerance(dtype))


def follow(ours_class, theirs_class, dtype=torch.float32, steps=STEPS, **options):
    params, other = make_params(dtype), make_params(dtype)
    ours, theirs = ours_class(params, **options), theirs_class(other, **options)
    for step in range(steps):
        set_grads(params, other, seed=step)
        ours.step()
        theirs.step()
        check_equal(ours, theirs, params, other, dtype)


ADAMW = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3},
    {"weight_decay": 0.0},
    {"weight_decay": 0.1, "amsgrad": True},
    {"weight_decay": 0.3, "maximize": True},
    {"amsgrad": True},
    {"amsgrad": True, "maximize": True, "lr": 0.05, "fused": True},
    {"lr": torch.tensor(0.02)},
    {"lr": 0.02, "foreach": True},
]
SGD = [
    {},
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"lr": 0.05, "momentum": 0.9, "nesterov": True, "maximize": True},
    {"lr": torch.tensor(0.02), "maximize": True},
]


@pytest.mark.parametrize("options", ADAMW, ids=str)
def test_adamw_is_pytorchs(options):
    follow(FusedAdamW, torch.optim.AdamW, **options)


@pytest.mark.parametrize("options", SGD, ids=str)
def test_sgd_is_pytorchs(options):
    follow(FusedSGD, torch.optim.SGD, **options)


def test_double_parameters():
    follow(FusedAdamW, torch.optim.AdamW, torch.float64, lr=0.05, amsgrad=True)
    follow(FusedSGD, torch.optim.SGD, torch.float64, lr=0.1, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_parameters_are_computed_in_float(dtype):
    params = make_params(dtype)
    adam = FusedAdamW(params, lr=0.05, weight_decay=0.1, max_grad_norm=3.0)
    for step in range(4):
        before = [
            (p.detach().float(), *(adam.state[p].get(k) for k in ("exp_avg", "exp_avg_sq")))
            for p in params
        ]
        before = [[None if t is None else t.float() for t in row] for row in before]
        set_grads(params, seed=step)
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in params))
        adam.step()
        for param, (p, m, v) in zip(params, before, strict=True):
            g = param.grad.float() * min(1.0, 3.0 / (norm + 1e-6))
            m = 0.1 * g if m is None else m + 0.1 * (g - m)
            v = 0.001 * g * g if v is None else 0.999 * v + 0.001 * g * g
            root = (v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
            p = p * (1 - 0.05 * 0.1) - 0.05 * m / (1 - 0.9 ** (step + 1)) / root
            state = adam.state[param]
            for actual, expected in ((param, p), (state["exp_avg"], m), (state["exp_avg_sq"], v)):
                assert actual.dtype == dtype
                torch.testing.assert_close(
                    actual.detach().float(), expected, rtol=torch.finfo(dtype).eps, atol=1e-7
                )


def test_states_in_float_for_half_parameters():
    (half,) = make_params(torch.bfloat16, [(100,)])
    (wide,) = make_params(torch.float32, [(100,)])
    with torch.no_grad():
        wide.copy_(half)
    ours, theirs = FusedAdamW([half], lr=1e-3), FusedAdamW([wide], lr=1e-3)
    half.grad = torch.linspace(-1, 1, 100).bfloat16()
    wide.grad = half.grad.float()
    ours.step()
    for key in ("exp_avg", "exp_avg_sq"):
        ours.state[half][key] = ours.state[half][key].float().zero_()
    ours.state[half]["step"].zero_()
    with torch.no_grad():
        half.copy_(wide)
    ours.step()
    theirs.step()
    torch.testing.assert_close(ours.state[half]["exp_avg"], theirs.state[wide]["exp_avg"])
    torch.testing.assert_close(half.detach(), wide.detach().bfloat16())


def test_groups_closure_and_schedulers():
    def build(adamw):
        params = make_params()
        groups = [
            {"params": params[:3], "weight_decay": 0.2},
            {"params": params[3:5], "betas": (0.5, 0.9), "amsgrad": True},
            {"params": params[5:], "lr": torch.tensor(0.5)},
        ]
        return params, adamw(groups, lr=0.1)

    (params, ours), (other, theirs) = build(FusedAdamW), build(torch.optim.AdamW)
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1)
        for o in (ours, theirs)
    ]
    for step in range(STEPS):

        def closure(step=step):
            assert torch.is_grad_enabled()
            set_grads(params, other, seed=step)
            return step

        with torch.no_grad():
            assert ours.step(closure) == step
        theirs.step(closure)
        check_equal(ours, theirs, params, other)
        for scheduler in schedulers:
            scheduler.step()
    assert ours.param_groups[0]["lr"] == theirs.param_groups[0]["lr"]


def test_parameters_without_gradient_are_left_alone():
    params, other = make_params(), make_params()
    ours, theirs = FusedAdamW(params, lr=0.1), torch.optim.AdamW(other, lr=0.1)
    for step in range(6):
        set_grads(params, other, seed=step)
        for skipped in range(step % 3, len(params), 3):
            params[skipped].grad = other[skipped].grad = None
        ours.step()
        theirs.step()
        check_equal(ours, theirs, params, other)
    ours.zero_grad()
    assert all(p.grad is None for p in params)
    before = copy.deepcopy(ours.state_dict())
    ours.step()
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)
    FusedSGD([torch.nn.Parameter(torch.ones(2))], max_grad_norm=1.0).step()


def test_sgd_first_step_is_per_parameter():
    params, other = make_params(), make_params()
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    ours, theirs = FusedSGD(params, **options), torch.optim.SGD(other, foreach=False, **options)
    for step in range(5):
        set_grads(params, other, seed=step)
        if step < 2:
            params[4].grad = other[4].grad = None
        ours.step()
        theirs.step()
        check_equal(ours, theirs, params, other)


@pytest.mark.parametrize(
    "ours_class, theirs_class, options",
    [
        (FusedAdamW, torch.optim.AdamW, {"amsgrad": True, "lr": 0.01}),
        (FusedSGD, torch.optim.SGD, {"momentum": 0.9, "lr": 0.01}),
        (FusedSGD, torch.optim.SGD, {"lr": 0.01}),
    ],
)
@pytest.mark.parametrize("fused", [None, True])
def test_state_dict_both_ways(ours_class, theirs_class, options, fused):
    params, other = make_params(), make_params()
    ours, theirs = ours_class(params, **options), theirs_class(other, fused=fused, **options)
    assert set(ours.state_dict()["param_groups"][0]) == set(theirs.state_dict()["param_groups"][0])
    for step in range(6):
        set_grads(params, other, seed=step)
        ours.step()
        theirs.step()
        saved, expected = io.BytesIO(), io.BytesIO()
        torch.save(ours.state_dict(), saved)
        torch.save(theirs.state_dict(), expected)
        saved.seek(0), expected.seek(0)
        ours.load_state_dict(torch.load(expected, weights_only=True))
        theirs.load_state_dict(torch.load(saved, weights_only=True))
        check_equal(ours, theirs, params, other)


def test_state_that_was_replaced_is_used():
    params, other = make_params(), make_params()
    ours, theirs = FusedAdamW(params), torch.optim.AdamW(other)
    for step in range(9):
        set_grads(params, other, seed=step)
        ours.step()
        theirs.step()
        if step == 2:
            for optimizer, list_ in ((ours, params), (theirs, other)):
                optimizer.state[list_[3]] = {}
        if step == 4:
            for optimizer, list_ in ((ours, params), (theirs, other)):
                del optimizer.state[list_[4]]
                optimizer.state[list_[5]]["exp_avg"] = torch.ones(4, 5, 6)
        if step == 6:
            for list_ in (params, other):
                list_[5].data = torch.ones(4, 5, 6)
    check_equal(ours, theirs, params, other)


def test_groups_added_later():
    params, other = make_params(), make_params()
    ours, theirs = FusedSGD(params[:4], momentum=0.5), torch.optim.SGD(other[:4], momentum=0.5)
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": params[4:], "lr": 0.5})
            theirs.add_param_group({"params": other[4:], "lr": 0.5})
        set_grads(params, other, seed=step)
        ours.step()
        theirs.step()
    check_equal(ours, theirs, params, other)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("steps", [0, 2])
def test_copies_go_on_alike(copied, steps):
    for cls in (FusedAdamW, FusedLAMB, FusedSGD):
        params = make_params()
        optimizer = cls(params, lr=0.1, max_grad_norm=0.5)
        for step in range(steps):
            set_grads(params, seed=step)
            optimizer.step()
        other = copied(optimizer)
        assert other.max_grad_norm == 0.5
        copies = other.param_groups[0]["params"]
        set_grads(params, copies, seed=9)
        optimizer.step()
        other.step()
        torch.testing.assert_close(params, copies, rtol=0, atol=0)


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6, 0.0, math.inf])
@pytest.mark.parametrize("kind", ["plain", "inf", "nan"])
def test_clipping_is_clip_grad_norm(max_norm, kind):
    for ours_class, theirs_class in (
        (FusedAdamW, torch.optim.AdamW),
        (FusedSGD, torch.optim.SGD),
    ):
        params, other = make_params(), make_params()
        ours = ours_class(params, lr=0.1, max_grad_norm=max_norm)
        theirs = theirs_class(other, lr=0.1)
        assert ours.grad_norm is None
        for step in range(3):
            set_grads(params, other, seed=step)
            if kind != "plain" and step == 1:
                for list_ in (params, other):
                    list_[3].grad[2] = float(kind)
            before = [p.grad.clone() for p in params]
            norm = torch.nn.utils.clip_grad_norm_(other, max_norm)
            theirs.step()
            ours.step()
            torch.testing.assert_close(ours.grad_norm, norm, equal_nan=True, rtol=1e-6, atol=0)
            for mine, expected in zip(params, other, strict=True):
                torch.testing.assert_close(mine, expected, equal_nan=True, rtol=2e-6, atol=1e-6)
            torch.testing.assert_close(
                [p.grad for p in params], before, equal_nan=True, rtol=0, atol=0
            )


def test_clipping_spans_groups_and_can_change():
    params, other = make_params(), make_params()
    ours = FusedSGD([{"params": params[:4]}, {"params": params[4:]}], lr=0.1, max_grad_norm=1.0)
    theirs = torch.optim.SGD(other, lr=0.1)
    for max_norm in (1.0, 0.1, None):
        ours.max_grad_norm = max_norm
        set_grads(params, other, seed=3)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(other, max_norm)
        ours.step()
        theirs.step()
        torch.testing.assert_close(params, other)
        assert (ours.grad_norm is None) == (max_norm is None)


def test_norm_does_not_depend_on_threads():
    params = make_params()
    set_grads(params, seed=1)
    norms = set()
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            optimizer = FusedSGD(params, lr=0.0, max_grad_norm=1.0)
            optimizer.step()
            norms.add(optimizer.grad_norm.item())
    finally:
        torch.set_num_threads(threads)
    assert len(norms) == 1


@pytest.mark.parametrize("case", ["all_other_order", "grad_other_order", "gaps", "expanded_grad"])
def test_other_memory_orders(case):
    def build():
        base = torch.randn(6, 8, 5, 3, generator=torch.Generator().manual_seed(0))
        if case == "all_other_order":
            return torch.nn.Parameter(base.to(memory_format=torch.channels_last))
        if case == "gaps":
            return torch.nn.Parameter(base[:, ::2, :, 1:])
        return torch.nn.Parameter(base)

    for ours_class, theirs_class, options in (
        (FusedAdamW, torch.optim.AdamW, {"amsgrad": True}),
        (FusedSGD, torch.optim.SGD, {"momentum": 0.9}),
    ):
        param, other = build(), build()
        ours, theirs = ours_class([param], **options), theirs_class([other], **options)
        for step in range(4):
            set_grads([param], [other], seed=step)
            for p in (param, other):
                if case in ("all_other_order", "grad_other_order"):
                    p.grad = p.grad.to(memory_format=torch.channels_last)
                if case == "expanded_grad":
                    p.grad = p.grad[:1].expand_as(p)
            ours.step()
            theirs.step()
            check_equal(ours, theirs, [param], [other])
        if case == "all_other_order":
            assert all(t.stride() == param.stride() for t in ours.state[param].values() if t.dim())


def test_written_parameters_get_a_new_version():
    params = make_params()
    set_grads(params, seed=0)
    params[3].grad = None
    optimizer = FusedAdamW(params)
    optimizer.step()
    versions = [p._version for p in params]
    optimizer.step()
    assert [p._version > v for p, v in zip(params, versions, strict=True)] == [
        i != 3 for i in range(len(params))
    ]
    weight = params[-1]
    loss = (weight * weight).sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler(unscale):
    for ours_class, theirs_class in ((FusedAdamW, torch.optim.AdamW), (FusedSGD, torch.optim.SGD)):
        params, other = make_params(), make_params()
        ours, theirs = ours_class(params, lr=0.1), theirs_class(other, lr=0.1)
        scalers = [
            torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=2) for _ in range(2)
        ]
        for step in range(10):
            overflow = step in (0, 3, 4, 8)
            before = copy.deepcopy((ours.state_dict(), [p.detach() for p in params]))
            for list_, optimizer, scaler in zip(
                (params, other), (ours, theirs), scalers, strict=True
            ):
                generator = torch.Generator().manual_seed(step)
                loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in list_)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                if overflow:
                    list_[3].grad[1] = math.inf if step != 4 else math.nan
                if unscale:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert scalers[0].get_scale() == scalers[1].get_scale()
            after = (ours.state_dict(), [p.detach() for p in params])
            if overflow:
                torch.testing.assert_close(after, before, rtol=0, atol=0)
            check_equal(ours, theirs, params, other)
        assert not hasattr(ours, "found_inf") and not hasattr(ours, "grad_scale")


def test_clipping_under_a_grad_scaler_is_of_unscaled_gradients():
    params, other = make_params(), make_params()
    ours, theirs = FusedAdamW(params, max_grad_norm=0.5), torch.optim.AdamW(other)
    set_grads(params, other, seed=0)
    norm = torch.nn.utils.clip_grad_norm_(other, 0.5)
    theirs.step()
    for p in params:
        p.grad *= 1024.0
    ours.grad_scale, ours.found_inf = torch.tensor(1024.0), torch.tensor(0.0)
    ours.step()
    torch.testing.assert_close(ours.grad_norm, norm)
    check_equal(ours, theirs, params, other)
    ours.found_inf = torch.tensor(1.0)
    ours.step()
    assert ours.grad_norm is None
    check_equal(ours, theirs, params, other)


def lamb_reference(params, grads, states, step, options):
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    clip = min(1.0, options["max_grad_norm"] / (norm + 1e-6))
    beta1, beta2 = options["betas"]
    for i, (p, g) in enumerate(zip(params, grads, strict=True)):
        g = g.double() * clip * (-1 if options["maximize"] else 1)
        m, v = states[i]
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        correct = options["bias_correction"]
        mean = m / (1 - beta1**step) if correct else m
        square = v / (1 - beta2**step) if correct else v
        update = mean / (square.sqrt() + options["eps"]) + options["weight_decay"] * p
        norms = p.norm().item(), update.norm().item()
        ratio = 1.0
        if norms[0] != 0 and norms[1] != 0:
            ratio = max(min(norms[0] / norms[1], options["ratio_max"]), options["ratio_min"])
        p -= options["lr"] * ratio * update


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias_correction": False, "weight_decay": 0.0},
        {"ratio_min": 0.1, "ratio_max": 0.5, "maximize": True, "max_grad_norm": 0.3},
    ],
    ids=str,
)
def test_lamb_is_its_formula(dtype, changes):
    options = {
        "lr": 0.02,
        "betas": (0.9, 0.99),
        "eps": 1e-6,
        "weight_decay": 0.05,
        "ratio_min": -math.inf,
        "ratio_max": math.inf,
        "bias_correction": True,
        "maximize": False,
        "max_grad_norm": 1e3,
        **changes,
    }
    params = make_params(dtype)
    with torch.no_grad():
        params[4].zero_()
    optimizer = FusedLAMB(params, **options)
    expected = [p.detach().double() for p in params]
    states = [(torch.zeros_like(p), torch.zeros_like(p)) for p in expected]
    steps = 3 if dtype == torch.bfloat16 else STEPS
    for step in range(1, steps + 1):
        set_grads(params, seed=step)
        optimizer.step()
        lamb_reference(expected, [p.grad for p in params], states, step, options)
        limits = {
            torch.float32: {"rtol": 2e-5, "atol": 2e-6},
            torch.float64: {"rtol": 1e-11, "atol": 1e-13},
            torch.bfloat16: {"rtol": 0.02, "atol": 0.02},
        }[dtype]
        torch.testing.assert_close([p.detach().double() for p in params], expected, **limits)
    state = optimizer.state[params[0]]
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"] and state["step"] == steps


def test_lamb_state_dict():
    params, other = make_params(), make_params()
    first, second = FusedLAMB(params, lr=0.1), FusedLAMB(other, lr=0.2, bias_correction=False)
    set_grads(params, other, seed=0)
    first.step()
    with torch.no_grad():
        for p, q in zip(params, other, strict=True):
            q.copy_(p)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    set_grads(params, other, seed=1)
    first.step()
    second.step()
    check_equal(first, second, params, other)


def test_models_train_as_with_pytorch():
    def train(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 4)
        ).to(memory_format=torch.channels_last)
        batch = torch.randn(5, 3, 8, 8)
        optimizer = make(model.parameters())
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    assert train(lambda p: FusedAdamW(p, lr=0.01)) == pytest.approx(
        train(lambda p: torch.optim.AdamW(p, lr=0.01)), rel=1e-5
    )


def sparse_ones(size):
    indices = torch.arange(size).reshape(1, size)
    return torch.sparse_coo_tensor(indices, torch.ones(size), (size,), check_invariants=True)


def one(shape=(3,), **options):
    return torch.nn.Parameter(torch.ones(shape, **options))


def check_refused(param, grad, error, message, optimizer=FusedAdamW, **options):
    good = one()
    good.grad = torch.ones(3)
    made = optimizer([good, param], **options)
    if grad is not None:
        param.grad = grad
    with pytest.raises(error, match=message):
        made.step()
    # Nothing was changed, and the optimizer goes on without the parameter.
    assert torch.equal(good, torch.ones(3))
    param.grad = None
    made.step()
    assert not torch.equal(good, torch.ones(3))


def test_refusals():
    sparse = sparse_ones(3)
    check_refused(one(), sparse, UnsupportedError, r"parameter 1\].*gradient is sparse")
    check_refused(one(), sparse, RuntimeError, "sparse", FusedSGD, momentum=0.9)
    number = torch.ones(3, dtype=torch.complex64)
    check_refused(one(dtype=torch.complex64), number, DTypeError, "complex64, expected")
    meta = torch.ones(3, device="meta")
    check_refused(one(device="meta"), meta, DeviceError, "parameter is on device 'meta'")


def test_refusals_name_the_parameter():
    model = torch.nn.Linear(2, 2)
    optimizer = FusedSGD(model.named_parameters(), lr=0.1)
    model.bias.grad = sparse_ones(2)
    with pytest.raises(UnsupportedError, match=r"parameter 1 'bias'\]"):
        optimizer.step()
    optimizer.add_param_group({"params": [("other", one())]})
    with pytest.raises(UnsupportedError, match=r"parameter 1 'bias' of group 0\]"):
        optimizer.step()


def test_damaged_states_are_refused():
    for damage, error, message in (
        ({"exp_avg": torch.ones(2)}, ShapeError, r"exp_avg has shape \[2\].*\[3\]"),
        ({"exp_avg": torch.ones(3).double()}, DTypeError, "exp_avg is float64"),
        ({"exp_avg": torch.ones(3).int()}, DTypeError, "exp_avg is torch.int32"),
        ({"step": torch.ones(2)}, InvalidModelError, "step"),
        ({"exp_avg_sq": None}, InvalidModelError, "exp_avg_sq"),
    ):
        param = one()
        param.grad = torch.ones(3)
        optimizer = FusedAdamW([param])
        optimizer.step()
        for key, value in damage.items():
            if value is None:
                del optimizer.state[param][key]
            else:
                optimizer.state[param][key] = value
        before = param.detach().clone()
        with pytest.raises(error, match=message):
            optimizer.step()
        assert torch.equal(param, before)


def test_failed_first_step_of_sgd_stays_the_first():
    params, other = [one(), one()], [one()]
    options = {"momentum": 0.9, "dampening": 0.5}
    ours, theirs = FusedSGD(params, **options), torch.optim.SGD(other, **options)
    set_grads(params[:1], other, seed=0)
    params[1].grad = sparse_ones(3)
    with pytest.raises(UnsupportedError):
        ours.step()
    params[1].grad = None
    for _ in range(2):
        ours.step()
        theirs.step()
    torch.testing.assert_close(params[0], other[0])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: FusedAdamW(p, lr=-1.0),
        lambda p: FusedAdamW(p, betas=(1.0, 0.9)),
        lambda p: FusedAdamW(p, max_grad_norm=-1.0),
        lambda p: FusedSGD(p, momentum=-0.1),
        lambda p: FusedSGD(p, nesterov=True),
        lambda p: FusedSGD(p, max_grad_norm=math.nan),
        lambda p: FusedLAMB(p, lr=-1.0),
        lambda p: FusedLAMB(p, lr=torch.ones(2)),
        lambda p: FusedLAMB(p, betas=(0.9, 1.0)),
        lambda p: FusedLAMB(p, eps=-1.0),
        lambda p: FusedLAMB(p, weight_decay=-1.0),
        lambda p: FusedLAMB(p, ratio_min=2.0, ratio_max=1.0),
        lambda p: FusedAdamW([]),
    ],
)
def test_invalid_options(make):
    with pytest.raises(ValueError):
        make([one()])


def test_options_of_compiled_steps_are_refused():
    for options in ({"capturable": True}, {"differentiable": True}):
        with pytest.raises(UnsupportedError, match="has no"):
            FusedAdamW([one()], **options)
        with pytest.raises(UnsupportedError, match="has no"):
            FusedAdamW([{"params": [one()], **options}])


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice_is_refused():
    param = one()
    with pytest.raises(ValueError, match="twice"):
        FusedAdamW([param, param])
    optimizer = FusedAdamW([one()])
    with pytest.raises(ValueError, match="twice"):
        optimizer.add_param_group({"params": [param, param]})
    assert len(optimizer.param_groups) == 1


def test_nothing_is_kept_alive():
    param = one()
    param.grad = torch.ones(3)
    optimizer = FusedAdamW([param])
    optimizer.step()
    first = weakref.ref(optimizer.state[param]["exp_avg"])
    kept = weakref.ref(param)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert first() is None
    optimizer.step()
    del optimizer, param
    assert kept() is None


def test_cycles_are_collected():
    param = one()
    param.grad = torch.ones(3)
    optimizer = FusedSGD([param], momentum=0.9)
    optimizer.step()
    optimizer.step()
    param.owner = optimizer
    kept = weakref.ref(optimizer)
    del optimizer, param
    gc.collect()
    assert kept() is None


def test_tensors_without_memory_are_refused():
    class Wrapper(torch.Tensor):
        @staticmethod
        def __new__(cls):
            return torch.Tensor._make_wrapper_subclass(cls, (3,), requires_grad=True)

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise NotImplementedError

    param = Wrapper()
    param.grad = torch.ones(3)
    with pytest.raises((UnsupportedError, DTypeError), match=r"parameter 0\]"):
        FusedSGD([param]).step()


def test_step_in_compiled_code():
    params, other = make_params(), make_params()
    ours, theirs = FusedAdamW(params, lr=0.1), torch.optim.AdamW(other, lr=0.1)

    @torch.compile(backend="eager")
    def step(x):
        ours.step()
        return x + 1

    for number in range(3):
        set_grads(params, other, seed=number)
        step(torch.ones(2))
        theirs.step()
    check_equal(ours, theirs, params, other)


def test_hooks_and_names():
    param = one()
    param.grad = torch.ones(3)
    optimizer = ortrain.optim.FusedAdamW([param])
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer.step()
    assert calls == ["pre", "post"]
    assert isinstance(optimizer, torch.optim.AdamW)
    assert isinstance(FusedSGD([param]), torch.optim.SGD)


def test_groups_of_adamw_that_do_not_decouple_the_decay():
    values = []
    for optimizer in (torch.optim.AdamW, FusedAdamW):
        parameter = torch.nn.Parameter(torch.ones(3))
        group = {"params": [parameter], "decoupled_weight_decay": False}
        made = optimizer([group], lr=0.1, weight_decay=0.5)
        for _ in range(3):
            parameter.grad = torch.arange(3.0) * 0.3
            made.step()
        values.append(parameter.detach())
    torch.testing.assert_close(values[1], values[0])

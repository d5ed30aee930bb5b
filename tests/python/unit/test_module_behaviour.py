# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What programs do with modules, done with a wrapped one and with the same one in PyTorch."""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint
from torch.utils.data import DataLoader, Dataset

from ortrain import ORTModule


class Net(nn.Module):
    """Two layers with running statistics between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


Make = Callable[[], nn.Module]


def pair(make: Make = Net) -> tuple[nn.Module, ORTModule]:
    return make(), ORTModule(make())


def data(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss = model(x.to(next(model.parameters()).dtype)).square().sum()
    loss.backward()
    return loss.detach()


def states_are_equal(ours: nn.Module, theirs: nn.Module) -> None:
    inner = ours.module if isinstance(ours, ORTModule) else ours
    for (name, mine), wanted in zip(
        inner.state_dict().items(), theirs.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(mine, wanted, msg=lambda m, n=name: f"{n}: {m}")
    for (name, mine), wanted in zip(inner.named_parameters(), theirs.parameters(), strict=True):
        if wanted.grad is None:
            assert mine.grad is None, name
        else:
            torch.testing.assert_close(
                mine.grad, wanted.grad, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


def follow(ours: nn.Module, theirs: nn.Module, *, steps: int = 2) -> None:
    """Compare steps of both, from the gradients that are there on."""
    for rows in (6, 3)[:steps]:
        torch.testing.assert_close(step(ours, data(rows)), step(theirs, data(rows)))
    states_are_equal(ours, theirs)


def both(ours: ORTModule, theirs: nn.Module) -> Iterator[nn.Module]:
    yield from (ours.module, theirs)


def test_buffers_are_updated_in_place() -> None:
    theirs, ours = pair()
    running = ours.module.norm.running_mean
    follow(ours, theirs)
    assert ours.module.norm.running_mean is running and running.abs().sum() > 0
    assert int(ours.module.norm.num_batches_tracked) == 2


def test_parameters_replaced_and_tied_after_the_first_step() -> None:
    theirs, ours = pair()
    follow(ours, theirs)
    for model in both(ours, theirs):
        model.first.weight = nn.Parameter(torch.full((5, 4), 0.3))
        model.last.weight.grad = None
    follow(ours, theirs)
    for model in both(ours, theirs):
        model.first.bias = model.norm.bias
    follow(ours, theirs)


@pytest.mark.parametrize("change", ["double", "to"])
def test_moved_to_another_type_after_the_first_step(change: str) -> None:
    theirs, ours = pair()
    follow(ours, theirs)
    for model in (ours, theirs):
        model.double() if change == "double" else model.to(torch.float64)
        model.zero_grad()
    loss = step(ours, data().double())
    torch.testing.assert_close(loss, step(theirs, data().double()))
    assert loss.dtype is torch.float64
    states_are_equal(ours, theirs)


def test_layers_added_and_removed() -> None:
    theirs, ours = pair()
    follow(ours, theirs)
    for model in both(ours, theirs):
        model.first = nn.Sequential(model.first, nn.LayerNorm(5))
        model.zero_grad()
    follow(ours, theirs)
    for model in both(ours, theirs):
        model.first = model.first[0]
        model.norm = nn.Identity()
        model.zero_grad()
    follow(ours, theirs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_hooks_on_the_module_and_on_layers() -> None:
    theirs, ours = pair()
    follow(ours, theirs, steps=1)
    seen: dict[bool, list[str]] = {True: [], False: []}
    for mine, model in ((True, ours), (False, theirs)):
        inner = ours.module if mine else theirs
        calls = seen[mine]
        model.register_forward_pre_hook(lambda m, args, calls=calls: calls.append("pre"))
        model.register_forward_hook(lambda m, args, out, calls=calls: calls.append("post"))
        inner.first.register_forward_hook(lambda m, args, out: out * 2)
        inner.last.register_full_backward_hook(
            lambda m, gi, go, calls=calls: calls.append("backward")
        )
        inner.last.weight.register_hook(lambda g: g * 3)
    follow(ours, theirs)
    assert seen[True] == seen[False] and "backward" in seen[True]


def test_backward_twice_with_retain_graph() -> None:
    theirs, ours = pair()
    for model in (ours, theirs):
        loss = model(data()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    states_are_equal(ours, theirs)


def test_several_forwards_and_backwards_in_any_order() -> None:
    theirs, ours = pair()
    for model in (ours, theirs):
        a, b = model(data(6)).sum(), model(data(3)).square().sum()
        c = model(data(4)).sum()
        b.backward()
        (a * 2 + c).backward()
    states_are_equal(ours, theirs)


def test_two_forwards_and_one_backward() -> None:
    theirs, ours = pair()
    for model in (ours, theirs):
        (model(data(6)).sum() * model(data(3)).square().sum()).backward()
    states_are_equal(ours, theirs)


class Around(nn.Module):
    """Uses a part twice, beside a layer of its own."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.part = part
        self.own = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.own(self.part(x)))


def test_nested_wrappers() -> None:
    # Statistics of three rows, twice: PyTorch's float32 gradients may be wrong by 1e-3 here.
    theirs, ours = Around(Net()).double(), ORTModule(Around(ORTModule(Net()))).double()
    follow(ours, theirs)


def test_a_wrapper_among_layers_of_pytorch_and_in_two_models() -> None:
    part, plain = ORTModule(Net()), Net()
    ours = [Around(part), Around(part)]
    theirs = [Around(plain), Around(plain)]
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(step(mine, data()), step(wanted, data()))
    states_are_equal(part, plain)


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint.checkpoint(
            lambda h: torch.tanh(self.norm(self.first(h))), x, use_reentrant=False
        )
        return self.last(hidden)


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_are_honoured_and_update_statistics_twice() -> None:
    theirs, ours = Checkpointed(), ORTModule(Checkpointed())
    for rows in (6, 3):
        torch.testing.assert_close(step(ours, data(rows)), step(theirs, data(rows)))
    assert int(ours.module.norm.num_batches_tracked) == 4
    states_are_equal(ours, theirs)


def test_double_backward_is_pytorchs() -> None:
    theirs, ours = pair()
    seconds = []
    for model in (ours, theirs):
        x = data().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds)


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_go_on_alone(how: str, started: bool) -> None:
    theirs, ours = pair()
    if started:
        follow(ours, theirs, steps=1)
    if how == "deepcopy":
        copied = copy.deepcopy(ours)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(ours))
    else:
        file = io.BytesIO()
        torch.save(ours, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    ours.zero_grad()
    copied.zero_grad()
    step(ours, data(5))
    assert all(p.grad is None for p in copied.parameters())
    theirs.zero_grad()
    follow(copied, theirs)


class Named(ORTModule):
    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self.name = name


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle"])
def test_copies_are_of_the_users_subclass(how: str) -> None:
    ours = Named(nn.Linear(3, 2), "first")
    if how == "pickle":
        copied = pickle.loads(pickle.dumps(ours))
    else:
        copied = getattr(copy, how)(ours)
    assert isinstance(copied, Named) and copied.name == "first"
    torch.testing.assert_close(copied(torch.ones(2, 3)), ours(torch.ones(2, 3)))


def test_forward_may_be_a_method_of_a_compiled_type() -> None:
    ours = ORTModule(nn.Linear(3, 2))
    ours.forward = ours.__sizeof__  # it has no __func__
    assert ours() == ours.__sizeof__()


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return data(8)[index]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_of_a_data_loader(method: str) -> None:
    theirs, ours = pair()
    follow(ours, theirs, steps=1)
    loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context=method)
    for batch in loader:
        torch.testing.assert_close(step(ours, batch), step(theirs, batch))
    states_are_equal(ours, theirs)


def _evaluate(model: nn.Module, queue: Any) -> None:
    with torch.no_grad():
        queue.put(model.eval()(data()).sum().item())


def test_a_forked_process_runs_the_module() -> None:
    theirs, ours = pair()
    follow(ours, theirs, steps=1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a process cannot fork a pool of threads
    try:
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()
        process = context.Process(target=_evaluate, args=(ours, queue))
        process.start()
        process.join(60)
        assert process.exitcode == 0
    finally:
        torch.set_num_threads(threads)
    with torch.no_grad():
        assert queue.get() == pytest.approx(theirs.eval()(data()).sum().item(), rel=1e-4)


def test_threads_with_a_module_each_and_with_one() -> None:
    theirs, ours = pair()
    ours.eval()
    theirs.eval()
    results: list[torch.Tensor] = []

    def work(rows: int) -> None:
        with torch.no_grad():
            results.append(ours(data(rows)) - theirs(data(rows)))

    threads = [threading.Thread(target=work, args=(n,)) for n in (2, 3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(r.abs().max() < 1e-5 for r in results)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(mode: Any) -> None:
    theirs, ours = pair()
    for model in (ours, theirs):
        model.eval()
    with mode():
        made, wanted = ours(data()), theirs(data())
    torch.testing.assert_close(made, wanted)
    assert not made.requires_grad and made.is_inference() == wanted.is_inference()
    for model in (ours, theirs):
        model.train()
    follow(ours, theirs)


def test_functional_call_takes_other_parameters() -> None:
    theirs, ours = pair()
    step(ours, data())
    ours.zero_grad()
    theirs.load_state_dict(ours.module.state_dict())
    other = {"first.weight": torch.full((5, 4), 0.2, requires_grad=True)}
    prefix = next(iter(dict(ours.named_parameters()))).removesuffix("first.weight")
    made = torch.func.functional_call(ours, {prefix + k: v for k, v in other.items()}, (data(),))
    wanted = torch.func.functional_call(theirs, other, (data(),))
    torch.testing.assert_close(made, wanted)
    (mine,) = torch.autograd.grad(made.sum(), other["first.weight"])
    (gradient,) = torch.autograd.grad(wanted.sum(), other["first.weight"])
    torch.testing.assert_close(mine, gradient, rtol=1e-4, atol=1e-5)


def test_transforms_of_torch_func_are_told_and_right() -> None:
    theirs, ours = pair()
    for model in (ours, theirs):
        model.eval()
    with pytest.warns(RuntimeWarning, match="vmap|torch.func|transform"):
        made = torch.func.vmap(ours)(data()[:, None])
    torch.testing.assert_close(made, torch.func.vmap(theirs)(data()[:, None]))


class Normalized(Net):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.weight_norm(self.first)
        parametrizations.orthogonal(self.last, orthogonal_map="cayley")


class OldWeightNorm(Net):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.first)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:.*run in PyTorch:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:.*in pieces:RuntimeWarning")
@pytest.mark.parametrize("make", [Normalized, OldWeightNorm])
def test_weight_norm_and_parametrizations(make: Make) -> None:
    theirs, ours = pair(make)
    follow(ours, theirs)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_and_zero_grad(set_to_none: bool) -> None:
    theirs, ours = pair()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, theirs)]
    for _ in range(2):
        follow(ours, theirs)  # two backwards add up
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        states_are_equal(ours, theirs)


def test_the_first_nan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_CHECK_NAN", "1")
    _, ours = pair()
    with torch.no_grad():
        ours.module.last.weight[0, 0] = float("inf")
    with pytest.raises(Exception, match="last"):
        for _ in range(2):
            step(ours, data())


# --- classes


class Scaled(nn.Module):
    """A class with attributes, which objects may have otherwise."""

    scale = 1.0
    kinds: dict[str, type] = {}

    def __init_subclass__(cls, *, name: str = "", **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if not name:
            raise TypeError("a kind needs a name")
        Scaled.kinds[name] = cls

    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shift(self.layer(x) * self.scale)

    def shift(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def larger(self) -> Scaled:
        return type(self)(5)


def test_attributes_of_objects_come_before_those_of_classes() -> None:
    plain = Scaled()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(2, 3)
    for change in (
        lambda m: None,
        lambda m: setattr(m, "scale", 3.0),
        lambda m: setattr(m, "shift", torch.neg),
        lambda m: setattr(m, "added", 2),
        lambda m: delattr(m, "scale"),
        lambda m: setattr(m, "forward", lambda x: x * 2),
    ):
        change(plain)
        change(ours)
        assert (ours.scale, getattr(ours, "added", None)) == (
            plain.scale,
            getattr(plain, "added", None),
        )
        torch.testing.assert_close(ours.shift(x), plain.shift(x))
        torch.testing.assert_close(ours(x), plain(x))
    ours.module.scale = 4.0
    assert ours.scale == 4.0 and type(ours).scale == 1.0
    Scaled.scale = 7.0
    try:
        del ours.module.scale
        assert ours.scale == 7.0
    finally:
        Scaled.scale = 1.0
    assert "ORTModule" not in str(Scaled.kinds) and len(Scaled.kinds) == 0


def test_methods_that_make_more_of_their_kind_make_plain_ones() -> None:
    assert type(ORTModule(Scaled()).larger()) is Scaled
    layers = ORTModule(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2)))
    part = layers[:2]
    assert type(part) is nn.Sequential and part[0] is layers.module[0]

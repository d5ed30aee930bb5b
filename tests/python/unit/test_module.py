# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule is the module it wraps, in values, gradients, state and behaviour."""

from __future__ import annotations

import copy
import gc
import inspect
import resource
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import ortrain
from ortrain import ORTModule, _core


class Net(nn.Module):
    """Two layers with an embedding, a frozen layer and a method of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 5)

    def forward(
        self, ids: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.0
    ) -> dict[str, torch.Tensor]:
        h = self.dropout(torch.relu(self.norm(self.hidden(self.embed(ids)))).mean(1))
        logits = self.head(h) * scale
        out = {"logits": logits}
        if labels is not None:
            out["loss"] = nn.functional.cross_entropy(logits, labels)
        return out

    def vocabulary(self) -> int:
        return self.embed.num_embeddings


def batch(size: int = 4, length: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "ids": torch.randint(0, 11, (size, length), generator=g),
        "labels": torch.randint(0, 5, (size,), generator=g),
    }


def pair(dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Net(dropout)
    return ORTModule(copy.deepcopy(plain)), plain


def assert_same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for (name, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_values_and_gradients_at_several_sizes() -> None:
    ours, plain = pair()
    for size, length in ((4, 6), (3, 9), (1, 2), (7, 1)):
        data = batch(size, length)
        for model in (ours, plain):
            model.zero_grad()
            model(**data)["loss"].backward()
        torch.testing.assert_close(ours(**data)["logits"], plain(**data)["logits"])
        assert_same_gradients(ours, plain)
    assert ours.report().native_share == 1.0


def test_looks_like_the_wrapped_module() -> None:
    ours, plain = pair()
    assert isinstance(ours, Net) and isinstance(ours, ORTModule)
    assert type(ours).__name__ == "Net"
    assert inspect.signature(ours.forward) == inspect.signature(plain.forward)
    assert inspect.signature(type(ours).forward) == inspect.signature(Net.forward)
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in ours.named_modules()] == [n for n, _ in plain.named_modules()]
    assert ours.vocabulary() == 11
    assert ours.module.hidden is ours.hidden
    ours.eval()
    assert not ours.training and not ours.module.training and not ours.dropout.training
    ours.train()
    ours.custom = 3
    assert ours.module.custom == 3
    with pytest.raises(AttributeError, match="missing"):
        _ = ours.missing


def test_state_loads_both_ways() -> None:
    ours, plain = pair()
    with torch.no_grad():
        ours.head.weight.add_(1.0)
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(plain.head.weight, ours.module.head.weight)
    data = batch()
    torch.testing.assert_close(ours(**data)["loss"], plain(**data)["loss"])


def test_training_follows_eager() -> None:
    ours, plain = pair()
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (ours, plain)]
    for step in range(20):
        data = batch(4 + step % 3, 5 + step % 2, step)
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(**data)["loss"]
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_gradients_accumulate_into_grad() -> None:
    ours, plain = pair()
    for seed in range(3):
        for model in (ours, plain):
            model(**batch(seed=seed))["loss"].backward()
    assert_same_gradients(ours, plain)


def test_frozen_parameters_get_no_gradient_and_no_work() -> None:
    ours, plain = pair()
    for model in (ours, plain):
        model.embed.requires_grad_(False)
        model.hidden.requires_grad_(False)
        model(**batch())["loss"].backward()
    assert_same_gradients(ours, plain)
    frozen = ours.report().native_nodes
    ours.embed.requires_grad_(True)
    ours.hidden.requires_grad_(True)
    ours(**batch())["loss"].backward()
    assert ours.report().captures[-1].native_nodes > frozen


def test_eval_and_no_grad_have_no_backward() -> None:
    ours, plain = pair(dropout=0.5)
    ours.eval()
    plain.eval()
    with torch.no_grad():
        result = ours(**batch())
    assert not result["loss"].requires_grad
    torch.testing.assert_close(result["loss"], plain(**batch())["loss"])
    assert not ours.report().captures[-1].training
    ours(**batch())["loss"].backward()
    plain(**batch())["loss"].backward()
    assert_same_gradients(ours, plain)


def test_keyword_values_are_not_stale() -> None:
    ours, plain = pair()
    for scale in (1.0, 2.0, 1.0):
        got = ours(**batch(), scale=scale)["loss"]
        torch.testing.assert_close(got, plain(**batch(), scale=scale)["loss"])
    without = ours(batch()["ids"])
    assert set(without) == {"logits"}


def test_dropout_follows_manual_seed() -> None:
    ours, _ = pair(dropout=0.5)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        ours.zero_grad()
        ours(**batch(64, 4))["loss"].backward()
        return ours.head.weight.grad.clone()

    first, again, other = run(1), run(1), run(2)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_dropout_has_the_right_mean_and_gradient() -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 1000))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x * self.weight, 0.3)

    module = ORTModule(Drop())
    y = module(torch.ones(64, 1000))
    kept = y != 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.01)
    torch.testing.assert_close(y[kept], torch.full_like(y[kept], 1 / 0.7))
    y.sum().backward()
    # The backward draws the same mask again.
    torch.testing.assert_close(module.weight.grad, y.detach())


def test_several_forwards_before_a_backward() -> None:
    ours, plain = pair()
    totals = []
    for model in (ours, plain):
        losses = [model(**batch(3 + i, 4 + i, i))["loss"] for i in range(3)]
        totals.append(sum(losses))
        totals[-1].backward()
    torch.testing.assert_close(totals[0], totals[1])
    assert_same_gradients(ours, plain)


def test_backward_from_another_output() -> None:
    ours, plain = pair()
    for model in (ours, plain):
        out = model(**batch())
        (out["loss"] + out["logits"].pow(2).sum()).backward()
    assert_same_gradients(ours, plain)


def test_backward_twice_with_retained_graph() -> None:
    ours, plain = pair(0.0)
    for model in (ours, plain):
        loss = model(**batch())["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(ours, plain)


def test_input_gradient() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3))
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(5, 6)
    grads = []
    for model in (ours, plain):
        leaf = x.clone().requires_grad_()
        model(leaf).square().sum().backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-5)


def test_noncontiguous_input_and_gradient() -> None:
    torch.manual_seed(0)
    plain = nn.Linear(6, 3)
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(6, 5).t()
    torch.testing.assert_close(ours(x), plain(x))
    ours(x).sum().backward()  # the gradient comes in expanded, with strides of zero
    plain(x).sum().backward()
    assert_same_gradients(ours, plain)


def test_submodule_can_be_wrapped() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 2)
    )
    ours = copy.deepcopy(plain)
    ours[1] = ORTModule(ours[1])
    assert list(ours.state_dict()) == list(plain.state_dict())
    x = torch.randn(4, 6)
    for model in (ours, plain):
        model(x).square().sum().backward()
    assert_same_gradients(ours, plain)


def test_batch_norm_updates_its_buffers() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    ours = ORTModule(copy.deepcopy(plain))
    for step in range(3):
        x = torch.randn(5 + step, 6)
        for model in (ours, plain):
            model(x).square().sum().backward()
        for (name, a), (_, b) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    assert_same_gradients(ours, plain)
    ours.eval()
    plain.eval()
    torch.testing.assert_close(ours(x), plain(x))


def test_changed_parameter_before_backward_is_refused() -> None:
    ours, _ = pair()
    loss = ours(**batch())["loss"]
    with torch.no_grad():
        ours.head.weight.add_(1.0)
    with pytest.raises(RuntimeError, match=r"head\.weight.*modified by an inplace operation"):
        loss.backward()
    ours(**batch())["loss"].backward()


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


def test_output_changed_in_place_counts_only_where_backward_reads_it() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x @ self.w
            return y, y.square().sum()

    x = torch.randn(3, 2)
    plain, ours = TwoOutputs(), ORTModule(TwoOutputs())
    for model in (plain, ours):
        _, total = model(x)
        total.add_(1)
        total.backward()
    assert_same_gradients(ours, plain)
    y, total = ours(x)
    with torch.no_grad():
        y.zero_()
    with pytest.raises(RuntimeError, match="output 0.*modified by an inplace operation"):
        total.backward()


def test_shapes_that_no_kernel_takes_run_in_pytorch() -> None:
    class Flipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.flip(0) * self.w).sum()

    plain, ours = Flipped(), ORTModule(Flipped())
    for rows in (4, 0, 2):
        x = torch.randn(rows, 3)
        results = [model(x) for model in (ours, plain)]
        torch.testing.assert_close(*results)
        for result in results:
            result.backward()
        assert_same_gradients(ours, plain)


def test_second_backward_without_retain_graph_is_refused() -> None:
    ours, _ = pair()
    loss = ours(**batch())["loss"]
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


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


def test_double_backward_is_refused() -> None:
    ours, _ = pair()
    loss = ours(**batch())["loss"]
    (grad,) = torch.autograd.grad(loss, [ours.head.weight], create_graph=True)
    with pytest.raises(RuntimeError, match="gradient of a gradient"):
        grad.sum().backward()


def test_label_out_of_range() -> None:
    ours, _ = pair()
    for bad in (5, -1, 2_000_000_000):
        data = batch()
        data["labels"][1] = bad
        with pytest.raises(IndexError, match=rf"CrossEntropy.*{bad}"):
            ours(**data)
    assert torch.isfinite(ours(**batch())["loss"])


def test_index_out_of_range_in_an_embedding() -> None:
    ours, _ = pair()
    ours(**batch())
    for bad in (11, -1, 10**12):
        data = batch()
        data["ids"][0, 0] = bad
        with pytest.raises(IndexError, match=rf"embed.*{bad}"):
            ours(**data)
    assert torch.isfinite(ours(**batch())["loss"])


def test_wrong_dtype_rank_and_device() -> None:
    ours, _ = pair()
    ours(**batch())
    data = batch()
    with pytest.raises(ortrain.DTypeError, match="'ids' is float32, expected int64"):
        ours(ids=data["ids"].float(), labels=data["labels"])
    with pytest.raises(ortrain.ShapeError, match="'labels'"):
        ours(ids=data["ids"], labels=data["labels"].unsqueeze(1).expand(-1, 2))
    with pytest.raises(ortrain.DeviceError, match="'ids' is on device 'meta'"):
        ours(ids=data["ids"].to("meta"), labels=data["labels"])
    with pytest.raises(TypeError):
        ours(nonsense=1)
    assert torch.isfinite(ours(**batch())["loss"])


def test_what_cannot_be_captured_runs_in_pytorch_with_one_warning() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y * 2 if y.sum() > 0 else -y

    torch.manual_seed(0)
    plain = Branch()
    ours = ORTModule(copy.deepcopy(plain))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(ours(x), plain(x))
    texts = [str(w.message) for w in caught if "Ortrain" in str(w.message)]
    assert len(texts) == 1 and "test_module.py" in texts[0]
    assert ours.report().native_share == 0.0


def test_strict_mode_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    with pytest.raises(ortrain.CaptureError):
        ORTModule(Branch())(torch.ones(2))


def test_only_modules_can_be_wrapped() -> None:
    with pytest.raises(TypeError, match="torch.nn.Module"):
        ORTModule(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="already"):
        ORTModule(ORTModule(nn.Linear(2, 2)))


def test_float64_and_half() -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.bfloat16, 5e-2)):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
        ours = ORTModule(copy.deepcopy(plain)).to(dtype)
        plain.to(dtype)
        x = torch.randn(5, 6, dtype=dtype)
        a, b = ours(x), plain(x)
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        a.sum().backward()
        b.sum().backward()
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=tolerance, atol=tolerance)


def test_copies_and_pickles() -> None:
    import io

    ours, plain = pair()
    ours(**batch())
    again = copy.deepcopy(ours)
    stream = io.BytesIO()
    torch.save(again, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for model in (again, loaded):
        assert isinstance(model, ORTModule)
        assert model.head.weight is not ours.head.weight
        torch.testing.assert_close(model(**batch())["loss"], plain(**batch())["loss"])


def _steps(model: nn.Module, optimizer: Any, count: int) -> None:
    for step in range(count):
        optimizer.zero_grad()
        model(**batch(16, 32, step % 4))["loss"].backward()
        optimizer.step()


def test_steady_state_neither_allocates_nor_faults() -> None:
    torch.manual_seed(0)
    ours = ORTModule(Net(0.1))
    optimizer = torch.optim.SGD(ours.parameters(), lr=1e-3)
    _steps(ours, optimizer, 10)
    gc.collect()
    allocations = _core.memory_stats()["system_allocations"]
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    _steps(ours, optimizer, 20)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    assert _core.memory_stats()["system_allocations"] == allocations
    assert faults / 20 < 100


def test_dropped_forwards_free_their_memory() -> None:
    ours, _ = pair()
    ours(**batch())
    gc.collect()
    before = _core.memory_stats()["bytes_in_use"]
    for seed in range(5):
        ours(**batch(seed=seed))
    gc.collect()
    assert _core.memory_stats()["bytes_in_use"] <= before


def test_memory_plan_is_known() -> None:
    ours, _ = pair()
    assert ours.memory_plan() is None
    ours(**batch())
    plan = ours.memory_plan()
    assert plan is not None
    assert plan.arena_lower_bound <= plan.arena_bytes <= plan.total_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_call(dtype: torch.dtype) -> None:
    ours, plain = pair()
    for model in (ours, plain):
        with torch.autocast("cpu", dtype=dtype):
            out = model(**batch())
        assert out["logits"].dtype == dtype
        out["loss"].backward()
    for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=5e-2, atol=5e-3)
    # Leaving autocast is another graph, not a stale one.
    assert ours(**batch())["logits"].dtype == torch.float32
    assert ours.report().native_share == 1.0


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


def test_hooks_on_the_wrapped_module_run() -> None:
    ours, _ = pair()
    seen = []
    handle = ours.register_forward_hook(lambda module, args, output: seen.append(output["loss"]))
    for _ in range(2):
        ours(**batch())
    assert len(seen) == 2
    handle.remove()
    ours(**batch())
    assert len(seen) == 2


def test_hooks_on_submodules_are_not_lost() -> None:
    ours, plain = pair()
    seen = []
    ours.hidden.register_forward_hook(lambda module, args, output: seen.append(1))
    with pytest.warns(RuntimeWarning, match=r"hidden.*hooks"):
        got = ours(**batch())["loss"]
    assert seen
    torch.testing.assert_close(got, plain(**batch())["loss"])


def test_structured_inputs_and_outputs() -> None:
    class Structured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, data: dict[str, Any], *, flip: bool = False) -> tuple[Any, ...]:
            a, (b, none) = data["a"], data["pair"]
            y = self.layer(a) - b if flip else self.layer(a) + b
            return [y, {"sum": y.sum(), "nothing": none}], a.shape[0]

    torch.manual_seed(0)
    plain = Structured()
    ours = ORTModule(copy.deepcopy(plain))
    for size, flip in ((2, False), (4, True), (3, True)):
        data = {"a": torch.randn(size, 3), "pair": (torch.randn(3), None)}
        (y, extra), count = ours(data, flip=flip)
        (want, more), _ = plain(data, flip=flip)
        assert count == size and extra["nothing"] is None
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(extra["sum"], more["sum"])


class Scaled(nn.Module):
    """One weight, and a forward given as a function of (module, x)."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0, 3.0, 4.0]))
        self.register_buffer("b", torch.ones(3))
        self.t = 1.0
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def compare(function: Any, use: Any, x: torch.Tensor, steps: int = 1) -> ORTModule:
    """Run ``use(model, x)`` on both sides; gradients and buffers must agree."""
    plain = Scaled(function)
    ours = ORTModule(copy.deepcopy(plain))
    for _ in range(steps):
        for model in (ours, plain):
            model.zero_grad()
            use(model, x.clone())
        assert_same_gradients(ours, plain)
        torch.testing.assert_close(ours.b, plain.b)
    return ours


def test_memory_of_a_replaced_storage_stays_until_backward() -> None:
    def use(model: nn.Module, x: torch.Tensor) -> None:
        leaf = x.requires_grad_()
        loss = (model(leaf) * 2).sum()
        model.w.data = torch.zeros(3)
        loss.backward()
        torch.testing.assert_close(leaf.grad, torch.tensor([4.0, 6.0, 8.0]))

    plain = ORTModule(Scaled(lambda m, x: x * m.w))
    use(plain, torch.ones(3))


@pytest.mark.filterwarnings("ignore:Scaled runs in PyTorch")
def test_buffers_written_in_forward() -> None:
    def in_place(m: Any, x: torch.Tensor) -> Any:
        m.b.mul_(2)
        y = x * m.w * m.b
        return y.sum(), y

    def assigned(m: Any, x: torch.Tensor) -> Any:
        m.b = m.b * 2
        return (x * m.w * m.b).sum()

    x = torch.ones(3)
    compare(in_place, lambda m, x: m(x)[1].square().sum().backward(), x, steps=3)
    compare(in_place, lambda m, x: m(x)[0].backward(), x, steps=3)
    compare(assigned, lambda m, x: m(x).backward(), x, steps=3)

    def twice(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x)[0]
        loss.backward(retain_graph=True)
        loss.backward()

    compare(in_place, twice, x, steps=2)


def test_outputs_that_no_loss_uses_get_no_zeros() -> None:
    x = torch.tensor([0.0, 1.0, 2.0])

    def heads(m: Any, x: torch.Tensor) -> Any:
        h = x * m.w
        return h, h.log(), h.sqrt()

    compare(heads, lambda m, x: m(x)[0].sum().backward(), x, steps=2)

    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.a(x), self.b(x)

    model = ORTModule(TwoHeads())
    model(torch.ones(1, 3))[0].sum().backward()
    assert model.b.weight.grad is None and model.a.weight.grad is not None


@pytest.mark.filterwarnings("ignore:Scaled runs in PyTorch")
def test_an_argument_written_in_place() -> None:
    def use(model: nn.Module, x: torch.Tensor) -> None:
        h = x.requires_grad_() * 1
        y = model(h)
        (y + (h * h).sum()).backward()

    compare(lambda m, x: (x.mul_(3) * m.w).sum(), use, torch.ones(3))


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


def test_unsqueeze_takes_any_extent() -> None:
    ours = ORTModule(Scaled(lambda m, x: (x.unsqueeze(1) * m.w).sum(1)))
    for rows, columns in ((3, 2), (1, 2), (1, 5), (4, 1)):
        ours(torch.ones(rows, columns, 3))
    assert len(ours.report().captures) == 1


def test_squeeze_of_an_extent_that_becomes_one() -> None:
    ours = ORTModule(Scaled(lambda m, x: (x * m.w).squeeze(0)))
    assert ours(torch.ones(4, 3)).shape == (4, 3)
    assert ours(torch.ones(1, 3)).shape == (3,)


def test_batch_norm_runs_twice_before_a_backward() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    ours = ORTModule(copy.deepcopy(plain))
    x, y = torch.randn(5, 3), torch.randn(6, 3)
    for model in (ours, plain):
        (model(x).sum() + model(y).square().sum()).backward()
    assert_same_gradients(ours, plain)


def test_full_backward_hook_runs() -> None:
    model = ORTModule(nn.Linear(3, 2))
    seen = []
    model.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out))
    model(torch.ones(4, 3, requires_grad=True)).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0][0], torch.ones(4, 2))


def test_batches_of_one_need_one_graph_for_all_lengths() -> None:
    class Views(nn.Module):
        """Views by sizes that the sample had, as GPT-2 does."""

        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = (x.view(-1, x.size(-1)) @ self.w).view((*x.size()[:-1], 4))
            return x + y.unsqueeze(1).sum(1)

    plain = Views()
    ours = ORTModule(copy.deepcopy(plain))
    for rows, columns in ((1, 5), (1, 7), (1, 2), (3, 5), (2, 6), (1, 9)):
        x = torch.randn(rows, columns, 4)
        torch.testing.assert_close(ours(x), plain(x))
    assert len(ours.report().captures) <= 2


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
    with pytest.warns(RuntimeWarning, match="makes 'made' at its first call|assigns a new tensor"):
        torch.testing.assert_close(ours(x), plain(x))
    torch.testing.assert_close(ours(x), plain(x))
    assert ours.report().captures[-1].native_nodes > 0
    torch.testing.assert_close(ours.module(x), plain(x))

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule is the module it wraps, in values, state and behaviour."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_modules import Net, Scaled, assert_same_gradients, batch, pair

from ortrain import ORTModule


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


def test_unsqueeze_takes_any_extent() -> None:
    ours = ORTModule(Scaled(lambda m, x: (x.unsqueeze(1) * m.w).sum(1)))
    for rows, columns in ((3, 2), (1, 2), (1, 5), (4, 1)):
        ours(torch.ones(rows, columns, 3))
    assert len(ours.report().captures) == 1


def test_squeeze_of_an_extent_that_becomes_one() -> None:
    ours = ORTModule(Scaled(lambda m, x: (x * m.w).squeeze(0)))
    assert ours(torch.ones(4, 3)).shape == (4, 3)
    assert ours(torch.ones(1, 3)).shape == (3,)


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

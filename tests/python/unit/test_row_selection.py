# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Layers that leave padding out give what PyTorch gives with it."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
)

from ortrain import ORTModule


def bert(dropout: float = 0.0) -> torch.nn.Module:
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=50,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config).train()


def distilbert() -> torch.nn.Module:
    config = DistilBertConfig(
        dim=32,
        n_layers=1,
        n_heads=4,
        hidden_dim=48,
        vocab_size=50,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    )
    return DistilBertForSequenceClassification(config).train()


def batch(lengths: list[int], size: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = len(lengths)
    return {
        "input_ids": torch.randint(1, 50, (rows, size), generator=generator),
        "attention_mask": (torch.arange(size) < torch.tensor(lengths)[:, None]).long(),
        "labels": torch.randint(0, 2, (rows,), generator=generator),
    }


def packed(model: ORTModule) -> bool:
    return any(program.form is not None for program in model._ortrain_engine._programs())


def assert_same(ours: ORTModule, plain: torch.nn.Module, data: dict[str, torch.Tensor]) -> None:
    results = []
    for model in (ours, plain):
        model.zero_grad(set_to_none=True)
        result = model(**data)
        result.loss.backward()
        results.append(result)
    torch.testing.assert_close(results[0].loss, results[1].loss)
    torch.testing.assert_close(results[0].logits, results[1].logits)
    expected = dict(plain.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [bert, distilbert])
def test_padding_is_left_out(make: object) -> None:
    torch.manual_seed(0)
    plain = make()
    ours = ORTModule(copy.deepcopy(plain))
    for lengths, size in (([3, 16, 9, 1], 16), ([21, 5, 7], 24), ([2, 30], 40)):
        assert_same(ours, plain, batch(lengths, size))
        assert packed(ours)
    with torch.no_grad():
        data = batch([5, 2], 16)
        plain.eval()
        ours.eval()
        torch.testing.assert_close(ours(**data).logits, plain(**data).logits)
        assert packed(ours)


def test_rows_stay_where_nothing_is_padding_or_a_sequence_is_empty() -> None:
    torch.manual_seed(0)
    plain = bert()
    ours = ORTModule(copy.deepcopy(plain))
    for lengths in ([16, 16, 16], [16, 0, 4]):
        assert_same(ours, plain, batch(lengths, 16))
        assert not packed(ours)


def test_mask_with_holes() -> None:
    torch.manual_seed(0)
    plain = bert()
    ours = ORTModule(copy.deepcopy(plain))
    data = batch([16, 16], 16)
    data["attention_mask"][0, 3:9] = 0
    data["attention_mask"][1, ::3] = 0
    data["attention_mask"][:, 0] = 1
    assert_same(ours, plain, data)
    assert packed(ours)


def test_hidden_states_that_are_returned_are_computed() -> None:
    torch.manual_seed(0)
    plain = bert()
    ours = ORTModule(copy.deepcopy(plain))
    data = batch([3, 16, 9], 16)
    results = [model(**data, output_hidden_states=True) for model in (ours, plain)]
    for a, b in zip(results[0].hidden_states, results[1].hidden_states, strict=True):
        torch.testing.assert_close(a, b)


def test_rows_that_fill_up_do_not_disturb_gradients() -> None:
    class Logarithm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.o = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            q = x.unsqueeze(2).transpose(1, 2)
            a = torch.nn.functional.scaled_dot_product_attention(
                q, q, q, attn_mask=mask[:, None, None, :]
            )
            a = a.transpose(1, 2).reshape(x.shape)
            return self.o((a * a).log())[:, 0].sum()  # of zeros: minus infinity

    torch.manual_seed(0)
    plain = Logarithm()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(2, 16, 8)
    mask = torch.arange(16) < torch.tensor([[5], [6]])
    for model in (ours, plain):
        model(x, mask).backward()
    assert packed(ours)
    torch.testing.assert_close(ours.o.weight.grad, plain.o.weight.grad)


def test_same_seed_same_bits() -> None:
    torch.manual_seed(0)
    ours = ORTModule(bert(dropout=0.1))
    data = batch([3, 16, 9, 1], 16)
    losses = []
    for _ in range(2):
        torch.manual_seed(5)
        losses.append([ours(**data).loss.item() for _ in range(3)])
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_the_pass_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_DISABLE_PASSES", "remove_padding")
    torch.manual_seed(0)
    plain = bert()
    ours = ORTModule(copy.deepcopy(plain))
    assert_same(ours, plain, batch([3, 16, 9, 1], 16))
    assert not packed(ours)

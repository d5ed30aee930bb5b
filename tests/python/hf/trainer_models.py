# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Small models and data for both trainers; no dropout, so that both compute the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    GPT2Config,
    GPT2LMHeadModel,
    set_seed,
)

VOCABULARY = 97
LABELS = 3
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def bert_config(num_labels: int = LABELS) -> BertConfig:
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=64,
        num_labels=num_labels,
        **_NO_DROPOUT,
    )


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    set_seed(11)
    return make()


def classifier() -> nn.Module:
    return seeded(lambda: BertForSequenceClassification(bert_config()))


def token_classifier() -> nn.Module:
    return seeded(lambda: BertForTokenClassification(bert_config()))


def question_answering() -> nn.Module:
    return seeded(lambda: BertForQuestionAnswering(bert_config(2)))


def language_model() -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=64,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return seeded(lambda: GPT2LMHeadModel(config))


def summarizer() -> nn.Module:
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        dropout=0.0,
        attention_dropout=0.0,
        activation_dropout=0.0,
        forced_eos_token_id=2,
    )
    return seeded(lambda: BartForConditionalGeneration(config))


class Regression(nn.Module):
    """A module of no library: two layers, two results, its loss where it gets labels.

    Args:
      form: What forward returns: "dict", "tuple" or "predictions" alone.
    """

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.first = nn.Linear(6, 16)
        self.second = nn.Linear(16, 1)
        self.double = True

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = torch.tanh(self.first(x))
        y = self.second(hidden).squeeze(-1)
        if self.form == "predictions":
            return y
        loss = None if labels is None else nn.functional.mse_loss(y, labels)
        if self.form == "dict":
            named = {"y": y, "hidden": hidden}
            return named if loss is None else {"loss": loss, **named}
        return (y, hidden) if loss is None else (loss, y, hidden)


def regression(form: str) -> Callable[[], nn.Module]:
    return lambda: seeded(lambda: Regression(form))


def regression_data(n: int = 40) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 6, generator=generator)
    y = x.sum(1) + 0.1 * torch.randn(n, generator=generator)
    return [{"x": a, "labels": b, "unused": 1.0} for a, b in zip(x, y, strict=True)]


def texts(n: int = 40, *, shortest: int = 6, longest: int = 14, seed: int = 3) -> list[Any]:
    """Token ids of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (n,), generator=generator).tolist()
    return [torch.randint(3, VOCABULARY, (k,), generator=generator) for k in lengths]


def classification_data(n: int = 40, **options: int) -> list[dict[str, Any]]:
    return [{"input_ids": t, "labels": int(t[0]) % LABELS} for t in texts(n, **options)]


def token_data(n: int = 40) -> list[dict[str, Any]]:
    return [{"input_ids": t, "labels": t % LABELS} for t in texts(n)]


def span_data(n: int = 40) -> list[dict[str, Any]]:
    return [
        {"input_ids": t, "start_positions": int(t[0]) % 4, "end_positions": 4 + int(t[1]) % 2}
        for t in texts(n)
    ]


def language_data(n: int = 40) -> list[dict[str, Any]]:
    return [{"input_ids": t, "labels": t} for t in texts(n)]


def summary_data(n: int = 40) -> list[dict[str, Any]]:
    rows = []
    for text in texts(n):
        labels = text[: 3 + len(text) % 4]
        before = torch.cat([torch.tensor([2]), labels[:-1]])
        rows.append({"input_ids": text, "decoder_input_ids": before, "labels": labels})
    return rows


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Put rows into a batch as long as its longest; labels are padded by -100."""
    batch: dict[str, torch.Tensor] = {}
    for name in rows[0]:
        values = [torch.as_tensor(row[name]) for row in rows]
        if values[0].dim() == 0:
            batch[name] = torch.stack(values)
            continue
        fill = -100 if name == "labels" else 0
        batch[name] = nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)
    if "input_ids" in batch:
        lengths = torch.tensor([len(row["input_ids"]) for row in rows])
        places = torch.arange(batch["input_ids"].shape[1])
        batch["attention_mask"] = (places[None, :] < lengths[:, None]).long()
    return batch


class Stream(torch.utils.data.IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

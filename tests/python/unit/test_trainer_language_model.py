# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The language model of 2020's getting-started programs: PyTorch's encoder, a mask kept from call to call, both trainers."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

import ortrain
from ortrain import optim
from ortrain.ort_trainer import IODescription, ModelDescription
from ortrain.ort_trainer import ORTTrainer as FirstTrainer

WORDS, WIDTH, LENGTH, COLUMNS = 40, 16, 7, 3


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        places = torch.arange(50.0)[:, None]
        rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(10000.0) / WIDTH))
        table = torch.stack([(places * rates).sin(), (places * rates).cos()], -1).reshape(50, WIDTH)
        self.register_buffer("table", table[:, None])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.size(0), :]


class LanguageModel(nn.Module):
    """Rows are places, columns are texts."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.words = nn.Embedding(WORDS, WIDTH)
        self.positions = Positions()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 24, 0.0), 1)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, src: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != len(src):
            size = len(src)
            before = (torch.triu(torch.ones(size, size)) == 1).transpose(0, 1)
            mask = before.float().masked_fill(before == 0, float("-inf"))
            self.mask = mask.masked_fill(before == 1, 0.0).to(src.device)
        hidden = self.positions(self.words(src) * math.sqrt(WIDTH))
        return self.head(self.layers(hidden, self.mask))


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(scores.view(-1, WORDS), labels)


def first(model: nn.Module) -> Any:
    """As the program says it: the type of the words and the shape of the labels are wrong."""
    inputs = [
        IODescription("src", [LENGTH, COLUMNS], torch.float32),
        IODescription("label", [LENGTH, COLUMNS, WORDS], torch.int64),
    ]
    outputs = [
        IODescription("loss", [], torch.float32),
        IODescription("output", [LENGTH, COLUMNS, WORDS], torch.float32),
    ]
    rate = IODescription("Learning_Rate", [0.1], torch.float32)
    return FirstTrainer(
        model,
        loss_of,
        ModelDescription(inputs, outputs),
        "SGDOptimizer",
        None,
        rate,
        torch.device("cpu"),
        _opset_version=12,
    )


def second(model: nn.Module) -> Any:
    description = {
        "inputs": [("src", ["length", "columns"]), ("label", ["words"])],
        "outputs": [("loss", [], True), ("output", ["length", "columns", WORDS])],
    }
    return ortrain.ORTTrainer(model, description, optim.SGDConfig(lr=0.1), loss_of)


@pytest.mark.parametrize("make", [first, second])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor:UserWarning")
def test_losses_are_those_of_pytorch(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = LanguageModel()
    other = copy.deepcopy(model)
    trainer = make(model)
    text = torch.randint(0, WORDS, (6 * LENGTH + 3, COLUMNS))
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with caplog.at_level(logging.WARNING, "ortrain"):
        for begin in range(0, len(text) - 1, LENGTH):
            end = min(begin + LENGTH, len(text) - 1)
            if end < begin + LENGTH and make is first:  # the shape of the scores is fixed
                continue
            data, labels = text[begin:end], text[begin + 1 : end + 1].reshape(-1)
            more = (torch.tensor([0.1]),) if make is first else ()
            loss = trainer.train_step(data, labels, *more)[0]
            optimizer.zero_grad()
            expected = loss_of(other(data), labels)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
    loss, scores = trainer.eval_step(text[:LENGTH], text[1 : LENGTH + 1].reshape(-1))
    other.eval()
    with torch.no_grad():
        torch.testing.assert_close(scores, other(text[:LENGTH]), rtol=1e-5, atol=1e-5)
    told = [record.getMessage() for record in caplog.records if "which counts" in record.msg]
    if make is second:
        assert told == []
    else:
        assert told[0] == (
            "the description says that input 'src' is float32[7, 3]; it is int64[7, 3], which counts"
        )
        assert "'label' is int64[7, 3, 40]; it is int64[21]" in told[1]
        assert len(told) == 2

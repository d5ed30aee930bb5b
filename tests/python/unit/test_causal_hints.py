# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's encoders and decoders with masks, which ask for the values of a mask: one graph, of any mask."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, optim
from ortrain.capture.causal_hints import causal_hints_left_out


def causal(length: int) -> torch.Tensor:
    return torch.full((length, length), -torch.inf).triu(1)


MASKS = {
    "causal": causal(5),
    "bool": causal(5) < 0,
    "window": causal(5) + causal(5).T.roll(2, 0).nan_to_num(neginf=-9.0),
    "none": None,
}


class Encoder(nn.Module):
    def __init__(self, layer: type[nn.Module] = nn.TransformerEncoderLayer) -> None:
        super().__init__()
        layers = layer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layers, 2, enable_nested_tensor=False)

    def forward(self, x: Any, mask: Any = None, padding: Any = None) -> torch.Tensor:
        return self.encoder(x, mask, padding)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoder(layers, 2)

    def forward(self, x: Any, mask: Any = None, padding: Any = None) -> torch.Tensor:
        return self.decoder(x, x.flip(1), mask, tgt_key_padding_mask=padding)


def assert_same_steps(module: nn.Module, calls: list[tuple[Any, ...]], native: bool) -> None:
    theirs, ours = copy.deepcopy(module), ORTModule(module)
    for call in calls:
        results = []
        for each in (theirs, ours):
            each.zero_grad()
            result = each(*call)
            result.square().sum().backward()
            results.append((result, [p.grad for p in each.parameters()]))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    report = ours.report()
    assert (report.native_share == 1.0) == native, str(report)


@pytest.mark.parametrize("make", [Encoder, Decoder])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_of_all_kinds_in_one_graph(make: type[nn.Module], padded: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    padding = torch.arange(5).expand(3, 5) > torch.tensor([[4], [3], [2]]) if padded else None
    assert_same_steps(make(), [(x, mask, padding) for mask in MASKS.values()], native=True)


def test_a_mask_that_is_trained_gets_what_it_gets_in_pytorch() -> None:
    class Trained(Encoder):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(causal(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.encoder(x, self.mask)

    torch.manual_seed(0)
    assert_same_steps(Trained(), [(torch.randn(3, 5, 8),)], native=False)


class OwnBlock(nn.TransformerEncoderLayer):
    """Reads the hint alone."""

    def _sa_block(
        self, x: Any, attn_mask: Any, key_padding_mask: Any, is_causal: bool = False
    ) -> Any:
        return x.cumsum(1) if is_causal else x


def test_a_layer_of_somebodys_own_gets_the_hint() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    calls = [(x, MASKS["causal"], None), (x, MASKS["window"], None)]
    assert_same_steps(Encoder(OwnBlock), calls, native=False)


def test_outside_of_a_trace_the_values_are_asked() -> None:
    with causal_hints_left_out():
        layer = nn.TransformerEncoderLayer(8, 2, 16)
        layer.forward = layer.forward  # replaced, if by the same
        encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        seen = []
        encoder.layers[0].forward = lambda x, is_causal, **_: seen.append(is_causal) or x
        encoder(torch.randn(5, 3, 8), causal(5))
        encoder(torch.randn(5, 3, 8), causal(5).T)
    assert seen == [True, False]


class LanguageModel(nn.Module):
    """The sample of the trainer of 2020: the mask is made where there is none of this length."""

    def __init__(self) -> None:
        super().__init__()
        self.mask: torch.Tensor | None = None
        self.encoder = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0)
        self.transformer = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.Linear(16, 50)
        self.norm = nn.BatchNorm1d(16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.mask is None or self.mask.size(0) != tokens.size(0):
            self.mask = causal(tokens.size(0)).to(tokens.device)
        hidden = self.norm(self.encoder(tokens).flatten(0, 1)).unflatten(0, tokens.shape)
        return self.decoder(self.transformer(hidden * 4.0, self.mask))


def test_the_trainer_takes_models_that_make_their_mask() -> None:
    def loss_of(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(scores.flatten(0, 1), targets)

    torch.manual_seed(0)
    model = LanguageModel()
    other = copy.deepcopy(model)
    description = {
        "inputs": [("tokens", ["length", "batch"]), ("targets", ["n"])],
        "outputs": [("loss", [], True), ("scores", ["length", "batch", 50])],
    }
    config = optim.SGDConfig(lr=0.1)
    trainer = ORTTrainer(model, description, config, loss_of)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for length in (7, 7, 5, 7):
            tokens = torch.randint(0, 50, (length, 3))
            targets = torch.randint(0, 50, (length * 3,))
            state = torch.get_rng_state()
            loss, _ = trainer.train_step(tokens, targets)
            assert torch.equal(torch.get_rng_state(), state)
            expected = loss_of(other(tokens), targets)
            optimizer.zero_grad()
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-5)
            assert model.mask is not None and model.mask.shape == (length, length)
            assert model.norm.num_batches_tracked == other.norm.num_batches_tracked
    for name, tensor in other.state_dict().items():
        torch.testing.assert_close(trainer.state_dict(pytorch_format=True)[name], tensor)

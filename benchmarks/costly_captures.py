# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Small models whose sizes are hard to follow with symbols: strides, windows, paddings, transforms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.small_sizes import OF_PATCHES, speech_sizes, text_sizes

Made = tuple[nn.Module, dict[str, torch.Tensor]]


def _padded_same(x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """Pad as TensorFlow's SAME does: by the size of the image, more at the end."""
    padding: list[int] = []
    for axis in (1, 0):
        size = x.shape[axis + 2]
        missing = max((-(-size // stride[axis]) - 1) * stride[axis] + kernel[axis] - size, 0)
        padding += [missing // 2, missing - missing // 2]
    return F.pad(x, padding)


class _SameConvolution(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = _padded_same(x, self.kernel_size, self.stride)
        return F.conv2d(x, self.weight, self.bias, self.stride, groups=self.groups)


class _StandardizedConvolution(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        count = self.weight[0].numel()
        weight = (self.weight - mean) * torch.rsqrt(torch.clamp(variance * count, min=1e-4))
        x = _padded_same(x, self.kernel_size, self.stride)
        return F.conv2d(x, weight, self.bias, self.stride, groups=self.groups)


class _InvertedBottleneck(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.is_residual = width == out and stride == 1
        self.layers = nn.Sequential(
            _SameConvolution(width, 2 * width, 1, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            _SameConvolution(2 * width, 2 * width, 3, stride, groups=2 * width, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.SiLU(),
            _SameConvolution(2 * width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return x + y if self.is_residual else y


class _NormalizerFree(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = _StandardizedConvolution(width, out, 3, stride)
        self.second = _StandardizedConvolution(out, out, 3)
        self.shortcut = _StandardizedConvolution(width, out, 1) if width != out else nn.Identity()
        self.pool = nn.AvgPool2d(2, ceil_mode=True) if stride == 2 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(F.gelu(self.first(F.gelu(x))))
        return self.shortcut(self.pool(x)) + 0.2 * y


class _Window(nn.Module):
    """Attention in windows of the image, of neighbours or of a grid with gaps."""

    def __init__(self, width: int, side: int, grid: bool) -> None:
        super().__init__()
        self.side, self.grid = side, grid
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, h, w = x.shape
        s = self.side
        if self.grid:
            parts = x.view(b, c, s, h // s, s, w // s).permute(0, 3, 5, 2, 4, 1)
        else:
            parts = x.view(b, c, h // s, s, w // s, s).permute(0, 2, 4, 3, 5, 1)
        parts = parts.reshape(-1, s * s, c)
        normed = self.norm(parts)
        parts = parts + self.attention(normed, normed, normed, need_weights=False)[0]
        parts = parts.view(b, h // s, w // s, s, s, c)
        order = (0, 5, 3, 1, 4, 2) if self.grid else (0, 5, 1, 3, 2, 4)
        return parts.permute(order).reshape(b, c, h, w)


class _Spectral(nn.Module):
    """A Fourier layer: the lowest frequencies of an image times complex weights."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        self.low = nn.Parameter(torch.randn(width, width, modes, modes, 2) / width)
        self.high = nn.Parameter(torch.randn(width, width, modes, modes, 2) / width)
        self.local = nn.Conv2d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m = self.modes
        spectrum = torch.fft.rfft2(x)
        out = torch.zeros_like(spectrum)
        low, high = torch.view_as_complex(self.low), torch.view_as_complex(self.high)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m, :m], low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -m:, :m], high)
        return F.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.local(x))


class _Classifier(nn.Module):
    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(width, 5)

    def forward(self, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.body(pixels).mean((2, 3))), labels)


def _of_images(body: nn.Module, width: int, size: int = 32) -> Made:
    return _Classifier(body, width), {
        "pixels": torch.randn(2, 3, size, size),
        "labels": torch.randint(5, (2,)),
    }


def _stages(block: Callable[[int, int, int], nn.Module]) -> list[nn.Module]:
    sizes = [(8, 8, 1), (8, 12, 2), (12, 12, 1), (12, 16, 2), (16, 16, 1), (16, 24, 2), (24, 24, 1)]
    return [block(*each) for each in sizes]


def _efficient_net() -> Made:
    stem = _SameConvolution(3, 8, 3, 2, bias=False)
    return _of_images(nn.Sequential(stem, *_stages(_InvertedBottleneck)), 24, 64)


def _normalizer_free_net() -> Made:
    stem = _StandardizedConvolution(3, 8, 3, 2)
    return _of_images(nn.Sequential(stem, *_stages(_NormalizerFree)), 24, 64)


def _max_vit() -> Made:
    parts: list[nn.Module] = [_SameConvolution(3, 8, 3, 2, bias=False)]
    for width, out in ((8, 8), (8, 16), (16, 16)):
        parts += [
            _InvertedBottleneck(width, out, 2 if width != out else 1),
            _Window(out, 4, grid=False),
            _Window(out, 4, grid=True),
        ]
    return _of_images(nn.Sequential(*parts), 16, 64)


def _fourier() -> Made:
    return _of_images(nn.Sequential(nn.Conv2d(3, 8, 1), *(_Spectral(8, 5) for _ in range(3))), 8)


def _pixels(size: int = 64, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def _segformer() -> Made:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 16, 24, 32],
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=16,
        drop_path_rate=0.0,
        num_labels=4,
    )
    return SegformerForSemanticSegmentation(config), {
        "pixel_values": _pixels(),
        "labels": torch.randint(4, (2, 64, 64)),
    }


class _Summed(nn.Module):
    """A model whose results are summed: what it would compare with labels runs outside of graphs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: torch.Tensor) -> torch.Tensor:
        result = self.model(**inputs)
        tensors = [v for v in result.values() if isinstance(v, torch.Tensor)]
        return torch.stack([t.float().square().mean() for t in tensors]).sum()


def _detr() -> Made:
    from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

    backbone = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16, 24, 32],
        depths=[1, 1, 1, 1],
        out_features=["stage4"],
    )
    config = DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=backbone,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        num_queries=7,
        num_labels=4,
    )
    return _Summed(DetrForObjectDetection(config)), {"pixel_values": _pixels()}


def _yolos() -> Made:
    from transformers import YolosConfig, YolosForObjectDetection

    config = YolosConfig(
        **OF_PATCHES, num_hidden_layers=2, image_size=[64, 64], num_detection_tokens=7
    )
    return _Summed(YolosForObjectDetection(config)), {"pixel_values": _pixels()}


def _dpt() -> Made:
    from transformers import DPTConfig, DPTForDepthEstimation

    config = DPTConfig(
        **OF_PATCHES,
        num_hidden_layers=4,
        image_size=64,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=8,
        initializer_range=0.2,
    )
    return _Summed(DPTForDepthEstimation(config)), {"pixel_values": _pixels()}


def _tokens(length: int, vocabulary: int = 97) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, vocabulary, (2, length))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def _longformer() -> Made:
    from transformers import LongformerConfig, LongformerForMaskedLM

    config = LongformerConfig(**text_sizes(), attention_window=8, max_position_embeddings=70)
    return LongformerForMaskedLM(config), _tokens(32)


def _big_bird() -> Made:
    from transformers import BigBirdConfig, BigBirdForMaskedLM

    config = BigBirdConfig(
        **text_sizes(),
        attention_type="block_sparse",
        block_size=4,
        num_random_blocks=1,
        max_position_embeddings=128,
    )
    return BigBirdForMaskedLM(config), _tokens(64)


def _long_t5() -> Made:
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    config = LongT5Config(
        vocab_size=97,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=2,
        num_heads=2,
        local_radius=7,
        encoder_attention_type="local",
        decoder_start_token_id=0,
    )
    return LongT5ForConditionalGeneration(config), _tokens(32)


def _of_series(name: str) -> Made:
    import transformers

    config = getattr(transformers, f"{name}Config")(
        prediction_length=8,
        context_length=16,
        lags_sequence=[1, 2, 3],
        num_time_features=2,
        d_model=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    )
    past = 16 + 3
    return getattr(transformers, f"{name}ForPrediction")(config), {
        "past_values": torch.randn(2, past),
        "past_time_features": torch.randn(2, past, 2),
        "past_observed_mask": torch.ones(2, past),
        "future_values": torch.randn(2, 8),
        "future_time_features": torch.randn(2, 8, 2),
    }


def _mamba2() -> Made:
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(
        vocab_size=97,
        hidden_size=16,
        num_hidden_layers=2,
        state_size=8,
        head_dim=8,
        num_heads=4,
        n_groups=1,
        chunk_size=8,
        use_cache=False,
    )
    return Mamba2ForCausalLM(config), _tokens(24)


def _hubert() -> Made:
    from transformers import HubertConfig, HubertForSequenceClassification

    config = HubertConfig(
        **speech_sizes(16, heads=2, channels=8, kernels=(10, 3, 2), strides=(5, 2, 2)),
        num_hidden_layers=2,
        classifier_proj_size=8,
        apply_spec_augment=False,
        layerdrop=0.0,
        num_labels=3,
    )
    return HubertForSequenceClassification(config), {
        "input_values": torch.randn(2, 1600),
        "labels": torch.tensor([0, 2]),
    }


MODELS: dict[str, Callable[[], Made]] = {
    "segformer": _segformer,
    "detr": _detr,
    "yolos": _yolos,
    "dpt": _dpt,
    "longformer": _longformer,
    "bigbird": _big_bird,
    "longt5": _long_t5,
    "informer": lambda: _of_series("Informer"),
    "autoformer": lambda: _of_series("Autoformer"),
    "efficientnet": _efficient_net,
    "nfnet": _normalizer_free_net,
    "maxvit": _max_vit,
    "fourier": _fourier,
    "mamba2": _mamba2,
    "hubert": _hubert,
}


def make(name: str) -> Made:
    """Return a model of ``MODELS`` in training mode without dropout, and its inputs."""
    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    for layer in model.modules():
        for attribute, value in list(vars(layer).items()):
            if isinstance(value, float) and "drop" in attribute:
                setattr(layer, attribute, 0.0)
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model.train(), inputs


def loss_of(result: Any) -> torch.Tensor:
    """Return the loss that a model's result is or holds."""
    return result if isinstance(result, torch.Tensor) else result.loss

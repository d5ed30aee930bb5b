# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Small modules that each use one thing a capture must get right, with batches of several sizes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

F = nn.functional
Sizes = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class ModuleCase:
    """A module, how to make its arguments for two sizes, and the sizes to try."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Any]]
    sample: Sizes = (3, 5)
    others: tuple[Sizes, ...] = ((4, 7), (2, 9))


CASES: dict[str, ModuleCase] = {}


def tokens(rows: int, columns: int) -> dict[str, Any]:
    """Floats x [rows, columns, 6]."""
    g = torch.Generator().manual_seed(rows * 100 + columns)
    return {"x": torch.randn(rows, columns, 6, generator=g)}


def module_case(
    name: str, batch: Callable[[int, int], dict[str, Any]] = tokens, **kwargs: Any
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a module class as a case."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        CASES[name] = ModuleCase(cls, batch, **kwargs)
        return cls

    return register


class Layer(nn.Module):
    """A module with one linear layer over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(6, 6)


@module_case("size_arithmetic")
class SizeArithmetic(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        y = self.fc(x).reshape(b * s, d)
        y = y.reshape(b, s * d)[:, : (s // 2) * d + 1]
        return y.sum() / (b * s) + y.mean(dim=1).max() * (s - 1) / b


@module_case("flatten_and_split")
class FlattenAndSplit(Layer):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.fc(x).flatten(0, 1)
        a, b = y.chunk(2, dim=-1)
        return (a * b).unflatten(0, x.shape[:2]), torch.stack(y.unbind(1)[:2])


@module_case("size_dependent_values")
class SizeDependentValues(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x.size(1)
        position = torch.arange(s, dtype=torch.float32) / s
        mask = torch.ones(s, s, dtype=torch.bool).tril(-1 + s // 2)
        scores = self.fc(x) @ x.transpose(1, 2) * s**-0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        return scores.softmax(-1).nan_to_num() @ (x + position[:, None])


@module_case("cat_of_sizes")
class CatOfSizes(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, self.fc(x)[:, 1:], x.new_zeros(x.shape[0], 2, 6)], dim=1)
        return F.pad(y, (0, 0, x.shape[1], 0))[:, ::2]


@module_case("in_place")
class InPlace(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x).clone()
        y[:, 0] = 1.5
        y[:, 1:, 2] += 3
        y[x > 0.5] = -1.0
        y.mul_(2).clamp_(min=-3)
        y.transpose(0, 1)[1].zero_()
        return y


@module_case("no_grad_region")
class NoGradRegion(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = self.fc(x).abs().mean()
        return self.fc(x) / scale + self.fc(x).detach()


@module_case("einsum_and_norms")
class EinsumAndNorms(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.einsum("bsd,btd->bst", self.fc(x), x)
        return F.normalize(y, dim=-1) + F.cosine_similarity(x[:, :, None], x[:, None], dim=-1)


@module_case("tied_weights")
class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


@module_case("frozen_and_unused")
class FrozenAndUnused(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.fc(x))


@module_case("buffers")
class Buffers(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.full((6,), 0.5), persistent=False)
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x) * self.scale + self.constant
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(dim=(0, 1)), alpha=0.1)
        self.steps += 1
        return y - self.mean


@module_case("batch_norm_channels_last")
class BatchNormChannelsLast(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, momentum=0.3)
        self.plain = nn.BatchNorm1d(6, track_running_stats=False, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.fc(x).transpose(1, 2))
        return y + self.plain(y)


@module_case("frozen_batch_norm")
class FrozenBatchNorm(BatchNormChannelsLast):
    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()


@module_case("multihead_attention")
class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        y, weights = self.attention(x, x, x, attn_mask=mask)
        return y, weights


@module_case("grouped_attention")
class GroupedAttention(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, _ = x.shape
        q = self.fc(x).view(b, s, 3, 2).transpose(1, 2)
        k = x[..., :2].view(b, s, 1, 2).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


@module_case("top_k_routing")
class TopKRouting(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.fc(x).softmax(-1).topk(2, dim=-1)
        spread = torch.zeros_like(x).scatter(-1, chosen, scores)
        order = x.argsort(dim=1)
        return torch.gather(spread, 1, order) + F.one_hot(chosen, 6).sum(-2)


def nested(rows: int, columns: int) -> dict[str, Any]:
    """A dict of a list, a tuple, None, numbers and a string."""
    x = tokens(rows, columns)["x"]
    return {
        "batch": {"x": x, "parts": [x * 2, (x + 1, None)]},
        "scale": 2.5,
        "mode": "sum",
        "flags": (True, 3),
    }


Result = collections.namedtuple("Result", ["value", "extra"])


@module_case("nested_arguments", nested)
class NestedArguments(Layer):
    def forward(
        self, batch: dict[str, Any], scale: float, mode: str, flags: tuple[bool, int]
    ) -> Result:
        x, (y, (z, absent)) = batch["x"], batch["parts"]
        assert absent is None
        total = self.fc(x) * scale + y - z if mode == "sum" and flags[0] else x
        return Result(total, {"rows": total.shape[0], "power": [total ** flags[1], None]})


def ids(rows: int, columns: int) -> dict[str, Any]:
    """Token ids and labels, some of them without label."""
    g = torch.Generator().manual_seed(rows * 100 + columns)
    x = torch.randint(0, 11, (rows, columns), generator=g)
    return {"ids": x, "labels": x.masked_fill(torch.rand(x.shape, generator=g) < 0.3, -100)}


@module_case("shifted_labels", ids)
class ShiftedLabels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6, padding_idx=0)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(ids))
        shifted = labels.new_full(labels.shape, -100)
        shifted[:, :-1] = labels[:, 1:]
        loss = F.cross_entropy(logits.view(-1, 11), shifted.view(-1), label_smoothing=0.05)
        per_token = F.nll_loss(logits.log_softmax(-1).transpose(1, 2), labels, reduction="none")
        return {"loss": loss + per_token.mean(), "logits": logits}


@module_case("recurrent_layers")
class RecurrentLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(6, 4, num_layers=2, bidirectional=True)
        self.gru = nn.GRU(8, 3, batch_first=True, bias=False)
        self.tanh = nn.RNN(3, 2, num_layers=2, bidirectional=True)
        self.relu = nn.RNN(4, 5, nonlinearity="relu", batch_first=True, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        y, (h, c) = self.lstm(x)
        z, last = self.gru(y)
        both, ends = self.tanh(z)
        row, end = self.relu(both[0])
        return z, h, c, last, both, ends, row, end


@module_case("convolutions", lambda rows, columns: {"x": torch.randn(rows, 3, columns + 4, 12)})
class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Conv2d(3, 4, 3, padding="same", padding_mode="zeros")
        self.b = nn.Conv2d(4, 4, (1, 3), stride=2, groups=2)
        self.c = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.max_pool2d(F.relu(self.a(x)), 2, ceil_mode=True)
        z = F.interpolate(self.c(self.b(y)), scale_factor=2.0)
        return F.adaptive_avg_pool2d(z, 1).flatten(1)


@module_case("autocast_inside")
class AutocastInside(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.fc(x)
        return y.float() * x


@module_case("type_promotion")
class TypePromotion(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count = (x > 0).sum(dim=1)
        share = count / x.shape[1] + count.to(torch.int32) // 2
        return self.fc(x).double() * share[:, None] + torch.arange(6) % 4


@module_case("scalar_item")
class ScalarItem(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) * (x > 0).sum().item() + x.abs().max().item()


@module_case("roll_flip_diff")
class RollFlipDiff(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x).roll(1, dims=1) + x.flip(1) + x.roll((2, -1), dims=(0, 1))
        return y.diff(dim=1).cumsum(1).std(dim=1) + y.unfold(1, 3, 1).amax(dim=(-1, 1))


@module_case("weight_norm")
class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)


@module_case("instance_norm", lambda rows, columns: {"x": torch.randn(rows, 4, columns)})
class InstanceNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.InstanceNorm1d(4, affine=True)
        self.rms = nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms(self.norm(x).transpose(1, 2))

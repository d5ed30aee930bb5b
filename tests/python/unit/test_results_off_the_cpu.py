# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators that give other types or sizes on devices than on the CPU; tensors on "meta" stand for those of devices."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from ortrain import ORTModule, _core
from ortrain.capture.convert import Converted, convert
from ortrain.capture.dtypes import TORCH_DTYPE
from ortrain.testing.parity import capture_known


def _converted(module: nn.Module, device: str, x: torch.Tensor) -> Converted:
    captured = capture_known(module.to(device), {"x": x.to(device)})
    return convert(captured, _core.GraphBuilder("module"))


def _dtypes(converted: Converted) -> list[torch.dtype]:
    return [TORCH_DTYPE[o["dtype"]] for o in converted.graph.outputs]


def _run(converted: Converted, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return list(_core.Run(_core.Session(converted.graph)).forward(given))


class InHalf(nn.Module):
    """A layer behind a cast, as autocast leaves it behind a convolution."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.bfloat16())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_norm_of_16_bits_keeps_the_types_of_its_buffers(
    dtype: torch.dtype, device: str
) -> None:
    module = InHalf(nn.BatchNorm2d(4)).to(dtype)
    converted = _converted(module, device, torch.randn(2, 4, 5, 6))
    assert _dtypes(converted) == [torch.bfloat16, dtype, dtype, torch.int64]
    assert converted.escapes == []


class Statistics(nn.Module):
    def __init__(self, training: bool) -> None:
        super().__init__()
        self.training_of_batch = training
        self.register_buffer("one", torch.ones(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        kept = (None, None) if self.training_of_batch else (self.one, self.one)
        return torch.native_batch_norm(
            x.bfloat16(), self.one, self.one, *kept, self.training_of_batch, 0.1, 1e-5
        )


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", torch.bfloat16), ("meta", torch.float32)], ids=["cpu", "meta"]
)
@pytest.mark.parametrize("training", [True, False])
def test_statistics_have_the_type_of_the_device(
    training: bool, device: str, dtype: torch.dtype
) -> None:
    converted = _converted(Statistics(training), device, torch.randn(2, 4, 5, 6))
    assert _dtypes(converted) == [torch.bfloat16, dtype, dtype]
    # Fixed statistics are results on devices alone.
    assert len(converted.escapes) == (device == "meta" and not training)


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_with_buffers_of_16_bits_equals_pytorch(affine: bool) -> None:
    plain = nn.BatchNorm2d(4, affine=affine).bfloat16()
    ours = ORTModule(copy.deepcopy(plain))
    torch.manual_seed(0)
    for _ in range(2):
        x = (3 * torch.randn(3, 4, 5, 6) + 1).bfloat16()
        torch.testing.assert_close(ours(x), plain(x), atol=2e-2, rtol=2e-2)
    for mine, theirs in zip(ours.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-2, rtol=1e-2)
    assert [c.fallback for c in ours.report().captures] == [""]


class Histogram(nn.Module):
    def __init__(self, bins: int, least: int, most: int) -> None:
        super().__init__()
        self.of = {"bins": bins, "min": least, "max": most}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.histc(x, **self.of)


def test_histogram_of_integers_divides_whole_numbers() -> None:
    x = torch.randint(-3, 30, (200,), dtype=torch.int32)
    for bins, least, most in ((8, 0, 7), (7, 0, 21), (5, -2, 26)):
        converted = _converted(Histogram(bins, least, most), "meta", x)
        assert converted.escapes == []
        inside = x[(x >= least) & (x <= most)].long()
        places = ((inside - least) * bins // (most - least)).clamp(max=bins - 1)
        expected = torch.bincount(places, minlength=bins).int()
        torch.testing.assert_close(_run(converted, [x]), [expected])


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8])
def test_histogram_of_other_integers_is_left_to_pytorch(dtype: torch.dtype) -> None:
    converted = _converted(Histogram(4, 0, 3), "meta", torch.zeros(5, dtype=dtype))
    assert len(converted.escapes) == 1

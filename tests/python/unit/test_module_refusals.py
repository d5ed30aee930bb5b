# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What an ORTModule refuses, and what it leaves to PyTorch."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from wrapped_modules import assert_same_gradients, batch, pair

import ortrain
from ortrain import ORTModule
from ortrain.capture.errors import ConversionError


def test_label_out_of_range() -> None:
    ours, _ = pair()
    for bad in (5, -1, 2_000_000_000):
        data = batch()
        data["labels"][1] = bad
        with pytest.raises(IndexError, match=rf"CrossEntropy.*{bad}"):
            ours(**data)
    assert torch.isfinite(ours(**batch())["loss"])


def test_index_out_of_range_in_an_embedding() -> None:
    ours, _ = pair()
    ours(**batch())
    for bad in (11, -1, 10**12):
        data = batch()
        data["ids"][0, 0] = bad
        with pytest.raises(IndexError, match=rf"embed.*{bad}"):
            ours(**data)
    assert torch.isfinite(ours(**batch())["loss"])


@pytest.mark.since_torch(2, 12)
def test_wrong_dtype_rank_and_device() -> None:
    ours, _ = pair()
    ours(**batch())
    data = batch()
    with pytest.raises(ortrain.DTypeError, match="'ids' is float32, expected int64"):
        ours(ids=data["ids"].float(), labels=data["labels"])
    with pytest.raises(ortrain.ShapeError, match="'labels'"):
        ours(ids=data["ids"], labels=data["labels"].unsqueeze(1).expand(-1, 2))
    with pytest.raises(ortrain.DeviceError, match="'ids' is on device 'meta'"):
        ours(ids=data["ids"].to("meta"), labels=data["labels"])
    with pytest.raises(TypeError):
        ours(nonsense=1)
    assert torch.isfinite(ours(**batch())["loss"])


@pytest.mark.parametrize("error", [ortrain.ShapeError("a defect"), ConversionError("a defect")])
def test_a_defect_of_the_capture_leaves_the_module_to_pytorch(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(ortrain.engine, "prepare", fail)
    ours, plain = pair()
    with pytest.warns(RuntimeWarning, match="runs in PyTorch, not in Ortrain: a defect"):
        result = ours(**batch())
    torch.testing.assert_close(result["logits"], plain(**batch())["logits"])
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    with pytest.raises(type(error), match="a defect"):
        ORTModule(plain)(**batch())


@pytest.mark.since_torch(2, 12)
def test_what_cannot_be_captured_runs_in_pieces_with_one_warning() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            return y * 2 if y.sum() > 0 else -y

    torch.manual_seed(0)
    plain = Branch()
    ours = ORTModule(copy.deepcopy(plain))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(3):
            x = torch.randn(2, 3, generator=torch.Generator().manual_seed(seed))
            torch.testing.assert_close(ours(x), plain(x))
    texts = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(texts) == 1 and "test_module_refusals.py" in texts[0]
    assert "runs in pieces, not whole" in texts[0]
    report = ours.report()
    assert report.captures[0].pieces == 2 and 0.5 < report.native_share < 1.0


def test_shapes_that_no_kernel_takes_run_in_pytorch() -> None:
    class Flipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.flip(0) * self.w).sum()

    plain, ours = Flipped(), ORTModule(Flipped())
    for rows in (4, 0, 2):
        x = torch.randn(rows, 3)
        results = [model(x) for model in (ours, plain)]
        torch.testing.assert_close(*results)
        for result in results:
            result.backward()
        assert_same_gradients(ours, plain)


def test_errors_of_the_module_itself_are_passed_on() -> None:
    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                raise KeyError("nothing there")
            return x * 2

    ours = ORTModule(Asks())
    with pytest.raises(KeyError, match="nothing there"):
        ours(torch.ones(2))

    class Stop(RuntimeError):
        pass

    class Stops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise Stop if x.sum() > 0 else KeyError

    with pytest.raises(Stop):
        ORTModule(Stops())(torch.ones(2))


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, IndexError])
@pytest.mark.parametrize("calls_before", [0, 1])
def test_what_code_raises_says_what_it_said(kind: type[Exception], calls_before: int) -> None:
    class Checks(nn.Module):
        def forward(self, x: torch.Tensor, limit: int = 9) -> torch.Tensor:
            if x.shape[0] > limit:
                raise kind(f"no more than {limit} rows")
            return x.exp()

    ours = ORTModule(Checks())
    for _ in range(calls_before):
        ours(torch.ones(2))
    for _ in range(2):
        with pytest.raises(kind) as raised:
            ours(torch.ones(3), 2)
        assert type(raised.value) is kind and str(raised.value) == "no more than 2 rows"


def test_ever_new_numbers_among_the_arguments_are_not_captured_forever() -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return (x * float(str(scale))).exp()  # which is no input of a graph

    ours, x = ORTModule(Scales()), torch.randn(3)
    ours(x, 0.5)
    with pytest.warns(RuntimeWarning, match="each of the last 8 calls needed a graph of its own"):
        for step in range(20):
            torch.testing.assert_close(ours(x, step / 7), (x * (step / 7)).exp())
    native = [c for c in ours.report().captures if not c.fallback]
    assert len(native) == 8
    # One that comes back is captured, and so is what is new after it.
    for scale in (99.0, 99.0, 99.0, 100.0):
        torch.testing.assert_close(ours(x, scale), (x * scale).exp())
    assert len([c for c in ours.report().captures if not c.fallback]) == 10


def test_what_python_refuses_is_its_own_error() -> None:
    class Rounds(nn.Module):
        def forward(self, x: torch.Tensor, value: float) -> torch.Tensor:
            return x * math.floor(value * 10)

    module = ORTModule(Rounds())
    for value in (0.5, 0.7):
        module(torch.ones(2), value)
    with pytest.raises(ValueError, match="cannot convert float NaN to integer"):
        module(torch.ones(2), math.nan)


def test_strict_mode_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    with pytest.raises(ortrain.CaptureError):
        ORTModule(Branch())(torch.ones(2))

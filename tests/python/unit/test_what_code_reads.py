# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What code reads in ways that name nothing, of the process, of packages and of layouts, changed between calls."""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import enum
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.distributions import Distribution

from ortrain import ORTModule

SETTING = {"gain": 2.0}
_get = getattr


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclasses.dataclass
class Config:
    gain: float = 2.0


class Meta(type):
    @property
    def gain(cls) -> float:
        return SETTING["gain"]


class WithMeta(metaclass=Meta):
    pass


class Shown:
    def __repr__(self) -> str:
        return str(SETTING["gain"])

    def __deepcopy__(self, memo: Any) -> float:
        return SETTING["gain"]

    def __class_getitem__(cls, _: Any) -> float:
        return SETTING["gain"]


class Reading(nn.Module):
    def __init__(self, read: Callable[[Reading], float]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))
        self.config, self.key, self.shown = Config(), "ga" + "in", Shown()
        self.read = read

    def matched(self) -> float:
        match self.config:
            case Config(gain):
                return gain
        raise AssertionError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.read(self)


READS: dict[str, Callable[[Reading], float]] = {
    "match": Reading.matched,
    "getattr by another name": lambda m: _get(m.config, m.key),
    "builtins.getattr": lambda m: builtins.getattr(m.config, m.key),
    "astuple": lambda m: dataclasses.astuple(m.config)[0],
    "format": lambda m: float("{0.gain}".format(m.config)),  # noqa: UP030, UP032
    "repr": lambda m: float(repr(m.shown)),
    "repr inside of a list": lambda m: float(str([m.shown])[1:-1]),
    "deepcopy": lambda m: copy.deepcopy(m.shown),
    "a subscript of a class": lambda m: Shown[int],  # type: ignore[misc, valid-type]
    "a metaclass": lambda m: WithMeta.gain,
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_is_followed(name: str) -> None:
    ours = ORTModule(Reading(READS[name]))
    try:
        for gain in (2.0, 5.125, 2.0):
            SETTING["gain"] = ours.config.gain = gain
            assert ours(torch.ones(2)).tolist() == [gain, gain]
    finally:
        SETTING["gain"] = 2.0


@contextlib.contextmanager
def _set(change: Callable[[], Any], back: Callable[[], Any]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        back()


ASKED: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "autocast's dtype": (
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: _set(
            lambda: torch.set_autocast_dtype("cpu", torch.float16),
            lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
        ),
    ),
    "autocast of another device": (
        lambda: torch.is_autocast_enabled(),
        lambda: _set(
            lambda: torch.set_autocast_enabled("cuda", True),
            lambda: torch.set_autocast_enabled("cuda", False),
        ),
    ),
    "autocast's cache": (
        lambda: torch.is_autocast_cache_enabled(),
        lambda: _set(
            lambda: torch.set_autocast_cache_enabled(False),
            lambda: torch.set_autocast_cache_enabled(True),
        ),
    ),
    "oneDNN": (lambda: torch._C._get_mkldnn_enabled(), lambda: torch.backends.mkldnn.flags(False)),
    "the default device": (
        lambda: torch.get_default_device().type == "meta",
        lambda: torch.device("meta"),
    ),
    "warnings": (
        lambda: torch.is_warn_always_enabled(),
        lambda: _set(lambda: torch.set_warn_always(True), lambda: torch.set_warn_always(False)),
    ),
    "NumPy's errors": (
        lambda: numpy.geterr()["over"] == "raise",
        lambda: numpy.errstate(over="raise"),
    ),
    "the fast path of attention": (
        lambda: torch.backends.mha.get_fastpath_enabled(),
        lambda: _set(
            lambda: torch.backends.mha.set_fastpath_enabled(False),
            lambda: torch.backends.mha.set_fastpath_enabled(True),
        ),
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_settings_that_code_asks_for_are_those_of_the_call(name: str) -> None:
    asked, changed = ASKED[name]
    module = Reading(lambda m: 2.0 if asked() else 3.0)
    ours = ORTModule(copy.deepcopy(module))
    x = torch.ones(2)
    for _ in range(2):
        assert ours(x).tolist() == module(x).tolist()
        with changed():
            assert ours(x).tolist() == module(x).tolist()


LEFT: dict[str, tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any]]] = {
    "the grad mode": (
        lambda: torch.set_grad_enabled(False),
        torch.is_grad_enabled,
        lambda: torch.set_grad_enabled(True),
    ),
    "autocast": (
        lambda: torch.set_autocast_enabled("cpu", True),
        lambda: torch.is_autocast_enabled("cpu"),
        lambda: torch.set_autocast_enabled("cpu", False),
    ),
    "autocast's dtype": (
        lambda: torch.set_autocast_dtype("cpu", torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
        lambda: torch.set_autocast_dtype("cpu", torch.bfloat16),
    ),
    "autocast's cache": (
        lambda: torch.set_autocast_cache_enabled(False),
        torch.is_autocast_cache_enabled,
        lambda: torch.set_autocast_cache_enabled(True),
    ),
    "how tensors are printed": (
        lambda: torch.set_printoptions(precision=7),
        lambda: str(torch.ones(1) / 3),
        lambda: torch.set_printoptions(precision=4),
    ),
    "subnormal numbers": (
        lambda: torch.set_flush_denormal(True),
        lambda: torch.full((1,), 1e-40).mul(0.5).item() == 0,
        lambda: torch.set_flush_denormal(False),
    ),
    "what distributions check": (
        lambda: Distribution.set_default_validate_args(not Distribution._validate_args),
        lambda: Distribution._validate_args,
        lambda: Distribution.set_default_validate_args(True),
    ),
    "threads of the backward": (
        lambda: torch.autograd.set_multithreading_enabled(False),
        torch._C._is_multithreading_enabled,
        lambda: torch.autograd.set_multithreading_enabled(True),
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_settings_that_a_forward_leaves_are_left(name: str) -> None:
    change, asked, back = LEFT[name]

    def leave(_: Reading) -> float:
        change()
        return 2.0

    module = Reading(leave)
    for run in (module, ORTModule(copy.deepcopy(module))):
        for _ in range(3):
            before = asked()
            try:
                run(torch.ones(2))
                assert asked() != before
            finally:
                back()


def test_packages_whose_layers_run_are_followed(
    imported_package: Callable[..., types.ModuleType],
) -> None:
    source = (
        "import torch\n"
        "GAIN, CALLS, TOTAL = 1.0, 0, torch.zeros(())\n"
        "class Layer(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        global CALLS\n"
        "        CALLS += 1\n"
        "        TOTAL.add_(1)\n"
        "        return x * GAIN * CALLS\n"
        "class Reader(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * GAIN\n"
    )
    installed_layers = imported_package("installed_layers", {"": source})
    ours = ORTModule(installed_layers.Layer())
    assert [ours(torch.ones(())).item() for _ in range(3)] == [1, 2, 3]
    assert (installed_layers.CALLS, installed_layers.TOTAL.item()) == (3, 3)
    ours = ORTModule(installed_layers.Reader())
    assert ours(torch.ones(())).item() == 1
    installed_layers.GAIN = 4.0
    assert ours(torch.ones(())).item() == 4
    assert [record.fallback for record in ours.report().captures] == ["", ""]


class Laid(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.convolution(x)
        return y.flatten(1) if y.is_contiguous() else y.permute(0, 2, 3, 1).flatten(1)


def test_weights_that_come_to_lie_otherwise_are_seen() -> None:
    plain = Laid()
    ours, x = ORTModule(copy.deepcopy(plain)), torch.randn(2, 3, 6, 6)
    for layout in (torch.contiguous_format, torch.channels_last, torch.contiguous_format):
        for module in (plain, ours):
            module.to(memory_format=layout)
        torch.testing.assert_close(ours(x), plain(x))
        inner = ours.convolution(x).stride(), plain.convolution(x).stride()
        assert inner[0] == inner[1]


def test_a_forward_that_is_replaced_in_its_class_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ORTModule(nn.Sequential(nn.ReLU(), nn.Identity()))
    assert ours(torch.ones(1)).item() == 1
    monkeypatch.setattr(nn.ReLU, "forward", lambda self, x: x * 3)
    assert ours(torch.ones(1)).item() == 3


class Mode(enum.Enum):
    ON = 1


KEYS: dict[str, tuple[Callable[[torch.Tensor, Any], Any], list[Any]]] = {
    "ranges": (lambda y, r: y * r.stop, [range(0, 3, 2), range(0, 4, 2)]),
    "types of keys": (lambda y, d: y * type(next(iter(d)))(2.5), [{1: 0}, {1.0: 0}]),
    "slices of tensors": (
        lambda y, s: y[s],
        [slice(torch.tensor(0), None), slice(torch.tensor(1), None)],
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_equal_arguments_are_told_apart(name: str) -> None:
    run, values = KEYS[name]
    module = Reading(lambda m: 1.0)
    module.forward = types.MethodType(lambda m, x, a: run(x * m.w, a), module)
    ours = ORTModule(module)
    for value in values * 2:
        torch.testing.assert_close(ours(torch.ones(2), value), run(torch.ones(2), value))


def test_attributes_of_enum_members_are_compared() -> None:
    ours = ORTModule(Reading(lambda m: 1.0))
    module = ours.module if hasattr(ours, "module") else ours
    module.forward = types.MethodType(lambda m, x, mode: x * m.w * mode._gain, module)
    for gain in (2.0, 5.0):
        Mode.ON._gain = gain
        assert ours(torch.ones(2), Mode.ON).tolist() == [gain, gain]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padding)


def test_padding_is_left_out_where_pytorch_leaves_it_out() -> None:
    torch.manual_seed(0)
    plain = Encoder().eval()
    ours, x = ORTModule(copy.deepcopy(plain)), torch.randn(2, 4, 8)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    for around in (torch.no_grad, contextlib.nullcontext):
        with around():
            torch.testing.assert_close(ours(x, padding), plain(x, padding))

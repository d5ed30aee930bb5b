# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions with parameters that few give them, on values with NaN among them: PyTorch's results and gradients."""

import math
import re
import warnings
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: F401 - for the texts below

from ortrain import ORTModule

inf, nan = math.inf, math.nan

_ODD = ("-1.5", "0.0", "1.0", ".3", "2.5", "-1", "inf", "-inf", "nan")
# ? stands for the parameter.
_OF_ONE = [
    "F.elu(x,?)",
    "F.celu(x,?)",
    "F.leaky_relu(x,?)",
    "F.softplus(x,?)",
    "F.softplus(x,1.,?)",
    "F.softplus(x,-1.5,?)",
    "F.softshrink(x,?)",
    "F.threshold(x,?,.25)",
    "F.threshold(x,.2,?)",
    "F.hardtanh(x,?,1.)",
    "F.hardtanh(x,-1.,?)",
    "x.clamp(?,.5)",
    "x.clamp(-.5,?)",
    "x.clamp(min=?)",
    "x.clamp(max=?)",
    "F.rrelu(x,?,.5,False)",
    "torch.logit(x.abs()*.03125,?)",
    "torch.lerp(x,x*2,?)",
    "torch.lerp(x*3,x*x,?)",
    "x.pow(?)",
    "torch.pow(?,x)",
    "torch.maximum(x,x*0+?)",
    "torch.minimum(x,x*0+?)",
    "torch.add(x,x,alpha=?)",
]
_OTHERS = [
    "F.hardshrink(x,.3)",
    "F.selu(x)",
    "F.glu(x,1)",
    "F.normalize(x,eps=0.)",
    "F.layer_norm(x,(6,),eps=0.)",
    "F.smooth_l1_loss(x,x.detach().flip(0),beta=0.)",
    "F.smooth_l1_loss(x,x.detach().flip(0),beta=.5)",
    "F.huber_loss(x,x.detach().flip(0),delta=.5)",
    "F.huber_loss(x,x.detach()*0+inf,delta=.5)",
    "x.std(0,correction=0)",
    "x.std(0,correction=6)",
    "x.var(0,correction=4)",
    "x.var(0,correction=6)",
    "x.var(0,correction=1.5)",
    "F.cosine_similarity(x,x.detach().flip(0),eps=10.)",
    "F.cosine_similarity(x,x+1,0,eps=0.)",
    "F.cosine_similarity(x[0],x.detach()+1,-1)",
    "F.cosine_similarity(x,x.detach()[:,:1]+1,-1)",
    "F.cosine_similarity(x,x.detach()*0+1e20,-1)",
    "torch.addmm(x*nan,x,x.detach()[:,:4]@x.detach(),beta=0)",
    "torch.addmm(x,x,torch.full((6,6),inf).to(x),alpha=0)",
    "x**.3",
    "x.abs()**1.3",
    "x.abs()**-1.7",
    "x.abs()**3.3",
    "torch.pow(1.7,x)",
]
_VALUES = [-9.0, -3.2, -1.5, -1, -0.5, -0.3, -0.2, -0.1, 0.1, 0.2, 0.25, 0.3]
_VALUES += [0.5, 0.75, 1, 1.5, 3, 25, -0.7, -2, 12, -4, 6, 0.01]
# Where PyTorch is not of one mind: its vectors and what is left over after them.
_NOT_AT_NAN = ("hardtanh", "shrink")


def _values(dtype: torch.dtype, special: float | None) -> torch.Tensor:
    x = torch.tensor(_VALUES).reshape(4, 6)
    if special is not None:
        x[0, 1] = special
    return x.to(dtype).requires_grad_()


def _taken(texts: Iterable[str], x: torch.Tensor) -> list[tuple[str, Callable[..., torch.Tensor]]]:
    """Return those that PyTorch computes, with a gradient."""
    taken = []
    for text in texts:
        function = eval(f"lambda x: {text}", globals())
        try:
            result = function(x)
            result.sum().backward()
        except (RuntimeError, ValueError, ZeroDivisionError):
            continue
        taken.append((text, function))
    return taken


def _module(texts: list[str]) -> nn.Module:
    """Return a module that gives the result of each for an argument of its own."""
    names = ", ".join(f"x{i}" for i in range(len(texts)))
    results = ", ".join(re.sub(r"\bx\b", f"x{i}", text) for i, text in enumerate(texts))
    scope: dict[str, object] = {}
    exec(f"def forward(self, {names}): return ({results},)", globals(), scope)
    return type("Functions", (nn.Module,), {"forward": scope["forward"]})()


def _assert_equal(texts: Iterable[str], dtype: torch.dtype, special: float | None) -> None:
    taken = _taken(texts, _values(dtype, special))
    mine, theirs = ([_values(dtype, special) for _ in taken] for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = ORTModule(_module([text for text, _ in taken]))(*mine)
        expected = [function(x) for (_, function), x in zip(taken, theirs, strict=True)]
    weights = [torch.linspace(0.5, 1.5, y.numel()).reshape(y.shape).to(y) for y in expected]
    torch.autograd.backward(results, weights)
    torch.autograd.backward(expected, weights)
    within = {"rtol": 2e-2, "atol": 1e-2} if dtype.itemsize == 2 else {"rtol": 1e-4, "atol": 1e-5}
    for (text, _), y, z, a, b in zip(taken, results, expected, mine, theirs, strict=True):
        torch.testing.assert_close(
            y, z, equal_nan=True, **within, msg=lambda m, t=text: f"{t}: {m}"
        )
        torch.testing.assert_close(
            a.grad, b.grad, equal_nan=True, **within, msg=lambda m, t=text: f"gradient of {t}: {m}"
        )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("odd", _ODD)
def test_an_odd_parameter(odd: str, dtype: torch.dtype) -> None:
    texts = [text.replace("?", f"({odd})") for text in _OF_ONE]
    _assert_equal(texts, dtype, None)
    _assert_equal([t for t in texts if not any(n in t for n in _NOT_AT_NAN)], dtype, nan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_degenerate_statistics_and_losses(dtype: torch.dtype) -> None:
    _assert_equal(_OTHERS, dtype, None)

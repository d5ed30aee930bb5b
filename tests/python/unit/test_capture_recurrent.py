# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward does around LSTMs, GRUs and RNNs, which stay whole in a capture."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture import recurrent_internals
from ortrain.capture.export import capture
from tests.python.processor import runs_lstm_in_16_bits

LAYERS = [nn.LSTM, nn.GRU, nn.RNN]
Layer = type[nn.RNNBase]


class Forward(nn.Module):
    """Layers, and a function that takes them and x [4, 3, 5]."""

    def __init__(self, function: Callable[..., Any], *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.layers, x)


def native_share(model: nn.Module, atol: float, x: torch.Tensor) -> float:
    """Compare results, their dtypes and gradients with PyTorch's."""
    ours = ORTModule(copy.deepcopy(model))
    pairs = [m(x) for m in (ours, model)]
    made, expected = [r if isinstance(r, tuple) else (r,) for r in pairs]
    for a, b in zip(made, expected, strict=True):
        assert a.requires_grad == b.requires_grad
        torch.testing.assert_close(a, b, atol=atol, rtol=0)
    if made[0].requires_grad:
        for results in (made, expected):
            sum(r.float().sum() for r in results).backward()
        for p, q in zip(ours.parameters(), model.parameters(), strict=True):
            if q.grad is not None:
                error = (p.grad - q.grad).norm()
                assert error <= (1e-5 if atol < 1e-4 else 0.05) * q.grad.norm()
    return ours.report().native_share


def _stacked(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return layers[2](layers[1](layers[0](x))[0])[0]


def _twice(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    return layers[1](layers[1](layers[0](x))[0])[0]


def _encoded(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    _, states = layers[1](layers[0](x))
    return layers[2](layers[0](x), states)[0]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("function", [_stacked, _twice, _encoded])
def test_layers_behind_layers(
    function: Callable[..., torch.Tensor], layer: Layer, autocast: bool
) -> None:
    torch.manual_seed(0)
    model = Forward(function, nn.Linear(5, 5), layer(5, 5), layer(5, 5))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        assert native_share(model, 0.02 if autocast else 1e-6, torch.randn(4, 3, 5)) == 1.0


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_writes_to_views_of_a_result_alias_as_in_pytorch(layer: Layer, batch_first: bool) -> None:
    def double(layers: nn.ModuleList, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = layers[0](x)[0]
        flat = y.contiguous().view(-1, 7)
        flat.mul_(2)
        return y, flat

    torch.manual_seed(0)
    model = Forward(double, layer(5, 7, batch_first=batch_first))
    # PyTorch's backward refuses writes to the results of some libraries.
    with torch.no_grad():
        assert native_share(model, 1e-6, torch.randn(4, 3, 5)) == 1.0


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("frozen", [False, True])
def test_results_require_gradients_as_in_pytorch(layer: Layer, frozen: bool) -> None:
    def branch(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        y = layers[0](x)[0]
        return y * 2 if y.requires_grad else y * 3

    torch.manual_seed(0)
    model = Forward(branch, layer(5, 7).requires_grad_(not frozen))
    assert native_share(model, 1e-6, torch.randn(4, 3, 5)) == 1.0


def test_a_gradient_inside_of_the_forward_is_left_to_pytorch() -> None:
    def gradient(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = layers[0](x)[0]
        return torch.autograd.grad(y.pow(2).sum() + x.pow(2).sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    with pytest.warns(RuntimeWarning, match="gradients through a recurrent layer"):
        assert native_share(Forward(gradient, nn.RNN(5, 7)), 1e-6, torch.randn(4, 3, 5)) == 0.0


def test_inference_mode_inside_of_the_forward_is_left_to_pytorch() -> None:
    def inference(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            y = layers[0](x)[0]
        return y * 1

    torch.manual_seed(0)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.warns(RuntimeWarning, match="inference_mode"),
    ):
        assert native_share(Forward(inference, nn.RNN(5, 7)), 1e-6, torch.randn(4, 3, 5)) == 0.0


@pytest.mark.parametrize("layer", LAYERS)
def test_a_sequence_of_no_steps_is_refused(layer: Layer) -> None:
    with pytest.raises(RuntimeError, match="larger than 0"):
        ORTModule(layer(5, 7))(torch.randn(0, 3, 5))


in_16_bits = pytest.mark.skipif(
    not runs_lstm_in_16_bits(), reason="PyTorch refuses it on this processor"
)


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=in_16_bits)])
def test_a_capture_draws_no_random_numbers(autocast: bool) -> None:
    layers = nn.LSTM(5, 7, num_layers=2, dropout=0.5)
    held = torch.get_rng_state()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        capture(layers, (torch.ones(4, 3, 5),))
    assert torch.equal(held, torch.get_rng_state())


@in_16_bits
def test_another_library_for_an_lstm_is_another_graph() -> None:
    plain, x = nn.LSTM(5, 7), torch.randn(4, 3, 5)
    ours = ORTModule(copy.deepcopy(plain))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for enabled in (True, False):
            with torch.backends.mkldnn.flags(enabled=enabled):
                assert ours(x)[0].dtype == plain(x)[0].dtype


def test_other_threads_trace_the_steps() -> None:
    targets: list[str] = []

    def export() -> None:
        program = torch.export.export(nn.GRU(5, 7), (torch.randn(4, 3, 5),), strict=False)
        targets.extend(str(n.target) for n in program.run_decompositions().graph.nodes)

    with recurrent_internals.recurrent_layers_whole():
        thread = threading.Thread(target=export)
        thread.start()
        thread.join()
    assert any("mm" in target for target in targets)


def test_layers_without_a_conversion_are_written_out() -> None:
    captured = capture(nn.GRU(5, 7), (torch.randn(4, 3, 5),), known=lambda op: "gru" not in str(op))
    assert any("linear" in str(n.target) for n in captured.graph_module.graph.nodes)

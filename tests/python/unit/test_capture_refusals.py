# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What cannot be captured or converted is refused with the layer, the reason and the line."""

from typing import Any

import pytest
import torch
from torch import nn

from ortrain.capture.convert.registry import converts
from ortrain.capture.errors import (
    AutogradFunctionError,
    CaptureError,
    ConversionError,
    UnseenStateError,
    UnsupportedInputError,
    UnsupportedOperatorError,
)
from ortrain.capture.locations import node_source
from ortrain.testing.parity import capture_known, reference_graph


class Doubled(torch.autograd.Function):
    """A function whose backward is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class WithFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x)


def test_autograd_function_is_one_operator() -> None:
    captured = capture_known(WithFunction(), {"x": torch.randn(3)})
    (call,) = captured.functions.calls.values()
    assert call.name.endswith("Doubled")
    (node,) = [n for n in captured.graph_module.graph.nodes if n.target in captured.functions.calls]
    assert "return Doubled.apply(x)" in node_source(node)
    # The patch is gone afterwards.
    x = torch.randn(3, requires_grad=True)
    Doubled.apply(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_function_made_in_forward_is_one_operator() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inner = type("Made", (torch.autograd.Function,), dict(Doubled.__dict__))
            return inner.apply(x)

    captured = capture_known(Module(), {"x": torch.randn(3)})
    assert [call.name.rpartition(".")[2] for call in captured.functions.calls.values()] == ["Made"]


def test_autograd_function_of_a_traced_closure_is_refused() -> None:
    class Called(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, function: Any) -> torch.Tensor:
            return function(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient, None

    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            return Called.apply(x, lambda z: z * y)

    with pytest.raises(AutogradFunctionError, match="belongs to one trace only"):
        capture_known(Module(), {"x": torch.randn(3)})


def test_autograd_function_under_autocast_is_refused() -> None:
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(AutogradFunctionError, match="Doubled") as caught,
    ):
        capture_known(WithFunction(), {"x": torch.randn(3)})
    assert "return Doubled.apply(x)" in caught.value.source
    assert caught.value.module == "WithFunction"


def test_reentrant_checkpoint_is_refused() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.fc, x, use_reentrant=True)

    with pytest.raises(AutogradFunctionError, match="CheckpointFunction"):
        capture_known(Module(), {"x": torch.randn(2, 3, requires_grad=True)})
    with pytest.raises(UnseenStateError, match="reentrant checkpoint"):
        capture_known(Module(), {"x": torch.randn(2, 3)})


def test_value_dependent_branch_names_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                return x * 2
            return x

    with pytest.raises(CaptureError) as caught:
        capture_known(Module(), {"x": torch.randn(3)})
    assert "if x.sum() > 0:" in caught.value.source
    assert caught.value.module == "Module"
    assert capfd.readouterr() == ("", "")


def test_rows_that_a_mask_selects_are_named_by_their_shape() -> None:
    class Selected(nn.Module):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (x * 2)[mask].sum()

    with pytest.raises(
        CaptureError, match=r"the shape \[u\d+, \w+\] of a tensor depends on values"
    ):
        capture_known(
            Selected(), {"x": torch.randn(3, 4), "mask": torch.tensor([True, False, True])}
        )


def test_error_in_forward_names_its_line() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("missing")

    with pytest.raises(CaptureError, match="missing") as caught:
        capture_known(Module(), {"x": torch.randn(3)})
    assert 'raise KeyError("missing")' in caught.value.source


def test_unknown_operator_names_target_layer_and_line() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.fft.fft(x @ x.T).real

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    captured = capture_known(Module(), {"x": torch.randn(3, 3)})
    with pytest.raises(UnsupportedOperatorError, match="fft") as caught:
        reference_graph(captured)
    assert caught.value.module == "inner"
    assert "torch.fft.fft" in caught.value.source
    assert "fft" in caught.value.target


@pytest.mark.parametrize(
    "expression",
    [
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: nn.functional.embedding(x.long(), x, sparse=True),
        lambda x: nn.functional.pad(x, (1, 1)).to(torch.complex64).real,
    ],
    ids=["mask", "nonzero", "sparse", "complex"],
)
def test_forms_without_meaning_are_refused(expression: Any) -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return expression(x)

    with pytest.raises((CaptureError, TypeError)):
        reference_graph(capture_known(Module(), {"x": torch.randn(3, 3)}))


def test_odd_arguments_are_refused() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, other: object) -> torch.Tensor:
            return x

    for other, match in ((object(), "other"), (torch.zeros(3).to_sparse(), "layout")):
        with pytest.raises(UnsupportedInputError, match=match):
            capture_known(Module(), {"x": torch.randn(3), "other": other})


def test_odd_result_is_refused() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return {"x": x, "odd": object()}

    with pytest.raises(UnsupportedInputError, match="odd"):
        capture_known(Module(), {"x": torch.randn(3)})


def test_loose_tensor_with_gradient_is_refused() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loose = [torch.randn(3, requires_grad=True)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.loose[0]

    with pytest.raises(CaptureError, match="outside of the module and wants a gradient"):
        capture_known(Module(), {"x": torch.randn(3)})


def test_write_to_a_tracked_tensor_under_no_grad_is_refused() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.fc(x)
            with torch.no_grad():
                y.mul_(2)
            return y

    with pytest.raises(CaptureError, match="no_grad"):
        capture_known(Module(), {"x": torch.randn(2, 3)})


def test_two_conversions_of_one_operator_are_refused() -> None:
    with pytest.raises(ValueError, match="two conversions"):
        converts("aten.add.Tensor")(lambda e, x, y: x)


def test_wrong_conversion_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from ortrain.capture.convert import registry

    captured = capture_known(nn.ReLU(), {"input": torch.randn(3)})
    wrong = {"aten.relu.default": lambda e, x: e.cast(x, torch.float64)}
    monkeypatch.setattr(registry, "_conversions", {**registry._conversions, **wrong})
    with pytest.raises(ConversionError, match="float64"):
        reference_graph(captured)

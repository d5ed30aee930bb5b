# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What traces do not compute because nobody would see it: text of graphs, stacks, times of guards."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import fx, nn
from torch._dynamo import exc, symbolic_convert

from ortrain import ORTModule
from ortrain.capture.dynamo_internals import settings_for_pieces, spare_reports
from ortrain.capture.export import capture
from ortrain.capture.trace_internals import graphs_compiled_when_called


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def choose(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x) if x.sum() > 0 else x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.choose(torch.tanh(self.first(x)))


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return a list of the graphs that are printed."""
    texts: list[str] = []
    original = fx.GraphModule.print_readable

    def note(module: fx.GraphModule, *args: object, **kwargs: object) -> str:
        texts.append(original(module, *args, **kwargs))
        return texts[-1]

    monkeypatch.setattr(fx.GraphModule, "print_readable", note)
    torch._dynamo.reset()
    yield texts
    torch._dynamo.reset()


def run(call: Callable[[torch.Tensor], torch.Tensor], plain: nn.Module) -> None:
    x = torch.randn(3, 4)
    torch.testing.assert_close(call(x), plain(x))


@pytest.mark.since_torch(2, 12)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_pieces_print_no_graphs(printed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_PIECES", "all")
    plain = Branching()
    ours = ORTModule(copy.deepcopy(plain))
    run(ours, plain)
    assert not printed
    (record,) = ours.report().captures
    assert record.pieces and any("Data-dependent" in cause for cause in record.breaks)
    assert any("test_spared_reports.py" in cause for cause in record.breaks)


def test_what_others_compile_is_told_as_ever(printed: list[str]) -> None:
    spare_reports()
    plain = Branching()
    run(torch.compile(copy.deepcopy(plain), backend="eager"), plain)
    assert printed


def test_logs_that_are_on_have_everything(printed: list[str]) -> None:
    log = symbolic_convert.graph_break_log
    level = log.level
    log.setLevel(logging.DEBUG)
    try:
        with settings_for_pieces():
            plain = Branching()
            run(torch.compile(copy.deepcopy(plain), backend="eager"), plain)
            assert printed
            assert exc.get_stack_above_dynamo()
    finally:
        log.setLevel(level)


def test_the_names_of_dynamo_are_there() -> None:
    with settings_for_pieces():
        if hasattr(exc, "_extract_stack_with_positions"):
            assert exc._extract_stack_with_positions() == []
        error = exc.Unsupported("Data-dependent branching")
        assert "Data-dependent" not in error.msg and "branching" in error.msg
        assert str(error.msg) == "Data-dependent branching"
    assert "Data-dependent" in exc.Unsupported("Data-dependent branching").msg


# --- code of graphs


class Sum(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 2 * y


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """Return a list of the graphs whose code is generated."""
    graphs: list[fx.Graph] = []
    original = fx.Graph.python_code

    def note(graph: fx.Graph, *args: object, **kwargs: object) -> object:
        graphs.append(graph)
        return original(graph, *args, **kwargs)

    monkeypatch.setattr(fx.Graph, "python_code", note)
    return graphs


def test_graphs_are_compiled_when_they_are_called(generated: list[fx.Graph]) -> None:
    with graphs_compiled_when_called():
        traced = fx.symbolic_trace(Sum())
        traced.recompile()
        outer = fx.GraphModule(nn.Module(), fx.Graph())
        outer.part = traced
        again = copy.deepcopy(traced)
        assert not generated
        assert traced(1, 2) == traced(1, 2) == 5
        assert len(generated) == 1
        product = next(node for node in traced.graph.nodes if 2 in node.args)
        product.args = tuple(3 if a == 2 else a for a in product.args)
        assert traced(1, 2) == 5
        outer.recompile()  # and the graphs within
        assert traced(1, 2) == 7
        late = fx.symbolic_trace(Sum())
    assert list(inspect.signature(again.forward).parameters) == ["x", "y"]
    assert "def forward(self, x" in late.code
    assert again(1, 2) == late(1, 2) == 5
    before = len(generated)
    fx.symbolic_trace(Sum())
    assert len(generated) == before + 1


def test_a_capture_compiles_no_graph(generated: list[fx.Graph]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    captured = capture(model, (torch.ones(2, 4),), known=lambda _: True)
    assert not generated
    assert "linear" in captured.graph_module.code

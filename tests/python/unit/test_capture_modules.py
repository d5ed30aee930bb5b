# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Whole modules: the captured and converted graph, run by the reference, against eager PyTorch."""

import importlib.util

import pytest
import torch
from captured_modules import CASES as MODULES

from ortrain.capture.guards import sizes_of
from ortrain.capture.locations import module_path, node_source
from ortrain.capture.signature import CallSignature
from ortrain.testing.models import CASES as MODELS
from ortrain.testing.parity import (
    EngineRunner,
    capture_known,
    difference,
    eager_step,
    graph_step,
    reference_graph,
)

_QUICK_MODELS = {"mlp", "bert", "gpt2"}


def _check(module: torch.nn.Module, batches: list[dict[str, object]], tolerance: float) -> None:
    captured = capture_known(module, batches[0])
    assert captured.dynamic
    converted = reference_graph(captured)
    for batch in batches:
        tensors = CallSignature(module.forward).flatten((), batch).tensors
        assert captured.guards.violated(sizes_of(tensors)) == []
        found = difference(
            eager_step(module, batch), graph_step(module, captured, converted, batch)
        )
        assert found.missing == ()
        assert found.largest() <= tolerance


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MODULES)
def test_module_equals_eager_at_every_size(name: str) -> None:
    case = MODULES[name]
    sizes = (case.sample, *case.others)
    _check(case.build().train(), [case.batch(*s) for s in sizes], 1e-5)


@pytest.mark.sampled(9)
@pytest.mark.parametrize(
    "name", [n if n in _QUICK_MODELS else pytest.param(n, marks=pytest.mark.slow) for n in MODELS]
)
def test_model_equals_eager_at_two_sizes(name: str) -> None:
    case = MODELS[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    _check(case.build(), [case.batch(*case.sample, 0), case.batch(*case.other, 1)], 2e-5)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", MODULES)
def test_module_on_the_engine_equals_eager(name: str) -> None:
    pytest.importorskip("ortrain._core")
    case = MODULES[name]
    module = case.build().train()
    runner = EngineRunner(module, {})
    for size in (case.sample, *case.others):
        batch = case.batch(*size)
        found = difference(eager_step(module, batch), runner.step(batch))
        assert found.missing == ()
        assert found.largest() <= 1e-5
    native_share, _, captures, reason = runner.summary()
    assert (native_share, captures, reason) == (1.0, 1, "")


def test_node_names_carry_the_layer() -> None:
    case = MODELS["mlp"]
    converted = reference_graph(capture_known(case.build(), case.batch(*case.sample, 0)))
    names = [node.name for node in converted.graph.nodes]
    assert "layers.0/Linear" in names
    assert "layers.3/Gelu" in names
    assert "loss/CrossEntropy" in names


def test_tied_parameter_is_one_input() -> None:
    case = MODULES["tied_weights"]
    converted = reference_graph(capture_known(case.build(), case.batch(*case.sample)))
    assert sorted(converted.parameters) == ["a.bias", "a.weight"]


def test_unused_parameter_is_no_input() -> None:
    case = MODULES["frozen_and_unused"]
    captured = capture_known(case.build(), case.batch(*case.sample))
    converted = reference_graph(captured)
    assert all(name.startswith(("fc.", "frozen.")) for name in converted.parameters)
    requires_grad = {p.name: p.requires_grad for p in captured.placeholders}
    assert requires_grad["fc.weight"] and not requires_grad["frozen.weight"]


def test_buffer_updates_name_their_buffer() -> None:
    case = MODULES["buffers"]
    captured = capture_known(case.build(), case.batch(*case.sample))
    assert {o.target for o in captured.outputs if o.target} == {"mean", "steps"}
    assert {p.name for p in captured.placeholders if p.role.value == "buffer"} == {
        "mean",
        "steps",
        "scale",
    }


def test_dropout_follows_the_seed() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Dropout(0.3)).train()
    captured = capture_known(module, {"input": torch.ones(100, 100)})
    converted = reference_graph(captured)
    streams = [n.attrs["stream"] for n in converted.graph.nodes if n.op == "Dropout"]
    assert len(set(streams)) == 2

    def run(seed: int) -> torch.Tensor:
        inputs = {"input": torch.ones(100, 100), "seed": torch.tensor(seed)}
        return converted.graph.run(inputs)[converted.user_outputs[0]]

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    assert abs(float((run(1) != 0).float().mean()) - 0.49) < 0.02
    assert abs(float(run(1).mean()) - 1.0) < 0.05


def test_evaluation_has_no_dropout() -> None:
    module = torch.nn.Sequential(torch.nn.Dropout(0.3), torch.nn.Linear(4, 4)).eval()
    converted = reference_graph(capture_known(module, {"input": torch.ones(2, 4)}))
    assert not converted.has_seed
    assert converted.graph.operators() == {"ortrain::Linear": 1}


def test_attention_dropout_stays_in_attention() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.25, batch_first=True).train()
    converted = reference_graph(capture_known(layer, {"src": torch.randn(2, 5, 8)}))
    attention = [n for n in converted.graph.nodes if n.op == "Attention"]
    assert [n.attrs["dropout"] for n in attention] == [0.25]
    assert converted.graph.operators()["ortrain::Dropout"] == 3


@pytest.mark.parametrize("region", ["autocast", "no_grad"])
def test_nodes_of_regions_keep_layer_and_source(region: str) -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
            self.count = torch.nn.Buffer(torch.zeros(()))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.count += 1  # something to functionalize
            if region == "autocast":
                return self.layer(input)
            with torch.no_grad():
                hidden = self.layer(input)
            return hidden + input

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=region == "autocast"):
        captured = capture_known(Inner(), {"input": torch.randn(3, 4)})
    products = [n for n in captured.graph_module.graph.nodes if "linear" in str(n.target)]
    assert [module_path(node) for node in products] == ["layer"]
    assert "F.linear" in node_source(products[0])


def test_autocast_around_the_call_is_captured() -> None:
    module = torch.nn.Linear(6, 6)
    batch = {"input": torch.randn(3, 6)}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        captured = capture_known(module, batch)
        expected = module(**batch)
    assert captured.autocast.enabled == (("cpu", torch.bfloat16),)
    converted = reference_graph(captured)
    inputs = {n: p.detach() for n, p in module.named_parameters()} | batch
    got = converted.graph.run(inputs)[converted.user_outputs[0]]
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got, expected)


def test_input_gradient_and_passthrough() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            y = x * 2
            return y, x, y

    x = torch.randn(3, requires_grad=True)
    captured = capture_known(Module(), {"x": x})
    assert captured.placeholders[0].requires_grad
    converted = reference_graph(captured)
    out = converted.graph.run({"x": x})
    result = captured.output_tree.rebuild([out[n] for n in converted.user_outputs])
    assert len(result) == 3
    assert result[0] is result[2]
    assert torch.equal(result[1], x)
    (gradient,) = torch.autograd.grad(result[0].sum(), x)
    assert torch.equal(gradient, torch.full_like(x, 2.0))


def test_written_input_is_an_output() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * 2

    captured = capture_known(Module(), {"x": torch.zeros(3)})
    assert [(o.role.value, o.target) for o in captured.outputs] == [
        ("input_update", "x"),
        ("user", ""),
    ]
    out = reference_graph(captured).graph.run({"x": torch.zeros(3)})
    assert torch.equal(out["x.update"], torch.ones(3))


def test_module_state_is_as_before_after_a_capture() -> None:
    case = MODELS["bert"]
    module = case.build()
    module.config.use_cache = True
    state = {n: t.clone() for n, t in module.state_dict().items()}
    flags = [m.training for m in module.modules()]
    capture_known(module, case.batch(*case.sample, 0))
    assert module.config.use_cache is True
    assert flags == [m.training for m in module.modules()]
    assert all(torch.equal(state[n], t) for n, t in module.state_dict().items())
    assert torch.backends.mha.get_fastpath_enabled()


def test_static_capture_guards_every_size() -> None:
    from ortrain.capture.export import capture

    captured = capture(torch.nn.Linear(6, 2), (torch.randn(3, 6),), dynamic=False)
    assert captured.dims == []
    assert captured.guards.holds([[3, 6]])
    assert captured.guards.violated([[4, 6]]) == ["input.size()[0] == 3"]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What ORTModules tell of themselves, as text and as a page."""

import collections
import re
import warnings

import pytest
import torch
import transformers
from torch import nn

from ortrain import ORTModule, made_modules
from ortrain.profile import profile
from ortrain.report import ModuleReport
from ortrain.tools.explain import text
from ortrain.tools.findings import findings_of, merged_name
from ortrain.tools.report import page
from ortrain.tools.report.graph_picture import draw_layers
from ortrain.tools.report.memory_picture import draw_plan, mebibytes


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(self.norm(x)), approximate="tanh") * 0.5


class Tower(nn.Module):
    def __init__(self, depth=6, width=32):
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Escaping(nn.Module):
    def forward(self, x):
        return torch.cumprod(x, 1).sum()


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).tanh() if x.sum() > 0 else x * 2


@pytest.fixture(scope="module")
def tower():
    model = ORTModule(Tower())
    with profile(model):
        for _ in range(2):
            model(torch.randn(8, 32)).backward()
    return model


@pytest.fixture(scope="module")
def found(tower):
    return findings_of(tower)


def quietly(model, *arguments):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(*arguments)


def test_nodes_tell_what_they_are_made_of(tower, found):
    (graph,) = found.graphs
    assert graph.is_explained and graph.title == "training; first call"
    assert len(graph.nodes) == found.report.total_nodes
    fused = [node for node in graph.nodes if node.parts]
    assert fused and all(node.op == "Fused" and len(node.parts) > 1 for node in fused)
    assert {node.op for node in graph.nodes if node.op == "Fused" and not node.parts} == set()
    ran = [node for node in graph.nodes if node.kernel]
    assert len(ran) == len(graph.plan.steps)
    assert all(node.seconds > 0 and node.shapes for node in ran)


def test_refusals_name_both_sides(found):
    (graph,) = found.graphs
    assert graph.refusals
    for refusal in graph.refusals:
        assert refusal.rewrite in {name for name, *_ in graph.passes}
        assert refusal.reason
        if len(refusal.nodes) == 2:
            maker, reader = (graph.nodes[node] for node in refusal.nodes)
            assert refusal.nodes[0] < refusal.nodes[1]
            assert set(maker.outputs) & set(reader.inputs)
    assert any("LayerNormalization" in refusal.reason for refusal in graph.refusals)


def test_plan_holds_the_rectangles(tower, found):
    (graph,) = found.graphs
    plan = graph.plan
    assert plan.total_bytes == tower.memory_plan().total_bytes
    end = max(buffer.offset + buffer.bytes for buffer in plan.buffers)
    assert end <= plan.arena_bytes < end + 64
    alive = collections.Counter()
    for buffer in plan.buffers:
        for step in range(buffer.first_step, buffer.last_step + 1):
            alive[step] += buffer.bytes
    assert max(alive.values()) <= plan.arena_lower_bound
    assert 0 < plan.num_forward_steps < len(plan.steps)


def test_picture_of_the_plan_has_one_rectangle_per_buffer(found):
    plan = found.graphs[0].plan
    picture = draw_plan(plan, 8)
    assert len(picture.rectangles) == len(plan.buffers)
    for rectangle in picture.rectangles:
        assert rectangle.x >= 0 and rectangle.x + rectangle.width <= picture.width + 1e-6
        assert rectangle.y >= -1e-6 and rectangle.y + rectangle.height <= picture.height + 1e-6
    for buffer, rectangle in zip(plan.buffers, picture.rectangles, strict=True):
        assert buffer.name in rectangle.text and mebibytes(buffer.bytes) in rectangle.text
    assert any("layer blocks.3" in rectangle.text for rectangle in picture.rectangles)


def test_repeated_layers_are_drawn_once(found):
    graph = found.graphs[0]
    layers = draw_layers(graph)
    titles = [(layer.title, layer.phase) for layer in layers]
    # The last one is followed by something else.
    assert ("blocks.0 to blocks.4, 5 alike", "forward") in titles
    assert any(phase == "backward" for _, phase in titles)
    # All nodes are somewhere: alike layers count as often as they are there.
    times = [re.search(r"(\d+) alike", layer.title) for layer in layers]
    counts = [int(t.group(1)) if t else 1 for t in times]
    assert sum(n * layer.num_nodes for n, layer in zip(counts, layers, strict=True)) == len(
        graph.nodes
    )
    for layer in layers:
        places = {(box.x, box.y) for box in layer.boxes}
        assert len(places) == len(layer.boxes) == layer.num_nodes - layer.num_hidden
        assert all(box.x + box.width <= layer.width for box in layer.boxes)
    whys = [arrow.text for layer in layers for arrow in layer.arrows if arrow.text]
    assert any(" stay apart: " in why for why in whys)


def test_nodes_that_only_compute_shapes_are_not_drawn():
    class Flattening(nn.Module):
        def forward(self, x):
            rows, columns = x.shape[0], x.shape[1]
            return torch.tanh(x.reshape(rows * columns, -1)).sum()

    model = ORTModule(Flattening())
    for rows in (2, 3):
        model(torch.ones(rows, 4, 5, requires_grad=True)).backward()
    graph = findings_of(model).graphs[0]
    (forward, _) = draw_layers(graph)
    labels = [box.label for box in forward.boxes]
    assert "Reshape" in labels and "Shape" not in labels
    shapes = [node for node in graph.nodes if node.op == "Shape" and node.phase == "forward"]
    assert 0 < len(shapes) <= forward.num_hidden


def test_text_tells_captures_fusions_and_memory(found):
    told = text(found)
    assert "100.0 %" in told and "first call" in told
    assert "capture" in told and "autodiff" in told
    assert re.search(r"not fused, \d+ times: LayerNormalization is not elementwise", told)
    assert re.search(r"\d+ steps; memory by plan", told)


def test_page_is_whole_and_fetches_nothing(found):
    made = page([found], "<b>mine</b> & more")
    assert "&lt;b&gt;mine&lt;/b&gt; &amp; more" in made and "<b>mine" not in made
    assert "http" not in made and "src=" not in made and "@import" not in made
    assert made.count('data-tip="') > len(found.graphs[0].plan.buffers)
    assert "Memory over time" in made and "By operator" in made and "Fusions refused" in made
    assert len(made) < 300_000


@pytest.mark.since_torch(2, 12)
def test_what_runs_in_pytorch_is_told():
    escaping = ORTModule(Escaping())
    quietly(escaping, torch.rand(3, 4, requires_grad=True))
    told = text(findings_of(escaping))
    assert "in PyTorch: aten.cumprod" in told and "test_findings.py" in told
    cut = ORTModule(Branching())
    quietly(cut, torch.ones(2, 4))
    findings = findings_of(cut)
    told = text(findings)
    assert re.search(r"runs in \d+ pieces: ", told) and "cut: " in told
    assert findings.graphs, "those of the pieces"
    made = page([findings_of(escaping), findings], "both")
    assert 'class="escape"' in made and "cumprod" in made
    assert "Captures of its pieces" in made and '<a href="#m2">' in made


def test_why_it_was_captured_again_is_told(monkeypatch):
    model = ORTModule(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    with torch.no_grad():
        model.eval()(torch.ones(2, 4))
    findings = findings_of(model)
    assert "the arguments, flags or parameters differ from earlier calls" in text(findings)
    assert [graph.title.partition(";")[0] for graph in findings.graphs] == ["training", "inference"]
    assert "Graph 2: " in page([findings], "two")
    monkeypatch.setattr("ortrain.tools.report.html_page._MOST_GRAPHS", 1)
    made = page([findings], "one")
    assert "Graph 2: " not in made and "1 smaller graph is left out" in made


def test_graphs_without_padding_are_explained():
    config = transformers.DistilBertConfig(
        dim=32,
        n_layers=1,
        n_heads=4,
        hidden_dim=48,
        vocab_size=50,
        dropout=0.0,
        attention_dropout=0.0,
        seq_classif_dropout=0.0,
    )
    model = ORTModule(transformers.DistilBertForSequenceClassification(config).train())
    lengths = torch.tensor([3, 20])
    model(
        input_ids=torch.randint(1, 50, (2, 20)),
        attention_mask=(torch.arange(20) < lengths[:, None]).long(),
        labels=torch.tensor([0, 1]),
    ).loss.backward()
    graphs = {graph.title: graph for graph in findings_of(model).graphs}
    packed = graphs["training, padding left out; first call"]
    assert packed.is_explained and packed.num_fused and packed.refusals
    assert packed.plan is not None and graphs["training; first call"].plan is None
    assert "The graph has not run." in page([findings_of(model)], "packed")


def test_a_module_that_was_never_called():
    findings = findings_of(ORTModule(nn.Linear(2, 2)))
    assert findings.report == ModuleReport([])
    assert "It has not been called." in text(findings)
    assert "No node has run." in page([findings], "nothing")
    assert page([], "no module")


def test_names_of_a_model_are_escaped():
    module = nn.Module()
    module.add_module("<i>x</i>", nn.Linear(4, 4))
    module.forward = lambda x: getattr(module, "<i>x</i>")(x).sum()
    model = ORTModule(module)
    model(torch.ones(2, 4)).backward()
    assert "<i>x" not in page([findings_of(model)], "t")


def test_a_graph_whose_passes_have_changed_is_not_explained(monkeypatch):
    model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Sigmoid()))
    model(torch.ones(2, 4)).sum().backward()
    assert findings_of(model).graphs[0].is_explained
    monkeypatch.setenv("ORTRAIN_DISABLE_PASSES", "fuse_elementwise")
    findings = findings_of(model)
    assert not findings.graphs[0].is_explained and findings.graphs[0].refusals == ()
    assert "cannot be told" in text(findings)
    assert "cannot be told" in page([findings], "t")


def test_made_modules_are_collected_and_let_go():
    with made_modules.collect() as outer:
        one = ORTModule(nn.Linear(2, 2))
        with made_modules.collect() as inner:
            two = ORTModule(nn.Linear(2, 2))
    ORTModule(nn.Linear(2, 2))
    assert [id(m) for m in outer] == [id(one), id(two)]
    assert [id(m) for m in inner] == [id(two)]


@pytest.mark.parametrize(
    ("name", "merged"),
    [
        ("encoder.layer.11.act", "encoder.layer.*.act"),
        ("0", "*"),
        ("3.norm", "*.norm"),
        ("layer1.0.conv2", "layer1.*.conv2"),
        ("head2", "head2"),
        ("", ""),
    ],
)
def test_numbers_of_layers_merge(name, merged):
    assert merged_name(name) == merged


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (1000, "1000 bytes"),
        (2048, "2 KiB"),
        (3 << 20, "3.00 MiB"),
        (1 << 30, "1,024 MiB"),
    ],
)
def test_sizes_for_people(size, words):
    assert mebibytes(size) == words

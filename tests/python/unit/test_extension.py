# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators from a shared library, gradients, conversions and passes from Python."""

import copy
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from ortrain import ORTModule, _core, extension
from ortrain.capture import cache
from ortrain.errors import (
    DTypeError,
    FileError,
    InvalidModelError,
    ShapeError,
    UnsupportedError,
)

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "custom_op" / "run.py"


@pytest.fixture(scope="module", autouse=True)
def graphs_on_disk_come_back():
    """What is registered here turns the cache off for the process, which other tests look at."""
    yield
    cache._disabled = False


def test_registering_turns_the_cache_off(monkeypatch, tmp_path, example):
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path))
    assert example.names and cache.folder() is None


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """The example's module, its library compiled, loaded and registered."""
    spec = importlib.util.spec_from_file_location("custom_op_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    library = module.build_library(tmp_path_factory.mktemp("library"))
    module.names = extension.load_library(library)
    module.library = library
    module.register()
    yield module
    extension.unregister_pass("swish_from_parts")


class Apply(nn.Module):
    """A linear layer, then a function."""

    def __init__(self, function):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.function = function

    def forward(self, x):
        return self.function(self.linear(x))


def compare(function, example_shape=(4, 5), **tolerance):
    """Run a function after a layer with the engine and in PyTorch; return the report."""
    torch.manual_seed(0)
    module = Apply(function)
    wrapped = ORTModule(copy.deepcopy(module))
    for rows in (example_shape[0], 7, 1):
        x = torch.randn(rows, *example_shape[1:])
        mine, theirs = wrapped(x), module(x)
        torch.testing.assert_close(mine, theirs, **tolerance)
        for run in (module, wrapped):
            run.zero_grad()
        (mine.sin().sum()).backward()
        (theirs.sin().sum()).backward()
        for a, b in zip(wrapped.parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, **tolerance)
    return wrapped.report()


def test_library_is_loaded_once(example):
    assert example.names == [
        "example::ScaledSquare",
        "example::ScaledSwish",
        "example::ScaledSwishGrad",
    ]
    assert extension.load_library(example.library) == example.names
    listed = {(op["domain"], op["name"]): op for op in _core.ops()}
    assert listed["example", "ScaledSwish"]["gradient"] == "yes"
    assert listed["example", "ScaledSwish"]["types"] == {"T": ["float32", "float64"]}


def test_operator_of_a_library_runs_natively(example):
    report = compare(lambda x: example.scaled_swish(x, 0.7))
    assert report.captures[0].escapes == ()
    assert not any(r.fallback for r in report.captures)


def test_gradient_from_python(example):
    report = compare(lambda x: example.scaled_square(x, -1.25))
    assert report.captures[0].escapes == ()


def test_gradients_by_finite_differences(example):
    del example

    def run(op, *inputs, **attributes):
        builder = _core.GraphBuilder()
        values = [builder.input(f"x{i}", 11, ["n"], "user", True) for i in range(len(inputs))]
        y = builder.node(op, values, attributes, domain="example")
        builder.output(y, "y", "user")
        graph = builder.finish()
        graph.build_backward([0])
        graph.run_passes("fuse")

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx, *tensors):
                ctx.tensors = [t.detach() for t in tensors]
                return _core.Run(_core.Session(graph)).forward(ctx.tensors)[0].clone()

            @staticmethod
            def backward(ctx, dy):
                again = _core.Run(_core.Session(graph))
                again.forward(ctx.tensors)
                return tuple(g.clone() for g in again.backward([dy.contiguous()]))

        return Function.apply(*inputs)

    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: run("ScaledSwish", t, beta=1.5), x)
    assert torch.autograd.gradcheck(lambda a, b: run("ScaledSwishGrad", a, b, beta=1.5), (x, dy))


def test_pass_rewrites_and_keeps_the_numbers(example):
    def function(x):
        return x * torch.sigmoid(x)

    compare(function, rtol=1e-5, atol=1e-6)
    graph = _core.Graph.parse(
        "graph g (float32[n] x) => (y) {\n  s = Sigmoid(x)\n  y = Mul(s, x) @layer\n}\n"
    )
    assert ("swish_from_parts", True) in [(n, c) for n, c, _ in graph.run_passes("simplify")]
    assert [(n["op"], n["name"]) for n in graph.nodes()] == [("ScaledSwish", "layer")]
    other = _core.Graph.parse(
        "graph g (float32[n] x, float32[n] z) => (y) {\n  s = Sigmoid(x)\n  y = Mul(s, z)\n}\n"
    )
    assert ("swish_from_parts", False) in [(n, c) for n, c, _ in other.run_passes("simplify")]
    assert example.names


@pytest.mark.parametrize("path", ["missing.so", "text.so"])
def test_what_is_no_library_is_refused(tmp_path, path):
    (tmp_path / "text.so").write_text("no library")
    with pytest.raises(FileError, match=path):
        extension.load_library(tmp_path / path)


def compile_source(folder, text):
    source = folder / "source.cpp"
    source.write_text(text)
    library = folder / "library.so"
    command = ["c++", "-std=c++20", "-shared", "-fPIC", source, "-o", library]
    subprocess.run([*command, f"-I{extension.include_dir()}"], check=True)
    return library


def test_libraries_that_define_wrongly_add_nothing(tmp_path, example):
    del example
    plain = compile_source(tmp_path, "int nothing() { return 0; }\n")
    with pytest.raises(InvalidModelError, match="ortrain_extension"):
        extension.load_library(plain)
    (tmp_path / "twice").mkdir()
    twice = compile_source(
        tmp_path / "twice",
        """
#include <ortrain/extension/extension.h>
namespace ox = ortrain::extension;
static ox::Operator op(const char* domain, const char* name) {
  ox::Operator result(domain, name);
  result.input("x", "T").output("y", "T").types("T", {ox::Type::f32});
  result.infer([](ox::Infer& n) { n.set_output(0, n.type(0), n.shape(0)); });
  result.kernel([](ox::Prepare&) { return [](const ox::Run&) {}; });
  return result;
}
ORTRAIN_EXTENSION(library) {
  library.add(op("fresh", "First"));
  library.add(op("example", "ScaledSwish"));
}
""",
    )
    with pytest.raises(InvalidModelError, match="example::ScaledSwish is defined already"):
        extension.load_library(twice)
    assert ("fresh", "First") not in {(op["domain"], op["name"]) for op in _core.ops()}


def test_errors_of_a_library_keep_their_type(tmp_path):
    library = compile_source(
        tmp_path,
        """
#include <ortrain/extension/extension.h>
namespace ox = ortrain::extension;
ORTRAIN_EXTENSION(library) {
  ox::Operator refuses("refusing", "Refuses");
  refuses.input("x", "T").output("y", "T").types("T", {ox::Type::f32});
  refuses.attribute("when", 0);
  refuses.infer([](ox::Infer& n) {
    if (n.int_("when") == 0) throw ox::Error("not this type", kOrtrainErrorType);
    n.set_output(0, n.type(0), n.shape(0));
  });
  refuses.kernel([](ox::Prepare& n) -> ox::Kernel {
    if (n.int_("when") == 1) throw ox::Error("not this shape", kOrtrainErrorShape);
    return [](const ox::Run& run) {
      ox::parallel_for(4, 1, [&](int64_t begin, int64_t) {
        if (begin == 0) throw ox::Error("this index", kOrtrainErrorIndex);
      });
    };
  });
  library.add(refuses);
}
""",
    )
    assert extension.load_library(library) == ["refusing::Refuses"]

    def run(when):
        graph = _core.Graph.parse(
            f"graph g (float32[n] x) => (y) {{\n"
            f"  y = refusing::Refuses <when = {when}> (x) @here\n}}\n"
        )
        _core.Run(_core.Session(graph)).forward([torch.ones(4)])

    with pytest.raises(DTypeError, match=r"here.*not this type"):
        run(0)
    with pytest.raises(ShapeError, match="not this shape"):
        run(1)
    with pytest.raises(IndexError, match="this index"):
        run(2)


def test_gradients_are_refused_where_they_do_not_belong(example):
    del example
    with pytest.raises(UnsupportedError, match="Nonsense"):
        extension.register_gradient("example::Nonsense")(lambda g: None)
    with pytest.raises(InvalidModelError, match="rule already"):
        extension.register_gradient("Relu")(lambda g: None)
    with pytest.raises(InvalidModelError, match="by definition"):
        extension.register_gradient("Equal")(lambda g: None)


@pytest.mark.parametrize(
    ("rule", "error", "text"),
    [
        (lambda g: [None, None], InvalidModelError, "2 gradients"),
        (lambda g: 1.0, TypeError, "value of the graph"),
        (lambda g: g.input(3), IndexError, "input 3"),
        (lambda g: g.op("Nonsense", g.input(0)), UnsupportedError, "Nonsense"),
        (lambda g: g.op("ReduceSum", g.input(0)), ShapeError, "gradient of input 0 has shape"),
        (
            lambda g: g.reduce_to_shape_of(g.op("ReduceSum", g.input(0), keepdims=0), g.input(0)),
            ShapeError,
            r"shape of \[n\] does not broadcast to \[\]",
        ),
        (lambda g: 1 / 0, ZeroDivisionError, "division"),
        (lambda g: g.op("Cast", g.input(0), to=7) * 0.5, DTypeError, "arithmetic with a float"),
        (lambda g: g.op("Cast", g.op("Cast", g.input(0), to=7) * 2, to=11), DTypeError, "float64"),
    ],
)
def test_errors_of_a_rule_reach_the_user(example, rule, error, text):
    correct = lambda g: 2.0 * g.attributes["scale"] * g.input(0) * g.output_grad(0)  # noqa: E731
    extension.register_gradient("example::ScaledSquare", replace=True)(rule)
    try:
        graph = _core.Graph.parse(
            "graph g (float32[n] x [user grad]) => (y) {\n  y = example::ScaledSquare(x) @here\n}\n"
        )
        with pytest.raises(error, match=text):
            graph.build_backward([0])
    finally:
        extension.register_gradient("example::ScaledSquare", replace=True)(correct)


def test_values_do_not_outlive_their_rule(example):
    held = []

    def rule(g):
        held.extend([g, g.input(0)])
        return g.output_grad(0)

    extension.register_gradient("example::ScaledSquare", replace=True)(rule)
    graph = _core.Graph.parse(
        "graph g (float32[n] x [user grad]) => (y) {\n  y = example::ScaledSquare(x)\n}\n"
    )
    graph.build_backward([0])
    with pytest.raises(InvalidModelError, match="only while the function runs"):
        held[1] + 1.0
    with pytest.raises(InvalidModelError, match="only while the function runs"):
        held[0].input(0)
    correct = lambda g: 2.0 * g.attributes["scale"] * g.input(0) * g.output_grad(0)  # noqa: E731
    extension.register_gradient("example::ScaledSquare", replace=True)(correct)
    assert example.names


def simplify(text):
    graph = _core.Graph.parse(text)
    graph.run_passes("simplify")
    return graph


PAIR = "graph g (float32[n] x, float32[m] z) => (y) {\n  y = Relu(x) @here\n}\n"


@pytest.mark.parametrize(
    ("body", "error", "text"),
    [
        (lambda graph: None, TypeError, "no bool"),
        (lambda graph: 1 / 0, ZeroDivisionError, "division"),
        (
            lambda graph: graph.replace(
                graph.nodes()[0].outputs[0], graph.op("Cast", graph.nodes()[0].inputs[0], to=11)
            ),
            DTypeError,
            "replace.*float64",
        ),
        (
            lambda graph: graph.replace(
                graph.nodes()[0].outputs[0], graph.op("ReduceSum", graph.nodes()[0].inputs[0])
            ),
            ShapeError,
            "replace.*shape",
        ),
    ],
)
def test_errors_of_a_pass_name_it(body, error, text):
    extension.register_pass("faulty")(body)
    try:
        with pytest.raises(error, match=text) as caught:
            simplify(PAIR)
    finally:
        extension.unregister_pass("faulty")
    notes = getattr(caught.value, "__notes__", [])
    assert sys.version_info < (3, 11) or "pass 'faulty'" in "".join([str(caught.value), *notes])


def test_pass_that_makes_a_cycle_is_refused():
    def body(graph):
        (node,) = graph.nodes()
        graph.replace(node.inputs[0], node.outputs[0])
        return True

    extension.register_pass("cyclic")(body)
    try:
        with pytest.raises(InvalidModelError, match="cyclic"):
            simplify(PAIR)
    finally:
        extension.unregister_pass("cyclic")


def test_pass_sees_the_graph():
    seen = {}

    def look(graph):
        for node in graph.nodes():
            seen[node.op] = (
                node.layer,
                node.is_backward,
                node.attributes,
                [None if v is None else v.shape for v in node.inputs],
            )
        (first, *_) = graph.nodes()
        seen["users"] = [n.op for n in graph.users(first.outputs[0])]
        seen["is_output"] = graph.is_output(first.outputs[0])
        return False

    extension.register_pass("look", stage="fuse")(look)
    try:
        graph = _core.Graph.parse(
            "graph g (float32[n, 4] x [user grad]) => (y) {\n"
            "  s = Softmax <axis = 1> (x) @soft\n  y = Erf(s) @erf\n}\n"
        )
        graph.build_backward([0])
        graph.run_passes("fuse")
    finally:
        extension.unregister_pass("look")
    assert seen["Softmax"] == ("soft", False, {"axis": 1}, [["n", 4]])
    assert seen["SoftmaxGrad"][:2] == ("soft", True)
    assert "Erf" in seen["users"] and seen["is_output"] is False


def test_registrations_are_checked():
    with pytest.raises(InvalidModelError, match="stage"):
        extension.register_pass("p", stage="later")(lambda graph: False)
    with pytest.raises(InvalidModelError, match="fuse_elementwise"):
        extension.register_pass("fuse_elementwise")(lambda graph: False)
    with pytest.raises(KeyError):
        extension.unregister_pass("p")
    with pytest.raises(ValueError, match="namespace::operator.overload"):
        extension.register_conversion("relu")
    with pytest.raises(ValueError, match="already"):
        extension.register_conversion("aten::relu.default")


@pytest.mark.long
@pytest.mark.slow
def test_the_example_runs():
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)
    assert "example::ScaledSwish" in done.stdout
    assert "losses differ by at most" in done.stdout

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Each non-public name of PyTorch still means what the capture relies on."""

from typing import Any

import pytest
import sympy
import torch
from torch import nn
from torch._export import utils as export_utils
from torch._subclasses import fake_impls

from ortrain.capture import operator_internals, recurrent_internals, size_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.composite_operators import run_decompositions
from ortrain.capture.guards import compile_guards
from tests.python.processor import runs_lstm_in_16_bits


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0] * 2, -1) if x.shape[0] > 2 else x


def _export(module: nn.Module, x: torch.Tensor) -> torch.export.ExportedProgram:
    shapes = (dict.fromkeys(range(x.dim()), torch.export.Dim.AUTO),)
    return torch.export.export(module, (x,), dynamic_shapes=shapes, strict=False)


def test_guards_code_is_python_over_sizes() -> None:
    program = _export(Halves(), torch.randn(4, 6))
    conditions = size_internals.guards_code(program)
    assert conditions
    guards = compile_guards(conditions, ["x"], [])
    assert guards.holds([[4, 6]])
    assert not guards.holds([[2, 6]])


def test_flexible_sizes_keep_a_batch_of_one_dynamic() -> None:
    with size_internals.flexible_sizes():
        program = _export(nn.Linear(3, 3), torch.randn(1, 3))
    node = next(n for n in program.graph.nodes if n.name == "input")
    assert not isinstance(size_internals.size_expression(node.meta["val"].shape[0]), int)


def test_recurrent_layers_stay_whole_at_any_length() -> None:
    with recurrent_internals.recurrent_layers_whole(), size_internals.flexible_sizes():
        relu = nn.RNN(3, 4, nonlinearity="relu")
        names = ("lstm", "gru", "rnn_tanh", "rnn_relu")
        layers = (nn.LSTM(3, 4), nn.GRU(3, 4), nn.RNN(3, 4), relu)
        for name, layer in zip(names, layers, strict=True):
            program = _export(layer, torch.randn(5, 2, 3)).run_decompositions({})
            targets = {str(n.target) for n in program.graph.nodes}
            assert f"aten.{name}.input" in targets
            sizes = next(n for n in program.graph.nodes if n.name == "input").meta["val"].shape
            assert isinstance(size_internals.size_expression(sizes[0]), sympy.Expr)


@pytest.mark.skipif(not runs_lstm_in_16_bits(), reason="PyTorch refuses it on this processor")
def test_recurrent_layers_have_the_dtypes_of_a_call_where_asked() -> None:
    layer, x = nn.LSTM(3, 4), torch.randn(5, 2, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(x)[0].dtype
        for as_called in (False, True):
            with (
                recurrent_internals.recurrent_layers_whole(as_called),
                size_internals.flexible_sizes(),
            ):
                program = _export(layer, x)
            node = next(n for n in program.graph.nodes if str(n.target) == "aten.lstm.input")
            assert node.meta["val"][0].dtype == (expected if as_called else torch.float32)
    assert torch.backends.mkldnn.enabled


def test_no_grad_region_is_an_operator_of_the_export() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                y = x * 2
            return y + x

    program = _export(Module(), torch.randn(3))
    targets = [n.target for n in program.graph.nodes]
    assert internals.no_grad_region() in targets


def test_autocast_region_is_an_operator_of_the_export() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return x @ x

    program = _export(Module(), torch.randn(3, 3))
    call = next(n for n in program.graph.nodes if n.target is internals.autocast_region())
    assert call.args[4].op == "get_attr"


def test_size_expressions_and_hints() -> None:
    program = _export(nn.Flatten(0), torch.randn(4, 6))
    x = next(n for n in program.graph.nodes if n.name == "input").meta["val"]
    rows = size_internals.size_expression(x.shape[0])
    assert isinstance(rows, sympy.Symbol)
    assert size_internals.size_hint(x.shape[0]) == 4
    assert size_internals.size_expression(7) == 7
    assert size_internals.size_hint(7) == 7
    assert size_internals.number_expression(x.shape[0] * 2) == 2 * rows
    assert size_internals.number_expression(True) is True


def test_unbacked_symbols_are_seen_in_an_error() -> None:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else x * 2

    with pytest.raises(Exception) as caught:
        _export(Module(), torch.randn(3))
    assert size_internals.has_unbacked_symbols(caught.value)
    assert not size_internals.has_unbacked_symbols(ValueError())


def test_composite_and_table_decompositions() -> None:
    einsum = torch.ops.aten.einsum.default
    assert operator_internals.is_composite(einsum)
    a, b = torch.randn(2, 3), torch.randn(3, 4)
    torch.testing.assert_close(operator_internals.decomposition(einsum)("ij,jk->ik", [a, b]), a @ b)
    assert not operator_internals.is_composite(torch.ops.aten.mm.default)
    assert operator_internals.decomposition(torch.ops.aten.native_group_norm.default) is not None
    assert operator_internals.decomposition(torch.sym_min) is None


def test_autograd_functions_are_taken_over_only_inside() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Thrice(Twice):
        @classmethod
        def apply(cls, x: torch.Tensor) -> torch.Tensor:
            return super().apply(x) * 1.5

    def handler(cls: type, original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return cls.__name__, original(*args, **kwargs).tolist()

    x = torch.ones(2)
    with internals.autograd_functions_by(handler):
        assert Twice.apply(x) == ("Twice", [2.0, 2.0])
    assert torch.equal(Twice.apply(x), x * 2)
    assert torch.equal(Thrice.apply(x), x * 3)
    assert "apply" not in Twice.__dict__
    assert "__init_subclass__" not in torch.autograd.Function.__dict__


def test_sympy_functions_of_sizes() -> None:
    s = sympy.Symbol("s", integer=True, positive=True)
    assert size_internals.FloorDiv(s * 4, 2) == 2 * s
    assert size_internals.FloorDiv(sympy.Integer(7), 2) == 3


def test_a_capture_leaves_nothing_of_its_trace_behind() -> None:
    import gc
    import linecache

    from torch.fx import graph_module
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    from ortrain import ORTModule

    def counts() -> tuple[int, int, int]:
        gc.collect()
        environments = sum(type(o) is ShapeEnv for o in gc.get_objects())
        generated = sum(name.startswith("<eval_with_key>") for name in linecache.cache)
        return environments, len(graph_module._loader.eval_cache), generated

    def use() -> None:
        model = ORTModule(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1)))
        model(torch.randn(3, 4)).sum().backward()

    use()
    before = counts()
    for _ in range(3):
        use()
    # Fewer, where garbage of other tests has gone meanwhile.
    assert all(now <= then for now, then in zip(counts(), before, strict=True))


class Composite(nn.Module):
    """Composite operators on both sides of a write, which only a second trace removes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).softmax(-1)
        y[:, :2].mul_(2)
        return nn.functional.silu(self.second(y)).std(0)


def _kernels() -> dict[Any, tuple[dict[Any, Any], bool]]:
    return {
        op: (dict(op.py_kernels), op in fake_impls.op_implementations_dict)
        for op in export_utils._collect_all_valid_cia_ops()
    }


@pytest.mark.parametrize("taken_apart", [[], ["linear"], ["linear", "silu", "std.dim"]])
def test_decompositions_are_those_of_pytorch(taken_apart: list[str]) -> None:
    ops = [
        getattr(getattr(torch.ops.aten, n), o or "default")
        for n, _, o in (name.partition(".") for name in taken_apart)
    ]
    table = {op: operator_internals.decomposition(op) for op in ops}
    assert all(table.values())
    expected = _export(Composite(), torch.randn(5, 3)).run_decompositions(dict(table))
    before = _kernels()
    for _ in range(2):  # the second time with what was kept of the first
        program = run_decompositions(_export(Composite(), torch.randn(5, 3)), table)
        assert program.graph_module.code == expected.graph_module.code
        assert _kernels() == before


def test_decompositions_see_operators_registered_later() -> None:
    x = torch.randn(4, 3)
    run_decompositions(_export(Composite(), x), {})
    with torch.library._scoped_library("ortrain_test_composite", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")

        class Twice(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.ops.ortrain_test_composite.twice(x)

        ours = run_decompositions(_export(Twice(), x), {})
        theirs = _export(Twice(), x).run_decompositions({})
        assert ours.graph_module.code == theirs.graph_module.code
        assert "ortrain_test_composite.twice" in ours.graph_module.code


def test_a_backward_inside_of_another_is_a_task_of_its_own() -> None:
    tasks = []
    x = torch.ones(2, requires_grad=True)
    inner = (x * 2).sum()
    inner.grad_fn.register_prehook(lambda _: tasks.append(internals.current_task()))
    outer = (x * 3).sum()

    def nested(gradient: Any) -> None:
        tasks.append(internals.current_task())
        torch.autograd.grad(inner, x)
        tasks.append(internals.current_task())

    outer.grad_fn.register_prehook(nested)
    assert internals.current_task() == -1
    outer.backward()
    assert tasks[0] == tasks[2] >= 0
    assert tasks[1] not in (-1, tasks[0])

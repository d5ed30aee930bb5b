# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Operators without a native form run in PyTorch as one node, with PyTorch's own backward."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture.errors import CaptureError

pytestmark = pytest.mark.filterwarnings("ignore:.*run in PyTorch:RuntimeWarning")


class TripledGradient(torch.autograd.Function):
    """The identity with three times its gradient: what tracing its forward would lose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


class ScaledSum(torch.autograd.Function):
    """Several tensors, a number, a flag and a size in; two tensors and a number out."""

    saved: list[weakref.ref[torch.Tensor]] = []

    @staticmethod
    def forward(
        ctx: Any, a: torch.Tensor, b: torch.Tensor, scale: float, rows: int, flip: bool = False
    ) -> tuple[torch.Tensor, int, torch.Tensor]:
        kept = a.exp()
        ScaledSum.saved.append(weakref.ref(kept))
        ctx.save_for_backward(kept, b)
        ctx.scale, ctx.flip = scale, flip
        best = (a * b).argmax(-1)
        ctx.mark_non_differentiable(best)
        return kept * b * scale / rows * (-1 if flip else 1), 7, best

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        a, b = ctx.saved_tensors
        gradient = gradient * ctx.scale * (-2 if ctx.flip else 2)  # not the true one, on purpose
        return gradient * a * b, (gradient * a).sum_to_size(b.shape), None, None, None


class WithSetup(torch.autograd.Function):
    """The newer form, with setup_context."""

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y * 5, gradient * x


class Block(nn.Module):
    """A linear layer, a function, a linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.gain = nn.Parameter(torch.rand(4) + 0.5)
        self.last = nn.Linear(4, 3)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.function(self, self.first(x)))


def scaled(m: Block, h: torch.Tensor) -> torch.Tensor:
    made, number, best = ScaledSum.apply(h, m.gain, 0.5, h.shape[0], True)
    return made * number + best.unsqueeze(-1)


def nested(m: Block, h: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        h = TripledGradient.apply(WithSetup.apply(h.tanh(), m.gain))
    return h


def bessel(m: Block, h: torch.Tensor) -> torch.Tensor:
    return torch.special.i0e(h) * m.gain + torch.lgamma(m.gain)


def eigenvalues(m: Block, h: torch.Tensor) -> torch.Tensor:
    return torch.linalg.eigvalsh(h.T @ h + torch.diag(m.gain)) * h


def without_gradient(m: Block, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        weight = TripledGradient.apply(h)
    return h * weight


def branch(m: Block, h: torch.Tensor) -> torch.Tensor:
    return torch.cond(h.sum() > 0, lambda x: x.exp() * m.gain, lambda x: x.sin(), (h,))


def loop(m: Block, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():  # PyTorch itself differentiates no loop
        _, count = torch.while_loop(
            lambda x, n: (x.abs().max() > 0.1) & (n < 20),
            lambda x, n: (x / 2, n + 1),
            (h.detach(), torch.zeros((), dtype=torch.int64)),
        )
    return h * m.gain * count


def solved(m: Block, h: torch.Tensor) -> torch.Tensor:
    matrix = h.T @ h + torch.diag(m.gain)
    lower = torch.linalg.cholesky(matrix)
    return h @ torch.linalg.inv(matrix) + torch.linalg.solve(lower, m.gain)


def bags(m: Block, h: torch.Tensor) -> torch.Tensor:
    places = torch.tensor([[0, 1], [2, 0], [1, 1]])
    sums = torch.nn.functional.embedding_bag(places, h * m.gain, mode="sum")
    return h + sums.mean(0)


FUNCTIONS = [
    lambda m, h: TripledGradient.apply(h),
    branch,
    loop,
    solved,
    bags,
    scaled,
    nested,
    bessel,
    eigenvalues,
    without_gradient,
]


@pytest.fixture(autouse=True)
def _one_seed() -> None:
    torch.manual_seed(7)
    ScaledSum.saved.clear()


@pytest.fixture
def custom_ops() -> Iterator[Any]:
    library = torch.library.Library("escape_test", "DEF")
    library.define("cube(Tensor x, float scale) -> Tensor")
    library.define("no_backward(Tensor x) -> Tensor")
    library.define("grows(Tensor x) -> Tensor")

    def cube(x: torch.Tensor, scale: float) -> torch.Tensor:
        return scale * x**3

    library.impl("cube", cube, "CPU")
    library.impl("no_backward", lambda x: x * 2, "CPU")
    library.impl("grows", lambda x: torch.cat([x, x]), "CPU")
    for name in ("no_backward", "grows"):  # the second one is wrong about its shape
        torch.library.register_fake(f"escape_test::{name}", torch.empty_like, lib=library)
    torch.library.register_fake(
        "escape_test::cube", lambda x, scale: torch.empty_like(x), lib=library
    )

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * 30 * ctx.scale * x**2, None  # ten times the true one

    torch.library.register_autograd("escape_test::cube", backward, setup_context=setup, lib=library)
    yield torch.ops.escape_test
    library._destroy()


def pair(function: Any) -> tuple[Block, Block, ORTModule]:
    plain, ours = Block(function), Block(function)
    return plain, ours, ORTModule(ours)


def assert_same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for (name, mine), theirs in zip(ours.named_parameters(), plain.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            torch.testing.assert_close(
                mine.grad, theirs.grad, rtol=1e-5, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
            )


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_steps_are_those_of_pytorch(function: Any) -> None:
    plain, ours, wrapped = pair(function)
    for rows in (5, 8, 5):  # other sizes need no other capture
        x = torch.randn(rows, 4)
        expected, actual = plain(x), wrapped(x)
        torch.testing.assert_close(actual, expected)
        expected.square().sum().backward()
        actual.square().sum().backward()
        assert_same_gradients(ours, plain)
    report = wrapped.report()
    assert len(report.captures) == 1 and not report.captures[0].fallback
    assert 0 < report.native_share < 1
    assert report.captures[0].escapes
    wrapped.eval()
    with torch.no_grad():
        torch.testing.assert_close(wrapped(x), plain(x))


def test_both_branches_are_taken() -> None:
    plain, ours, wrapped = pair(branch)
    x = torch.randn(5, 4)
    taken = set()
    for sign in (1.0, -1.0):
        for model in (plain, ours):
            model.zero_grad()
            with torch.no_grad():
                model.first.bias.fill_(100.0 * sign)
                model.first.weight.div_(1000.0)
        taken.add(bool(plain.first(x).sum() > 0))
        if sign > 0:
            for model in (plain, ours):
                with torch.no_grad():
                    model.first.bias.div_(100.0)
        expected, actual = plain(x), wrapped(x)
        torch.testing.assert_close(actual, expected)
        expected.sum().backward()
        actual.sum().backward()
        assert_same_gradients(ours, plain)
    assert taken == {True, False} and len(wrapped.report().captures) == 1


def test_a_matrix_without_inverse_is_told() -> None:
    _, _, wrapped = pair(lambda m, h: torch.linalg.inv(h[:4] * 0.0))
    with pytest.raises(RuntimeError, match="singular"):
        wrapped(torch.randn(5, 4))


def test_custom_operators_keep_their_backward(custom_ops: Any) -> None:
    plain, ours, wrapped = pair(lambda m, h: custom_ops.cube(h, 2.0) * m.gain)
    x = torch.randn(6, 4)
    for module in (plain, wrapped):
        module(x).sum().backward()
    assert_same_gradients(ours, plain)
    (escape,) = wrapped.report().captures[0].escapes
    assert escape.target == "escape_test.cube.default"


def test_an_operator_without_backward_gives_no_gradient(custom_ops: Any) -> None:
    plain, ours, wrapped = pair(lambda m, h: custom_ops.no_backward(h.detach()) + h)
    x = torch.randn(6, 4)
    for module in (plain, wrapped):
        module(x).sum().backward()
    assert_same_gradients(ours, plain)


def test_a_wrong_shape_is_named_and_pytorch_runs_the_call(custom_ops: Any) -> None:
    plain, _, wrapped = pair(lambda m, h: custom_ops.grows(h.detach()))
    x = torch.randn(6, 4)
    with pytest.warns(RuntimeWarning, match=r"escape_test.grows.default: result 0 is .*\[12, 4\]"):
        torch.testing.assert_close(wrapped(x), plain(x))


def test_the_warning_names_operator_layer_and_line() -> None:
    wrapped = ORTModule(Block(scaled))
    with pytest.warns(
        RuntimeWarning, match=r"1 of its operators run in PyTorch.*ScaledSum"
    ) as told:
        wrapped(torch.randn(5, 4))
    assert "self.function(self, self.first(x))" in str(told[0].message)
    assert "ScaledSum" in str(wrapped.report())


def test_strict_mode_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    with pytest.raises(CaptureError, match="ScaledSum"):
        ORTModule(Block(scaled))(torch.randn(5, 4))


def test_several_forwards_then_their_backwards() -> None:
    plain, ours, wrapped = pair(scaled)
    batches = [torch.randn(rows, 4) for rows in (3, 6, 3)]
    for module in (plain, wrapped):
        losses = [module(x).square().sum() for x in batches]
        for loss in reversed(losses):
            loss.backward()
    assert_same_gradients(ours, plain)


def test_backward_twice() -> None:
    plain, ours, wrapped = pair(nested)
    x = torch.randn(5, 4)
    for module in (plain, wrapped):
        loss = module(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(ours, plain)


def test_what_the_forward_kept_is_dropped() -> None:
    _, _, wrapped = pair(scaled)
    wrapped(torch.randn(5, 4)).sum().backward()
    abandoned = wrapped(torch.randn(5, 4))
    del abandoned
    gc.collect()
    assert ScaledSum.saved and all(kept() is None for kept in ScaledSum.saved)


def test_inputs_may_be_kept_by_the_function() -> None:
    seen: list[torch.Tensor] = []

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient

    module = Block(lambda m, h: Recorded.apply(h))
    x = torch.randn(5, 4)
    wrapped = ORTModule(module)
    for _ in range(2):
        seen.clear()
        wrapped(x).sum().backward()
    torch.testing.assert_close(seen[0].detach(), module.first(x).detach())


def test_random_functions_follow_the_seed() -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.noise = torch.rand_like(x)
            return x * ctx.noise

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * ctx.noise

    wrapped = ORTModule(Block(lambda m, h: Noise.apply(h)))
    x = torch.randn(5, 4)

    def run(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return wrapped(x).detach()

    first = run(1)
    assert torch.equal(first, run(1)) and not torch.equal(first, run(2))
    assert not torch.equal(wrapped(x).detach(), wrapped(x).detach())


def test_functions_draw_numbers_of_their_own() -> None:
    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.rand_like(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> None:
            return None

    wrapped = ORTModule(Block(lambda m, h: Noise.apply(h) - Noise.apply(h)))
    assert float(wrapped(torch.randn(50, 4)).std()) > 0.1


def test_only_what_wants_a_gradient_is_asked_for_one() -> None:
    asked: list[tuple[bool, ...]] = []

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
            return tensors[0] * tensors[1] * tensors[2]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
            asked.append(ctx.needs_input_grad)
            return tuple(gradient * 2 if wanted else None for wanted in ctx.needs_input_grad)

    def function(m: Block, h: torch.Tensor) -> torch.Tensor:
        return Asking.apply(h.detach(), m.gain.expand_as(h), h)

    plain, ours, wrapped = pair(function)
    ours.gain.requires_grad_(False)
    plain.gain.requires_grad_(False)
    x = torch.randn(5, 4)
    for module in (plain, wrapped):
        module(x).sum().backward()
    assert asked == [(False, False, True)] * 2
    assert_same_gradients(ours, plain)


def test_results_without_gradient_leave_parameters_without_one() -> None:
    class Marked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            made = x * 2
            ctx.mark_non_differentiable(made)
            return made

    plain, ours, wrapped = pair(lambda m, h: Marked.apply(h * m.gain))
    x = torch.randn(5, 4)
    for module in (plain, wrapped):
        module(x).sum().backward()
    assert plain.gain.grad is None
    assert_same_gradients(ours, plain)


def test_a_missing_gradient_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> None:
            return None

    ours = Block(lambda m, h: Nothing.apply(h * m.gain))
    wrapped = ORTModule(ours)
    for _ in range(2):
        wrapped(torch.randn(5, 4)).sum().backward()
    assert torch.equal(ours.gain.grad, torch.zeros(4))
    told = [record.message for record in caplog.records if record.name == "ortrain"]
    assert len(told) == 1 and "has no gradient for its argument 0" in told[0]


def test_errors_of_a_function_reach_the_caller() -> None:
    class Picky(torch.autograd.Function):
        limit = 100.0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor and float(x.abs().max()) > Picky.limit:
                raise FloatingPointError("too large")
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            if Picky.limit == 0:
                raise FloatingPointError("not backward")
            return gradient

    wrapped = ORTModule(Block(lambda m, h: Picky.apply(h)))
    x = torch.randn(5, 4)
    wrapped(x).sum().backward()
    with pytest.raises(FloatingPointError, match="too large"):
        wrapped(x * 1e4)
    loss = wrapped(x).sum()
    Picky.limit = 0
    with pytest.raises(FloatingPointError, match="not backward"):
        loss.backward()
    Picky.limit = 100.0
    wrapped(x).sum().backward()


def test_a_function_that_writes_to_its_arguments_runs_with_its_module() -> None:
    class InPlace(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    plain, ours, wrapped = pair(lambda m, h: InPlace.apply(h * 1))
    x = torch.randn(5, 4)
    with pytest.warns(RuntimeWarning, match="writes to its arguments"):
        wrapped(x).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(ours, plain)


def test_a_written_view_of_a_function_runs_with_its_module() -> None:
    def function(m: Block, h: torch.Tensor) -> torch.Tensor:
        seen = TripledGradient.apply(h)
        h = nn.functional.relu(h, inplace=True)
        return h + seen * 1

    plain, _, wrapped = pair(function)
    x = torch.randn(5, 4)
    with torch.no_grad(), pytest.warns(RuntimeWarning, match="returns a view"):
        torch.testing.assert_close(wrapped(x), plain(x))


def test_strides_are_pytorchs() -> None:
    plain, _, wrapped = pair(lambda m, h: h.T.as_strided((4, 4), (1, 4)))
    x = torch.randn(5, 4)
    torch.testing.assert_close(wrapped(x), plain(x))


def test_sparse_results_run_with_their_module() -> None:
    plain, ours, wrapped = pair(lambda m, h: torch.sparse.mm(h.relu().to_sparse(), h.T @ h))
    x = torch.randn(5, 4)
    for module in (plain, wrapped):
        module(x).sum().backward()
    assert_same_gradients(ours, plain)


def test_an_object_with_a_traced_tensor_runs_with_its_module() -> None:
    class Holder:
        def __init__(self, scale: torch.Tensor) -> None:
            self.scale = scale

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, holder: Holder) -> torch.Tensor:
            ctx.holder = holder
            return x * holder.scale

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradient * ctx.holder.scale, None

    plain, ours, wrapped = pair(lambda m, h: Held.apply(h, Holder(m.gain * 2)))
    x = torch.randn(5, 4)
    with pytest.warns(RuntimeWarning, match="takes a Holder that belongs to one trace only"):
        wrapped(x).sum().backward()
    plain(x).sum().backward()
    assert_same_gradients(ours, plain)


def test_random_operators_draw_the_same_again() -> None:
    library = torch.library.Library("escape_random", "DEF")
    library.define("noise(Tensor x) -> Tensor")
    library.impl("noise", lambda x: x * torch.rand_like(x), "CPU")
    torch.library.register_fake("escape_random::noise", torch.empty_like, lib=library)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            factor = torch.ops.escape_random.noise(x)
            return self.w * factor, (self.w * 2).sum()

    module = Two()
    made, _ = ORTModule(module)(torch.rand(4))
    made.sum().backward()  # the backward of the other output was expected
    torch.testing.assert_close(module.w.grad, made.detach())
    library._destroy()


def test_other_threads_call_their_functions_during_a_capture() -> None:
    stop = threading.Event()
    wrong: list[Exception] = []

    def work() -> None:
        x = torch.ones(3, requires_grad=True)
        while not stop.is_set():
            try:
                TripledGradient.apply(x).sum().backward()
            except Exception as error:
                wrong.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(3):
            ORTModule(Block(nested))(torch.randn(5, 4))
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_copies_have_functions_of_their_own() -> None:
    _, _, wrapped = pair(scaled)
    x = torch.randn(5, 4)
    expected = wrapped(x).detach()
    twin = copy.deepcopy(wrapped)
    del wrapped
    gc.collect()
    torch.testing.assert_close(twin(x).detach(), expected)


def test_threads() -> None:
    _, _, wrapped = pair(nested)
    x = torch.randn(5, 4)
    expected = wrapped(x).detach()
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(20):
            out = wrapped(x)
            out.sum().backward()
            results.append(out.detach())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    for result in results:
        torch.testing.assert_close(result, expected)


@pytest.mark.slow
def test_graphs_with_functions_are_not_kept_on_disk(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path))
    ORTModule(Block(bessel))(torch.randn(5, 4))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    again = ORTModule(Block(bessel))
    again(torch.randn(5, 4))
    assert not again.report().captures[0].from_disk

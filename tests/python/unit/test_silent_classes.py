# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Classes of modules on which a graph could silently differ from PyTorch, each step against it."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.errors import ShapeError

told: list[str] = []


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.register_buffer("meter", torch.zeros(()))


@pytest.fixture(autouse=True)
def without_warnings() -> Iterator[None]:
    told.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def steps(model: nn.Module, inputs: list[Any], after: Callable[[], Any] = lambda: None) -> Any:
    """Return the result, the gradients and buffers and what ``after`` gives, or the error, of each step."""
    seen: list[Any] = []
    for given in inputs:
        model.zero_grad()
        args = [
            t.clone().requires_grad_(t.is_floating_point()) if isinstance(t, torch.Tensor) else t
            for t in (given if isinstance(given, tuple) else (given,))
        ]
        try:
            result = model(*args)
            result.sum().backward()
        except (RuntimeError, AssertionError, IndexError, ValueError) as error:
            seen.append(type(error).__name__)
        else:
            seen += [result.detach().clone(), *(a.grad for a in args if torch.is_tensor(a))]
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen += [b.clone() for b in model.buffers()]
        seen.append(copy.deepcopy(after()))
    return seen


def assert_like_pytorch(
    module: nn.Module, inputs: list[Any], after: Callable[[], Any] = lambda: None
) -> ORTModule:
    """Assert that each step leaves what PyTorch's leaves; return the wrapped module."""
    plain = copy.deepcopy(module)
    expected = steps(plain, inputs, after)
    told.clear()
    wrapped = ORTModule(module)
    actual = steps(wrapped, inputs, after)
    assert len(actual) == len(expected)
    for mine, theirs in zip(actual, expected, strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs)
        else:
            assert mine == theirs
    return wrapped


def native_share(wrapped: ORTModule) -> float:
    return wrapped.report().native_share


# --- autograd functions


class Tells(torch.autograd.Function):
    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Tells.runs += 1
        told.append("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        told.append("backward")
        return gradient


class CountsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, meter: torch.Tensor) -> torch.Tensor:
        ctx.meter = meter
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.meter.add_(gradient.abs().sum())
        return gradient * 2, None


class NeedsContentsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 if float(gradient.sum()) > 0 else gradient


def test_effects_of_an_autograd_function_come_once_per_call() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Tells.apply(self.linear(x))

    runs = Tells.runs
    wrapped = assert_like_pytorch(Net(), [torch.randn(n, 4) for n in (3, 5, 3)], lambda: told)
    assert told == ["forward", "backward"] * 3
    assert Tells.runs == runs + 6
    assert 0 < native_share(wrapped) < 1


def test_a_forward_that_reads_what_an_autograd_function_changes() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Tells.apply(self.linear(x)) * len(told)

    assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)], lambda: told)


def test_effects_of_an_autograd_function_whose_result_is_not_used() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Tells.apply(x)
            return self.linear(x)

    assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)], lambda: told)


def test_a_backward_that_writes_to_a_buffer_runs_in_pytorch() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return CountsInBackward.apply(self.linear(x), self.meter)

    wrapped = assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)])
    assert "writes to an argument of its forward" in wrapped.report().captures[0].fallback


def test_a_backward_that_needs_contents_stays_a_node() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return NeedsContentsInBackward.apply(self.linear(x))

    wrapped = assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(3)])
    assert 0 < native_share(wrapped) < 1


# --- what PyTorch raises


@pytest.mark.since_torch(2, 12)
def test_an_assert_on_values_raises_what_it_says() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.min() > 0, "not positive"
            return self.linear(x)

    wrapped = assert_like_pytorch(Net(), [torch.rand(3, 4) + shift for shift in (2, 2, -9, 2)])
    assert native_share(wrapped) > 0
    with pytest.raises(AssertionError, match="not positive"):
        wrapped(-torch.ones(3, 4))


@pytest.mark.parametrize("check", ["async", "scalar"])
def test_a_check_of_values_is_not_lost(check: str) -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if check == "async":
                torch._assert_async(x.max() < 5)
            else:
                torch._check(int(x.max()) < 5)
            return self.linear(x)

    wrapped = assert_like_pytorch(Net(), [torch.rand(3, 4) + shift for shift in (0, 0, 9, 0)])
    with pytest.raises(RuntimeError):
        wrapped(torch.full((3, 4), 9.0))


def test_a_check_of_sizes_leaves_the_graph_whole() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(x.shape[0] < 9)
            return self.linear(x)

    wrapped = assert_like_pytorch(Net(), [torch.rand(n, 4) for n in (3, 5)])
    assert native_share(wrapped) == 1
    with pytest.raises(ShapeError, match="cannot take 'x' float32"):
        wrapped(torch.rand(10, 4))


def test_a_buffer_is_written_up_to_what_raises() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            self.meter += 1
            y = self.linear(x)[ids]
            self.meter += 1
            return y

    inputs = [(torch.randn(3, 4), torch.tensor([0, last])) for last in (2, 2, 3, 2)]
    wrapped = assert_like_pytorch(Net(), inputs)
    assert native_share(wrapped) == 1
    assert wrapped.meter == 7


def test_an_inference_tensor_is_no_input_of_a_training() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    wrapped = ORTModule(Net())
    wrapped(torch.randn(3, 4)).sum().backward()
    with torch.inference_mode():
        made = wrapped(torch.randn(3, 4))
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        wrapped(made)
    with torch.no_grad():
        torch.testing.assert_close(wrapped(made), wrapped.linear(made).tanh())


# --- values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("operator", [torch.sign, torch.sgn])
def test_sign_of_nan_and_zeros(operator: Any, dtype: torch.dtype) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return operator(x)

    x = torch.tensor([float("nan"), -float("inf"), float("inf"), 0.0, -0.0, -2.0, 3.0], dtype=dtype)
    wrapped = assert_like_pytorch(Net(), [x, x])
    assert native_share(wrapped) == 1
    assert not torch.signbit(wrapped(x)[:5][[0, 3, 4]]).any()


@pytest.mark.parametrize(
    "clamp",
    [
        lambda x: x.clamp(-3.5e38, 3.5e38),
        lambda x: x.clamp_min(-3.5e38),
        lambda x: x.clamp_max(1e39),
        lambda x: x.half().clamp(max=1e5).float(),
        lambda x: x.clamp(-float("inf"), 0.5),
    ],
)
def test_bounds_beyond_the_dtype(clamp: Any) -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return clamp(self.linear(x))

    assert_like_pytorch(Net(), [torch.randn(3, 4), torch.randn(3, 4)])


# --- the module's class


def test_a_call_of_the_class_goes_around_the_forward_once() -> None:
    class Net(Linear):
        def __call__(self, *args: Any) -> torch.Tensor:
            return super().__call__(*args) * 2 + 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    wrapped = assert_like_pytorch(Net(), [torch.randn(n, 4) for n in (3, 5)])
    assert native_share(wrapped) == 1


# --- memory


def test_a_queue_that_is_written_after_it_was_cloned() -> None:
    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", torch.randn(6, 4))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            logits = y @ self.queue.clone().detach().t()
            at = int(self.pointer)
            self.queue[at : at + x.shape[0]] = y.detach()
            self.pointer[0] = (at + x.shape[0]) % 6
            return logits

    assert_like_pytorch(Net(), [torch.randn(2, 4) for _ in range(5)])


@pytest.mark.parametrize("cloned", [True, False])
def test_a_buffer_written_between_forward_and_backward(cloned: bool) -> None:
    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("keys", torch.randn(5, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) @ (self.keys.t().clone() if cloned else self.keys.t())

    plain = Net()
    untouched, wrapped = copy.deepcopy(plain), ORTModule(copy.deepcopy(plain))
    untouched(torch.ones(3, 4)).sum().backward()
    for model in (plain, wrapped):
        result = model(torch.ones(3, 4)).sum()
        with torch.no_grad():
            model.keys.zero_()
        if model is plain and not cloned:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                result.backward()
        else:  # the engine may have kept what it reads
            result.backward()
    torch.testing.assert_close(wrapped.linear.weight.grad, untouched.linear.weight.grad)
    assert native_share(wrapped) == 1


def _add(x: torch.Tensor) -> None:
    windows = x.unfold(1, 1, 5)
    windows.add_(windows)


def _fill(x: torch.Tensor) -> None:
    x.view(-1).unfold(0, 3, 8).index_fill_(0, torch.tensor([0, 2]), 7.0)


def _add_in_a_region(x: torch.Tensor) -> None:
    windows = x.unfold(1, 2, 3)
    with torch.no_grad():
        windows[0].mul_(3)


@pytest.mark.parametrize("write", [_add, _fill, _add_in_a_region])
def test_writes_through_windows(write: Callable[[torch.Tensor], None]) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * 1
            write(x.detach())
            return x * self.scale

    wrapped = assert_like_pytorch(Net(), [torch.randn(4, 6) for _ in range(2)])
    assert "shows memory more than once, or in part" in wrapped.report().captures[0].fallback


def test_reads_through_windows_of_a_written_tensor_stay_in_the_graph() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            y.mul_(2)
            return y.unfold(1, 2, 2)

    wrapped = assert_like_pytorch(Net(), [torch.randn(3, 4) for _ in range(2)])
    assert native_share(wrapped) == 1


# --- results


@dataclasses.dataclass
class Output:
    logits: torch.Tensor
    extra: dict[str, Any]


def test_a_container_of_the_caller_comes_back_itself() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor, extra: dict[str, Any]) -> Output:
            return Output(self.linear(x), extra)

    wrapped = ORTModule(Net())
    for rows in (3, 3, 5):
        x, extra = torch.randn(rows, 4), {"rows": rows}
        output = wrapped(x, extra)
        assert output.extra is extra
        torch.testing.assert_close(output.logits, wrapped.linear(x))


def test_a_container_of_the_module_comes_back_itself() -> None:
    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.names = ["a"]

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
            return self.linear(x), self.names

    wrapped = ORTModule(Net())
    for _ in range(3):
        assert wrapped(torch.randn(3, 4))[1] is wrapped.names


def test_a_container_made_in_the_forward_is_made_by_a_graph() -> None:
    class Net(Linear):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"all": [self.linear(x)], "names": ["a"]}

    wrapped = ORTModule(Net())
    results = [wrapped(torch.randn(3, 4)) for _ in range(2)]
    assert results[0]["names"] == ["a"] and results[0]["names"] is not results[1]["names"]
    assert native_share(wrapped) == 1


def test_a_generator_runs_when_it_is_asked() -> None:
    class Net(Linear):
        def parts(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            told.append("begun")
            yield self.linear(x)
            return "done"  # type: ignore[return-value]

        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            return self.parts(x)

    wrapped = ORTModule(Net())
    for number in range(3):
        x = torch.randn(3, 4)
        parts = wrapped(x)
        assert told == ["begun"] * number
        torch.testing.assert_close(next(parts), wrapped.linear(x))
        with pytest.raises(StopIteration) as stopped:
            next(parts)
        assert stopped.value.value == "done"


def test_methods_of_a_local_class_write_to_variables_around_it() -> None:
    log: list[int] = []

    class Meter:
        def touch(self, rows: int) -> None:
            log.append(rows)

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Meter().touch(x.shape[0])
            return self.linear(x) * len(log)

    wrapped = ORTModule(Net())
    for step, rows in enumerate((3, 3, 5, 3)):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(wrapped(x), wrapped.linear(x) * (step + 1))
    assert log == [3, 3, 5, 3]

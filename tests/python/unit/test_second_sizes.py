# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Calls of sizes that a graph holds for and does not run: PyTorch is asked before the user is."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import ortrain
from ortrain import ORTModule, _core, forward_and_backward, pieces, step
from ortrain.random_numbers import GeneratorStates

pytestmark = pytest.mark.filterwarnings("ignore:.*of its operators run in PyTorch")
Refuse = Any


class Net(nn.Module):
    """A norm that counts, a draw, and a check of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.fc(x))
        torch._check(y.shape[0] < 60, lambda: "too many rows")
        return y * torch.rand_like(y)


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(count))


def pair(**options: Any) -> tuple[nn.Module, ORTModule]:
    model = Net()
    return copy.deepcopy(model), ORTModule(model, **options)


def agree(plain: nn.Module, ours: nn.Module, x: torch.Tensor) -> None:
    seen = []
    for m in (plain, ours):
        m.zero_grad()
        torch.manual_seed(5)
        result = m(x)
        if result.requires_grad:
            result.square().sum().backward()
        gradients = [p.grad for p in m.parameters()]
        buffers = [b.clone() for b in m.buffers()]
        seen.append([result.detach(), gradients, buffers, torch.get_rng_state()])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-3, atol=2e-4)


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Iterator[Refuse]:
    """Let graphs of any size fail for some numbers of rows, after they have drawn."""
    run = step._run_forward
    bad: dict[int, Exception] = {}
    failed: list[int] = []

    def run_or_fail(entry: Any, inputs: Any, *rest: Any) -> Any:
        done = run(entry, inputs, *rest)
        users = [i for (k, _), i in zip(entry.tensors, inputs, strict=False) if k == "user"]
        count = users[0].shape[0]
        if count in bad and (not entry.fixed or bad.get(-count)):
            failed.append(count)
            raise bad[count]
        return done

    monkeypatch.setattr(step, "_run_forward", run_or_fail)
    bad_and_failed = (bad, failed)
    yield bad_and_failed


ERRORS = [
    _core.ShapeError("extents 3 and 4 do not fit"),
    _core.UnsupportedError("no kernel"),
    _core.DTypeError("float64"),
    _core.InvalidModelError("a cycle"),
    RuntimeError("a node of PyTorch"),
]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("training", [True, False])
def test_pytorch_runs_the_call_and_nothing_has_happened_before(
    refuse: Refuse, error: Exception, training: bool
) -> None:
    plain, ours = pair()
    plain.train(training), ours.train(training)
    agree(plain, ours, rows(6))
    bad, failed = refuse
    bad[5] = error
    with pytest.warns(RuntimeWarning, match=f"runs in PyTorch, not in Ortrain: {error}"):
        agree(plain, ours, rows(5))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not in Ortrain")
        for count in (6, 5, 5, 7):
            agree(plain, ours, rows(count))
    assert failed == [5]  # the second time there is a graph of its own
    records = ours.report().captures
    assert [bool(r.fallback) for r in records] == [False, True, False]
    assert records[2].reason == "sizes that another graph does not run"


def test_sizes_that_their_own_graph_does_not_run_stay_in_pytorch(refuse: Refuse) -> None:
    plain, ours = pair()
    agree(plain, ours, rows(6))
    bad, failed = refuse
    bad[5] = _core.ShapeError("no")
    bad[-5] = bad[5]
    with pytest.warns(RuntimeWarning, match="no"):
        for _ in range(5):
            agree(plain, ours, rows(5))
    assert failed == [5, 5]
    agree(plain, ours, rows(6))
    assert ours.report().captures[-1].native_nodes > 0


def test_many_such_sizes_cost_few_captures(refuse: Refuse) -> None:
    plain, ours = pair()
    agree(plain, ours, rows(30))
    bad, _ = refuse
    bad.update({count: _core.ShapeError(f"{count} rows") for count in range(2, 12)})
    with pytest.warns(RuntimeWarning) as caught:
        for count in [*range(2, 12)] * 3:
            agree(plain, ours, rows(count))
    assert len([w for w in caught if "not in Ortrain" in str(w.message)]) == 1
    captures = [r for r in ours.report().captures if not r.fallback]
    assert len(captures) == 5
    agree(plain, ours, rows(30))
    assert len([r for r in ours.report().captures if not r.fallback]) == 5


@pytest.mark.parametrize("error", [_core.ShapeError("clear"), _core.UnsupportedError("clear")])
def test_where_pytorch_raises_too_the_argument_is_named(
    refuse: Refuse, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, ours = pair()
    ours(rows(6))
    bad, _ = refuse
    bad[5] = error

    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view(7)  # which PyTorch refuses

    monkeypatch.setattr(type(ours.module), "forward", lambda self, x: forward(x))
    with pytest.raises(ortrain.ShapeError, match=r"'x' float32\[5, 3\]: shape '\[7\]' is invalid"):
        ours(rows(5))


def test_errors_about_the_machine_are_shown(refuse: Refuse) -> None:
    _, ours = pair()
    ours(rows(6))
    bad, _ = refuse
    bad[5] = _core.OutOfMemoryError("all of it")
    with pytest.raises(ortrain.OutOfMemoryError, match="all of it"):
        ours(rows(5))


def test_a_strict_user_sees_the_error(refuse: Refuse, monkeypatch: pytest.MonkeyPatch) -> None:
    _, ours = pair()
    ours(rows(6))
    monkeypatch.setenv("ORTRAIN_STRICT", "1")
    bad, _ = refuse
    bad[5] = _core.ShapeError("as it is")
    with pytest.raises(ortrain.ShapeError, match="as it is"):
        ours(rows(5))


def test_a_backward_that_the_engine_refuses_runs_in_pytorch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, ours = pair()
    agree(plain, ours, rows(6))

    def refuse(self: Any, backward: Any, gradients: Any, given: Any) -> None:
        raise _core.ShapeError("no backward")

    monkeypatch.setattr(forward_and_backward.Pass, "_make", refuse)
    with pytest.warns(RuntimeWarning, match="no backward"):
        agree(plain, ours, rows(5))
    assert "the backward" in str(ours.report())


def test_states_of_the_generators_are_those_before(refuse: Refuse) -> None:
    _, ours = pair()
    ours(rows(6))
    bad, _ = refuse
    bad[5] = _core.ShapeError("no")
    before = GeneratorStates(torch.device("cpu"))
    counter = ours.norm.num_batches_tracked
    version = counter._version
    with pytest.warns(RuntimeWarning, match="no"):
        ours(rows(5))
    assert counter == 2 and counter._version == version + 1
    state = torch.get_rng_state()
    before.restore()
    torch.rand(5, 4)
    assert torch.equal(torch.get_rng_state(), state)


def test_shapes_that_do_not_fit_print_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    class Adds(nn.Module):
        def __init__(self, cut: bool) -> None:
            super().__init__()
            self.fc, self.cut = nn.Linear(3, 4), cut

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            z = self.fc(x)
            if self.cut and z.sum() > 1e9:
                z = -z
            return z + y

    for cut in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for first in (True, False):
                ours = ORTModule(Adds(cut))
                if not first:
                    ours(rows(2), torch.ones(2, 4))
                with pytest.raises(RuntimeError, match="must match the size of tensor"):
                    ours(rows(2), torch.ones(3, 4))
                with pytest.raises(RuntimeError, match="mat1 and mat2"):
                    ours(torch.ones(2, 7), torch.ones(2, 4))
    written = capfd.readouterr()
    assert "Traceback" not in written.err and "torch/" not in written.err, written.err


@pytest.mark.since_torch(2, 12)
@pytest.mark.parametrize("writes", [False, True])
def test_pieces_that_raise_where_pytorch_does_not(
    writes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return -y if y.sum() > 1e9 else y

    def run(self: Any, args: Any, kwargs: Any) -> None:
        torch.rand(3)
        if writes:
            self._module.norm.num_batches_tracked.add_(1)
        raise RuntimeError("as it is traced")

    monkeypatch.setattr(pieces.Pieces, "run", run)
    model = Cut()
    plain, ours = copy.deepcopy(model), ORTModule(model)
    if writes:  # PyTorch would count once more
        with pytest.raises(RuntimeError, match="^as it is traced$") as raised:
            ours(rows(3))
        assert type(raised.value) is RuntimeError
        return
    with pytest.warns(RuntimeWarning, match="as it is traced"):
        for count in (3, 5, 3, 4):
            agree(plain, ours, rows(count))
    assert "its pieces raise where PyTorch does not" in str(ours.report())


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("where", ["argument", "attribute"])
def test_what_a_failing_forward_has_done_is_done_once(where: str) -> None:
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)
            self.seen: list[float] = []

        def forward(self, x: torch.Tensor, log: list[int]) -> torch.Tensor:
            y = self.layer(x)
            if y.sum() > 1e6:
                y = y / 2
            (log if where == "argument" else self.seen).append(1)
            if x.shape[0] == 4:
                raise ValueError("the user's own")
            return y * 2

    module = Fails()
    ours, log = ORTModule(module), []
    for rows in (4, 4, 2, 4, 3):
        x = torch.randn(rows, 3)
        if rows == 4:
            with pytest.raises(ValueError, match="the user's own"):
                ours(x, log)
        else:
            torch.testing.assert_close(ours(x, log), module.layer(x) * 2)
    assert log + module.seen == [1] * 5

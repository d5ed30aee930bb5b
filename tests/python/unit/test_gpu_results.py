# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Results on a GPU are tensors of PyTorch's own memory, as the simulator can give them too."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ortrain import ORTModule, ORTTrainer, _core, optim

pytestmark = pytest.mark.skipif(
    _core.gpu_platform() != "simulator", reason="this build has no simulator of the GPU provider"
)


@pytest.fixture(autouse=True)
def torch_results(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "1")
    _core.simulate_torch_results(True)
    yield
    _core.simulate_torch_results(False)


def is_torch_memory(tensor: torch.Tensor) -> bool:
    """Tell whether PyTorch's allocator made a tensor's memory: it can be resized then."""
    return tensor.untyped_storage().resizable()


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.head(torch.tanh(self.first(x)))
        return scores.logsumexp(-1).sum(), scores


def test_the_question_tells_them_apart() -> None:
    assert is_torch_memory(torch.empty(3))
    assert not is_torch_memory(torch.utils.dlpack.from_dlpack(torch.empty(3)))
    _core.simulate_torch_results(False)
    loss, _ = ORTModule(Scores())(torch.randn(4, 6))
    assert not is_torch_memory(loss)


def test_outputs_and_gradients_are_torch_memory() -> None:
    torch.manual_seed(0)
    plain = Scores()
    ours = ORTModule(copy.deepcopy(plain))
    for rows in (4, 2, 4):
        values = torch.randn(rows, 6)
        results = []
        for module in (plain, ours):
            module.zero_grad()
            x = values.clone().requires_grad_()
            loss, scores = module(x)
            (loss + scores.square().sum()).backward()
            results.append([loss, scores, x.grad, *(p.grad for p in module.parameters())])
        for expected, actual in zip(*results, strict=True):
            torch.testing.assert_close(actual, expected)
            assert is_torch_memory(actual)
            assert actual.is_contiguous()
    assert ours.report().native_share == 1.0, str(ours.report())


def test_no_result_outlives_its_last_reference() -> None:
    ours = ORTModule(Scores())
    gc.collect()
    gc.disable()
    try:
        # Neither without a backward, where the run goes on holding what it made.
        loss, scores = ours(torch.randn(4, 6))
        run = weakref.ref(loss.grad_fn)
        storages = [t.untyped_storage()._weak_ref() for t in (loss, scores)]
        del loss, scores
        assert run() is None
        for storage in storages:
            assert torch.UntypedStorage._expired(storage)
            torch.UntypedStorage._free_weak_ref(storage)
    finally:
        gc.enable()


def test_results_outlive_the_module() -> None:
    torch.manual_seed(0)
    plain = Scores()
    ours = ORTModule(copy.deepcopy(plain))
    x = torch.randn(4, 6)
    loss, scores = ours(x)
    loss.backward(retain_graph=True)
    loss.backward()
    gradients = [p.grad for p in ours.parameters()]
    del ours
    gc.collect()
    expected_loss, expected_scores = plain(x)
    (2 * expected_loss).backward()
    torch.testing.assert_close(scores, expected_scores)
    torch.testing.assert_close(loss, expected_loss)
    for actual, expected in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(actual, expected.grad)


def test_empty_results_and_other_types() -> None:
    class Kinds(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x * 2, x > 0, x.to(torch.bfloat16), x.argmax(-1), x.double()

    ours = ORTModule(Kinds())
    for rows in (0, 3):
        x = torch.randn(rows, 5, requires_grad=True)
        for actual, expected in zip(ours(x), Kinds()(x), strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected)
            assert is_torch_memory(actual)


def test_the_trainer_and_fused_optimizers() -> None:
    torch.manual_seed(0)
    description = {
        "inputs": [("x", ["n", 6]), ("target", ["n"])],
        "outputs": [("loss", [], True), ("scores", ["n", 3])],
    }
    trainer = ORTTrainer(
        nn.Linear(6, 3),
        description,
        optim.AdamConfig(lr=0.01, max_norm_clip=1.0),
        nn.functional.cross_entropy,
    )
    for result in trainer.train_step(torch.randn(4, 6), torch.tensor([0, 1, 2, 0])):
        assert is_torch_memory(result)
    parameter = nn.Parameter(torch.ones(5))
    parameter.grad = torch.full((5,), 2.0)
    optimizer = optim.FusedAdamW([parameter], max_grad_norm=1.0)
    optimizer.step()
    assert is_torch_memory(optimizer.grad_norm)
    assert optimizer.grad_norm.item() == pytest.approx(20**0.5)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""FP16_Optimizer with the optimizers of DeepSpeed, and classes like those of Megatron-LM and Apex."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import types
from typing import Any

import pytest
import torch

from ortrain.optim import FP16_Optimizer

# In a process of its own: DeepSpeed sets up torch.distributed, and its accelerator for the CPU says
# that it has no float16.
DEEPSPEED = """
import json, math, os, sys
import torch
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
import torch.distributed
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
import deepspeed
from deepspeed.accelerator import get_accelerator
from ortrain import ORTModule
from ortrain.optim import FP16_Optimizer

get_accelerator().is_fp16_supported = lambda: True
# Its collectives over shared memory would be compiled first, for most of a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")

def train(stage, ours):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 4))
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), 1e-2),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.1,
            "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 3, "hysteresis": 1},
        },
    )
    calls = []
    if ours:
        same = FP16_Optimizer(optimizer)
        assert same is optimizer and engine.optimizer is optimizer
        for name in ("has_overflow_partitioned_grads_serial", "get_grad_norm_direct"):
            def counted(*args, _inner=getattr(optimizer, name), _name=name):
                calls.append(_name)
                return _inner(*args)
            setattr(optimizer, name, counted)
    trace = []
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(4, 6, generator=generator).half()
        if step in (2, 6):
            x[1, 2] = math.inf
        engine.backward(engine(x).float().square().sum())
        engine.step()
        trace.append([float(optimizer.loss_scale), bool(optimizer.overflow), engine.get_global_grad_norm()])
        trace[-1][2] = None if trace[-1][2] is None else float(trace[-1][2])
    return [trace, [p.float().tolist() for p in model.parameters()], sorted(set(calls))]

print("RESULT" + json.dumps([train(int(sys.argv[1]), ours) for ours in (True, False)]))
# Threads of a group that is there at the end of the process are seen to end it by an abort.
torch.distributed.destroy_process_group()
"""


def run_deepspeed(stage: int) -> Any:
    result = subprocess.run(
        [sys.executable, "-c", DEEPSPEED, str(stage)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    (line,) = [x for x in result.stdout.splitlines() if x.startswith("RESULT")]
    return json.loads(line.removeprefix("RESULT"))


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_trains_as_before(stage: int) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    (trace, parameters, calls), (expected, wanted, _) = run_deepspeed(stage)
    assert "get_grad_norm_direct" in calls and "has_overflow_partitioned_grads_serial" in calls
    assert [row[:2] for row in trace] == [row[:2] for row in expected]
    assert [row[1] for row in trace].count(True) == 2
    for (_, _, a), (_, _, b) in zip(trace, expected, strict=True):
        assert a == b or a == pytest.approx(b, rel=1e-3)
    for a, b in zip(parameters, wanted, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), rtol=2e-3, atol=2e-3)


class MegatronOptimizer:
    """The attributes and methods of Megatron-LM's FP16_Optimizer that matter here."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)

        def parameter(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            p = torch.randn(shape, generator=generator).to(dtype).requires_grad_()
            p.grad = torch.randn(shape, generator=generator).to(dtype)
            return p

        self.fp16_groups = [
            [parameter(3, 4, dtype=torch.float16)],
            [parameter(5, dtype=torch.half)],
        ]
        self.fp32_from_fp32_groups = [[parameter(2, dtype=torch.float32)]]
        self.fp32 = [p.detach().float().requires_grad_() for g in self.fp16_groups for p in g]
        for p, (half,) in zip(self.fp32, self.fp16_groups, strict=True):
            p.grad = half.grad.float()
        self.optimizer = torch.optim.SGD([*self.fp32, *self.fp32_from_fp32_groups[0]], 0.1)
        self.overflow = False

    def _check_overflow(self) -> bool:
        raise AssertionError("replaced")

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> float:
        params = [p for g in self.optimizer.param_groups for p in g["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type).item()


@pytest.fixture
def megatron() -> MegatronOptimizer:
    names = {"__module__": "megatron.fp16.fp16", "__qualname__": "FP16_Optimizer"}
    cls: type[MegatronOptimizer] = type("FP16_Optimizer", (MegatronOptimizer,), names)
    return cls()


def gradients(optimizer: MegatronOptimizer) -> list[torch.Tensor]:
    return [p.grad for g in optimizer.optimizer.param_groups for p in g["params"]]


@pytest.mark.parametrize("norm_type", [2, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_megatron_clips(megatron: MegatronOptimizer, max_norm: float, norm_type: float) -> None:
    other = MegatronOptimizer()
    expected = other.clip_master_grads(max_norm, norm_type)
    assert FP16_Optimizer(megatron) is megatron
    assert megatron._check_overflow() is False and megatron.overflow is False
    assert megatron.clip_master_grads(max_norm, norm_type) == pytest.approx(expected, rel=1e-6)
    for a, b in zip(gradients(megatron), gradients(other), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", ["half", "float"])
def test_megatron_sees_overflows(megatron: MegatronOptimizer, place: str, value: float) -> None:
    FP16_Optimizer(megatron)
    groups = megatron.fp16_groups if place == "half" else megatron.fp32_from_fp32_groups
    groups[-1][0].grad[1] = value
    assert megatron._check_overflow() is True and megatron.overflow is True
    before = [g.clone() for g in gradients(megatron)]
    assert megatron.clip_master_grads(0.5) == -1
    for a, b in zip(gradients(megatron), before, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


def test_megatron_with_parallel_layers(megatron: MegatronOptimizer) -> None:
    """On a rank other than 0 only what is split counts; the others hold the rest as well."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        megatron.fp32[0].model_parallel = True
        FP16_Optimizer(
            megatron,
            get_tensor_model_parallel_rank=lambda: 1,
            get_tensor_model_parallel_group=lambda: None,
        )
        expected = megatron.fp32[0].grad.norm().item()
        rest = megatron.fp32[1].grad.clone()
        assert megatron.clip_master_grads(0.5) == pytest.approx(expected, rel=1e-6)
        torch.testing.assert_close(megatron.fp32[1].grad, rest * (0.5 / (expected + 1e-6)))
    finally:
        torch.distributed.destroy_process_group()


class ApexOptimizer(torch.optim.SGD):
    """What amp.initialize at level O2 makes of an optimizer."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(2)
        half = [torch.randn(n, generator=generator).half().requires_grad_() for n in (3, 4)]
        wide = [p.detach().float().requires_grad_() for p in half]
        own = torch.randn(5, generator=generator).requires_grad_()
        super().__init__([*wide, own], 0.1)
        self._amp_stash = types.SimpleNamespace(
            all_fp16_params=half,
            all_fp32_from_fp16_params=wide,
            all_fp32_from_fp32_params=[own],
            all_fp32_from_fp32_grad_stash=[None],
        )
        self.initialized = 0

    def _amp_lazy_init(self) -> None:
        self.initialized += 1

    def _post_amp_backward(self, scaler: Any) -> None:
        raise AssertionError("replaced")


class ApexScaler:
    """Apex's LossScaler as its optimizers see it."""

    def __init__(self) -> None:
        self._has_overflow = False
        self._overflow_buf = torch.zeros(1, dtype=torch.int32)

    def loss_scale(self) -> float:
        return 128.0


def test_apex_unscales_into_float32() -> None:
    optimizer, scaler = ApexOptimizer(), ApexScaler()
    assert FP16_Optimizer(optimizer) is optimizer
    stash = optimizer._amp_stash
    first, second = stash.all_fp16_params
    (own,) = stash.all_fp32_from_fp32_params
    first.grad = torch.tensor([128.0, 256.0, 64.0]).half()
    own.grad = torch.full((5,), 384.0)
    optimizer._post_amp_backward(scaler)
    assert not scaler._has_overflow
    wide = stash.all_fp32_from_fp16_params
    torch.testing.assert_close(wide[0].grad, torch.tensor([1.0, 2.0, 0.5]))
    assert wide[1].grad is None
    torch.testing.assert_close(own.grad, torch.full((5,), 3.0))
    # A second backward adds to what is there.
    second.grad = torch.full((4,), 128.0).half()
    stash.all_fp32_from_fp32_grad_stash[0], own.grad = own.grad, torch.full((5,), 128.0)
    optimizer._post_amp_backward(scaler)
    torch.testing.assert_close(wide[0].grad, torch.tensor([2.0, 4.0, 1.0]))
    torch.testing.assert_close(own.grad, torch.full((5,), 4.0))
    first.grad[1] = math.inf
    optimizer._post_amp_backward(scaler)
    assert scaler._has_overflow and scaler._overflow_buf.item() == 1
    optimizer.zero_grad(set_to_none=False)
    assert not first.grad.any() and wide[0].grad is None
    optimizer.zero_grad()
    assert first.grad is None and own.grad is None


def test_others_come_back_with_a_warning(megatron: MegatronOptimizer) -> None:
    plain = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    with pytest.warns(UserWarning, match=r"knows nothing of torch\.optim\.sgd\.SGD"):
        assert FP16_Optimizer(plain) is plain
    megatron.clip_master_grads = None  # type: ignore[assignment]
    with pytest.warns(UserWarning, match="has no clip_master_grads; it stays as it is"):
        assert FP16_Optimizer(megatron) is megatron
    with pytest.raises(TypeError, match="got 'static_loss_scale'"):
        FP16_Optimizer(plain, static_loss_scale=1.0)
    with pytest.raises(TypeError, match="expected a function without arguments"):
        FP16_Optimizer(plain, get_tensor_model_parallel_rank=3)

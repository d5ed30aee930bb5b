# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Masks that models make of positions: attention is causal by itself, whatever the sizes."""

import copy
import importlib.util

import pytest
import torch

from ortrain import ORTModule
from ortrain.testing.models import CASES


def graph_text(model: torch.nn.Module) -> str:
    programs = model._ortrain_engine.made_programs()
    return "\n".join(program.graph.text() for _, program in programs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("padding", ["none", "right", "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_causal_models_need_no_mask_of_queries_times_keys(name: str, padding: str) -> None:
    case = CASES[name]
    if importlib.util.find_spec(case.needs) is None:
        pytest.fail(f"package {case.needs} is missing: run make setup")
    plain = case.build()
    ours = ORTModule(copy.deepcopy(plain))
    for rows, length in ((2, 7), (3, 12)):
        batch = case.batch(rows, length, 0)
        mask = torch.ones(rows, length, dtype=torch.int64)
        if padding == "right":
            mask[0, -3:] = 0
        elif padding == "left":
            mask[0, :3] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["labels"].where(mask.bool(), -100)
        losses = []
        for model in (ours, plain):
            model.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        for p, q in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    text = graph_text(ours)
    assert "is_causal = 1" in text and "is_causal = 0" not in text
    # What is left of the mask says which keys are padding, to all queries the same.
    assert "LessOrEqual" not in text

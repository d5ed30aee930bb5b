# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the guards of a step cost: flattening the call, looking at the module, finding the graph."""

from __future__ import annotations

import statistics
import time

import torch

from ortrain import ORTModule

BAR_MICROSECONDS = 60
_ROUNDS = 2000


def check_microseconds() -> float:
    """Return the median time, over 2000 calls, of finding the graph of BERT-base's step, in µs."""
    import transformers

    # All layers and parameters of BERT-base, narrow: guards look at tensors, not into them.
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=48, num_attention_heads=12, intermediate_size=96
    )
    model = ORTModule(transformers.BertForSequenceClassification(config).train())
    batch = {
        "input_ids": torch.randint(0, 64, (2, 16)),
        "attention_mask": torch.ones(2, 16, dtype=torch.int64),
        "labels": torch.tensor([0, 1]),
    }
    for _ in range(2):
        model(**batch).loss.backward()
    engine = model._ortrain_engine
    times = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        call = engine.signature.flatten((), batch)
        engine._look_at_module()
        entry = engine._graphs.find(engine._key(call), call)
        times.append(time.perf_counter() - start)
        assert entry is not None
    return statistics.median(times) * 1e6

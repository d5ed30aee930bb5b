# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Seq2SeqTrainer on the engine."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

from ortrain.hf.trainer import ORTTrainer
from ortrain.hf.training_args import ORTTrainingArguments


@dataclasses.dataclass
class ORTSeq2SeqTrainingArguments(ORTTrainingArguments, Seq2SeqTrainingArguments):
    """Seq2SeqTrainingArguments, with the options of ``ORTTrainingArguments``."""


class ORTSeq2SeqTrainer(ORTTrainer, Seq2SeqTrainer):
    """Seq2SeqTrainer that trains on the Ortrain engine.

    Arguments are those of Seq2SeqTrainer. ``generate`` runs in PyTorch: each of its steps has other
    shapes and a cache that it changes.
    """

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Seq2SeqTrainer's; generates in the training's precision, as a prepared model does."""
        if not self.args.predict_with_generate:
            return super().prediction_step(*args, **kwargs)
        with self.accelerator.autocast():
            return super().prediction_step(*args, **kwargs)

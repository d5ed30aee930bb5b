# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer on the Ortrain engine.

``ORTTrainer`` and ``ORTTrainingArguments`` take the places of ``Trainer`` and ``TrainingArguments``.
They need ``transformers`` and ``accelerate``.
"""

from ortrain.hf.module_with_loss import LossLayer, ModuleWithLoss
from ortrain.hf.seq2seq import ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments
from ortrain.hf.trainer import ORTTrainer, get_ort_optimizer_cls_and_kwargs
from ortrain.hf.training_args import ORTOptimizerNames, ORTTrainingArguments

__all__ = [
    "LossLayer",
    "ModuleWithLoss",
    "ORTOptimizerNames",
    "ORTSeq2SeqTrainer",
    "ORTSeq2SeqTrainingArguments",
    "ORTTrainer",
    "ORTTrainingArguments",
    "get_ort_optimizer_cls_and_kwargs",
]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Losses and training models of ONNX models, built of blocks in Python.

    class Training(onnxblock.TrainingBlock):
        def build(self, scores_name):
            return onnxblock.loss.CrossEntropyLoss()(scores_name)

    block = Training()
    block.requires_grad("fc.weight")
    with onnxblock.base(model):
        block("scores")
    training_model, eval_model = block.to_model_proto()
    with onnxblock.empty_base() as accessor:
        onnxblock.optim.AdamW()(block.parameters())
        optimizer_model = accessor.model

A block may be the ``loss`` of ``ortrain.artifacts.generate_artifacts`` too.
"""

from ortrain.onnxblock import blocks, loss, optim
from ortrain.onnxblock.base_model import base, empty_base
from ortrain.onnxblock.blocks import Block
from ortrain.onnxblock.training_blocks import (
    ForwardBlock,
    TrainingBlock,
    load_checkpoint_to_model,
    save_checkpoint,
)

__all__ = [
    "Block",
    "ForwardBlock",
    "TrainingBlock",
    "base",
    "blocks",
    "empty_base",
    "load_checkpoint_to_model",
    "loss",
    "optim",
    "save_checkpoint",
]

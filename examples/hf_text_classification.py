# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune MiniLM on Reuters R8 with ORTTrainer, where transformers' Trainer would stand.

    python examples/hf_text_classification.py --steps 100

Trains, evaluates, saves, exports the trained model to ONNX and evaluates the file.
"""

import argparse
import json
import logging
import pathlib
import tempfile
from typing import Any

import numpy as np
import torch
from reuters_r8 import load_data, load_model
from transformers import EvalPrediction, Trainer, TrainingArguments

from ortrain.hf import ORTTrainer, ORTTrainingArguments


def rows(split: Any, count: int) -> list[dict[str, Any]]:
    pairs = list(zip(split.token_ids, split.labels, strict=True))[:count]
    return [{"input_ids": ids, "labels": label} for ids, label in pairs]


def collate(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pad rows to the longest of them."""
    ids = [torch.tensor(row["input_ids"]) for row in given]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)  # [PAD] is 0
    lengths = torch.tensor([len(i) for i in ids])
    mask = torch.arange(padded.shape[1])[None, :] < lengths[:, None]
    labels = torch.tensor([row["labels"] for row in given])
    return {"input_ids": padded, "attention_mask": mask.long(), "labels": labels}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float(np.mean(prediction.predictions.argmax(-1) == prediction.label_ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--test-rows", type=int, default=400)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--plain", action="store_true", help="transformers' Trainer instead")
    parser.add_argument("--output", type=pathlib.Path, help="a folder; a temporary one by default")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.manual_seed(0)
    train, test, _ = load_data()
    folder = arguments.output or pathlib.Path(tempfile.mkdtemp())
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": arguments.steps,
        "per_device_train_batch_size": 16,
        "per_device_eval_batch_size": 64,
        "learning_rate": 1e-4,
        "logging_steps": 10,
        "bf16": arguments.bf16,
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
    }
    if arguments.plain:
        kind, args = Trainer, TrainingArguments(**options)
    else:
        kind, args = ORTTrainer, ORTTrainingArguments(**options, optim="adamw_ort_fused")
    trainer = kind(
        model=load_model(dropout=True),
        args=args,
        train_dataset=rows(train, len(train)),
        eval_dataset=rows(test, arguments.test_rows),
        data_collator=collate,
        compute_metrics=accuracy,
    )
    trained = trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    print(json.dumps(trained.metrics))
    print(f"accuracy {metrics['eval_accuracy']:.4f}, loss {metrics['eval_loss']:.4f}")
    if not arguments.plain:
        exported = trainer.evaluate(inference_with_ort=True)
        print(
            f"the ONNX file: accuracy {exported['eval_accuracy']:.4f}, "
            f"loss {exported['eval_loss']:.4f}"
        )
        print(trainer.model_wrapped.report())
    print(f"saved in {folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")


if __name__ == "__main__":
    main()

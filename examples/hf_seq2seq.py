# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Teach a small BART to read numbers: "four hundred and two" becomes "402", with ORTSeq2SeqTrainer.

    python examples/hf_seq2seq.py --steps 600

Trains from random weights, generates for numbers that it has not seen, and counts right answers.
"""

import argparse
import logging
import pathlib
import random
import tempfile
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import BartConfig, BartForConditionalGeneration, EvalPrediction

from ortrain.hf import ORTSeq2SeqTrainer, ORTSeq2SeqTrainingArguments

PAD, END, FIRST = 0, 1, 2  # token ids
_ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
]
_TENS = ["_", "_", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
# One token per word, and per digit of the answer.
VOCABULARY = [*"0123456789", *_ONES, *_TENS[2:], "and", "hundred", "thousand"]


def spelled(number: int) -> str:
    """Return a number below a million in English."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens] + (f" {_ONES[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {spelled(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    return f"{spelled(thousands)} thousand" + (f" {spelled(rest)}" if rest else "")


def tokens(words: Iterable[str]) -> list[int]:
    return [*(FIRST + VOCABULARY.index(word) for word in words), END]


def text_of(ids: list[int]) -> str:
    """Return the words up to the end token, joined."""
    ids = ids[: ids.index(END)] if END in ids else ids
    return "".join(VOCABULARY[i - FIRST] for i in ids if i >= FIRST)


def rows(numbers: list[int]) -> list[dict[str, list[int]]]:
    return [{"input_ids": tokens(spelled(n).split()), "labels": tokens(str(n))} for n in numbers]


def collate(given: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def padded(name: str, fill: int) -> torch.Tensor:
        values = [torch.tensor(row[name]) for row in given]
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True, padding_value=fill)

    ids = padded("input_ids", PAD)
    return {
        "input_ids": ids,
        "attention_mask": (ids != PAD).long(),
        "labels": padded("labels", -100),
    }


def exact_match(prediction: EvalPrediction) -> dict[str, float]:
    labels = np.where(prediction.label_ids == -100, PAD, prediction.label_ids)
    pairs = zip(prediction.predictions.tolist(), labels.tolist(), strict=True)
    return {"exact_match": float(np.mean([text_of(p[1:]) == text_of(q) for p, q in pairs]))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--limit", type=int, default=1000, help="numbers are below this")
    parser.add_argument("--test", type=int, default=100, help="how many are kept for the test")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    numbers = list(range(min(arguments.limit, 1_000_000)))
    random.Random(0).shuffle(numbers)
    test, train = numbers[: arguments.test], numbers[arguments.test :]
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=FIRST + len(VOCABULARY),
        d_model=96,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=192,
        decoder_ffn_dim=192,
        max_position_embeddings=32,
        dropout=0.1,
        pad_token_id=PAD,
        bos_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
    )
    args = ORTSeq2SeqTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        max_steps=arguments.steps,
        per_device_train_batch_size=32,
        per_device_eval_batch_size=50,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        logging_steps=max(1, arguments.steps // 10),
        predict_with_generate=True,
        generation_max_length=12,
        optim="adamw_ort_fused",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    trainer = ORTSeq2SeqTrainer(
        model=BartForConditionalGeneration(config),
        args=args,
        train_dataset=rows(train),
        eval_dataset=rows(test),
        data_collator=collate,
        compute_metrics=exact_match,
    )
    trained = trainer.train()
    metrics = trainer.evaluate()
    trainer.save_model()
    print(
        f"{trained.metrics['train_steps_per_second']:.1f} steps a second; of {len(test)} numbers "
        f"that it has not seen, {metrics['eval_exact_match'] * 100:.0f} % are read right"
    )
    predicted = trainer.predict(rows(test[:5])).predictions.tolist()
    for number, ids in zip(test, predicted, strict=False):
        print(f"  {spelled(number)} -> {text_of(ids[1:])}")
    print(trainer.model_wrapped.report())
    print(f"saved in {pathlib.Path(args.output_dir)}")


if __name__ == "__main__":
    main()

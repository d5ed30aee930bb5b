# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainers and models of libraries on a device."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu_all.programs.registry import (
    PROGRAMS,
    Net,
    Seen,
    Wrap,
    gradients_of,
    ids_of,
    kind_of,
    program,
)


@program
def lora_with_checkpointing(wrap: Wrap, device: str) -> Seen:
    """A small Llama with LoRA of peft and gradient checkpointing, in bfloat16 autocast."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    plain = get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    ).to(device)
    for name, p in plain.named_parameters():  # the second factor is zero at first
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    plain.gradient_checkpointing_enable({"use_reentrant": False})
    plain.train()
    model = wrap(plain)
    for step in range(3):
        ids = ids_of(device, step)
        with torch.autocast(kind_of(device), torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return gradients_of(plain, torch.bfloat16) | {"loss": float(loss.detach())}


def _tiny_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config)


def _rows() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(5)
    rows = []
    for index in range(48):
        length = 4 + index % 9
        ids = torch.randint(1, 50, (12,), generator=generator)
        mask = (torch.arange(12) < length).long()
        rows.append({"input_ids": ids * mask, "attention_mask": mask, "labels": index % 3})
    return rows


def _hugging_face(**options: Any) -> Callable[[Wrap, str], Seen]:
    def run(wrap: Wrap, device: str) -> Seen:
        from transformers import Trainer, TrainingArguments, set_seed

        from ortrain.hf import ORTTrainer, ORTTrainingArguments

        theirs, ours = (Trainer, TrainingArguments), (ORTTrainer, ORTTrainingArguments)
        trainer_class, arguments_class = ours if wrap.ours else theirs
        set_seed(3)
        model = _tiny_bert()
        with tempfile.TemporaryDirectory() as folder:

            def make(**more: Any) -> Any:
                arguments = arguments_class(
                    output_dir=folder,
                    per_device_train_batch_size=4,
                    learning_rate=1e-3,
                    logging_steps=1,
                    report_to=[],
                    disable_tqdm=True,
                    save_steps=6,
                    seed=7,
                    use_cpu=kind_of(device) == "cpu",
                    **{"max_steps": 12, **options, **more},
                )
                return trainer_class(model=model, args=arguments, train_dataset=_rows())

            trainer = make()
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            model = _tiny_bert()
            again = make(max_steps=14)
            again.train(resume_from_checkpoint=True)
            losses += [entry["loss"] for entry in again.state.log_history if "loss" in entry]
            seen: Seen = {f"loss {i}": round(float(loss), 3) for i, loss in enumerate(losses)}
            seen["metrics"] = round(float(again.evaluate(_rows()[:16])["eval_loss"]), 3)
        return seen

    return run


PROGRAMS["hugging_face"] = _hugging_face()
PROGRAMS["hugging_face_bf16"] = _hugging_face(bf16=True, gradient_accumulation_steps=2)
PROGRAMS["hugging_face_fp16"] = _hugging_face(fp16=True, max_grad_norm=0.5)


@program
def accelerated(wrap: Wrap, device: str) -> Seen:
    """accelerate's loop with float16 and accumulation."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = "fp16" if kind_of(device) == "cuda" else "bf16"
    accelerator = Accelerator(
        mixed_precision=mixed, gradient_accumulation_steps=2, cpu=kind_of(device) == "cpu"
    )
    plain = Net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(wrap(plain), optimizer)
    seen: Seen = {}
    for step in range(10):
        with accelerator.accumulate(model):
            loss = model(ids_of(str(accelerator.device), step))
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        seen[f"loss {step}"] = float(loss.detach())
    return seen


@program
def lightning(wrap: Wrap, device: str) -> Seen:
    """Lightning's Trainer with a network inside of the module wrapped."""
    try:
        import lightning.pytorch as pl
    except ImportError:
        import pytorch_lightning as pl

    losses: list[float] = []

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = wrap(Net())

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            loss = self.net(batch)
            losses.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    data = [ids_of("cpu", step) for step in range(8)]
    loader = torch.utils.data.DataLoader(data, batch_size=None)
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=2,
            accelerator="gpu" if kind_of(device) == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(Lit(), loader)
    return {f"loss {i}": round(loss, 2) for i, loss in enumerate(losses)}


@program
def trainer_of_2020(wrap: Wrap, device: str) -> Seen:
    """ORTTrainer with its loss and optimizer in one graph, against a loop."""
    from ortrain import ORTTrainer, ORTTrainerOptions, optim

    plain = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))
    ours = wrap.ours
    optimizer = torch.optim.AdamW(plain.to(device).parameters(), lr=1e-2, weight_decay=0.0)
    trainer: Any = None
    if ours:
        description = {
            "inputs": [("x", ["n", 12]), ("target", ["n"])],
            "outputs": [("loss", [], True), ("scores", ["n", 5])],
        }
        options = ORTTrainerOptions({"device": {"id": device}})
        trainer = ORTTrainer(
            plain, description, optim.AdamConfig(lr=1e-2), F.cross_entropy, options
        )
    seen: Seen = {}
    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 12, generator=generator).to(device)
        target = torch.randint(0, 5, (16,), generator=generator).to(device)
        if ours:
            loss = trainer.train_step(x, target)[0]
        else:
            loss = F.cross_entropy(plain(x), target)
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)  # as AdamConfig does by default
            optimizer.step()
            optimizer.zero_grad()
        seen[f"loss {step}"] = float(loss.detach())
    return seen


@program
def generated(wrap: Wrap, device: str) -> Seen:
    """generate() of a causal model, greedily, between steps of its training."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50, n_positions=64, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=49,
    )  # fmt: skip
    plain = GPT2LMHeadModel(config).to(device)
    model = wrap(plain)
    ids = ids_of(device)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    seen: Seen = {}
    for step in range(3):
        model.train()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        made = model.generate(ids[:, :5], max_new_tokens=8, do_sample=False, pad_token_id=49)
        seen[f"tokens {step}"] = made
        seen[f"loss {step}"] = float(loss.detach())
    return seen


@program
def images_of_timm(wrap: Wrap, device: str) -> Seen:
    """Two networks of timm."""
    import timm

    seen: Seen = {}
    for name, size in (("resnet18", 64), ("vit_tiny_patch16_224", 224)):
        plain = timm.create_model(name, num_classes=5).to(device)
        model = wrap(plain)
        for step in range(2):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(4, 3, size, size, generator=generator).to(device)
            F.cross_entropy(model(x), torch.arange(4, device=device)).backward()
        seen |= {f"{name} {key}": value for key, value in gradients_of(plain).items()}
    return seen

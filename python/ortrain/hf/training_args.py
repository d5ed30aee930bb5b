# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""TrainingArguments with the options of the engine."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

from transformers import TrainingArguments

from ortrain.memory_budget import MemoryBudget

_LOG_LEVELS = ("VERBOSE", "INFO", "WARNING", "ERROR", "FATAL")


class ORTOptimizerNames(str, enum.Enum):
    """Values of ``optim`` beside those of transformers."""

    ADAMW_ORT_FUSED = "adamw_ort_fused"


class EngineArguments:
    """What both kinds of arguments add; the fields themselves stand in the dataclasses."""

    optim: Any
    onnx_log_level: str
    max_memory: str | None

    def __post_init__(self) -> None:
        # transformers checks `optim` against a closed list.
        named = getattr(self.optim, "value", self.optim)
        ours = named == ORTOptimizerNames.ADAMW_ORT_FUSED.value
        if ours:
            self.optim = "adamw_torch"
        super().__post_init__()  # type: ignore[misc]
        if ours:
            self.optim = ORTOptimizerNames.ADAMW_ORT_FUSED.value
        if self.onnx_log_level not in _LOG_LEVELS:
            raise ValueError(
                f"onnx_log_level is {self.onnx_log_level!r}, expected one of {', '.join(_LOG_LEVELS)}"
            )
        # Command lines and JSON files give texts.
        given = self.max_memory
        if isinstance(given, str) and given.isdecimal():
            self.max_memory = int(given)  # type: ignore[assignment]
        MemoryBudget.parse(self.max_memory)
        if getattr(self, "torch_compile", False):
            raise ValueError(
                "torch_compile=True: the model runs on the Ortrain engine, which takes the place of "
                "torch.compile; leave it False"
            )

    def set_optimizer(self, name: Any = "adamw_torch", **options: Any) -> Any:
        """As TrainingArguments'; takes ``"adamw_ort_fused"`` too."""
        ours = getattr(name, "value", name) == ORTOptimizerNames.ADAMW_ORT_FUSED.value
        result = super().set_optimizer("adamw_torch" if ours else name, **options)  # type: ignore[misc]
        if ours:
            self.optim = ORTOptimizerNames.ADAMW_ORT_FUSED.value
        return result


@dataclasses.dataclass
class ORTTrainingArguments(EngineArguments, TrainingArguments):
    """TrainingArguments, with the options of the engine.

    Args:
      optim: As in transformers, and ``"adamw_ort_fused"``: AdamW in one pass over memory.
      use_module_with_loss: Compute a loss that the Trainer computes beside the model (label
        smoothing, ``compute_loss_func``) in the graph of the model.
      save_onnx: Write the graphs that the training ran as ONNX files into ``output_dir``, at its end.
      onnx_prefix: How the names of those files begin.
      onnx_log_level: What the engine logs while it captures: VERBOSE, INFO, WARNING, ERROR, FATAL.
      max_memory: What the plan of a step may take, as ORTModule's: bytes, "2GiB", "0.3x".

    Raises:
      ValueError: An option has no such value, or contradicts another one.
    """

    optim: str = dataclasses.field(
        default=TrainingArguments.__dataclass_fields__["optim"].default,
        metadata={"help": "The optimizer: one of transformers' or adamw_ort_fused."},
    )
    use_module_with_loss: bool = dataclasses.field(
        default=False,
        metadata={"help": "Whether a loss beside the model is computed in the model's graph."},
    )
    save_onnx: bool = dataclasses.field(
        default=False, metadata={"help": "Whether the graphs that ran are written as ONNX files."}
    )
    onnx_prefix: str | None = dataclasses.field(
        default=None, metadata={"help": "How the names of those files begin."}
    )
    onnx_log_level: str = dataclasses.field(
        default="WARNING",
        metadata={"help": "What the engine logs while it captures.", "choices": _LOG_LEVELS},
    )
    max_memory: str | None = dataclasses.field(
        default=None,
        metadata={
            "help": "What the plan of a step may take: bytes, 2GiB, or a share such as 0.3x."
        },
    )

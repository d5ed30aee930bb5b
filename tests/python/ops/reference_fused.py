# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Expression programs run over whole tensors in float64 with PyTorch."""

from __future__ import annotations

import numpy as np
import torch

from tests.python.ops.reference_elementwise import dropout_mask
from tests.python.ops.registry import reference

OPERATIONS = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "exp": torch.exp,
    "tanh": torch.tanh,
    "rsqrt": torch.rsqrt,
    "eq": torch.eq,
    "select": torch.where,
    "row_sum": lambda x: x.sum(-1, keepdim=True),
    "row_mean": lambda x: x.mean(-1, keepdim=True),
    "row_max": lambda x: x.amax(-1, keepdim=True),
    "row_min": lambda x: x.amin(-1, keepdim=True),
}
DTYPES = {"bfloat16": torch.bfloat16}


def dtype_of(name: str) -> torch.dtype:
    return DTYPES.get(name) or getattr(torch, name)


def register_dtype(name: str) -> torch.dtype:
    """Floats are held in float64 here, whatever the engine holds them in."""
    dtype = dtype_of(name)
    return torch.float64 if dtype.is_floating_point else dtype


class Machine:
    """Runs one program line by line."""

    def __init__(self, inputs: list, shape: tuple[int, ...]) -> None:
        self.inputs = inputs
        self.shape = shape
        self.registers: list[torch.Tensor] = []
        self.extents: list[str] = []  # "one", "row" or "full"

    def run(self, op: str, dtype: str, words: list[str]) -> tuple[torch.Tensor, str]:
        if op == "input":
            x = torch.from_numpy(np.ascontiguousarray(self.inputs[len(self.registers)]))
            per_row = words == ["per_row"]
            x = x.to(register_dtype(dtype))
            if not per_row and x.numel() != 1:
                x = x.expand(self.shape)
            return x, "row" if per_row else "full"
        if op == "constant":
            return torch.tensor(float(words[0])).to(register_dtype(dtype)), "one"
        operands = [int(word[1:]) for word in words if word.startswith("%")]
        values = [self.registers[i] for i in operands]
        extent = max((self.extents[i] for i in operands), key=["one", "row", "full"].index)
        if op in ("dropout", "dropout_mask"):
            ratio, stream = float(words[-3]), int(words[-1])
            kept = torch.from_numpy(dropout_mask(self.shape, int(values[-1]), ratio, stream))
            if op == "dropout_mask":
                return kept, "full"
            return values[0] * kept / (1.0 - ratio), "full"
        if op == "cast":
            return values[0].to(register_dtype(dtype)), extent
        if op.startswith("row_"):
            return OPERATIONS[op](values[0].expand(self.shape)), "row"
        return OPERATIONS[op](*values), extent


@reference("ortrain::Fused")
def fused(inputs: list, attrs: dict) -> list[np.ndarray]:
    shape = np.broadcast_shapes(*(x.shape for x in inputs))
    machine = Machine(inputs, shape)
    outputs = []
    for line in attrs["program"].splitlines()[1:]:
        words = line.split()
        if words[0] == "output":
            reg = int(words[1][1:])
            full = machine.extents[reg] == "full"
            result = machine.registers[reg].expand(shape if full else (*shape[:-1], 1))
            result = result.to(dtype_of(words[2]))
            outputs.append((result.float() if result.dtype == torch.bfloat16 else result).numpy())
            continue
        register, extent = machine.run(words[2], words[3], words[4:])
        machine.registers.append(register)
        machine.extents.append(extent)
    return outputs

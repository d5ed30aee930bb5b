# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Layers on the rows that a call needs: padding is left out of [batch, length, ...] values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ortrain import _core, devices

# On a device, after a call whose rows were all needed.
_CALLS_BETWEEN_LOOKS = 32


class RowSelection:
    """Finds out, call by call, which rows the layers of a graph have to compute.

    Args:
      graph: The captured graph.
      found: What ``_core.remove_padding`` made of it.
      device: Where its tensors are.
    """

    def __init__(self, graph: Any, found: dict[str, Any], device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._useless = 0
        self._masks = _core.Session(found["masks"], device=devices.provider_of(device))
        self._mask_inputs: list[int] = found["mask_inputs"]
        self._picked: list[int] = found["picked"]
        self._batch: tuple[int, int] = found["batch"]
        self._length: tuple[int, int] = found["length"]
        self._packed = {False: found["packed"]}

    @staticmethod
    def of(graph: Any, device: torch.device = devices.CPU) -> RowSelection | None:
        """Return the selection for a graph, or None where every row can be seen outside."""
        found = _core.remove_padding(graph, causal=False)
        return None if found is None else RowSelection(graph, found, device)

    def select(self, inputs: Sequence[torch.Tensor]) -> tuple[bool, list[torch.Tensor]] | None:
        """Look at the attention masks of a call.

        Returns:
          Whether queries see only keys up to themselves, and the additional inputs of the packed
          graph; None where the rows are to be computed as they stand.
        """
        on_host = self._device.type == "cpu"
        if not on_host and self._useless > 0 and self._useless % _CALLS_BETWEEN_LOOKS != 0:
            self._useless += 1
            return None  # looking at masks waits for the device
        masks = _core.Run(self._masks).forward([inputs[i] for i in self._mask_inputs])
        batch, length = (inputs[i].shape[axis] for i, axis in (self._batch, self._length))
        if not on_host:
            masks = [mask.cpu() for mask in masks]
        selected = _core.pack_rows(masks, batch, length, self._picked)
        self._useless = self._useless + 1 if selected is None else 0
        if selected is None or on_host:
            return selected
        return selected[0], [t.to(self._device, non_blocking=True) for t in selected[1]]

    def packed(self, causal: bool) -> Any:
        """Return the graph that computes the selected rows alone."""
        if causal not in self._packed:
            self._packed[causal] = _core.remove_padding(self._graph, causal=causal)["packed"]
        return self._packed[causal]

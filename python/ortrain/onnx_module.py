# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A module that runs ONNX files exported from another module."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ortrain import _core
from ortrain.capture.guards import sizes_of
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.signature import CallSignature, FlatCall
from ortrain.onnx_export import export_module


@dataclasses.dataclass(frozen=True, slots=True)
class _Exported:
    """One file: the kind of call that it is for, and what runs it."""

    key: Hashable
    prepared: PreparedGraph
    session: Any
    names: list[str]


def name_below_adapters(module: nn.Module) -> str:
    """Return the name of a module's class, of the model below where adapters of peft are around."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    return base._get_name()


class OnnxModule(nn.Module):
    """Runs what a module computes in eval mode, from ONNX files written of it.

    The first call of a kind writes a file (``model.onnx``, then ``model_1.onnx`` and so on) and reads
    it back; results have the form of the module's own. There are no gradients.

    Args:
      module: The module; its weights at the first call are in the file.
      folder: Where files are written; made where there is none.
    """

    def __init__(self, module: nn.Module, folder: str | Path) -> None:
        super().__init__()
        state = self.__dict__
        state["_source"] = module
        state["_folder"] = Path(folder)
        state["_signature"] = CallSignature(module.forward)
        state["_files"] = []
        self.eval()

    @property
    def paths(self) -> list[Path]:
        """The files that were written so far."""
        return [self._path(i) for i in range(len(self.__dict__["_files"]))]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the file for this kind of call.

        Raises:
          CaptureError: The module cannot be captured whole.
          UnsupportedError: An operator has no form in standard operators.
        """
        state = self.__dict__
        call = state["_signature"].flatten(args, kwargs)
        found = next((f for f in state["_files"] if self._fits(f, call)), None)
        if found is None:
            found = self._export(call, args, kwargs)
        by_name = dict(found.prepared.user_inputs)
        given = [call.tensors[by_name[name]].detach() for name in found.names]
        outputs = _core.Run(found.session).forward(given)
        return found.prepared.output_tree.rebuild(outputs)

    def _get_name(self) -> str:
        return name_below_adapters(self.__dict__["_source"])  # Trainer decides by it

    def _path(self, index: int) -> Path:
        name = f"model_{index}.onnx" if index else "model.onnx"
        return self.__dict__["_folder"] / name

    @staticmethod
    def _fits(file: _Exported, call: FlatCall) -> bool:
        return file.key == call.key and file.prepared.guards.holds(tuple(sizes_of(call.tensors)))

    def _export(self, call: FlatCall, args: Any, kwargs: Any) -> _Exported:
        state = self.__dict__
        state["_folder"].mkdir(parents=True, exist_ok=True)
        path = self._path(len(state["_files"]))
        with torch.autocast("cpu", enabled=False):  # files are in the module's own types
            prepared = export_module(state["_source"], path, args, kwargs)
        graph, _ = _core.load_onnx_model(
            path, initializers="constants", external_data_directory=path.parent
        )
        graph.run_passes("fuse")
        names = [i["name"] for i in graph.inputs]
        made = _Exported(call.key, prepared, _core.Session(graph), names)
        state["_files"].append(made)
        return made

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_source" not in self.__dict__:
                raise
            return getattr(self.__dict__["_source"], name)

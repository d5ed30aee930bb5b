# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods of tensors that do what no graph holds, refused while a forward is traced.

The parameters and arguments of a trace have no contents, and PyTorch tells who asks for them. Other tensors have
theirs, and what Python reads there a graph would keep for ever. Hooks set in a forward would stay with the trace.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ortrain.capture.errors import CaptureError
from ortrain.capture.source_files import CAPTURE_ROOT, TORCH_ROOT, real_path
from ortrain.capture.torch_internals import are_pytorchs_own, is_fake, replaced

_READS = (
    *("item", "tolist", "numpy", "data_ptr", "__array__", "__dlpack__", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__"),
)
_HOOKS = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


def _refuse_read(tensor: torch.Tensor, name: str) -> None:
    # PyTorch's own code reads constants of the trace.
    if is_fake(tensor):
        return
    if not real_path(sys._getframe(2).f_code.co_filename).startswith((TORCH_ROOT, CAPTURE_ROOT)):
        raise CaptureError(
            f"its forward reads values of a tensor ({name}) that is no argument and no parameter"
        )


def _refuse_hook(tensor: torch.Tensor, name: str) -> None:
    if real_path(sys._getframe(2).f_code.co_filename).startswith(CAPTURE_ROOT):
        return
    raise CaptureError(f"its forward calls {name} of a tensor, which a graph would lose")


@contextlib.contextmanager
def methods_refused() -> Iterator[None]:
    """Raise CaptureError where this thread reads values of tensors that have some, or sets hooks of its own."""
    thread = threading.get_ident()

    def checked(name: str, check: Callable[[torch.Tensor, str], None]) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        @functools.wraps(original)
        def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == thread:
                check(tensor, name)
            return original(tensor, *args, **kwargs)

        return method

    def push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> Any:
        if threading.get_ident() == thread and not are_pytorchs_own((pack, unpack)):
            raise CaptureError(
                "its forward enters torch.autograd.graph.saved_tensors_hooks, which a graph would lose"
            )
        return push_hooks(pack, unpack)

    push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
    with replaced(
        [
            *((torch.Tensor, name, checked(name, _refuse_read)) for name in _READS),
            *((torch.Tensor, name, checked(name, _refuse_hook)) for name in _HOOKS),
            (torch._C._autograd, "_push_saved_tensors_default_hooks", push),
        ]
    ):
        yield

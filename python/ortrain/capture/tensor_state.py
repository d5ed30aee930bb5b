# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a forward says of tensors, and enters, that no graph holds, refused while it is traced.

A trace sees operators. Whether a leaf wants a gradient, what lies in ``grad``, attributes that a user gives a tensor,
inference mode and modes of the user's own are no operators.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributions import Distribution
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain.capture import tensor_questions
from ortrain.capture.errors import UnseenStateError
from ortrain.capture.source_files import (
    CAPTURE_ROOT,
    LAYERS_ROOT,
    TORCH_ROOT,
    is_installed,
    real_path,
)
from ortrain.capture.torch_internals import is_fake, replaced

# Between who asks and what is asked.
_THESE = (sys._getframe().f_code.co_filename, tensor_questions.__file__)
_CLIPPING = os.path.realpath(nn.utils.clip_grad.__file__)
_GRAD_MODES = torch.autograd.grad_mode.__name__
# Attributes of its own that PyTorch gives tensors.
_MEMOS = [name for name in vars(FakeTensor) if name.endswith("_memo")]
_OF_PYTORCH = frozenset(
    {
        *("_is_buffer", "_is_param", "_wrapped_number"),
        *FakeTensor.__annotations__,
        *_MEMOS,
        *(f"_{name}{what}" for name in _MEMOS for what in ("", "_vc", "_epoch")),
    }
)


def _asking() -> tuple[str, str]:
    """Return the file and the name of the function that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in _THESE:
        frame = frame.f_back
    return real_path(frame.f_code.co_filename), frame.f_code.co_name


def _is_the_forwards() -> bool:
    """Tell whether a user's code, or a layer's of PyTorch, asks, not PyTorch's machinery or the capture."""
    file, _ = _asking()
    return file.startswith(LAYERS_ROOT) or not file.startswith((TORCH_ROOT, CAPTURE_ROOT))


def _is_asked_by_users_code() -> bool:
    """Tell whether it is code of no package that asks for an attribute, which a later call may find."""
    file, _ = _asking()
    return not (file.startswith((TORCH_ROOT, CAPTURE_ROOT)) or is_installed(file))


def _is_asked_by_a_forward() -> bool:
    """Tell whether it is not a machinery of PyTorch's that enters inference mode."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == _GRAD_MODES:
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith(
        ("torch._", "torch.export", "torch.fx")
    )


def _set_grad(tensor: torch.Tensor, value: Any) -> None:
    if _is_the_forwards():
        raise UnseenStateError("its forward writes to the gradient of a tensor")
    _GRAD.__set__(tensor, value)


def _delete_grad(tensor: torch.Tensor) -> None:
    if _is_the_forwards():
        raise UnseenStateError("its forward deletes the gradient of a tensor")
    _GRAD.__delete__(tensor)


def _get_grad(tensor: torch.Tensor) -> Any:
    file, function = _asking()  # the user's code is read for this name
    if file.startswith(LAYERS_ROOT) and (function == "zero_grad" or file == _CLIPPING):
        raise UnseenStateError("its forward reads the gradient of a tensor")
    return _GRAD.__get__(tensor)


_AUTOCAST_DEVICES = ("cpu", "cuda")


def _autocast() -> tuple[Any, ...]:
    kinds = [
        (d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES
    ]
    return torch.is_autocast_cache_enabled(), *kinds


def _set_autocast(settings: tuple[Any, ...]) -> None:
    cached, *kinds = settings
    torch.set_autocast_cache_enabled(cached)
    for device, enabled, dtype in kinds:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _print_options() -> dict[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


def _set_print_options(options: dict[str, Any]) -> None:
    vars(torch._tensor_str.PRINT_OPTS).update(options)


def _flushes_subnormals() -> bool:
    smallest = numpy.float32(1e-45)
    return bool(smallest + smallest == 0)


# Of the process or the thread: what asks for each, and what sets it.
_SETTINGS: tuple[tuple[str, Callable[[], Any], Callable[[Any], object]], ...] = (
    ("the default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("the number of threads", torch.get_num_threads, torch.set_num_threads),
    (
        "whether algorithms are deterministic",
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    (
        "the precision of products",
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    ("the grad mode", torch.is_grad_enabled, torch._C._set_grad_enabled),
    ("autocast", _autocast, _set_autocast),
    ("whether warnings are repeated", torch.is_warn_always_enabled, torch.set_warn_always),
    ("how tensors are printed", _print_options, _set_print_options),
    (
        "whether backward runs in threads",
        torch._C._is_multithreading_enabled,
        torch._C._set_multithreading_enabled,
    ),
    ("the default device", torch.get_default_device, torch.set_default_device),
    ("whether subnormal numbers are flushed", _flushes_subnormals, torch.set_flush_denormal),
    (
        "whether distributions check their arguments",
        lambda: Distribution._validate_args,
        Distribution.set_default_validate_args,
    ),
    (
        "how modules are converted",
        torch.__future__.get_swap_module_params_on_conversion,
        torch.__future__.set_swap_module_params_on_conversion,
    ),
    ("NumPy's handling of errors", numpy.geterr, lambda kinds: numpy.seterr(**kinds)),
)


def _is_patched_by_dynamo() -> bool:
    """Tell whether Dynamo, which `torch.cond` enters, has set PyTorch as it needs it: once in a process, for good."""
    patcher = getattr(sys.modules.get("torch._dynamo.eval_frame"), "TorchPatcher", None)
    return patcher is not None and patcher.patch.cache_info().currsize > 0


@contextlib.contextmanager
def settings_kept() -> Iterator[None]:
    """Set back what a forward leaves set otherwise; raise UnseenStateError then."""
    before = [get() for _, get, _ in _SETTINGS]
    was_patched = _is_patched_by_dynamo()
    changed: list[str] = []
    try:
        yield
    finally:
        has_patched = _is_patched_by_dynamo() and not was_patched
        for (name, get, put), value in zip(_SETTINGS, before, strict=True):
            by_dynamo = has_patched and put is Distribution.set_default_validate_args
            if get() != value and not by_dynamo:
                put(value)
                changed.append(name)
    if changed:
        raise UnseenStateError(f"its forward changes {' and '.join(changed)}")


_REQUIRES_GRAD = torch._C.TensorBase.requires_grad
_GRAD = torch._C.TensorBase.grad
_DATA = torch._C.TensorBase.data


@contextlib.contextmanager
def tensor_state_kept(
    arguments: Iterable[tuple[torch.Tensor, torch.Tensor]],
    held: Iterable[tuple[torch.Tensor, torch.Tensor]],
    asked_in_vain: Callable[[torch.Tensor, str], None],
) -> Iterator[None]:
    """Raise CaptureError where this thread's forward changes, or asks for, such state.

    Of attributes that tensors have nothing is in a trace.

    Args:
      arguments: Those of the call, of which its key names the attributes, and what the trace has in their place.
        Another that wants a gradient shows it in the results.
      held: Those of the module, and what the trace has in their place.
      asked_in_vain: Called with a tensor of the module, and an attribute that it does not have, for which an installed
        package asks.
    """
    arguments = list(arguments)
    unnamed = {id(stand_in): tensor for tensor, stand_in in held}  # whose attributes are in no key
    given = [*unnamed.values(), *(tensor for tensor, _ in arguments)]
    known = unnamed.keys() | {id(stand_in) for _, stand_in in arguments}
    thread = threading.get_ident()
    own_requires_grad_ = torch.Tensor.requires_grad_
    own_names = {name for tensor in given for name in tensor.__dict__} - _OF_PYTORCH

    def ours(method: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            return (method if threading.get_ident() == thread else otherwise)(*args)

        return call

    def refuse_change(tensor: torch.Tensor, wants: bool) -> None:
        is_given = id(tensor) in known or not is_fake(tensor)
        if is_given and bool(wants) != _REQUIRES_GRAD.__get__(tensor) and _is_the_forwards():
            raise UnseenStateError("its forward changes whether a tensor wants a gradient")

    def set_requires_grad(tensor: torch.Tensor, value: bool) -> None:
        refuse_change(tensor, value)
        _REQUIRES_GRAD.__set__(tensor, value)

    @functools.wraps(own_requires_grad_)
    def requires_grad_(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        if threading.get_ident() == thread:
            refuse_change(tensor, requires_grad)
        return own_requires_grad_(tensor, requires_grad)

    def get_missing(tensor: torch.Tensor, name: str) -> Any:
        of_module = unnamed.get(id(tensor)) if threading.get_ident() == thread else None
        may_be_there = name in own_names or (of_module is not None and _is_asked_by_users_code())
        if may_be_there and threading.get_ident() == thread and _is_the_forwards():
            raise UnseenStateError(f"its forward asks for the attribute '{name}' of a tensor")
        if of_module is not None and _is_the_forwards():
            asked_in_vain(of_module, name)
        inherited = getattr(super(torch.Tensor, tensor), "__getattr__", None)
        if inherited is not None:
            return inherited(name)
        raise AttributeError(f"'{type(tensor).__name__}' object has no attribute '{name}'")

    def set_attribute(tensor: torch.Tensor, name: str, value: Any) -> None:
        is_new = name not in _OF_PYTORCH and not hasattr(type(tensor), name)
        if is_new and threading.get_ident() == thread and _is_the_forwards():
            raise UnseenStateError(f"its forward sets the attribute '{name}' of a tensor")
        set_plainly(tensor, name, value)

    def inference(enabled: bool) -> Any:
        if enabled and threading.get_ident() == thread and _is_asked_by_a_forward():
            raise UnseenStateError("its forward enters inference mode, which a graph would forget")
        return own_inference(enabled)

    def convert(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            raise UnseenStateError(f"its forward converts a layer ({type(layer).__name__})")
        return own_convert(layer, *args, **kwargs)

    def enter_dispatch(mode: TorchDispatchMode) -> Any:
        if threading.get_ident() == thread and not type(mode).__module__.startswith(
            ("torch.", "ortrain.")
        ):
            raise UnseenStateError(
                f"its forward enters {type(mode).__qualname__}, a mode that decides what operators do"
            )
        return own_dispatch(mode)

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if _is_the_forwards():
            raise UnseenStateError("its forward puts other memory behind a tensor ('data')")
        _DATA.__set__(tensor, value)

    own_convert = nn.Module._apply
    set_plainly = object.__setattr__
    own_inference = torch._C._InferenceMode
    own_dispatch = TorchDispatchMode.__enter__
    attributes = [
        (
            torch.Tensor,
            "requires_grad",
            property(_REQUIRES_GRAD.__get__, ours(set_requires_grad, _REQUIRES_GRAD.__set__)),
        ),
        (
            torch.Tensor,
            "grad",
            property(
                ours(_get_grad, _GRAD.__get__),
                ours(_set_grad, _GRAD.__set__),
                ours(_delete_grad, _GRAD.__delete__),
            ),
        ),
        (torch.Tensor, "data", property(_DATA.__get__, ours(set_data, _DATA.__set__))),
        (torch.Tensor, "requires_grad_", requires_grad_),
        (torch.Tensor, "__getattr__", get_missing),
        (torch.Tensor, "__setattr__", set_attribute),
        (torch._C, "_InferenceMode", inference),
        (TorchDispatchMode, "__enter__", enter_dispatch),
        (nn.Module, "_apply", convert),  # to(), float(), cuda()
    ]
    with replaced(attributes):
        yield

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The names of Dynamo that are not public, in one place, as ``torch_internals`` is for the rest."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ortrain.capture.torch_internals import is_transforming

# Hooks of layers may come and go; a counter among the attributes shall not mean another compilation
# per call; what Dynamo itself cannot do runs in PyTorch; an assert raises what it says, where it stands;
# NumPy's random numbers are NumPy's, not others of PyTorch's generator.
_SETTINGS = {
    "skip_nnmodule_hook_guards": False,
    "allow_unspec_int_on_nn_module": True,
    "suppress_errors": True,
    "rewrite_assert_with_torch_assert": False,
    "use_numpy_random_stream": True,
}


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of ours that Dynamo calls where it meets it, and does not look into.

    torch.compiler.disable does the same, but imports the compiler at the first call.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP  # neither the function nor what it calls
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    # What Dynamo asks a function for before it follows a call.
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "it runs on Ortrain's engine"  # type: ignore[attr-defined]
    return function


def nothing_compiles() -> Any:
    """Return a context in which no other thread compiles."""
    from torch._dynamo import convert_frame

    return getattr(convert_frame, "compile_lock", None) or contextlib.nullcontext()


def compiled_in_pieces(function: Callable[..., Any], backend: Callable[..., Any]) -> Any:
    """Return ``function`` as Dynamo runs it, its pieces made by ``backend``.

    Nothing is compiled before the first call. Other functions that share code with this one do not
    count towards its limit of compilations, where PyTorch can tell them apart.
    """
    apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if apart else {}
    return torch.compile(function, backend=backend, **options)


@contextlib.contextmanager
def settings_for_pieces() -> Iterator[None]:
    """Hold Dynamo to PyTorch's behaviour where its defaults trade that for speed."""
    config = _config()
    with config.patch(**{n: v for n, v in _SETTINGS.items() if hasattr(config, n)}):
        yield


# What is told of functions that are left to PyTorch, and of operators that refuse tensors without contents.
_UNTOLD = {
    "torch._dynamo.convert_frame": ("WON'T CONVERT", "recompile_limit", "recompilation"),
    "torch._subclasses.fake_tensor": ("failed while attempting to run meta",),
}


@contextlib.contextmanager
def failures_untold() -> Iterator[None]:
    """Keep this thread's traces from printing why they end; what PyTorch raises says it better."""
    thread = threading.get_ident()

    def filter_of(texts: tuple[str, ...]) -> Callable[[logging.LogRecord], bool]:
        return lambda record: (
            record.thread != thread or not any(text in str(record.msg) for text in texts)
        )

    filters = [(logging.getLogger(name), filter_of(texts)) for name, texts in _UNTOLD.items()]
    for logger, passes in filters:
        logger.addFilter(passes)
    try:
        yield
    finally:
        for logger, passes in filters:
            logger.removeFilter(passes)


@contextlib.contextmanager
def graph_breaks(causes: list[str]) -> Iterator[None]:
    """Put into ``causes`` why and where Dynamo cuts what it compiles inside of the context."""
    from torch._dynamo import utils

    known = len(utils.graph_break_reasons)
    try:
        yield
    finally:
        for cause in utils.graph_break_reasons[known:]:
            text = cause.reason.strip().partition("\n")[0]
            line = cause.user_stack[-1] if cause.user_stack else None
            causes.append(f"{text}, at {line.filename}:{line.lineno}" if line else text)


def may_compile() -> bool:
    """Tell whether Dynamo may run here: not inside of a trace or transform, nor switched off."""
    if torch.compiler.is_compiling() or is_transforming() or torch._C._len_torch_dispatch_stack():
        return False
    if torch.jit.is_tracing() or torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        return False
    return _is_supported() and not _config().disable


@functools.cache
def _is_supported() -> bool:
    from torch._dynamo.eval_frame import is_dynamo_supported

    return bool(is_dynamo_supported())


def _config() -> Any:
    from torch._dynamo import config

    return config

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The names of Dynamo that are not public, in one place, as ``torch_internals`` is for the rest."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ortrain import logs
from ortrain.capture.dynamo_guards import tell_equal_values_apart
from ortrain.capture.dynamo_python import cut_where_python_is_replaced
from ortrain.capture.number_arithmetic import numbers_as_in_python
from ortrain.capture.torch_internals import is_transforming

_log = logs.get_logger("ortrain.capture")

# Hooks of layers may come and go; a counter among the attributes shall not mean another compilation
# per call; what Dynamo itself cannot do runs in PyTorch; an assert raises what it says, where it stands;
# NumPy computes with its own functions, dtypes and random numbers, not by PyTorch's likenesses of them; nobody is told
# of side effects.
_SETTINGS = {
    "skip_nnmodule_hook_guards": False,
    "allow_unspec_int_on_nn_module": True,
    "suppress_errors": True,
    "rewrite_assert_with_torch_assert": False,
    "trace_numpy": False,
    "use_numpy_random_stream": True,
    "side_effect_replay_policy": "silent",
}
# Tells which threads compile pieces.
_thread = threading.local()


def _makes_pieces() -> bool:
    return getattr(_thread, "makes_pieces", False)


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


def skipped_frame(reason: str) -> Exception:
    """Return what a backend raises to have Python run the code that its piece was made of."""
    from torch._dynamo.exc import SkipFrame

    return SkipFrame(reason)


def compiled_in_pieces(function: Callable[..., Any], backend: Callable[..., Any]) -> Any:
    """Return ``function`` as Dynamo runs it, its pieces made by ``backend``.

    Nothing is compiled before the first call. Other functions that share code with this one do not
    count towards its limit of compilations, where PyTorch can tell them apart.
    """
    apart = "isolate_recompiles" in inspect.signature(torch.compile).parameters
    options: dict[str, Any] = {"isolate_recompiles": True} if apart else {}
    # What was compiled for one backend is not run for another, however equal their functions are.
    own = functools.wraps(backend)(lambda *args: backend(*args))
    return torch.compile(function, backend=own, **options)


@contextlib.contextmanager
def settings_for_pieces() -> Iterator[None]:
    """Hold Dynamo to PyTorch's behaviour where its defaults trade that for speed."""
    spare_reports()
    cut_where_python_is_replaced(_makes_pieces)
    tell_equal_values_apart(_makes_pieces)
    before, _thread.makes_pieces = _makes_pieces(), True
    try:
        with _settings_held(), numbers_as_in_python():
            yield
    finally:
        _thread.makes_pieces = before


class _Holders:
    """How many threads want Dynamo's settings to be ours, and what puts them back."""

    lock = threading.Lock()
    count = 0
    patch: Any = None


@contextlib.contextmanager
def _settings_held() -> Iterator[None]:
    config = _config()
    patch = config.patch(**{n: v for n, v in _SETTINGS.items() if hasattr(config, n)})
    if isinstance(next(iter(config._config.values())).user_override, contextvars.ContextVar):
        with patch:
            yield
        return
    # Up to 2.11 settings are the process's: what one thread puts back would be the other's.
    with _Holders.lock:
        if _Holders.count == 0:
            _Holders.patch = patch
            patch.__enter__()
        _Holders.count += 1
    try:
        yield
    finally:
        with _Holders.lock:
            _Holders.count -= 1
            if _Holders.count == 0:
                _Holders.patch.__exit__(None, None, None)


class _Message(str):
    """The text of an error behind which Dynamo does not look for graphs to print."""

    def __contains__(self, part: object) -> bool:
        return part != "Data-dependent" and isinstance(part, str) and self.find(part) >= 0


@functools.cache
def spare_reports() -> None:
    """Let Dynamo compute nothing, while it makes pieces, that only logs show which are off.

    Those are the lines behind a cut and above Dynamo with their columns, the names of functions for the lines that
    it follows, which functions it does not know, the time that guards take, and the text of the graph so far, once per
    function that a cut is in.
    """
    from torch._dynamo import exc, guards, output_graph, symbolic_convert, utils

    cuts = getattr(symbolic_convert, "graph_break_log", None)

    def is_spared(log: Any) -> bool:
        is_shown = log is not None and log.isEnabledFor(logging.DEBUG)
        return _makes_pieces() and not is_shown

    def spare(home: Any, name: str, log: Any, instead: Callable[[], Any]) -> None:
        original = getattr(home, name, None)
        if original is not None:

            @functools.wraps(original)
            def call(*args: Any, **kwargs: Any) -> Any:
                return instead() if is_spared(log) else original(*args, **kwargs)

            setattr(home, name, call)

    spare(exc, "_extract_stack_with_positions", cuts, traceback.StackSummary)
    spare(utils, "warn_once", None, lambda: None)
    spare(guards, "profile_guard_manager", getattr(guards, "guards_log", None), float)
    calls = getattr(output_graph, "trace_call_log", None)
    spare(symbolic_convert, "get_funcname", calls, lambda: None)
    init = exc.Unsupported.__init__

    @functools.wraps(init)
    def made(error: Any, *args: Any, **kwargs: Any) -> None:
        init(error, *args, **kwargs)
        if is_spared(cuts):
            error.msg = _Message(error.msg)

    exc.Unsupported.__init__ = made


# What is told of functions that are left to PyTorch, and of operators and conditions that refuse values that are not
# there.
_UNTOLD = {
    "torch._dynamo.variables.builtin": ("incorrect arg count",),
    "torch.fx.experimental.symbolic_shapes": ("failed during evaluate_expr",),
    "torch._dynamo.variables.tensor": ("Graph break from",),
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
    try:
        return _is_supported() and not _config().disable
    except Exception as error:
        # It is imported here for the first time, for which there may be no file, folder or depth left, and finds
        # modules of which some part is missing.
        _log.warning("Dynamo cannot be imported now (%s); this call runs in PyTorch", error)
        return False


@functools.cache
def _is_supported() -> bool:
    from torch._dynamo.eval_frame import is_dynamo_supported

    return bool(is_dynamo_supported())


def _config() -> Any:
    from torch._dynamo import config

    return config

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Every name of PyTorch that is not public, in one place.

Each function says what it gives; a release of PyTorch that moves one of these names is met here
and nowhere else. Checked against 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import _config as _symbolic_config
from torch.fx.experimental import symbolic_shapes
from torch.utils._sympy import functions as sympy_functions

from ortrain.capture.errors import AutogradFunctionError, CaptureError

FloorDiv = sympy_functions.FloorDiv
Mod = sympy_functions.Mod

# Raised where control flow depends on the values of a tensor.
DataDependentError: type[Exception] = symbolic_shapes.GuardOnDataDependentSymNode


# Functions of PyTorch that stand behind operators whose gradient PyTorch knows. Others of its own,
# such as reentrant checkpointing and backward hooks of modules, would lose their backward.
_HARMLESS_FUNCTIONS = ("torch._", "torch.autograd.", "torch.nn.parallel.", "torch.nested.")


_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def outside_compiled_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that torch.compile must call and not trace.

    torch.compiler.disable does the same, but imports the compiler at once.
    """
    return torch._disable_dynamo(function)


def has_global_module_hooks() -> bool:
    """Tell whether hooks that run for every module are registered."""
    module = torch.nn.modules.module
    return any(getattr(module, table, None) for table in _GLOBAL_HOOKS)


def is_fake(value: object) -> bool:
    """Tell whether a value is a tensor without contents, made while tracing."""
    return isinstance(value, FakeTensor)


def storage_identity(tensor: torch.Tensor) -> int:
    """Return a number that living tensors with the same memory, and no others, share."""
    if tensor.layout is not torch.strided:
        return id(tensor)
    return int(tensor.untyped_storage()._cdata)


def fake_result(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what an operator makes of fake tensors; None if not known for all of their sizes."""
    mode = detect_fake_mode((args, kwargs))
    if mode is None:
        return None
    guards = len(mode.shape_env.guards) if mode.shape_env is not None else 0
    try:
        with mode, torch.no_grad():
            result = target(*args, **kwargs)
    except (RuntimeError, TypeError):
        return None
    if mode.shape_env is not None and len(mode.shape_env.guards) != guards:
        return None
    return result


def guards_code(program: torch.export.ExportedProgram) -> list[str]:
    """Return the conditions on input sizes under which an exported program holds, as Python text."""
    code = getattr(program, "_guards_code", None)
    if code is None:
        raise CaptureError(f"PyTorch {torch.__version__} does not tell the guards of an export")
    return list(code)


@contextlib.contextmanager
def flexible_sizes() -> Iterator[None]:
    """Let sizes 0 and 1 be dynamic, and record conditions as guards, not as nodes of the graph."""
    options: dict[str, bool] = {}
    if hasattr(_symbolic_config, "backed_size_oblivious"):
        options["backed_size_oblivious"] = True
    with _symbolic_config.patch(**options) if options else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Keep ``aten.lstm`` and ``aten.gru`` one node with a dynamic length while exporting.

    A release without these registrations exports the layers at a fixed length.
    """
    try:
        patches = importlib.import_module("torch.export._patches")
    except ImportError:
        patches = None
    with contextlib.ExitStack() as stack:
        for kind in ("lstm", "gru"):
            register = getattr(patches, f"register_{kind}_while_loop_decomposition", None)
            if register is not None:
                stack.enter_context(register())
        yield


def no_grad_region() -> Any:
    """Return the higher order operator in which export keeps a region of other grad mode."""
    return torch.ops.higher_order.wrap_with_set_grad_enabled


def autocast_region() -> Any:
    """Return the higher order operator in which export keeps a region under autocast."""
    return torch.ops.higher_order.wrap_with_autocast


# What switches grad modes while it traces, and the switches calling each other.
_NOT_THE_MODULE = ("torch._", "torch.fx.", "torch.autograd.grad_mode")


@contextlib.contextmanager
def at_grad_mode_switches(action: Callable[[], None]) -> Iterator[None]:
    """Call ``action`` before this thread enters or leaves no_grad, enable_grad, set_grad_enabled.

    Not for what tracing itself does.
    """
    thread = threading.get_ident()

    def watched(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if threading.get_ident() == thread and not caller.startswith(_NOT_THE_MODULE):
                action()
            return method(*args, **kwargs)

        return call

    switches = ("__enter__", "__exit__"), ("__enter__", "__exit__"), ("__init__", "__exit__")
    held: list[tuple[type, str, Any]] = []
    classes = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
    try:
        for cls, names in zip(classes, switches, strict=True):
            for name in names:
                held.append((cls, name, cls.__dict__[name]))
                setattr(cls, name, watched(cls.__dict__[name]))
        yield
    finally:
        for cls, name, method in held:
            setattr(cls, name, method)


def size_expression(size: Any) -> int | sympy.Expr:
    """Return a size as an int, or as a sympy expression of the symbols of the graph."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def number_expression(number: Any) -> int | float | bool | sympy.Basic:
    """Return a SymInt, SymFloat or SymBool as a Python number or a sympy expression."""
    if isinstance(number, (bool, int, float)):
        return number
    expression = number.node.expr
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Float or expression.is_Rational:
        return float(expression)
    return expression


def size_hint(size: Any) -> int:
    """Return the size seen in the sample for an int or SymInt that comes from an input."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    if hint is None:
        raise CaptureError(f"size {size} depends on values, not on sizes of the inputs")
    return int(hint)


class QuietError(Exception):
    """Carries an error out of a module's forward, past an export that would print its graph."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "partial_fx_graph":
            super().__setattr__(name, value)


def unwrapped(error: BaseException) -> BaseException:
    """Return the error that a QuietError carries, any other as it is."""
    while isinstance(error, QuietError) and error.__cause__ is not None:
        error = error.__cause__
    return error


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Keep an export that fails from logging to the terminal; its exception says the same."""
    names = ("torch.export", "torch.export._trace", "torch.fx.experimental.symbolic_shapes")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def has_unbacked_symbols(error: BaseException) -> bool:
    """Tell whether an export failed because control flow depends on a tensor's values."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, DataDependentError):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@functools.cache
def _decomposition_table() -> dict[Any, Callable[..., Any]]:
    from torch._decomp import decomposition_table

    return dict(decomposition_table)


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Tell whether eager PyTorch itself differentiates ``op`` through the operators inside it."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


def decomposition(op: Any) -> Callable[..., Any] | None:
    """Return a function that computes ``op`` by simpler operators, or None."""
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if is_composite(op):
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        kernel = op.py_kernels.get(key)
        if kernel is not None and not isinstance(kernel, torch._C.DispatchKey):
            return kernel
        # Not op.decompose: the export registers this function as the operator's kernel, so that
        # would call itself.
        return functools.partial(op._op_dk, key)
    return _decomposition_table().get(op)


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


@contextlib.contextmanager
def refuse_autograd_functions() -> Iterator[None]:
    """Raise AutogradFunctionError where a torch.autograd.Function is applied.

    Export would trace through its forward and silently lose its backward.
    """

    def refuse(cls: type, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        raise AutogradFunctionError(
            f"torch.autograd.Function '{cls.__module__}.{cls.__qualname__}' has a backward of its "
            "own, which a capture would lose"
        )

    base = torch.autograd.Function
    held: list[tuple[type, Any]] = []

    # The subclasses are patched, not the base: dynamo, which traces loops, knows the base's method.
    def patch(cls: type) -> None:
        if not cls.__module__.startswith(_HARMLESS_FUNCTIONS):
            held.append((cls, cls.__dict__.get("apply")))
            cls.apply = classmethod(refuse)  # type: ignore[attr-defined]

    def init_subclass(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        patch(cls)

    base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    try:
        for cls in set(_subclasses(base)):
            patch(cls)
        yield
    finally:
        del base.__init_subclass__
        for cls, original in held:
            if original is None:
                del cls.apply  # type: ignore[attr-defined]
            else:
                cls.apply = original  # type: ignore[attr-defined]

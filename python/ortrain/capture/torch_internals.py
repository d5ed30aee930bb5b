# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Names of PyTorch that are not public; those of one field stand in the files beside it that end alike.

Each function says what it gives; a release of PyTorch that moves one of these names is met in these
files and nowhere else. Checked against 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from ortrain.capture.errors import SymbolicBudgetError

TORCH_VERSION: tuple[int, ...] = tuple(map(int, torch.__version__.split(".")[:2]))


# Functions of PyTorch that stand behind operators whose gradient PyTorch knows. Others of its own,
# such as reentrant checkpointing and backward hooks of modules, would lose their backward.
_HARMLESS_FUNCTIONS = ("torch._", "torch.autograd.", "torch.nn.parallel.", "torch.nested.")
# What Dynamo puts in the place of a function of the user.
_IN_PLACE_OF_FUNCTIONS = "torch._functorch.autograd_function"


_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_get_global = vars(torch.nn.modules.module).get  # programs put other tables in their places


def outside_compiled_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that torch.compile must call and not trace.

    torch.compiler.disable does the same, but imports the compiler at once.
    """
    return torch._disable_dynamo(function)


def has_global_module_hooks() -> bool:
    """Tell whether hooks that run for every module are registered."""
    return any(map(_get_global, _GLOBAL_HOOKS))


def acts_by_itself(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is of a class that decides what operators do, or of what class their results are."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or is_fake(tensor):
        return False
    return kind.__torch_function__ is not torch._C._disabled_torch_function_impl


def is_transforming() -> bool:
    """Tell whether a transform of torch.func (vmap, grad, jvp, ...) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_of_modes() -> contextlib.AbstractContextManager[None]:
    """Let operators do what they do outside of a trace."""
    return _disable_current_modes()


def keeps_graph() -> bool:
    """Tell whether the backward that runs was asked for with retain_graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def current_task() -> int:
    """Return the number of the backward that runs in this thread, the innermost; -1 for none."""
    return torch._C._current_graph_task_id()


def is_batched(tensor: torch.Tensor | None) -> bool:
    """Tell whether a tensor stands for a batch of tensors in a vmap."""
    kinds = torch._C._functorch
    return tensor is not None and (
        kinds.is_batchedtensor(tensor) or kinds.is_legacy_batchedtensor(tensor)
    )


def are_pytorchs_own(hooks: Iterable[Any]) -> bool:
    """Tell whether hooks of saved tensors give back what they take, as those of checkpoints do."""
    return all((getattr(hook, "__module__", None) or "").startswith("torch.") for hook in hooks)


def has_hooks_of_saved_tensors() -> bool:
    """Tell whether somebody takes what autograd saves: a checkpoint around, which runs the forward again."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def nothing_saved_for_others() -> contextlib.AbstractContextManager[Any]:
    """Keep what a trace saves from the hooks of a checkpoint around it, which counts."""
    if not has_hooks_of_saved_tensors():
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_itself, _itself)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def mode_around() -> str | None:
    """Return what this thread's calls pass through: a mode, forward differentiation, a cache; None for neither."""
    if forward_ad._current_level >= 0:
        return "torch.autograd.forward_ad.dual_level"
    if parametrize._cache_enabled:  # what one call computes of its parameters, another one takes
        return "torch.nn.utils.parametrize.cached"
    if torch._C._len_torch_dispatch_stack() > 0:
        return type(_get_current_dispatch_mode()).__qualname__
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks and not are_pytorchs_own(hooks):
        return "torch.autograd.graph.saved_tensors_hooks"
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    # A default device is a mode, of what is made without tensors.
    found = (type(mode).__qualname__ for mode in modes if not isinstance(mode, DeviceContext))
    return next(found, None)


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


def trace_of_operators(
    function: Callable[..., Any], values: list[Any]
) -> torch.fx.GraphModule | None:
    """Return the operators that a function calls on fake tensors and sizes; none is composite.

    None where it cannot be called so, or not without a condition on sizes that no other trace has made.
    """
    mode = detect_fake_mode(values)
    if mode is None:
        return None
    known = _conditions(mode.shape_env)
    try:
        with mode, torch.no_grad(), enable_python_dispatcher():
            traced = make_fx(function)(*values)
    except SymbolicBudgetError:
        raise
    except Exception:
        return None  # decompositions raise anything
    return traced if _conditions(mode.shape_env) == known else None


def _conditions(shapes: symbolic_shapes.ShapeEnv | None) -> tuple[int, ...]:
    """Count what a trace has said about sizes so far, and the sizes that depend on values."""
    if shapes is None:
        return ()
    asserts = sum(map(len, shapes.deferred_runtime_asserts.values()))
    return len(shapes.guards), asserts, len(shapes.pending_fresh_unbacked_symbols)


def fake_results_with_gradients(
    function: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> Any:
    """Call a function on fake tensors that want a gradient; None where it cannot be called so."""
    mode = detect_fake_mode((args, kwargs))
    if mode is None:
        return None

    def wanting(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            return leaf.detach().requires_grad_()
        return leaf

    try:
        with mode, torch.enable_grad():
            args, kwargs = pytree.tree_map(wanting, (args, kwargs))
            return function(*args, **kwargs)
    except Exception:
        # Code of the user may raise anything where it does not take such tensors.
        return None


def no_grad_region() -> Any:
    """Return the higher order operator in which export keeps a region of other grad mode."""
    return torch.ops.higher_order.wrap_with_set_grad_enabled


def autocast_region() -> Any:
    """Return the higher order operator in which export keeps a region under autocast."""
    return torch.ops.higher_order.wrap_with_autocast


# What switches grad modes while it traces, and the switches calling each other.
_NOT_THE_MODULE = ("torch._", "torch.fx.", "torch.autograd.grad_mode")


@contextlib.contextmanager
def replaced(attributes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put other values in the place of attributes: of a class or module, the name, the value.

    What was not there before is taken away again.
    """
    held: list[tuple[Any, str, bool, Any]] = []
    try:
        for home, name, value in attributes:
            held.append((home, name, name in vars(home), vars(home).get(name)))
            setattr(home, name, value)
        yield
    finally:
        for home, name, was_there, before in reversed(held):
            if was_there:
                setattr(home, name, before)
            elif name in vars(home):
                delattr(home, name)


@contextlib.contextmanager
def autocast_regions_entered() -> Iterator[list[Any]]:
    """Yield the regions of autocast that this thread is in, of those entered since."""
    thread = threading.get_ident()
    entered: list[Any] = []
    cls = torch.amp.autocast_mode.autocast
    enter, leave = cls.__enter__, cls.__exit__

    @functools.wraps(enter)
    def entering(region: Any, *args: Any) -> Any:
        if threading.get_ident() == thread:
            entered.append(region)
        return enter(region, *args)

    @functools.wraps(leave)
    def leaving(region: Any, *args: Any) -> Any:
        if threading.get_ident() == thread and region in entered:
            entered.remove(region)
        return leave(region, *args)

    with replaced([(cls, "__enter__", entering), (cls, "__exit__", leaving)]):
        yield entered


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
    classes = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled)
    methods = [(cls, n) for cls, names in zip(classes, switches, strict=True) for n in names]
    with replaced((cls, name, watched(vars(cls)[name])) for cls, name in methods):
        yield


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
    names = (
        "torch.export",
        "torch.export._trace",
        "torch.fx.experimental.sym_node",
        "torch.fx.experimental.symbolic_shapes",
        "torch._subclasses.fake_tensor",
    )
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


@contextlib.contextmanager
def autograd_functions_by(
    handler: Callable[[type, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Call ``handler`` where a torch.autograd.Function is applied.

    Export would trace through its forward and silently lose its backward. The handler gets the
    class, its own ``apply``, and the arguments.
    """

    base, below = torch.autograd.Function, torch.autograd.function._SingleLevelFunction
    originals: dict[type, Any] = {}  # None where it is inherited
    patches: list[Any] = []
    thread = threading.get_ident()
    applied: list[type | None] = []  # by the handler, down to what PyTorch's own `apply` calls
    if "apply" in vars(below):
        raise RuntimeError("torch.autograd.Function has another form in this PyTorch")

    def is_harmless(cls: type) -> bool:
        name = cls.__module__
        return name != _IN_PLACE_OF_FUNCTIONS and name.startswith(_HARMLESS_FUNCTIONS)

    def applying(cls: type, classes: Sequence[type]) -> Callable[..., Any]:
        """Return the first ``apply`` that one of some classes has, of ``cls``."""

        def original(*args: Any, **kwargs: Any) -> Any:
            found = (originals.get(c, c.__dict__.get("apply")) for c in classes)
            apply = next(f for f in found if f is not None).__get__(None, cls)
            if threading.get_ident() != thread:
                return apply(*args, **kwargs)
            depth = len(applied)
            applied.append(cls)
            try:
                return apply(*args, **kwargs)
            finally:
                del applied[depth:]

        return original

    # The subclasses are patched, not the base: dynamo, which traces loops, knows the base's method.
    def patch(cls: type) -> None:
        if not is_harmless(cls):
            own = cls.__dict__.get("apply")
            originals[cls] = None if own in patches else own  # a copy of another class's attributes
            original = applying(cls, cls.__mro__)

            def apply(_: type, *args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != thread:  # another one, which traces nothing
                    return original(*args, **kwargs)
                return handler(cls, original, args, kwargs)

            patches.append(classmethod(apply))
            cls.apply = patches[-1]  # type: ignore[attr-defined]

    # What was taken from a class before (`relu = ReLU.apply`) is the base's method, which comes to this one.
    def apply_below(cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread and not is_harmless(cls):
            if not applied or applied[-1] is not cls:
                # Not its own one: what led here may have changed the arguments.
                return handler(cls, applying(cls, [base]), args, kwargs)
            applied[-1] = None  # its forward may apply it again
        return super(below, cls).apply(*args, **kwargs)  # type: ignore[misc]

    def init_subclass(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs)
        patch(cls)

    base.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    below.apply = classmethod(apply_below)  # type: ignore[attr-defined]
    try:
        for cls in set(_subclasses(base)):
            patch(cls)
        yield
    finally:
        del below.apply, base.__init_subclass__  # type: ignore[attr-defined]
        for cls, original in originals.items():
            if original is None:
                del cls.apply  # type: ignore[attr-defined]
            else:
                cls.apply = original  # type: ignore[attr-defined]


def any_accumulation_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether something runs when a gradient has been added to the ``grad`` of one of some tensors."""
    return any(map(_accumulation_hooks_of, tensors))


_accumulation_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Every name of PyTorch that is not public, in one place.

Each function says what it gives; a release of PyTorch that moves one of these names is met here
and nowhere else. Checked against 2.11 to 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental import _config as _symbolic_config
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ortrain.capture.errors import CaptureError, SymbolicBudgetError

TORCH_VERSION: tuple[int, ...] = tuple(map(int, torch.__version__.split(".")[:2]))

FloorDiv = sympy_functions.FloorDiv
Mod = sympy_functions.Mod

# Raised where control flow depends on the values of a tensor.
DataDependentError: type[Exception] = symbolic_shapes.GuardOnDataDependentSymNode


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


def outside_compiled_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function that torch.compile must call and not trace.

    torch.compiler.disable does the same, but imports the compiler at once.
    """
    return torch._disable_dynamo(function)


def has_global_module_hooks() -> bool:
    """Tell whether hooks that run for every module are registered."""
    return any(map(vars(torch.nn.modules.module).get, _GLOBAL_HOOKS))


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


_RECURRENT = tuple(
    getattr(torch.ops.aten, name).input for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
)
# Their kernels in PyTorch, while others stand in for them.
_written_out: dict[Any, Callable[..., Any]] = {}


def has_onednn() -> bool:
    """Tell whether PyTorch may compute by oneDNN; ``torch.backends.mkldnn.enabled`` takes longer."""
    return torch._C._get_mkldnn_enabled()


def is_recurrent(op: Any) -> bool:
    """Tell whether an operator is all layers of an LSTM, GRU or RNN over padded sequences."""
    return op in _RECURRENT


@contextlib.contextmanager
def recurrent_layers_whole(as_called: bool = False) -> Iterator[None]:
    """Keep LSTMs, GRUs and RNNs one node of any length while tracing; PyTorch would write them out.

    Args:
      as_called: While a module's own code is traced: results have the dtypes that autocast gives
        them, and gradients may pass but not be taken inside of the trace (CaptureError).
        Otherwise they have the dtype of x.
    """
    from torch._decomp import decomposition_table

    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    with contextlib.ExitStack() as stack:
        for op in _RECURRENT:
            # Calls find their kernel by this cache.
            op._dispatch_cache.clear()
            stack.callback(op._dispatch_cache.clear)
            if composite in op.py_kernels:
                _written_out[op] = op.py_kernels[composite]
                stack.callback(_written_out.pop, op)
            # Fake tensors with symbolic sizes go by the table, others by the kernel.
            for held, key in ((decomposition_table, op), (op.py_kernels, composite)):
                original = held.get(key)
                if callable(original):
                    held[key] = _without_steps(op, original, as_called)
                    stack.callback(held.__setitem__, key, original)
        yield


def _without_steps(op: Any, original: Callable[..., Any], as_called: bool) -> Callable[..., Any]:
    """Return a kernel that gives fake results of recurrent layers and traces none of their steps."""
    onednn = has_onednn()
    thread = threading.get_ident()

    def kernel(x: Any, hx: Any, params: Any, *flags: Any) -> Any:
        operands = pytree.tree_leaves((x, hx, params))
        if threading.get_ident() != thread or detect_fake_mode(operands) is None:
            return original(x, hx, params, *flags)
        *_, bidirectional, batch_first = flags
        by_batch = batch_first and x.dim() == 3
        if as_called and size_hint(x.shape[1 if by_batch else 0]) == 0:
            raise CaptureError("a recurrent layer over a sequence of length 0")
        states = [hx] if isinstance(hx, torch.Tensor) else hx
        dtypes = [x.dtype] * (1 + len(states))
        if as_called and torch.is_inference_mode_enabled():
            # No kernel is told there whether autocast is on.
            raise CaptureError("a recurrent layer under torch.inference_mode")
        if as_called and torch.is_autocast_enabled(x.device.type):
            dtypes = [r.dtype for r in _one_step(op, onednn, x, hx, params, *flags)]
        lead = [x.shape[1], x.shape[0]] if by_batch else x.shape[:-1]
        width = states[0].shape[-1] * (2 if bidirectional else 1)
        y = x.new_empty((*lead, width), dtype=dtypes[0])
        ends = [s.new_empty(s.shape, dtype=d) for s, d in zip(states, dtypes[1:], strict=True)]
        # In memory a batch stands inside of a step; whether views alias depends on it.
        results = [y.transpose(0, 1) if by_batch else y, *ends]
        if as_called and torch.is_grad_enabled():
            wanting = [o for o in operands if o.requires_grad]
            results = [_after(r, wanting) for r in results] if wanting else results
        return tuple(results)

    return kernel


def _one_step(op: Any, onednn: bool, x: Any, hx: Any, params: Any, *flags: Any) -> Any:
    """Run recurrent layers of fake tensors over one step of one row of zeros, without dropout.

    Which library computes them, and so what autocast does, is known to PyTorch's dispatch alone.
    """

    def zeros(like: Any, *rows: int) -> torch.Tensor:
        sizes = [*rows, *map(size_hint, like.shape[len(rows) :])]
        return torch.zeros(sizes, dtype=like.dtype, device=like.device)

    has_biases, num_layers, _, *others = flags
    with (
        _disable_current_modes(),
        torch._C._DisablePythonDispatcher(),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(torch._C._set_mkldnn_enabled, has_onednn())
        torch._C._set_mkldnn_enabled(onednn)  # an export turns it off
        states = pytree.tree_map(lambda s: zeros(s, size_hint(s.shape[0]), 1), hx)
        weights = [zeros(p) for p in params]
        return op(zeros(x, 1, 1), states, weights, has_biases, num_layers, 0.0, *others)


def _after(result: torch.Tensor, operands: list[torch.Tensor]) -> torch.Tensor:
    """Return a fake result that requires a gradient as one computed from the operands does."""

    def refuse(_: torch.Tensor) -> None:
        raise CaptureError("its forward takes gradients through a recurrent layer")

    linked = (result + sum(o.sum() for o in operands)).to(result.dtype)
    linked.register_hook(refuse)
    return linked


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


def size_expression(size: Any) -> int | sympy.Expr:
    """Return a size as an int, or as a sympy expression of the symbols of the graph."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression) if expression.is_Integer else expression


def size_function(expression: int | sympy.Expr, symbols: list[sympy.Symbol]) -> Callable[..., int]:
    """Return a function of the values of the symbols, as Python ints, that gives the expression's."""
    formula = sympy.sympify(expression)

    def value(*values: int) -> int:
        known = dict(zip(symbols, values, strict=True))
        return int(sympy_interp(PythonReferenceAnalysis, known, formula))

    return value


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


def has_kernels(op: torch._ops.OpOverload) -> bool:
    """Tell whether an operator is one of the dispatcher's, and not a question that tracing puts to tensors."""
    return bool(torch._C._dispatch_has_kernel(op.name()))


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Tell whether eager PyTorch itself differentiates ``op`` through the operators inside it."""
    return bool(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


# Composite, with parts that autocast casts, while it does not know them. Convolutions with a padding
# in words are known to autocast on the CPU alone.
_HIDE_AUTOCAST = frozenset(
    f"aten::{name}" for name in ("inner", "nll_loss_nd", "pad", "conv1d", "conv2d", "conv3d")
)
# Composite, with parts that CUDA's autocast runs in float32, while it does not know them.
_HIDE_FLOAT_ON_CUDA = frozenset(
    f"aten::{name}"
    for name in (
        "cross_entropy_loss",
        "square",
        "upsample_nearest1d",
        "upsample_nearest2d",
        "upsample_nearest3d",
    )
)


def knows_autocast(op: torch._ops.OpOverload, device: str) -> bool:
    """Tell whether the autocast of a type of devices ("cpu", "cuda") has a rule for ``op``."""
    key = "AutocastCUDA" if device == "cuda" else "AutocastCPU"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def hides_float(op: Any, device: str) -> bool:
    """Tell whether autocast runs all parts of ``op`` in float32 that it knows, and not ``op``."""
    return (
        device == "cuda"
        and isinstance(op, torch._ops.OpOverload)
        and op.name().partition(".")[0] in _HIDE_FLOAT_ON_CUDA
        and not knows_autocast(op, device)
    )


def loses_autocast(op: Any, known: Callable[[Any], bool], device: str) -> bool:
    """Tell whether autocast acts on the parts of ``op`` alone, and it has to come apart for that."""
    if not isinstance(op, torch._ops.OpOverload) or not is_composite(op):
        return False
    if knows_autocast(op, device):
        return False
    return op.name().partition(".")[0] in _HIDE_AUTOCAST or not known(op)


# Whole, their gradient is right where their parts' is NaN, or they check what they computed, which
# an export could only order by tokens.
_KEPT_WHOLE = frozenset(
    f"aten::{name}"
    for name in (
        "special_log_ndtr",
        "special_entr",
        *(f"special_xlog1py{kind}" for kind in ("", ".other_scalar", ".self_scalar")),
        *(f"xlogy.{kind}" for kind in ("Tensor", "Scalar_Other", "Scalar_Self")),
        # Exact at powers, and where 1 - erf(x) has no digits left.
        *("erfc", "log10", "log2"),
        "linalg_cholesky",
        "linalg_inv",
        "linalg_ldl_factor",
        "linalg_lu_factor",
        "linalg_solve",
        # What PyTorch writes it out as counts padding as a target.
        "multilabel_margin_loss",
        "multilabel_margin_loss_forward",
        # There a negative index counts from the end.
        "max_unpool2d",
        "max_unpool3d",
    )
)


def _embedding_bag(*args: Any, **kwargs: Any) -> Any:
    return torch.ops.aten._embedding_bag.default(*args, **kwargs)


# What eager PyTorch calls in the place of an operator when nothing wants a gradient has none.
_WITH_GRADIENT = {"aten::_embedding_bag_forward_only": _embedding_bag}


def decomposition(op: Any) -> Callable[..., Any] | None:
    """Return a function that computes ``op`` by simpler operators, or None."""
    if not isinstance(op, torch._ops.OpOverload) or op.name() in _KEPT_WHOLE:
        return None
    if moves_generator(op) and not is_composite(op):
        return None  # what it is made of draws other numbers
    if is_composite(op):
        key = torch._C.DispatchKey.CompositeImplicitAutograd
        kernel = op.py_kernels.get(key)
        if kernel is not None and not isinstance(kernel, torch._C.DispatchKey):
            return _written_out.get(op, kernel)
        # Not op.decompose: the export registers this function as the operator's kernel, so that
        # would call itself.
        return functools.partial(op._op_dk, key)
    return _WITH_GRADIENT.get(op.name()) or _decomposition_table().get(op)


def higher_order_name(target: Any) -> str:
    """Return the name of an operator that takes graphs (cond, while_loop); empty for others."""
    return target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""


_OF_STRIDES = frozenset(
    f"aten::{name}"
    for name in ("as_strided_copy", "as_strided_scatter", "resize", "resize_as", "set")
)


def is_escapable(op: Any) -> bool:
    """Tell whether ``op`` can run in PyTorch as one node: from tensors to tensors, no writes."""
    return (
        isinstance(op, torch._ops.OpOverload)
        and op.namespace != "prims"  # those have no gradient
        and op.name() not in _WITH_GRADIENT
        and not op._schema.is_mutable
        # Views depend on strides, which tensors of a graph do not have.
        and all(r.alias_info is None for r in op._schema.returns)
        and op.name().partition(".")[0] not in _OF_STRIDES
        and bool(op._schema.returns)
        and all("Tensor" in str(r.type) for r in op._schema.returns)
    )


def has_dense_gradients(node: torch.fx.Node) -> bool:
    """Tell whether the gradients of an operator have the layout of its arguments."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    return not given.get("sparse", False)


def draws_random_numbers(op: Any) -> bool:
    """Tell whether an operator may read PyTorch's generator; of others than its own nobody knows."""
    return op.namespace != "aten" or moves_generator(op)


def moves_generator(op: Any) -> bool:
    """Tell whether an operator is known to draw from PyTorch's generator."""
    return torch.Tag.nondeterministic_seeded in getattr(op, "tags", ())


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

    base = torch.autograd.Function
    originals: dict[type, Any] = {}  # None where it is inherited
    patches: list[Any] = []
    thread = threading.get_ident()

    # The subclasses are patched, not the base: dynamo, which traces loops, knows the base's method.
    def patch(cls: type) -> None:
        name = cls.__module__
        if name == _IN_PLACE_OF_FUNCTIONS or not name.startswith(_HARMLESS_FUNCTIONS):
            own = cls.__dict__.get("apply")
            originals[cls] = None if own in patches else own  # a copy of another class's attributes

            def original(*args: Any, **kwargs: Any) -> Any:
                found = (originals.get(c, c.__dict__.get("apply")) for c in cls.__mro__)
                return next(f for f in found if f is not None).__get__(None, cls)(*args, **kwargs)

            def apply(_: type, *args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != thread:  # another one, which traces nothing
                    return original(*args, **kwargs)
                return handler(cls, original, args, kwargs)

            patches.append(classmethod(apply))
            cls.apply = patches[-1]  # type: ignore[attr-defined]

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
        for cls, original in originals.items():
            if original is None:
                del cls.apply  # type: ignore[attr-defined]
            else:
                cls.apply = original  # type: ignore[attr-defined]


def any_accumulation_hooks(tensors: Iterable[torch.Tensor]) -> bool:
    """Tell whether something runs when a gradient has been added to the ``grad`` of one of some tensors."""
    return any(map(_accumulation_hooks_of, tensors))


_accumulation_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule: a module that runs on the engine and is otherwise the module it wraps."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ortrain import made_modules, progress_display
from ortrain.capture.dynamo_internals import untraced
from ortrain.debug_options import DebugOptions, tell_of_variables
from ortrain.engine import Engine
from ortrain.errors import UnsupportedError
from ortrain.memory_budget import MemoryBudget
from ortrain.pieces import Pieces
from ortrain.random_numbers import DropoutSource
from ortrain.report import MemoryPlan, ModuleReport
from ortrain.verification import schedule
from ortrain.verification.check import Verification

if TYPE_CHECKING:
    from ortrain.profile import NodeTime

__all__ = ["ORTModule"]

# What an ORTModule has beside the dictionary of attributes, which is the wrapped module's.
_SLOTS = (
    *("_ortrain_engine", "_ortrain_forward", "_ortrain_module", "_ortrain_options"),
    *("_ortrain_prepared", "_ortrain_verification"),
)
# accelerate's mark of a module whose forward it has replaced.
_PREPARED = "_is_accelerate_prepared"
_OWN = frozenset({"forward", _PREPARED, *_SLOTS})
_TABLES = ("_parameters", "_buffers", "_modules")
_ADDED = ("module", "report", "memory_plan", "profile", "save_graphs")


class _Added:
    """A method, or an attribute, of all ORTModules but those of modules that have one of that name.

    Args:
      function: The method, or what computes the attribute.
      is_called: Whether it is a method.
    """

    def __init__(self, function: Any, *, is_called: bool = False) -> None:
        self._function, self._is_called = function, is_called
        functools.update_wrapper(self, function)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # The instance's own dictionary comes before this; its tables, which nn.Module looks into last, do not.
        if instance is None:
            return self._function if self._is_called else self
        name = self._function.__name__
        for table in _TABLES:
            held = instance.__dict__.get(table)
            if held and name in held:
                return held[name]
        if self._is_called:
            return types.MethodType(self._function, instance)
        return self._function(instance)


def _added(function: Any) -> Any:
    return _Added(function)


def _added_method(function: Any) -> Any:
    return _Added(function, is_called=True)


class ORTModule(nn.Module):
    """Wrap a module so that its forward and backward run on the Ortrain engine.

    The result is an instance of a class with the name, methods and forward signature of the
    wrapped module's class, and is an instance of that class too. Its attributes, parameters,
    buffers, submodules and hooks are the wrapped module's: both have one ``__dict__``. Names in
    ``state_dict`` have no prefix.

    Args:
      module: The module to run. Its first call captures it; later calls with the same kind of
        arguments reuse the graph, whatever their sizes.
      debug_options: What it says and writes; None for warnings alone.
      max_memory: What the plan of a step may take from the engine (``memory_plan().total_bytes``:
        activations, temporaries, outputs, gradients): bytes as an int, a text such as "2GiB", or a
        share of what it would take, such as "0.3x". Where a plan exceeds it, activations are
        computed again in the backward instead of being kept (docs/memory.md). None: no limit.
      random: Who draws the masks of dropout: "engine", quickly, from a seed that each forward takes
        from PyTorch's generator, or "pytorch", the masks that the module itself would draw, so that
        a run can be compared with PyTorch's. All other random numbers are PyTorch's in both
        (docs/random_numbers.md).
      verify: Which calls run in PyTorch too and must agree, gradients included
        (docs/verification.md): "first", "sampled" (calls 1, 2, 4, 8, ...) or the number of first
        calls; 0 for none. None: what the environment variable ORTRAIN_VERIFY_STEPS says.

    Raises:
      TypeError: ``module`` is no nn.Module, or an ORTModule already, or ``debug_options`` or
        ``max_memory`` has another type.
      ValueError: ``max_memory`` says no number of bytes and no share, ``random`` is another text,
        or ``verify`` none of these.
      VerificationError: (from a call, or its backward) A verified step is another in PyTorch.

    Example:
      >>> model = ORTModule(model)
      >>> loss = model(**batch).loss
      >>> loss.backward()
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of a class that joins ORTModule and the class of ``module``."""
        wrapped = cls.__dict__.get("_ortrain_wrapped_class")
        if wrapped is not None:  # a method of the wrapped class makes another of its kind
            return wrapped.__new__(wrapped, *args, **kwargs)
        module = args[0] if args else kwargs.get("module")
        if not isinstance(module, nn.Module):
            raise TypeError(f"ORTModule takes a torch.nn.Module, got {type(module).__name__}")
        if isinstance(module, ORTModule):
            raise TypeError("the module is an ORTModule already")
        return object.__new__(_joined_class(cls, type(module)))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep joined classes out of registries that the wrapped class may keep of its kinds."""

    def __init__(
        self,
        module: nn.Module,
        debug_options: DebugOptions | None = None,
        *,
        max_memory: int | str | None = None,
        random: str = "engine",
        verify: str | int | None = None,
    ) -> None:
        if debug_options is not None and not isinstance(debug_options, DebugOptions):
            raise TypeError(f"debug_options is {debug_options!r}, expected DebugOptions")
        budget, dropout = MemoryBudget.parse(max_memory), DropoutSource.parse(random)
        verified_steps = schedule.parse(verify)
        object.__setattr__(self, "__dict__", module.__dict__)
        engine = Engine(module, cut=Pieces, budget=budget, dropout=dropout)
        verification = Verification(engine, verified_steps) if verified_steps else None
        options = {"max_memory": max_memory, "random": random, "verify": verify}
        tell_of_variables()
        values = (engine, None, module, options, False, verification)
        for name, value in zip(_SLOTS, values, strict=True):
            object.__setattr__(self, name, value)
        if debug_options is not None:
            self._ortrain_debug(debug_options)
        made_modules.tell(self)
        progress_display.attach()

    def _ortrain_debug(self, options: DebugOptions) -> None:
        """Say and write as much from now on."""
        options.apply()
        self._ortrain_options["debug_options"] = options
        to = options.save_onnx_models
        self._ortrain_engine.saves = (to.path, to.name_prefix) if to.save else None

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module's forward on the engine; its signature is the wrapped one's."""
        verification = self._ortrain_verification
        if verification is not None and verification.is_due():
            return verification.run(args, kwargs)
        return self._ortrain_engine.run(args, kwargs)

    # --- what the engine adds: where the module has the name, it is the module's

    @_added
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._ortrain_module

    @_added_method
    def report(self) -> ModuleReport:
        """Return what was captured, what ran natively, and why anything did not."""
        engine = self._ortrain_engine
        memory = engine.last_plan if engine.budget is not None else None
        verification = self._ortrain_verification
        verified = "" if verification is None else str(verification.verified)
        return ModuleReport(list(engine.records), engine.piece_records, memory, verified)

    @property
    def _is_accelerate_prepared(self) -> bool:
        return self._ortrain_prepared

    @_added_method
    def memory_plan(self) -> MemoryPlan | None:
        """Return the memory plan of the latest forward; None before the first."""
        return self._ortrain_engine.last_plan

    @_added_method
    def profile(self) -> list[NodeTime]:
        """Return the time of each node of all captured graphs, slowest first.

        Empty unless they ran inside of ``with ortrain.profile.profile():``, which also gives tables
        and a trace, or with ORTRAIN_PROFILE=1.
        """
        from ortrain.profile import Profile

        return Profile(self._ortrain_engine.profiles()).nodes

    @_added_method
    def save_graphs(self, folder: str | Path, prefix: str = "model") -> list[Path]:
        """Write the first graph of each kind that was captured as ONNX files, without weights.

        Args:
          folder: Where to; made where there is none.
          prefix: How the names begin.

        Returns:
          The files: ``<prefix>_torch_exported_<training or inference>.onnx`` as it was captured,
          ``<prefix>_optimized_...`` with the backward, ``<prefix>_optimized_pre_grad_training.onnx`` without, and
          ``<prefix>_execution_model_...`` rewritten and fused.

        Raises:
          FileError: A file cannot be written.
        """
        return self._ortrain_engine.save_graphs(Path(folder), prefix)

    # --- being the wrapped module

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # of an instance that is not made yet
            raise AttributeError(name)
        state = self.__dict__
        for table in _TABLES:
            if table in state and name in state[table]:
                return state[table][name]
        return getattr(self._ortrain_module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            # Who takes back what he has put there may find the wrapped class's by way of `__wrapped__`.
            original = inspect.unwrap(type(self).forward)
            is_own = getattr(value, "__self__", None) is self
            is_back = is_own and getattr(value, "__func__", None) is original
            object.__setattr__(self, "_ortrain_forward", None if is_back else value)
        elif name == _PREPARED:
            object.__setattr__(self, "_ortrain_prepared", value)
        elif name in _OWN:
            object.__setattr__(self, name, value)
        elif name == "__class__":
            self.__become(value)
        elif name == "__dict__":
            self._ortrain_module.__dict__ = value
            object.__setattr__(self, "__dict__", value)
        else:
            setattr(self._ortrain_module, name, value)

    def __become(self, kind: type) -> None:
        """Let the wrapped module become what one of its own class would, and join that class.

        Parametrizations derive a class from that of their module, and take the first base of that
        one when they go.
        """
        module, present = self._ortrain_module, type(self)
        if kind is _wrapper_of(self) and "forward" not in vars(type(module)):
            module.__class__ = type(module).__bases__[0]
        elif kind.__bases__ == (present,):
            own = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
            module.__class__ = type(type(module))(kind.__name__, (type(module),), own)
        else:
            raise UnsupportedError(
                f"an ORTModule cannot become a {kind.__name__}: FSDP's fully_shard keeps pieces of "
                "parameters, and graphs need them whole; use DistributedDataParallel or DeepSpeed "
                "ZeRO 1 or 2"
            )
        object.__setattr__(self, "__class__", _joined_class(_wrapper_of(self), type(module)))

    def __delattr__(self, name: str) -> None:
        if name == "forward":
            if self._ortrain_forward is None:
                raise AttributeError(name)
            object.__setattr__(self, "_ortrain_forward", None)
        elif name == _PREPARED:
            object.__setattr__(self, "_ortrain_prepared", False)
        else:
            delattr(self._ortrain_module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self._ortrain_module)})

    def __repr__(self) -> str:
        return f"ORTModule({self._ortrain_module!r})"

    def __copy__(self) -> ORTModule:
        """Wrap a copy that shares what a copy of the module shares."""
        module = copy.copy(self._ortrain_module)
        return _wrapped(_wrapper_of(self), module, self._ortrain_options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Captured graphs are made again where the copy runs.
        return (_wrapped, (_wrapper_of(self), self._ortrain_module, self._ortrain_options))


class _Forward:
    """The forward of a class of ORTModules; it comes before one that the wrapped module has got.

    Args:
      function: Runs the engine.
    """

    def __init__(self, function: types.FunctionType) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._function
        replaced = instance._ortrain_forward
        return types.MethodType(self._function, instance) if replaced is None else replaced

    def __set__(self, instance: Any, value: Any) -> None:
        setattr(instance, "forward", value)  # noqa: B010


@functools.cache
def _metaclass(of_wrapped: type) -> type:
    """Return the type of joined classes: properties belong to the wrapped class, as its own do."""

    class Joined(of_wrapped):  # type: ignore[misc]
        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return cls._ortrain_wrapped_class(*args, **kwargs)

        def __setattr__(cls, name: str, value: Any) -> None:
            if isinstance(value, property):
                setattr(cls._ortrain_wrapped_class, name, value)
            else:
                super().__setattr__(name, value)

        def __delattr__(cls, name: str) -> None:
            if name in cls.__dict__:
                super().__delattr__(name)
            else:
                delattr(cls._ortrain_wrapped_class, name)

    return Joined


def _wrapper_of(module: ORTModule) -> type[ORTModule]:
    """Return ORTModule, or the user's subclass of it, that a module was wrapped by."""
    return type(module).__bases__[0]


def _wrapped(wrapper: type[ORTModule], module: nn.Module, options: dict[str, Any]) -> ORTModule:
    """Wrap a copy of a wrapped module, which has what the constructor of a subclass would add."""
    again = wrapper.__new__(wrapper, module)
    ORTModule.__init__(again, module, **options)
    return again


def _deepcopy(module: Any, memo: dict[int, Any]) -> ORTModule:
    """Copy the wrapped module its own way and wrap the copy."""
    inner = copy.deepcopy(module._ortrain_module, memo)
    copied = _wrapped(_wrapper_of(module), inner, module._ortrain_options)
    memo[id(module)] = copied
    return copied


def _leave(self: Any) -> None:
    """Do nothing."""


def _of_wrapped(wrapped: type, name: str) -> Any:
    return inspect.getattr_static(wrapped, name)


# While somebody has a module of it: the user's classes go when nobody else holds them.
_joined_classes: weakref.WeakValueDictionary[tuple[type, type], type] = (
    weakref.WeakValueDictionary()
)


def _joined_class(wrapper: type, wrapped: type) -> type:
    """Return a class that is both, under the wrapped class's name and forward signature."""
    joined = _joined_classes.get((wrapper, wrapped))
    if joined is None:
        joined = _joined_classes[wrapper, wrapped] = _join(wrapper, wrapped)
    return joined


def _join(wrapper: type, wrapped: type) -> type:
    # A copy of the function, which shows itself as the wrapped class's.
    written = wrapper.forward
    forward = types.FunctionType(
        written.__code__, written.__globals__, None, written.__defaults__, written.__closure__
    )
    forward.__kwdefaults__ = written.__kwdefaults__
    # By what stands in the class: a descriptor of TorchScript shows itself to instances alone.
    functools.update_wrapper(forward, inspect.getattr_static(wrapped, "forward"))
    namespace = {
        "__slots__": _SLOTS,
        "forward": _Forward(untraced(forward)),
        **{name: _of_wrapped(wrapped, name) for name in _ADDED if hasattr(wrapped, name)},
        "__module__": wrapped.__module__,
        "__qualname__": wrapped.__qualname__,
        "__doc__": wrapped.__doc__,
        "_ortrain_wrapped_class": wrapped,
    }
    if hasattr(wrapped, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy
    if hasattr(wrapped, "__del__"):
        namespace["__del__"] = _leave  # what it would end is the module's, which may live on
    # nn.Module itself, and bases of ORTModule, would break the linearization.
    bases = (wrapper,) if wrapped is nn.Module else (wrapper, wrapped)
    return _metaclass(type(wrapped))(wrapped.__name__, bases, namespace)

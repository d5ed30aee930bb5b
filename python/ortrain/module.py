# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""ORTModule: a module that runs on the engine and is otherwise the module it wraps."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ortrain import made_modules, progress_display
from ortrain.capture.dynamo_internals import untraced
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

# What nn.Module keeps in an instance, shared by reference with the wrapped module.
# (Flags are no references: reads and writes of those go to the wrapped module.)
_MODULE_STATE = frozenset(nn.Module().__dict__) - {"training", "_is_full_backward_hook"}
# The latter two are accelerate's marks of a module whose forward it has replaced.
_OWN = frozenset(
    {"_ortrain_module", "_ortrain_engine", "_ortrain_options", "forward", "_original_forward"}
    | {"_ortrain_verification", "_is_accelerate_prepared"}
)


class ORTModule(nn.Module):
    """Wrap a module so that its forward and backward run on the Ortrain engine.

    The result is an instance of a class with the name, methods and forward signature of the
    wrapped module's class, and is an instance of that class too. Parameters, buffers, submodules
    and hooks are the wrapped module's own; names in ``state_dict`` have no prefix.

    Args:
      module: The module to run. Its first call captures it; later calls with the same kind of
        arguments reuse the graph, whatever their sizes.
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
      TypeError: ``module`` is no nn.Module, or an ORTModule already, or ``max_memory`` has another
        type.
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
            return wrapped(*args, **kwargs)
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
        *,
        max_memory: int | str | None = None,
        random: str = "engine",
        verify: str | int | None = None,
    ) -> None:
        budget, dropout = MemoryBudget.parse(max_memory), DropoutSource.parse(random)
        verified_steps = schedule.parse(verify)
        state = self.__dict__
        for name in _MODULE_STATE:
            if name in module.__dict__:
                state[name] = module.__dict__[name]
        state["_ortrain_module"] = module
        engine = Engine(module, cut=Pieces, budget=budget, dropout=dropout)
        state["_ortrain_engine"] = engine
        state["_ortrain_options"] = {"max_memory": max_memory, "random": random, "verify": verify}
        state["_ortrain_verification"] = (
            Verification(engine, verified_steps) if verified_steps else None
        )
        made_modules.tell(self)
        progress_display.attach()

    # --- what the engine adds

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self.__dict__["_ortrain_module"]

    def report(self) -> ModuleReport:
        """Return what was captured, what ran natively, and why anything did not."""
        engine = self.__dict__["_ortrain_engine"]
        memory = engine.last_plan if engine.budget is not None else None
        verification = self.__dict__["_ortrain_verification"]
        verified = "" if verification is None else str(verification.verified)
        return ModuleReport(list(engine.records), engine.piece_records, memory, verified)

    def memory_plan(self) -> MemoryPlan | None:
        """Return the memory plan of the latest forward; None before the first."""
        return self.__dict__["_ortrain_engine"].last_plan

    def profile(self) -> list[NodeTime]:
        """Return the time of each node of all captured graphs, slowest first.

        Empty unless they ran inside of ``with ortrain.profile.profile():``, which also gives tables
        and a trace, or with ORTRAIN_PROFILE=1.
        """
        from ortrain.profile import Profile

        return Profile(self.__dict__["_ortrain_engine"].profiles()).nodes

    def save_graphs(self, folder: str | Path, prefix: str = "model") -> list[Path]:
        """Write the first graph of each kind that was captured as ONNX files, without weights.

        Args:
          folder: Where to; made where there is none.
          prefix: How the names begin.

        Returns:
          The files: ``<prefix>_torch_exported_<training or inference>.onnx`` as it was captured, and
          ``<prefix>_execution_model_...`` with the backward, rewritten and fused.

        Raises:
          FileError: A file cannot be written.
        """
        return self.__dict__["_ortrain_engine"].save_graphs(Path(folder), prefix)

    # --- being the wrapped module

    @property
    def training(self) -> bool:
        """Train or eval mode, the wrapped module's."""
        return self.__dict__["_ortrain_module"].training

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_ortrain_module"].training = mode

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__
        for table in ("_parameters", "_buffers", "_modules"):
            if table in state and name in state[table]:
                return state[table][name]
        if "_ortrain_module" in state and name not in _OWN:
            return getattr(state["_ortrain_module"], name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            self.__dict__[name] = value
        elif name == "training":
            self.__dict__["_ortrain_module"].training = value
        elif name == "__class__":
            self.__become(value)
        else:
            setattr(self.__dict__["_ortrain_module"], name, value)

    def __become(self, kind: type) -> None:
        """Let the wrapped module become what one of its own class would, and join that class.

        Parametrizations derive a class from that of their module, and take the first base of that
        one when they go.
        """
        module, present = self.__dict__["_ortrain_module"], type(self)
        if kind is present.__bases__[0] and "forward" not in vars(type(module)):
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
        object.__setattr__(self, "__class__", _joined_class(present.__bases__[0], type(module)))

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ and name in _OWN:
            del self.__dict__[name]
        else:
            delattr(self.__dict__["_ortrain_module"], name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.__dict__["_ortrain_module"])})

    def __repr__(self) -> str:
        return f"ORTModule({self.__dict__['_ortrain_module']!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Captured graphs are made again where the copy runs.
        again = functools.partial(ORTModule, **self.__dict__["_ortrain_options"])
        return (again, (self.__dict__["_ortrain_module"],))


class _Shadow:
    """Reads what a class defines through the wrapped module, which may have its own."""

    def __init__(self, wrapped: type, name: str) -> None:
        self._wrapped, self._name = wrapped, name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return getattr(self._wrapped, self._name)
        module = instance.__dict__["_ortrain_module"]
        if self._name in module.__dict__:
            return module.__dict__[self._name]
        # Methods get the ORTModule, whose class has them from the wrapped one's.
        value = inspect.getattr_static(self._wrapped, self._name)
        return value.__get__(instance, owner) if hasattr(type(value), "__get__") else value


def _shadows(wrapped: type) -> dict[str, _Shadow]:
    """Return what makes an attribute of the module come before one of its class."""
    own = (*vars(ORTModule), *_OWN)
    return {
        name: _Shadow(wrapped, name)
        for cls in wrapped.__mro__
        if cls not in nn.Module.__mro__
        for name, value in vars(cls).items()
        if not name.startswith("__")
        and name not in own
        and (isinstance(value, types.FunctionType) or not hasattr(type(value), "__get__"))
    }


@functools.cache
def _metaclass(of_wrapped: type) -> type:
    """Return the type of joined classes: properties belong to the wrapped class, as its own do."""

    class Joined(of_wrapped):  # type: ignore[misc]
        def __setattr__(cls, name: str, value: Any) -> None:
            if isinstance(value, property):
                setattr(cls.__dict__["_ortrain_wrapped_class"], name, value)
            else:
                super().__setattr__(name, value)

        def __delattr__(cls, name: str) -> None:
            if name in cls.__dict__:
                super().__delattr__(name)
            else:
                delattr(cls.__dict__["_ortrain_wrapped_class"], name)

    return Joined


def _deepcopy(module: Any, memo: dict[int, Any]) -> ORTModule:
    """Copy the wrapped module its own way and wrap the copy."""
    options = module.__dict__["_ortrain_options"]
    copied = ORTModule(copy.deepcopy(module.__dict__["_ortrain_module"], memo), **options)
    memo[id(module)] = copied
    return copied


@functools.cache
def _joined_class(wrapper: type, wrapped: type) -> type:
    """Return a class that is both, under the wrapped class's name and forward signature."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        verification = self.__dict__["_ortrain_verification"]
        if verification is not None and verification.is_due():
            return verification.run(args, kwargs)
        return self.__dict__["_ortrain_engine"].run(args, kwargs)

    # By what stands in the class: a descriptor of TorchScript shows itself to instances alone.
    functools.update_wrapper(forward, inspect.getattr_static(wrapped, "forward"))
    namespace = {
        **_shadows(wrapped),
        "forward": untraced(forward),
        "__module__": wrapped.__module__,
        "__qualname__": wrapped.__qualname__,
        "__doc__": wrapped.__doc__,
        "_ortrain_wrapped_class": wrapped,
    }
    if hasattr(wrapped, "__deepcopy__"):
        namespace["__deepcopy__"] = _deepcopy
    # nn.Module itself, and bases of ORTModule, would break the linearization.
    bases = (wrapper,) if wrapped is nn.Module else (wrapper, wrapped)
    return _metaclass(type(wrapped))(wrapped.__name__, bases, namespace)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Calls of autograd functions, each one operator of the captured graph.

An export would trace through the forward of a ``torch.autograd.Function`` and lose its backward. While
a module is captured, applying one calls an operator made for this call instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from ortrain import logs
from ortrain.capture import torch_internals as internals
from ortrain.capture.aliases import origin_of, written_by
from ortrain.capture.errors import (
    AutogradFunctionError,
    ChangingAttributeError,
    UnseenStateError,
)
from ortrain.capture.escapes import Operand, with_operands
from ortrain.capture.locations import module_path, node_source
from ortrain.capture.random_internals import keep_dead
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.shallow_copies import Changes

_log = logs.get_logger("ortrain.capture")
_numbers = itertools.count()
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# PyTorch's own ones run pieces of a model whose tensors are no arguments, or are hooks.
_NOT_THE_USERS = "torch."


@dataclasses.dataclass(slots=True, eq=False)
class FunctionCall:
    """One application of an autograd function.

    Attributes:
      name: The class, with its module.
      leaves: The arguments, flat, with an ``Operand`` where a tensor or a size stands.
      tree: How they are nested.
      shares_memory: Whether a result is a view of an argument or of another result.
      has_effects: Whether its forward changes what Python code behind it may see.
      writes_in_backward: Whether its backward writes to an argument of its forward.
    """

    name: str
    cls: type
    apply: Callable[..., Any]
    leaves: list[Any]
    tree: Any
    around: ReachableState | None = None  # what the module reaches
    result_tree: Any = None
    constants: dict[int, Any] = dataclasses.field(default_factory=dict)
    shares_memory: bool = False
    has_effects: bool = False
    writes_in_backward: bool = False

    def __call__(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[Any]:
        """Apply the function; return the tensors of its result."""
        return _tensors_of(self._apply(tensors, sizes))

    def on_fakes(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[Any]:
        """Apply the function, and its backward, to tensors without contents, for what is found out.

        Returns the tensors of its result. Nothing is known of a backward that needs contents.
        """
        with self._without_effects():
            made = _tensors_of(self._apply(tensors, sizes))
            tracked = [t for t in made if t.requires_grad]
            leaves = [t for t in tensors if t.requires_grad]
            versions = [t._version for t in tensors]
            try:
                if tracked and leaves:
                    given = [torch.empty_like(t) for t in tracked]
                    torch.autograd.grad(tracked, leaves, given, allow_unused=True)
            except Exception as error:  # code of the user may raise anything here
                _log.debug("%s: its backward does not run in a trace: %s", self.name, error)
            finally:
                self.writes_in_backward |= versions != [t._version for t in tensors]
        return made

    @contextlib.contextmanager
    def _without_effects(self) -> Iterator[None]:
        """Take back what applying the function changes in Python: the engine applies it as well.

        Raises:
          UnseenStateError: It could use up an iterator.
        """
        state = ReachableState(self.cls, self.leaves, functions=True, tensors=False)
        if state.consumed:
            raise UnseenStateError(
                f"autograd function '{self.name}' reaches {', '.join(map(repr, state.consumed))}, "
                "of whose items a trace could take some"
            )
        try:
            yield
        finally:
            self.has_effects |= state.restore() != Changes()

    def traced(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        """Return empty tensors like the results, and remember how the result is nested.

        Raises:
          AutogradFunctionError: The function writes to its arguments, or its result holds something
            that no graph can give.
        """
        memories = [internals.storage_identity(t) for t in tensors]
        # Versions do not count here, below autograd.
        writes = _WriteWatch(memories)
        with torch.no_grad(), self._without_effects(), writes:
            flat, self.result_tree = pytree.tree_flatten(self._apply(tensors, sizes))
        if self.has_effects:
            self._refuse_effects_on_the_module(tensors, sizes)
        if writes.are_any:
            raise AutogradFunctionError(f"autograd function '{self.name}' writes to its arguments")
        results = []
        self.constants = {}
        for index, part in enumerate(flat):
            if isinstance(part, torch.Tensor):
                if part.layout is not torch.strided:
                    raise AutogradFunctionError(
                        f"autograd function '{self.name}' returns a tensor of {part.layout}"
                    )
                self.shares_memory |= internals.storage_identity(part) in memories
                memories.append(internals.storage_identity(part))
                results.append(torch.empty(part.shape, dtype=part.dtype, device=part.device))
            elif part is None or type(part) in (bool, int, float, str):
                self.constants[index] = part
            else:
                raise AutogradFunctionError(
                    f"autograd function '{self.name}' returns a {type(part).__name__}"
                )
        return results

    def _refuse_effects_on_the_module(
        self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]
    ) -> None:
        """Raise ChangingAttributeError where the module's own code can see what the function changes."""
        if self.around is None:
            return
        before = self.around.again()
        with torch.no_grad(), self._without_effects():
            try:
                self._apply(tensors, sizes)
            finally:
                changes = before.restore()
        if changes != Changes():
            raise ChangingAttributeError(
                f"autograd function '{self.name}' changes what the forward of the module can see"
            )

    def _apply(self, tensors: Sequence[torch.Tensor], sizes: Sequence[Any]) -> Any:
        args, kwargs = with_operands(
            self.leaves, self.tree, lambda o: (sizes if o.is_number else tensors)[o.position]
        )
        return self.apply(*args, **kwargs)

    def nested(self, results: Sequence[torch.Tensor]) -> Any:
        """Return the results as the function nests them."""
        tensors = iter(results)
        count = self.result_tree.num_leaves
        flat = [self.constants[i] if i in self.constants else next(tensors) for i in range(count)]
        return pytree.tree_unflatten(flat, self.result_tree)


class _WriteWatch(TorchDispatchMode):
    """Tells whether operators write to some memory."""

    def __init__(self, memories: Sequence[int]) -> None:
        super().__init__()
        self._memories = frozenset(memories)
        self.are_any = False

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        for position, argument in enumerate(op._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else given.get(argument.name)
                self.are_any |= any(
                    internals.storage_identity(leaf) in self._memories
                    for leaf in pytree.tree_leaves(value)
                    if isinstance(leaf, torch.Tensor)
                )
        return op(*args, **given)


class FunctionCalls:
    """Makes an operator for each application of an autograd function; they go when it goes.

    Attributes:
      around: What the module reaches whose forward runs.
    """

    def __init__(self) -> None:
        self.around: ReachableState | None = None
        self._namespace = f"ortrain_functions_{next(_numbers)}"
        self._library: torch.library.Library | None = None
        self.calls: dict[Any, FunctionCall] = {}

    def apply(
        self, cls: type, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call the operator that stands for ``cls.apply(*args, **kwargs)``.

        Raises:
          AutogradFunctionError: The call has no place in a graph.
        """
        name = f"{cls.__module__}.{cls.__qualname__}"
        if internals.is_transforming():  # where Dynamo forgets its backward too
            raise UnseenStateError(
                f"autograd function '{name}' is called inside of a transform of torch.func"
            )
        wanting = (leaf for leaf in args if isinstance(leaf, torch.Tensor) and leaf.requires_grad)
        if issubclass(cls, checkpoint.CheckpointFunction) and not any(True for _ in wanting):
            raise UnseenStateError(
                "its forward calls a reentrant checkpoint none of whose arguments wants a gradient: "
                "its layers get none in PyTorch"
            )
        if name.startswith(_NOT_THE_USERS) or torch.is_autocast_enabled("cpu"):
            raise AutogradFunctionError(
                f"torch.autograd.Function '{name}' has a backward of its own, which a capture "
                "would lose"
            )
        leaves, tree = pytree.tree_flatten((args, kwargs))
        tensors: list[torch.Tensor] = []
        sizes: list[torch.SymInt] = []
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                leaves[index] = Operand(len(tensors))
                tensors.append(leaf)
            elif isinstance(leaf, torch.SymInt):
                leaves[index] = Operand(len(sizes), is_number=True)
                sizes.append(leaf)
            elif isinstance(leaf, (torch.SymFloat, torch.SymBool)) or _holds_traced(leaf):
                raise AutogradFunctionError(
                    f"autograd function '{name}' takes a {type(leaf).__name__} that belongs to "
                    "one trace only"
                )
        call = FunctionCall(name, cls, original, leaves, tree, self.around)
        results = self._operator(cls, call)(tensors, sizes)
        return call.nested(results)

    def refuse_lost_effects(self, program: torch.export.ExportedProgram) -> None:
        """Refuse a program that leaves out a function with effects, since nothing uses its result.

        Raises:
          UnseenStateError: It does.
        """
        if not any(call.has_effects for call in self.calls.values()):
            return
        live: set[fx.Node] = set()
        for node in reversed(program.graph.nodes):
            writes = any(True for _ in written_by(node))
            if node.op == "output" or writes or live.intersection(node.users):
                live.add(node)
        used = {node.target for node in live}
        for operator, call in self.calls.items():
            if call.has_effects and operator not in used:
                raise UnseenStateError(
                    f"autograd function '{call.name}' has effects, and its result is not used"
                )

    def refuse_writes_to_shared_memory(self, program: torch.export.ExportedProgram) -> None:
        """Refuse a program that writes to what a function's result shares memory with.

        Raises:
          AutogradFunctionError: It does; the operator has a result of its own.
        """
        shared: dict[fx.Node, FunctionCall] = {}
        for node in program.graph.nodes:
            call = self.calls.get(node.target)
            if call is not None and call.shares_memory:
                for member in (node, *node.all_input_nodes):
                    shared[origin_of(member)[0]] = call
        for node in program.graph.nodes if shared else ():
            for written in written_by(node):
                found = shared.get(origin_of(written)[0])
                if found is not None:
                    raise AutogradFunctionError(
                        f"autograd function '{found.name}' returns a view, and {node.target} "
                        "writes to its memory",
                        module=module_path(node),
                        source=node_source(node),
                    )

    def _operator(self, cls: type, call: FunctionCall) -> Any:
        if self._library is None:
            self._library = torch.library.Library(self._namespace, "DEF")
        name = f"{''.join(c if c.isalnum() else '_' for c in cls.__qualname__)}_{len(self.calls)}"
        self._library.define(f"{name}(Tensor[] tensors, SymInt[] sizes) -> Tensor[]")
        torch.library.register_fake(f"{self._namespace}::{name}", call.traced, lib=self._library)
        operator = getattr(getattr(torch.ops, self._namespace), name).default
        self.calls[operator] = call
        keep_dead(operator)
        return operator


def _tensors_of(result: Any) -> list[torch.Tensor]:
    return [part for part in pytree.tree_leaves(result) if isinstance(part, torch.Tensor)]


def _holds_traced(value: Any, depth: int = 4) -> bool:
    """Tell whether an argument holds tensors without contents, as far as it can be looked into.

    The tensors of layers are without contents during a trace only.
    """
    if internals.is_fake(value):
        return True
    if depth == 0 or value is None or isinstance(value, (*_PLAIN, nn.Module, type)):
        return False
    if isinstance(value, Mapping):
        parts = [*value.keys(), *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).values())
        parts += [getattr(value, name, None) for name in ("__self__", "func", "args", "keywords")]
        parts += _closure(value)
    return any(_holds_traced(part, depth - 1) for part in parts)


def _closure(value: Any) -> list[Any]:
    contents = []
    for cell in getattr(value, "__closure__", None) or ():
        try:
            contents.append(cell.cell_contents)
        except ValueError:  # it is empty
            continue
    return contents

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a program's own: an update rule in Python, compiled to fused graphs."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from ortrain import _core
from ortrain.capture.dtypes import onnx_code
from ortrain.capture.kept_changes import cells_of
from ortrain.capture.names_in_code import codes_in
from ortrain.capture.torch_internals import outside_compiled_code
from ortrain.errors import DeviceError, DTypeError, ShapeError, UnsupportedError
from ortrain.optim.closure_step import ClosureStep

Number = int | float
Group = dict[str, Any]

# Dtypes of parameters, and in which their rules are computed.
_COMPUTED_IN = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


# Attributes that every optimizer has.
_OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(())]))) | {
    "_sessions",
    "_names_of_rule",
    "step",
}
# By these code reads attributes that it does not name.
_READERS = frozenset({"getattr", "hasattr", "vars", "__dict__", "__getattribute__"})
# Graphs of one kind, for what options and attributes have held.
_MOST_SESSIONS = 8


class Expression:
    """A tensor of an update rule: arithmetic on it adds nodes to the rule's graph."""

    __slots__ = ("_builder", "value")

    def __init__(self, builder: RuleBuilder, value: Any) -> None:
        self._builder = builder
        self.value = value

    def __add__(self, other: Expression | Number) -> Expression:
        return self._builder.op("Add", self, other)

    def __radd__(self, other: Number) -> Expression:
        return self._builder.op("Add", self, other)

    def __sub__(self, other: Expression | Number) -> Expression:
        return self._builder.op("Sub", self, other)

    def __rsub__(self, other: Number) -> Expression:
        return self._builder.op("Sub", other, self)

    def __mul__(self, other: Expression | Number) -> Expression:
        return self._builder.op("Mul", self, other)

    def __rmul__(self, other: Number) -> Expression:
        return self._builder.op("Mul", self, other)

    def __truediv__(self, other: Expression | Number) -> Expression:
        return self._builder.op("Div", self, other)

    def __rtruediv__(self, other: Number) -> Expression:
        return self._builder.op("Div", other, self)

    def __pow__(self, other: Expression | Number) -> Expression:
        return self._builder.op("Pow", self, other)

    def __rpow__(self, other: Number) -> Expression:
        return self._builder.op("Pow", other, self)

    def __neg__(self) -> Expression:
        return self._builder.op("Neg", self)

    def __bool__(self) -> bool:
        raise UnsupportedError(
            "an update rule cannot branch on the value of a tensor; use g.op('Where', ...)"
        )


class RuleBuilder:
    """What an update rule builds with; all is in the parameter's dtype, of 16 bits in float32."""

    def __init__(self, builder: Any, dtype: torch.dtype) -> None:
        self._builder = builder
        self._dtype = dtype

    def op(
        self, name: str, *operands: Expression | Number, domain: str = "", **attributes: Any
    ) -> Expression:
        """Add a node with one output; numbers among the operands become constants."""
        values = [self._value(operand) for operand in operands]
        return Expression(self, self._builder.node(name, values, attributes, domain=domain))

    def _value(self, operand: Expression | Number | torch.Tensor) -> Any:
        if isinstance(operand, Expression):
            return operand.value
        if isinstance(operand, torch.Tensor):
            return self._builder.constant(operand)
        return self._builder.constant(torch.tensor(operand, dtype=self._dtype))

    def sqrt(self, x: Expression) -> Expression:
        """Square root of each element."""
        return self.op("Sqrt", x)

    def sign(self, x: Expression) -> Expression:
        """-1, 0 or 1 for each element."""
        return self.op("Sign", x)

    def maximum(self, x: Expression, y: Expression | Number) -> Expression:
        """Return the larger of two, element by element."""
        return self.op("Max", x, y)

    def norm(self, x: Expression) -> Expression:
        """Euclidean norm over all elements, a scalar."""
        return self.op("ReduceL2", x, keepdims=0)


class GraphOptimizer(ClosureStep):
    """An optimizer whose update rule is a Python function, run as fused graphs.

    A subclass names its state in ``state_names`` and defines ``update``. The rule is turned into a
    graph once for each group, dtype and rank; floats of a group (learning rate, betas, also in tuples)
    are inputs of the graph, so that schedules cost nothing. Where other options, attributes of the
    optimizer or of its classes, or what the rule closes over, hold something else than when the
    graph was made, another one is made; globals that a rule reads count once. State
    starts as zeros, in the parameter's shape and dtype; ``step`` is counted beside it as
    torch.optim does, so ``state_dict`` has the usual layout.

    A step raises DTypeError for parameters that are no floats, DeviceError for those outside the
    CPU, UnsupportedError for sparse gradients and tensors among the options, and what the rule
    raises, before anything is changed.
    """

    state_names: ClassVar[Sequence[str]] = ()

    def __init__(self, params: Any, defaults: Group) -> None:
        super().__init__(params, defaults)
        self._sessions: dict[Any, list[tuple[Any, Any]]] = {}
        # What the rule reads, as far as it is known; None for anything.
        self._names_of_rule: frozenset[str] | None = frozenset()

    def update(
        self,
        g: RuleBuilder,
        param: Expression,
        grad: Expression,
        state: Mapping[str, Expression],
        options: Mapping[str, Any],
    ) -> tuple[Expression, Mapping[str, Expression]]:
        """Return the new parameter and the new state.

        Args:
          g: Adds nodes that arithmetic does not have.
          param: The parameter.
          grad: Its gradient.
          state: The state by name.
          options: The parameter group: floats as scalar expressions, everything else as it is, and
            ``step``, the number of this update from 1.
        """
        raise NotImplementedError

    @outside_compiled_code
    @torch.no_grad()
    def _update_all(self) -> None:
        work = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        # Whatever may be refused is refused before the first parameter changes.
        for number, (_, param) in enumerate(work):
            if param.dtype not in _COMPUTED_IN:
                raise DTypeError(f"parameter {number} is {param.dtype}, which no update rule takes")
            if param.device.type != "cpu":
                raise DeviceError(f"parameter {number} is on {param.device}")
            if param.grad.layout is not torch.strided:
                raise UnsupportedError(f"the gradient of parameter {number} is sparse")
        found: dict[Any, Any] = {}
        for group, param in work:
            kind = id(group), param.dtype, param.dim()
            if kind not in found:
                found[kind] = self._session(group, param)
        sessions = [found[id(g), p.dtype, p.dim()] for g, p in work]
        scalars: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        for (group, param), session in zip(work, sessions, strict=True):
            computed = _COMPUTED_IN[param.dtype]
            place = (id(group), computed)
            if place not in scalars:
                scalars[place] = [torch.tensor(n, dtype=computed) for n in _floats(group).values()]
            state = self.state[param]
            held = [self._held(state, name, param) for name in self.state_names]
            step = state.get("step", torch.zeros((), dtype=torch.float32)) + 1
            inputs = [param.detach(), param.grad.to(param.dtype), *held, *scalars[place]]
            made = _core.Run(session).forward([*inputs, step.to(computed)])
            for target, value in zip([param, *held], made, strict=True):
                target.copy_(value)
            state["step"] = step

    @staticmethod
    def _held(state: Any, name: str, param: torch.Tensor) -> torch.Tensor:
        if name not in state:
            state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        held: torch.Tensor = state[name]
        if held.shape != param.shape:
            raise ShapeError(
                f"the state '{name}' has shape {list(held.shape)}, the parameter {list(param.shape)}"
            )
        if held.dtype != param.dtype:
            held = state[name] = held.to(param.dtype)
        return held

    def _session(self, group: Group, param: torch.Tensor) -> Any:
        """Return what runs the rule for parameters of this dtype and rank in this group."""
        fixed = _fixed(group)
        for name, value in fixed.items():
            _refuse_tensors(name, value)
        for guard, session in reversed(self._sessions.get(self._key(group, param), ())):
            if guard.holds():
                return session
        named = self._names_of_rule = _names_read(self)
        own = vars(self).keys() - _OF_OPTIMIZERS if named is None else named
        shared = {
            name
            for of in type(self).__mro__[:-1]
            for name in vars(of)
            if not name.startswith("__") and (named is None or name in named)
        }
        read: list[tuple[Any, str]] = [(type(self), name) for name in sorted({"update", *shared})]
        read += [(group, name) for name in fixed]
        # Those that are not there too: they may come.
        read += [(vars(self), name) for name in sorted({"update", *own})]
        # Before the rule runs, so that what it changes itself is not taken for what it read.
        guard = _core.ModuleGuard([], None, read, [])
        session = self._compile(group, param)
        present = {id(each) for each in self.param_groups}
        for key in [key for key in self._sessions if key[0] not in present]:
            del self._sessions[key]
        kept = self._sessions.setdefault(self._key(group, param), [])
        kept.append((guard, session))
        del kept[:-_MOST_SESSIONS]
        return session

    def _key(self, group: Group, param: torch.Tensor) -> tuple[Any, ...]:
        # Guards keep the group, so that no other one gets its number.
        own = frozenset(vars(self)) if self._names_of_rule is None else None
        return (
            *(id(group), param.dtype, param.dim()),
            *(frozenset(_fixed(group)), tuple(_floats(group)), own),
        )

    def _compile(self, group: Group, param: torch.Tensor) -> Any:
        stored, computed = onnx_code(param.dtype), onnx_code(_COMPUTED_IN[param.dtype])
        graph = _core.GraphBuilder(type(self).__name__)
        builder = RuleBuilder(graph, _COMPUTED_IN[param.dtype])
        sizes = [f"d{axis}" for axis in range(param.dim())]

        def tensor(name: str) -> Expression:
            value = graph.input(name, stored, sizes, "user")
            if stored != computed:
                value = graph.node("Cast", [value], {"to": computed})
            return Expression(builder, value)

        def number(name: str) -> Expression:
            return Expression(builder, graph.input(name, computed, [], "user"))

        values = [tensor("param"), tensor("grad")]
        state = {name: tensor(f"state.{name}") for name in self.state_names}
        options = _with_expressions(group, {n: number(f"option.{n}") for n in _floats(group)})
        options["step"] = number("step")
        updated, states = self.update(builder, *values, state, options)
        if states.keys() != set(self.state_names):
            raise ValueError(
                f"{type(self).__name__}.update returned the state {sorted(states)}, "
                f"expected {sorted(self.state_names)}"
            )
        results = {"param": updated, **{name: states[name] for name in self.state_names}}
        for name, result in results.items():
            value = result.value
            if value.dtype != computed or list(value.shape) != sizes:
                raise ShapeError(
                    f"{type(self).__name__}.update returned '{name}' of shape {list(value.shape)}, "
                    f"expected that of the parameter, {sizes}"
                )
            if stored != computed:
                value = graph.node("Cast", [value], {"to": stored})
            graph.output(value, f"{name}.out", "user")
        finished = graph.finish()
        finished.run_passes("fuse")
        return _core.Session(finished)

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept.pop("_sessions", None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sessions, self._names_of_rule = {}, frozenset()


def _is_float(value: Any) -> bool:
    """Tell whether an option is a float, a tensor that holds one, or a tuple of such."""
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(_is_float(v) and not isinstance(v, tuple) for v in value)
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, float)


def _floats(group: Group) -> dict[str, float]:
    """Return the floats of a group by name, those in tuples as ``name.index``."""
    result: dict[str, float] = {}
    for name, value in group.items():
        if name == "params" or not _is_float(value):
            continue
        if isinstance(value, (tuple, list)):
            result.update({f"{name}.{i}": float(part) for i, part in enumerate(value)})
        else:
            result[name] = float(value)
    return result


def _fixed(group: Group) -> Group:
    """Return the options that are no floats: a rule reads them when its graph is made."""
    return {n: v for n, v in group.items() if n != "params" and not _is_float(v)}


def _names_read(optimizer: GraphOptimizer) -> frozenset[str] | None:
    """Return the names in the code of an optimizer's rule, and of what it calls; None where others may be read."""
    classes = type(optimizer).__mro__[:-1]
    names, seen = {"update"}, set()
    left: list[Any] = [vars(optimizer).get("update"), *(vars(c).get("update") for c in classes)]
    while left:
        function = left.pop()
        function = getattr(function, "fget", None) or getattr(function, "__func__", function)
        if not isinstance(function, types.FunctionType) or id(function) in seen:
            continue
        seen.add(id(function))
        if (function.__module__ or "").startswith("torch."):
            continue
        left += [getattr(function, "__wrapped__", None)]
        left += [cell.cell_contents for cell in cells_of(function)]
        for code in codes_in(function.__code__):
            for name in code.co_names:
                names.add(name)
                left += [function.__globals__.get(name), *(vars(c).get(name) for c in classes)]
    return None if names & _READERS else frozenset(names)


def _refuse_tensors(name: str, value: Any) -> None:
    """Raise UnsupportedError for tensors in an option, in its containers too: no graph would follow them."""
    if isinstance(value, torch.Tensor):
        raise UnsupportedError(f"option '{name}' is a tensor that is no single float")
    if isinstance(value, (list, tuple, set, frozenset)):
        for part in value:
            _refuse_tensors(name, part)
    elif isinstance(value, Mapping):
        for part in value.values():
            _refuse_tensors(name, part)


def _with_expressions(group: Group, numbers: Mapping[str, Expression]) -> Group:
    """Return the options of a group with expressions in the place of their floats."""
    result = _fixed(group)
    for name, value in group.items():
        if name == "params" or name in result:
            continue
        if isinstance(value, (tuple, list)):
            result[name] = tuple(numbers[f"{name}.{i}"] for i in range(len(value)))
        else:
            result[name] = numbers[name]
    return result

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizers of a program's own: an update rule in Python, compiled to fused graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ortrain import _core
from ortrain.capture.dtypes import onnx_code
from ortrain.capture.torch_internals import outside_compiled_code
from ortrain.errors import DTypeError, UnsupportedError

Number = int | float
Group = dict[str, Any]


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
    """What an update rule builds with; every tensor is in the parameter's dtype."""

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


class GraphOptimizer(torch.optim.Optimizer):
    """An optimizer whose update rule is a Python function, run as fused graphs.

    A subclass names its state in ``state_names`` and defines ``update``. The rule is turned into a
    graph once per dtype, rank and set of options that are no floats; floats of a group (learning
    rate, betas, also in tuples) are inputs of the graph, so that schedules cost nothing. State
    starts as zeros, in the parameter's shape and dtype; ``step`` is counted beside it as
    torch.optim does, so ``state_dict`` has the usual layout.

    A step raises DTypeError for parameters that are not floating point, and UnsupportedError for
    sparse gradients, before anything is changed.
    """

    state_names: ClassVar[Sequence[str]] = ()

    def __init__(self, params: Any, defaults: Group) -> None:
        super().__init__(params, defaults)
        self._sessions: dict[Any, Any] = {}

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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
          closure: Evaluates the model again and returns the loss.

        Returns:
          What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    @outside_compiled_code
    @torch.no_grad()
    def _update_all(self) -> None:
        work = [(g, p) for g in self.param_groups for p in g["params"] if p.grad is not None]
        for number, (_, param) in enumerate(work):
            if not param.is_floating_point():
                raise DTypeError(f"parameter {number} is {param.dtype}, no floating point")
            if param.grad.layout is not torch.strided:
                raise UnsupportedError(f"the gradient of parameter {number} is sparse")
        scalars: dict[tuple[int, torch.dtype], dict[str, torch.Tensor]] = {}
        for group, param in work:
            state = self.state[param]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                for name in self.state_names:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
            state["step"] += 1
            place = (id(group), param.dtype)
            if place not in scalars:
                scalars[place] = {
                    name: torch.tensor(number, dtype=param.dtype)
                    for name, number in _floats(group).items()
                }
            self._update_one(group, param, state, scalars[place])

    def _update_one(
        self, group: Group, param: torch.Tensor, state: Any, scalars: Mapping[str, torch.Tensor]
    ) -> None:
        fixed = {n: v for n, v in group.items() if n != "params" and not _is_numeric(v)}
        key = (param.dtype, param.dim(), repr(sorted(fixed.items())), tuple(scalars))
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = self._compile(group, param, scalars)
        held = [state[name] for name in self.state_names]
        inputs = [param.detach(), param.grad.to(param.dtype), *held, *scalars.values()]
        inputs.append(state["step"].to(param.dtype))
        made = _core.Run(session).forward(inputs)
        for target, value in zip([param, *held], made, strict=True):
            target.copy_(value)

    def _compile(
        self, group: Group, param: torch.Tensor, scalars: Mapping[str, torch.Tensor]
    ) -> Any:
        dtype, code = param.dtype, onnx_code(param.dtype)
        graph = _core.GraphBuilder(type(self).__name__)
        builder = RuleBuilder(graph, dtype)
        sizes = [f"d{axis}" for axis in range(param.dim())]

        def tensor(name: str, shape: list[str]) -> Expression:
            return Expression(builder, graph.input(name, code, shape, "user"))

        values = [tensor("param", sizes), tensor("grad", sizes)]
        state = {name: tensor(f"state.{name}", sizes) for name in self.state_names}
        numbers = {name: tensor(f"option.{name}", []) for name in scalars}
        options = _with_expressions(group, numbers)
        options["step"] = tensor("step", [])
        updated, states = self.update(builder, *values, state, options)
        if states.keys() != set(self.state_names):
            raise ValueError(
                f"{type(self).__name__}.update returned the state {sorted(states)}, "
                f"expected {sorted(self.state_names)}"
            )
        graph.output(updated.value, "param.out", "user")
        for name in self.state_names:
            graph.output(states[name].value, f"{name}.out", "user")
        finished = graph.finish()
        finished.run_passes("fuse")
        return _core.Session(finished)

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        kept.pop("_sessions", None)
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._sessions = {}


def _is_numeric(value: Any) -> bool:
    """Tell whether an option is a float, or a tuple of floats; an int counts, a bool does not."""
    if isinstance(value, (tuple, list)):
        return len(value) > 0 and all(map(_is_numeric, value))
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _floats(group: Group) -> dict[str, float]:
    """Return the numbers of a group by name, those in tuples as ``name.index``."""
    result: dict[str, float] = {}
    for name, value in group.items():
        if name == "params" or not _is_numeric(value):
            continue
        if isinstance(value, (tuple, list)):
            result.update({f"{name}.{i}": float(part) for i, part in enumerate(value)})
        else:
            result[name] = float(value)
    return result


def _with_expressions(group: Group, numbers: Mapping[str, Expression]) -> Group:
    """Return the options of a group with expressions in the place of their numbers."""
    result: Group = {}
    for name, value in group.items():
        if name == "params":
            continue
        if not _is_numeric(value):
            result[name] = value
        elif isinstance(value, (tuple, list)):
            result[name] = tuple(numbers[f"{name}.{i}"] for i in range(len(value)))
        else:
            result[name] = numbers[name]
    return result

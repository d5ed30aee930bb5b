# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a program is, how it is registered, and what it does with the module under test.

A program is a function of a `Session`. It builds a module, hands it to `Session.wrap`, calls what
comes back, and tells the session what a user of the module could see: outputs, gradients, buffers,
Python state. The same function runs once per way (PyTorch alone, `torch.compile`, Ortrain); what the
sessions have seen must be equal.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from conformance.silent.observed import NOT_RAISED, Comparison, Raised, observe

SEED = 1234
OWN = "own"
TOPICS = (
    "attributes",
    "outside_tensors",
    "containers",
    "hidden_state",
    "held_values",
    "control",
    "random_draws",
    "aliases",
    "in_place",
    "layout",
    "autograd",
    "functions",
    "hooks",
    "modes",
    "arithmetic",
    "kinds",
    "indexing",
    "layers",
    "questions",
    "training",
    "refusals",
)

MODULES = tuple(f"conformance.silent.{topic}" for topic in TOPICS)

Wrap = Callable[[nn.Module], nn.Module]


@dataclasses.dataclass(frozen=True)
class Program:
    """A registered program.

    Attributes:
      name: Of its function.
      topic: The file that it is in.
      origin: The public issue whose class of error it rebuilds, as ``repository#number``, or "own".
      year: When that issue was opened; 0 where there is none.
      what: One line of what may go wrong.
      body: The function.
      comparison: How what it shows is compared.
    """

    name: str
    topic: str
    origin: str
    year: int
    what: str
    body: Callable[[Session], None]
    comparison: Comparison


_programs: dict[str, Program] = {}


def program(
    origin: str = OWN,
    year: int = 0,
    *,
    layout: bool = False,
    coarse: torch.dtype | None = None,
) -> Callable[[Callable[[Session], None]], Callable[[Session], None]]:
    """Register the function below as a program.

    Args:
      origin: The public issue whose class of error it rebuilds, or "own".
      year: When that issue was opened.
      layout: Whether strides of tensors count.
      coarse: The least exact dtype that results come from, whatever theirs is.
    """

    def register(body: Callable[[Session], None]) -> Callable[[Session], None]:
        name, topic = body.__name__, body.__module__.rpartition(".")[2]
        assert name not in _programs, f"two programs are named {name}"
        what = (inspect.getdoc(body) or "").splitlines()[0]
        comparison = Comparison(layout, coarse)
        _programs[name] = Program(name, topic, origin, year, what, body, comparison)
        return body

    return register


def programs(names: Sequence[str] = (), modules: Sequence[str] = MODULES) -> list[Program]:
    """Return the programs of ``modules``; with ``names`` those of these topics and parts of names."""
    for module in modules:
        importlib.import_module(module)
    return [
        p
        for p in _programs.values()
        if p.body.__module__ in modules
        and (not names or any(n == p.topic or (n in p.name and n not in TOPICS) for n in names))
    ]


def cotangent(output: torch.Tensor) -> torch.Tensor:
    """Return a gradient for an output that no two neighbouring elements share; draws nothing."""
    steps = torch.arange(output.numel()) % 7 - 2.5
    return (steps / 4).reshape(output.shape).to(output.dtype)


class Session:
    """What a program has of one way of running it.

    Args:
      wrap: Makes the module of this way from a plain one.

    Attributes:
      seen: What the program told, in order: a label and the value as `observe` has it.
      wrapped: The modules that ``wrap`` made.
    """

    def __init__(self, wrap: Wrap) -> None:
        self._wrap = wrap
        self._plain: dict[int, nn.Module] = {}
        self.seen: list[tuple[str, Any]] = []
        self.wrapped: list[nn.Module] = []
        self.seed(SEED)

    def seed(self, value: int) -> None:
        """Seed every generator of random numbers."""
        torch.manual_seed(value)
        random.seed(value)
        np.random.seed(value)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Return ``module`` as this way runs it."""
        made = self._wrap(module)
        self._plain[id(made)] = module
        self.wrapped.append(made)
        return made

    def see(self, label: str, value: Any) -> None:
        """Record a value as it is now."""
        self.seen.append((f"{len(self.seen)} {label}", observe(value)))

    @contextlib.contextmanager
    def may_raise(self, label: str) -> Iterator[None]:
        """Record whether the block raises, and go on."""
        try:
            yield
        except Exception as error:
            self.seen.append(
                (f"{len(self.seen)} {label}", Raised(f"{type(error).__name__}: {error}"))
            )
        else:
            self.seen.append((f"{len(self.seen)} {label}", NOT_RAISED))

    def call(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the model; record outputs and buffers."""
        output = model(*args, **kwargs)
        self.see("output", output)
        self.buffers(model)
        return output

    def train(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the model, run backward from all outputs; record all, and the gradients.

        Gradients of parameters and of arguments that require one are recorded and cleared.
        """
        output = self.call(model, *args, **kwargs)
        self.backward(output)
        self.gradients(model, *args, **kwargs)
        self.buffers(model)
        return output

    def backward(self, output: Any) -> None:
        """Run backward from all tensors of ``output`` that require a gradient."""
        leaves = [
            leaf
            for leaf in pytree.tree_leaves(output)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.grad_fn is not None
        ]
        if leaves:
            torch.autograd.backward(leaves, [cotangent(leaf) for leaf in leaves])

    def gradients(self, model: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Record and clear the gradients of the model's parameters and of the arguments."""
        for name, parameter in self._plain[id(model)].named_parameters():
            self.see(f"gradient of {name}", parameter.grad)
            parameter.grad = None
        for position, leaf in enumerate(pytree.tree_leaves((args, kwargs))):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_leaf:
                self.see(f"gradient of argument {position}", leaf.grad)
                leaf.grad = None

    def buffers(self, model: nn.Module) -> None:
        """Record the model's buffers."""
        for name, buffer in self._plain[id(model)].named_buffers():
            self.see(f"buffer {name}", buffer)

    def same_tensor(self, label: str, a: torch.Tensor, b: torch.Tensor) -> None:
        """Record whether two tensors begin at the same memory, and whether they are one object."""
        self.see(f"{label}: same memory", a.data_ptr() == b.data_ptr())
        self.see(f"{label}: same object", a is b)

    def values(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of different values in [-1, 1]; draws nothing."""
        count = int(np.prod(shape))
        steps = torch.arange(count, dtype=torch.float64) * 0.6180339887
        return (2 * (steps - steps.floor()) - 1).reshape(shape).to(dtype)

    def leaf(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return such a tensor that requires a gradient."""
        return self.values(*shape, dtype=dtype).requires_grad_()


def run(chosen: Program, wrap: Wrap) -> tuple[Session, Exception | None]:
    """Run a program; return its session and what it raised."""
    session = Session(wrap)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            chosen.body(session)
        except Exception as error:
            return session, error
    return session, None


def plain(module: nn.Module) -> nn.Module:
    """PyTorch alone: the module itself."""
    return module


def twin(module: nn.Module) -> nn.Module:
    """Return a copy of a module that shares nothing with it."""
    return copy.deepcopy(module)

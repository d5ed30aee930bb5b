# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What a module of `conformance.stateful_programs` does in its forward, and what others do between calls."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance.stateful_places import WIDTH

# Held apart from the class that it is a method of.
take_item = torch.Tensor.item
_level = 1.0


def reset() -> None:
    """Set what all modules share to what it is at first."""
    global _level
    _level = 1.0


def _reads(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y.tanh()


def _counts(module: Any, y: torch.Tensor) -> torch.Tensor:
    for place in module.numbers[:1]:
        place.write(place.read() + 1)
    return y


def _counts_in_training(module: Any, y: torch.Tensor) -> torch.Tensor:
    return _counts(module, y) if module.training else y


def _counts_globally(module: Any, y: torch.Tensor) -> torch.Tensor:
    global _level
    _level += 1
    return y * _level


def _reads_global(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y * _level


def _keeps(module: Any, y: torch.Tensor) -> torch.Tensor:
    for place in module.tensors[:1]:
        place.write(y.detach().mean(0))
    return y


def _keeps_in_place(module: Any, y: torch.Tensor) -> torch.Tensor:
    for place in module.tensors[:1]:
        place.read().detach().mul_(0.5)
    return y


def _keeps_history(module: Any, y: torch.Tensor) -> torch.Tensor:
    module.history.append(y.detach().mean())
    return y + module.history[0]


def _keeps_table(module: Any, y: torch.Tensor) -> torch.Tensor:
    if y.shape[0] not in module.by_size:
        module.by_size[y.shape[0]] = torch.arange(float(y.shape[0]))
    return y * (module.by_size[y.shape[0]].unsqueeze(1) + 1)


def _asks_cache(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y + module.table_of(y.shape[0]).unsqueeze(1)


def _registers_buffer(module: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "late"):
        module.register_buffer("late", y.detach().mean(0))
    return y - module.late


def _makes_layer(module: Any, y: torch.Tensor) -> torch.Tensor:
    if not hasattr(module, "late_layer"):
        module.late_layer = nn.Linear(WIDTH, WIDTH)
    return module.late_layer(y)


def _sets_computed_name(module: Any, y: torch.Tensor) -> torch.Tensor:
    name = "seen_" + str(y.shape[0])
    setattr(module, name, getattr(module, name, 0) + 1)
    return y


def _draws_python(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y * random.random()


def _draws_numpy(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y * float(np.random.rand())


def _skips_at_random(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y if random.random() < 0.5 else y.sigmoid()


def _draws_torch(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y + torch.randn_like(y)


def _draws_by_own_generator(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y + torch.randn(y.shape, generator=module.generator)


def _draws_in_a_thread(module: Any, y: torch.Tensor) -> torch.Tensor:
    drawn: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: drawn.append(torch.rand(WIDTH)))
    thread.start()
    thread.join()
    return y + drawn[0]


def _takes_turns(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y * next(module.turns)


def _asks_generator(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y + next(module.yielding)


def _hooks(module: Any, y: torch.Tensor) -> torch.Tensor:
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 2)
    return y * 1


def _writes(module: Any, y: torch.Tensor) -> torch.Tensor:
    y = y * 1
    y[0] = 0
    return y.add_(1)


def _branches(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y * 2 if y.sum() > 0 else y - 1


def _takes_item(module: Any, y: torch.Tensor) -> torch.Tensor:
    for place in module.tensors[:1]:
        y = y * take_item(place.read().detach().sum())
    return y


def _tells_objects_apart(module: Any, y: torch.Tensor) -> torch.Tensor:
    return y if module.active is module.first else y.neg()


def _chooses_by_name(module: Any, y: torch.Tensor) -> torch.Tensor:
    return {"tanh": torch.tanh, "relu": torch.relu}[module.name](y)


def _without_gradient(module: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        scale = y.abs().mean()
    return y / (scale + 1)


def _checkpoints(module: Any, y: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda t: module.layer(t).sigmoid(), y, use_reentrant=False)


def _decays(module: Any, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        module.layer.bias.mul_(0.9)
    return y


def _reads_gradient(module: Any, y: torch.Tensor) -> torch.Tensor:
    gradient = module.layer.bias.grad
    return y if gradient is None else y + gradient.mean()


def _tries(module: Any, y: torch.Tensor) -> torch.Tensor:
    try:
        return y.view(WIDTH, 2)[:, :1] + y.T
    except RuntimeError:
        return y * 3


FORWARD: tuple[Callable[[Any, torch.Tensor], torch.Tensor], ...] = (
    *(_reads, _reads, _reads, _counts, _counts_in_training, _counts_globally, _reads_global),
    *(_keeps, _keeps_in_place, _keeps_history, _keeps_table, _asks_cache, _registers_buffer),
    *(_makes_layer, _sets_computed_name, _draws_python, _draws_numpy, _skips_at_random),
    *(_draws_torch, _draws_by_own_generator, _draws_in_a_thread, _takes_turns, _asks_generator),
    *(_hooks, _writes, _branches, _takes_item, _tells_objects_apart, _chooses_by_name),
    *(_without_gradient, _checkpoints, _decays, _reads_gradient, _tries),
)

# Those that a graph may stand for.
READING: tuple[Callable[[Any, torch.Tensor], torch.Tensor], ...] = (
    *(_reads, _reads_global, _draws_torch, _writes, _tells_objects_apart, _chooses_by_name),
    *(_without_gradient, _checkpoints),
)


def _new_number(module: Any, draw: random.Random) -> None:
    for place in module.numbers[-1:]:
        place.write(float(draw.randint(1, 4)))


def _new_tensor(module: Any, draw: random.Random) -> None:
    for place in module.tensors[-1:]:
        place.write(torch.full((WIDTH,), float(draw.randint(1, 4))))


def _row_in_a_place(module: Any, draw: random.Random) -> None:
    for place in module.tensors[-1:]:
        place.write(module.layer.weight.detach()[draw.randint(0, WIDTH - 1)])


def _through_data(module: Any, draw: random.Random) -> None:
    for place in module.tensors[-1:]:
        place.read().data.add_(draw.randint(1, 3))


def _switch_mode(module: Any, draw: random.Random) -> None:
    module.train(not module.training)


def _new_parameter(module: Any, draw: random.Random) -> None:
    module.layer.bias = nn.Parameter(torch.full((WIDTH,), float(draw.randint(0, 2))))


def _freeze(module: Any, draw: random.Random) -> None:
    module.layer.weight.requires_grad_(not module.layer.weight.requires_grad)


def _layer_hook(module: Any, draw: random.Random) -> None:
    module.layer.register_forward_hook(lambda layer, args, result: result * 1.5)


def _other_forward(module: Any, draw: random.Random) -> None:
    layer, factor = module.layer, draw.randint(1, 2)
    layer.forward = types.MethodType(lambda self, x: nn.Linear.forward(self, x) * factor, layer)


def _unread(module: Any, draw: random.Random) -> None:
    module.metric = draw.random()


def _other_object(module: Any, draw: random.Random) -> None:
    if hasattr(module, "active"):
        module.active = module.second if module.active is module.first else module.first


def _other_name(module: Any, draw: random.Random) -> None:
    module.name = draw.choice(["tanh", "relu"])


def _empties_caches(module: Any, draw: random.Random) -> None:
    if hasattr(module, "by_size"):
        module.by_size.clear()
    if hasattr(module, "table_of"):
        module.table_of.cache_clear()


def _writes_to_cache(module: Any, draw: random.Random) -> None:
    if hasattr(module, "table_of"):
        module.table_of(2).add_(1)
    for table in getattr(module, "by_size", {}).values():
        table.mul_(2)


def _new_global(module: Any, draw: random.Random) -> None:
    global _level
    _level = float(draw.randint(1, 3))


def _loads_state(module: Any, draw: random.Random) -> None:
    module.load_state_dict({k: v * 0.5 for k, v in module.state_dict().items()})


BETWEEN: tuple[Callable[[Any, random.Random], None], ...] = (
    *(_new_number, _new_number, _new_tensor, _new_tensor, _row_in_a_place, _through_data),
    *(_switch_mode, _new_parameter, _freeze, _layer_hook, _other_forward, _unread),
    *(_other_object, _other_name, _empties_caches, _writes_to_cache, _new_global, _loads_state),
)

RESULTS: tuple[Callable[..., Any], ...] = (
    lambda m, x, y: y,
    lambda m, x, y: (y, x),
    lambda m, x, y: {"y": y, "flat": y.view(-1), "row": x[0]},
    lambda m, x, y: (y.t(), m.layer.weight),
    lambda m, x, y: (y, y.detach(), y[:, 1:]),
)

# Those that share no memory.
OWN_RESULTS: tuple[Callable[..., Any], ...] = (
    lambda m, x, y: y,
    lambda m, x, y: {"y": y, "mean": y.mean()},
)


def _set_generator(module: Any) -> None:
    module.generator = torch.Generator().manual_seed(5)


def _set_objects(module: Any) -> None:
    module.first, module.second = [1], [1]
    module.active = module.first


# What some of the actions in a forward use.
SETUP: dict[Any, Callable[[Any], object]] = {
    _draws_by_own_generator: _set_generator,
    _tells_objects_apart: _set_objects,
    _takes_turns: lambda m: setattr(m, "turns", itertools.cycle([1.0, 2.0, 3.0])),
    _asks_generator: lambda m: setattr(m, "yielding", (float(i) for i in range(1, 100))),
    _keeps_history: lambda m: setattr(m, "history", []),
    _keeps_table: lambda m: setattr(m, "by_size", {}),
    _asks_cache: lambda m: setattr(
        m, "table_of", functools.lru_cache(lambda size: torch.arange(float(size)))
    ),
    _chooses_by_name: lambda m: setattr(m, "name", "tanh"),
}

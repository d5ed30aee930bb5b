# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Hooks of a wrapped module and of its layers run as they do in PyTorch."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from wrapped_modules import batch, pair

from ortrain import ORTModule


def test_hooks_on_the_wrapped_module_run() -> None:
    ours, _ = pair()
    seen = []
    handle = ours.register_forward_hook(lambda module, args, output: seen.append(output["loss"]))
    for _ in range(2):
        ours(**batch())
    assert len(seen) == 2
    handle.remove()
    ours(**batch())
    assert len(seen) == 2


def test_hooks_on_submodules_are_not_lost() -> None:
    ours, plain = pair()
    seen = []
    ours.hidden.register_forward_hook(lambda module, args, output: seen.append(1))
    with pytest.warns(RuntimeWarning, match=r"hidden.*hooks"):
        got = ours(**batch())["loss"]
    assert seen
    torch.testing.assert_close(got, plain(**batch())["loss"])


def test_full_backward_hook_runs() -> None:
    model = ORTModule(nn.Linear(3, 2))
    seen = []
    model.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append(grad_out))
    model(torch.ones(4, 3, requires_grad=True)).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0][0], torch.ones(4, 2))


def test_hook_added_after_the_first_call_runs() -> None:
    ours, _ = pair()
    ours(**batch())
    seen: list[torch.Tensor] = []
    handle = ours.hidden.register_forward_hook(lambda module, args, output: seen.append(output))
    with pytest.warns(RuntimeWarning, match="hooks"):
        ours(**batch())
    assert len(seen) == 1
    handle.remove()
    ours(**batch())
    assert len(seen) == 1
    assert len([c for c in ours.report().captures if not c.fallback]) == 1


def make_inputs_require_grads(module, args, output):
    output.requires_grad_(True)


make_inputs_require_grads.__module__ = "transformers.modeling_utils"


def test_hooks_that_only_let_gradients_flow_need_no_cut() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    ours = ORTModule(copy.deepcopy(plain))
    handle = ours.module[0].register_forward_hook(make_inputs_require_grads)
    x = torch.randn(3, 4)
    torch.testing.assert_close(ours(x), plain(x))
    ours(x).sum().backward()
    assert not any(record.fallback for record in ours.report().captures)
    # Another hook in its place is seen, although their number is the same.
    handle.remove()
    ours.module[0].register_forward_hook(lambda module, args, output: output + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(ours(x), plain[2](torch.tanh(plain[0](x) + 1)))


def test_a_hook_for_all_modules_set_after_a_capture() -> None:
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    ours = ORTModule(copy.deepcopy(plain))
    ours(torch.ones(3, 4))

    def doubled(module: nn.Module, into: Any, out: Any) -> Any:
        return tuple(None if g is None else g * 2 for g in into)

    handle = nn.modules.module.register_module_full_backward_hook(doubled)
    try:
        for _ in range(3):
            x, y = torch.ones(3, 4, requires_grad=True), torch.ones(3, 4, requires_grad=True)
            plain(x).sum().backward()
            ours(y).sum().backward()
            torch.testing.assert_close(y.grad, x.grad)
    finally:
        handle.remove()

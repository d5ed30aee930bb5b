# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes in place: to inputs, through views, between reads, by custom operators."""

from __future__ import annotations

import torch
from torch import nn

from conformance.silent.program import Session, program


class Scale(nn.Module):
    """One number that learns, for the programs below."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))


def _show(s: Session, net: nn.Module, *inputs: torch.Tensor, steps: int = 3) -> None:
    """Train on copies of the inputs, and show what is left in the copies."""
    model = s.wrap(net)
    for step in range(steps):
        copies = [x.clone() + step for x in inputs]
        s.train(model, *copies)
        s.see("inputs", copies)


@program("pytorch#94777", 2023)
def read_before_the_write(s: Session) -> None:
    """A result is computed from the input, which is then changed by the same function in place."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.log() * self.scale
            x.log_()
            return y

    _show(s, Net(), s.values(3, 4) + 3)


@program("pytorch#198101", 2026)
def dtype_view_read_before_the_write(s: Session) -> None:
    """A view in another dtype is read, its result changed, then the input overwritten in part."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = x.view(torch.int32) * 2
            y.sub_(-4)
            x[:, 2:5] = 2
            return y.view(torch.int64), x.sum() * self.scale

    _show(s, Net(), torch.arange(-12, 12).reshape(4, 6))


@program("pytorch#198102", 2026)
def write_through_a_gapped_unfold(s: Session) -> None:
    """A write through windows that leave gaps must leave what lies between them."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            windows = x.unfold(1, 1, 5)
            windows.add_(windows)
            return x * self.scale

    _show(s, Net(), s.values(4, 6))


@program("pytorch#198102", 2026)
def fill_through_a_gapped_unfold(s: Session) -> None:
    """The same over a flat view, by index_fill_."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.view(24).unfold(0, 3, 8).index_fill_(0, torch.tensor([0, 2]), 7.0)
            return x * self.scale

    _show(s, Net(), s.values(4, 6))


@program("pytorch#198270", 2026)
def write_then_add_its_own_flip(s: Session) -> None:
    """index_put_ into a tensor, then an update that reads it at other positions."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.index_put_((torch.arange(x.shape[0]),), x * 2.0)
            x.add_(x.flip(0))
            return x * self.scale

    _show(s, Net(), s.values(4, 8))


@program("pytorch#198270", 2026)
def write_then_shift(s: Session) -> None:
    """Rows are written at indices, then each takes a copy of the row before."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[torch.tensor([0, 2])] = x[torch.tensor([1, 3])] * 3
            x[1:] = x[:-1].clone()
            return x * self.scale

    _show(s, Net(), s.values(4, 8))


@program("pytorch#183986", 2026)
def index_ops_on_expanded(s: Session) -> None:
    """index_add, index_copy, index_fill and index_put on a tensor that is expanded."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            wide = x.expand(4, 8)
            at, rows = torch.tensor([0, 2]), torch.ones(2, 8) * self.scale
            return (
                wide.index_add(0, at, rows),
                wide.index_copy(0, at, rows),
                wide.index_fill(0, at, 3.0) * self.scale,
                wide.index_put((at,), rows, accumulate=True),
                wide.index_put((at,), rows),
            )

    _show(s, Net(), s.values(8))


@program("pytorch#152425", 2025)
def write_into_expanded(s: Session) -> None:
    """One element of an expanded scalar is written: all are the same memory."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = x[1].expand(3)
            wide[-1] = 3.0
            return wide * self.scale + x.sum()

    _show(s, Net(), s.values(4))


@program("pytorch#174074", 2026)
def indices_that_repeat(s: Session) -> None:
    """x[[0, 0]] += x[[0, 0]]: both rows are read before either is written."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x[[0, 0]] += x[[0, 0]]
            return x * self.scale

    _show(s, Net(), s.values(2, 3))


@program("pytorch#162146", 2025)
def slice_of_a_written_tensor(s: Session) -> None:
    """index_put_ through a slice, read through another slice of the same tensor."""

    class Net(Scale):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            table = torch.zeros(3, 5)
            table[1].index_put_((at,), x, accumulate=True)
            table[:, 0].add_(table[1, at])
            return table * self.scale

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.values(3), torch.tensor([0, 3, 3]))


@program("pytorch#191571", 2026)
def scatter_then_gather_of_one_row(s: Session) -> None:
    """scatter_add_ into one row, gathered again for each element in the same forward."""

    class Net(Scale):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            total = torch.zeros(1, x.shape[1])
            total.scatter_add_(0, at.unsqueeze(-1).expand_as(x), x * self.scale)
            return total.index_select(0, at) - x

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(8, 4), torch.zeros(8, dtype=torch.int64))


@program("pytorch#97130", 2023)
def write_seen_through_another_view(s: Session) -> None:
    """A function writes through one view; a second view of the same tensor must show it."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            base = x * 1
            first, second = base.reshape(-1), base[0:1]

            def write() -> None:
                first[0] = 2
                first[1:3].neg_()

            write()
            return second * self.scale

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(3, 4))


@torch.library.custom_op("ortrain_silent::reverse_into", mutates_args=("target",))
def _reverse_into(source: torch.Tensor, target: torch.Tensor) -> None:
    last = source.shape[0] - 1
    for row in range(last + 1):
        target[last - row] = source[row]


@program("pytorch#198031", 2026)
def custom_op_and_a_clone(s: Session) -> None:
    """An operator of the user's reads a clone of the tensor that it writes."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.clone()
            torch.ops.ortrain_silent.reverse_into(y, x)
            return x * self.scale

    _show(s, Net(), s.values(6, 2))


@torch.library.custom_op("ortrain_silent::add_both", mutates_args=("a", "b"))
def _add_both(a: torch.Tensor, b: torch.Tensor) -> None:
    a.add_(1)
    b.add_(2)


@torch.library.custom_op("ortrain_silent::sum_into", mutates_args=("out",))
def _sum_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(a + b + 2)


@program("pytorch#153389", 2025)
def custom_ops_on_rows_of_one_tensor(s: Session) -> None:
    """Operators of the user's write rows of one tensor, which others read through smaller views."""

    class Net(Scale):
        def forward(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            torch.ops.ortrain_silent.add_both(a, b)
            torch.ops.ortrain_silent.sum_into(a[0], b[0], out)
            return out * self.scale

    model = s.wrap(Net())
    for step in range(3):
        x, out = s.values(3, 3) + step, torch.zeros(3)
        s.train(model, x[:1], x[1:2], out)
        s.see("tensors", [x, out])


@program("pytorch#128035", 2024)
def differentiable_input_written(s: Session) -> None:
    """Forward scales an argument that has a history in place, and returns a detached alias too."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            before = x.detach()
            x.mul_(self.scale)
            return x, before

    model = s.wrap(Net())
    for _ in range(3):
        leaf = s.leaf(3)
        made = leaf * 2
        y, before = model(made)
        s.see("outputs", [y, before, made])
        (y.sum() + made.square().sum()).backward()
        s.gradients(model, leaf)


@program("pytorch#108963", 2023)
def index_add_of_one_element(s: Session) -> None:
    """index_add with alpha on one element, and the same in place."""

    class Net(Scale):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            at, zeros = torch.tensor([0]), torch.zeros(1)
            a = zeros.index_add(0, at, x * self.scale, alpha=2.0) / 2
            return a, zeros.index_add_(0, at, x, alpha=2.0) / 2

    model = s.wrap(Net())
    for _ in range(3):
        s.train(model, s.leaf(1))


@program()
def caches_of_keys_and_values(s: Session) -> None:
    """Forward writes a position of a cache that the caller made, and attends to what is filled."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, cache: torch.Tensor, at: int) -> torch.Tensor:
            key = self.project(x)
            cache[:, at] = key.detach()
            scores = key.unsqueeze(1) @ cache[:, : at + 1].transpose(1, 2)
            return scores.softmax(-1)

    model = s.wrap(Net())
    cache = torch.zeros(2, 5, 4)
    for at in range(4):
        s.train(model, s.leaf(2, 4) + at, cache, at)
        s.see("cache", cache)

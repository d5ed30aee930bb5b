# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What PyTorch refuses, and what must work again in the call after it."""

from __future__ import annotations

import torch
from torch import nn

from conformance.silent.parts import Linear
from conformance.silent.program import Session, program


@program()
def assertion_on_values(s: Session) -> None:
    """Forward asserts that its input is positive; one batch is not."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.min() > 0, "not positive"
            return self.linear(x)

    model = s.wrap(Net())
    for shift in (2.0, 2.0, 0.0, 2.0):
        with s.may_raise(f"shift {shift}"):
            s.train(model, s.values(3, 4) + shift)


@program()
def own_exception_on_values(s: Session) -> None:
    """Forward raises an exception of its own for NaN, after it has counted the batch."""

    class NotFiniteError(ValueError):
        pass

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.batches += 1
            if not torch.isfinite(x).all():
                raise NotFiniteError("a batch with NaN")
            return self.linear(x)

    net = Net()
    model = s.wrap(net)
    for bad in (False, False, True, False):
        x = s.values(3, 4)
        if bad:
            x[0, 0] = float("nan")
        try:
            s.train(model, x)
        except NotFiniteError:
            s.see("refused", True)
        s.see("batches", net.batches)


@program()
def checked_by_torch(s: Session) -> None:
    """torch._assert and torch._check on sizes and values."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check(x.shape[0] < 4, lambda: "too many rows")
            torch._assert(bool((x < 5).all()), "too large")
            return self.linear(x)

    model = s.wrap(Net())
    for rows, shift in ((3, 0), (3, 0), (5, 0), (3, 9), (2, 0)):
        with s.may_raise(f"{rows} rows, shift {shift}"):
            s.train(model, s.values(rows, 4) + shift)


@program()
def assertion_between_writes(s: Session) -> None:
    """A write before a failing check stays, one behind it does not happen."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("begun", torch.zeros(()))
            self.register_buffer("ended", torch.zeros(()))

        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            self.begun += 1
            y = self.linear(x)[ids]
            self.ended += 1
            return y

    net = Net()
    model = s.wrap(net)
    for last in (2, 2, 3, 2):
        with s.may_raise(f"position {last}"):
            s.train(model, s.values(3, 4), torch.tensor([0, last]))
        s.see("ended", net.ended)


@program()
def view_of_a_transposed_argument(s: Session) -> None:
    """Forward views its input flat; a transposed input has no such view."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.view(-1, 4))

    model = s.wrap(Net())
    for x in (s.values(2, 2, 4), s.values(2, 2, 4), s.values(2, 4, 2).transpose(1, 2)):
        with s.may_raise("view"):
            s.train(model, x)


@program()
def write_into_an_expanded_argument(s: Session) -> None:
    """Forward writes its input in place; an expanded input has elements that share memory."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return self.linear(x)

    model = s.wrap(Net())
    for x in (s.values(3, 4), s.values(3, 4), s.values(1, 4).expand(3, 4), s.values(3, 4)):
        with s.may_raise("write"):
            s.train(model, x)
        s.see("input", x)


@program()
def write_into_a_leaf(s: Session) -> None:
    """Forward writes its input in place; a leaf that requires a gradient refuses it."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(2)
            return self.linear(x)

    model = s.wrap(Net())
    for x in (s.values(3, 4), s.values(3, 4), s.leaf(3, 4), s.values(3, 4)):
        with s.may_raise("write"):
            s.train(model, x)
        s.see("input", x)


@program()
def sizes_that_do_not_fit(s: Session) -> None:
    """A sum of sizes that do not broadcast, a matrix product of others, a batch too small."""

    class Net(Linear):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.norm(self.linear(x)) + y

    model = s.wrap(Net())
    for rows, others in ((3, 3), (3, 3), (3, 2), (3, 1), (1, 1), (3, 3)):
        with s.may_raise(f"{rows} and {others}"):
            s.train(model, s.values(rows, 4), s.values(others, 4))
    with s.may_raise("width"):
        s.call(model, s.values(3, 5), s.values(3, 4))


@program()
def targets_out_of_range(s: Session) -> None:
    """Cross entropy refuses classes that are none, gather positions that are none."""

    class Net(Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z = self.linear(x)
            return nn.functional.cross_entropy(z, y), z.gather(1, y.unsqueeze(1))

    model = s.wrap(Net())
    for y in ([0, 3], [0, 3], [0, 4], [0, -1], [1, 2]):
        with s.may_raise(f"targets {y}"):
            s.train(model, s.values(2, 4), torch.tensor(y))


@program()
def dtype_of_the_argument_refused(s: Session) -> None:
    """A float64, a float16 and an integer batch for a float32 layer."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x)

    model = s.wrap(Net())
    kinds = (torch.float32, torch.float32, torch.float64, torch.float16, torch.int64, torch.float32)
    for dtype in kinds:
        with s.may_raise(str(dtype)):
            s.train(model, s.values(3, 4).to(dtype))


@program()
def anomaly_mode(s: Session) -> None:
    """With anomaly detection a backward that makes NaN raises."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.linear(x) * 0).sqrt().sum() * 0

    model = s.wrap(Net())
    for _ in range(3):
        with s.may_raise("backward"), torch.autograd.detect_anomaly(check_nan=True):
            model(s.leaf(3, 4)).backward()


@program()
def result_written_and_differentiated(s: Session) -> None:
    """The caller writes a result in place whose value backward needs, and one where it does not."""

    class Net(Linear):
        def __init__(self, squash: bool) -> None:
            super().__init__()
            self.squash = squash

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y.sigmoid() if self.squash else y * 3

    for squash in (True, False):
        net = Net(squash)
        model = s.wrap(net)
        for _ in range(3):
            y = model(s.values(3, 4))
            y.add_(1)
            with s.may_raise(f"backward, squash {squash}"):
                y.sum().backward()
            s.gradients(model)


@program()
def inference_tensor_in_training(s: Session) -> None:
    """A result of inference mode goes into a training step, which PyTorch refuses to save."""

    class Net(Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).tanh()

    model = s.wrap(Net())
    s.train(model, s.values(3, 4))
    with torch.inference_mode():
        made = model(s.values(3, 4))
    with s.may_raise("training on it"):
        s.backward(model(made))
    s.train(model, s.values(3, 4))

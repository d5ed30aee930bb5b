# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""One forward of a program, and the backwards that are asked for behind it."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from ortrain import _core
from ortrain.capture.torch_internals import current_task, is_batched, keeps_graph
from ortrain.entry import Entry
from ortrain.fallback import is_refusal
from ortrain.forward_again import ForwardAgain, with_own_history
from ortrain.program import BackwardPart, CallersMemory, Program
from ortrain.random_numbers import GeneratorStates
from ortrain.verification import watching
from ortrain.watched_results import WatchedResults

NOT_DIFFERENTIABLE = (
    "PyTorch cannot take over the gradients of this ORTModule: {}; or run the module itself, "
    "ORTModule.module"
)

_AS_IT_IS = contextlib.nullcontext()

# Held where generators or the tensors of a module, which all threads share, are other ones for a while.
_of_all_threads = threading.RLock()


def _without_gradients() -> contextlib.AbstractContextManager[Any]:
    """Return `torch.no_grad`; most backwards are in it already, and entering it costs more than asking."""
    return torch.no_grad() if torch.is_grad_enabled() else _AS_IT_IS


class Link:
    """Lives as long as PyTorch will ask for further parts of a backward."""

    __slots__ = ("__weakref__",)


class Backward:
    """What belongs to one backward; others of the same pass may go on in threads or inside of it.

    Args:
      is_first: No other one goes on: it has the run of the forward.

    Attributes:
      refusal: Why what it makes cannot be differentiated.
      run: Goes on with the next part; None where all is made.
      made: By position, not handed over yet.
      witness: Is told of the gradients; None for nobody.
      link: Gives the link between its parts; None once PyTorch has dropped it.
    """

    __slots__ = ("is_first", "link", "made", "refusal", "run", "witness")

    def __init__(self, is_first: bool) -> None:
        self.is_first, self.refusal, self.run = is_first, "", None
        self.made: dict[int, torch.Tensor] = {}
        self.witness: watching.GradientWitness | None = None
        link = Link()
        self.link: Callable[[], Link | None] = lambda: link  # until a token has it

    def linked(self, token: torch.Tensor) -> torch.Tensor:
        """Return a tensor that leads to the next part, with the link."""
        token.link = link = self.link() or Link()  # a hook of a node may have dropped it
        self.link = weakref.ref(link)
        return token


class Pass:
    """One forward of a program and its backwards, each of which may be asked for in parts.

    Args:
      entry: The captured graph.
      program: The form of it that runs.
      inputs: Its inputs.
      again: The call in PyTorch.
      generators: What the forward's draws in PyTorch start from; None where there are none.

    Attributes:
      witness: Is told of the gradients; None for nobody.
      watched: The graph's results, where the caller may have them; set once they are made.
    """

    watched: WatchedResults
    witness: watching.GradientWitness | None = None

    def __init__(
        self,
        entry: Entry,
        program: Program,
        inputs: Sequence[torch.Tensor],
        again: ForwardAgain | None,
        generators: GeneratorStates | None,
    ) -> None:
        self.entry, self.program, self.generators = entry, program, generators
        self.again, self.originals = again, with_own_history(inputs, entry.with_gradient)
        # Aliases keep the memory that this step reads, whatever `.data` is set to meanwhile.
        self.inputs = [t.detach() for t in inputs]
        for position in entry.copied_inputs:  # backward may run the forward again
            self.inputs[position] = self.inputs[position].clone()
        self.run = _core.Run(program.session)
        self.parts: list[BackwardPart] = []
        self._freed: frozenset[int] = frozenset()  # outputs that have no backward any more
        self._in_use = threading.Lock()  # held by the backward that has `run`; nobody waits for it
        self._unfinished: dict[int, Backward] = {}  # of which parts are left, by task of PyTorch's

    def forward(self) -> list[torch.Tensor]:
        """Run the forward."""
        outputs = self.run.forward(self.inputs)
        self._copy_unsaved()
        self.versions = [t._version for t in self.inputs]
        # Aliases share the version counter but not the history: no reference cycle.
        self.outputs = [t.detach() for t in outputs[: self.entry.num_user_outputs]]
        self.output_versions = [t._version for t in self.outputs]
        self.results, self.result_versions = self.outputs, self.output_versions
        if self.entry.orders:  # what the caller gets is no memory of the graph's
            outputs = self.entry.laid_out(outputs)
            self.results = [t.detach() for t in outputs[: self.entry.num_user_outputs]]
            self.result_versions = [t._version for t in self.results]
        return outputs

    def first_part(
        self, gradients: Sequence[torch.Tensor | None], positions: Iterable[int]
    ) -> tuple[list[torch.Tensor | None], Backward]:
        """Begin a backward; return the gradients of inputs that its first part makes, and itself.

        Args:
          gradients: Those of the outputs.
          positions: The inputs.
        """
        backward = self._begin(gradients, keeps_graph())
        if len(self.parts) <= 1:
            try:
                return self._hand_over(backward, 0, positions), backward
            finally:
                self._release(backward)
        task = current_task()
        self._end(task)
        self._unfinished[task] = backward
        return self._part(task, backward, 0, positions), backward

    def later_part(self, index: int) -> tuple[list[torch.Tensor | None], Backward]:
        """Go on with the backward that PyTorch runs now; return as the first part does."""
        task = current_task()
        backward = self._unfinished.get(task)
        if backward is None:
            raise RuntimeError(
                "a part of the backward of an ORTModule was asked for without those before it"
            )
        return self._part(task, backward, index, self.parts[index].positions), backward

    def _part(
        self, task: int, backward: Backward, index: int, positions: Iterable[int]
    ) -> list[torch.Tensor | None]:
        try:
            made = self._hand_over(backward, index, positions)
        except BaseException:
            self._end(task)
            raise
        if index == len(self.parts) - 1:
            self._end(task)
        return made

    def _end(self, task: int) -> None:
        backward = self._unfinished.pop(task, None)
        if backward is not None:
            self._release(backward)

    def _release(self, backward: Backward) -> None:
        if backward.is_first:
            backward.is_first = False
            self._in_use.release()

    def _take(self) -> Backward:
        """Return a new backward; the first of those that go on at once has the run of the forward."""
        for task, other in list(self._unfinished.items()):
            if other.link() is None:  # it has failed, or PyTorch wanted the gradients of some parts
                self._end(task)
        return Backward(self._in_use.acquire(blocking=False))

    def _begin(self, gradients: Sequence[torch.Tensor | None], kept: bool) -> Backward:
        """Take the gradients of the outputs; run the forward again where it must be.

        Args:
          gradients: Those.
          kept: Whether all of it may be asked for again, by retain_graph.
        """
        entry = self.entry
        # Zeros for which autograd has not taken memory.
        gradients = [g.clone() if g is not None and g._is_zerotensor() else g for g in gradients]
        given = tuple(
            i
            for i, gradient in enumerate(gradients[: entry.num_user_outputs])
            if gradient is not None and entry.differentiable[i]
        )
        if not self._freed.isdisjoint(given):
            raise RuntimeError(
                "Trying to backward through the graph a second time: what the gradient needs was "
                "freed by an earlier backward() or autograd.grad(); specify retain_graph=True there"
            )
        if entry.captured.needed_results:
            read = entry.results_read(given)
            _check_unwritten(self.results, self.result_versions, read)
        refusal = ""
        batched = any(map(is_batched, gradients))
        differentiable = torch.is_grad_enabled() or batched
        if differentiable:
            refusal = self.again.why_not()
            if batched and torch.is_grad_enabled():
                refusal = "a batch of gradients comes in at once (vectorize=False takes each)"
            if batched and refusal:
                raise RuntimeError(NOT_DIFFERENTIABLE.format(refusal))
        backward = self._take()
        backward.refusal = refusal
        try:
            if differentiable and not refusal:
                self._make_in_pytorch(backward, gradients)
            else:
                with _without_gradients():
                    self._make_or_ask_pytorch(backward, gradients, given)
        except BaseException:
            self._release(backward)
            raise
        if not kept:
            common = entry.captured.common_saves
            self._freed = self._freed.union(*(common[i] for i in given))
        return backward

    def _make_or_ask_pytorch(
        self,
        backward: Backward,
        gradients: Sequence[torch.Tensor | None],
        given: tuple[int, ...],
    ) -> None:
        """Run the backward; where the engine has none for these gradients, PyTorch's."""
        try:
            self._make(backward, gradients, given)
        except _core.OrtrainError as error:
            if not is_refusal(error) or self.entry.budget is not None or self.again.why_not():
                raise
            self._make_in_pytorch(backward, gradients)
            self.again.tell_backward(error)

    def _make_in_pytorch(
        self, backward: Backward, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        """Compute the gradients such that they can be differentiated, or for a batch at once."""
        everything = list(range(len(self.inputs)))
        _check_versions(self, CallersMemory(everything, []))
        _check_elements(self, everything)
        user = gradients[: self.entry.num_user_outputs]
        with _of_all_threads:
            made = self.again.gradients(self.inputs, self.originals, user, self.generators)
        backward.made = made

    def _make(
        self,
        backward: Backward,
        gradients: Sequence[torch.Tensor | None],
        given: tuple[int, ...],
    ) -> None:
        entry, program, run = self.entry, self.program, self.run
        if given != program.gradient_of:
            # Other outputs than guessed: run the forward of the program for these, with the same
            # seed, and expect them from now on. Zeros for the others would not do: they turn into
            # NaN where a derivative is infinite, and None into a gradient.
            entry.preferred = given
            program = entry.program(given, program.form)
            run = _core.Run(program.session)
        elif backward.is_first:
            _check_versions(self, program.reads(run))
        else:
            run = _core.Run(program.session)
        in_parts = run is self.run and len(self.parts) > 1
        if not run.can_run_backward or run.in_backward:
            # Others may have changed: an optimizer has stepped since the backward of another output.
            read = entry.inputs_of(given, len(self.inputs))
            _check_versions(self, CallersMemory(read, []))
            _check_elements(self, read)
            self._run_forward_again(run)
            if in_parts:  # hooks of the first ones may write what the later ones read
                self._copy_unsaved()
        if backward.is_first and self.witness is not None:
            backward.witness = self.witness
            backward.witness.begin(gradients[: entry.num_user_outputs], program.outgoing)
        incoming = [gradients[i] for i in program.incoming]
        if in_parts:
            run.begin_backward(incoming)
            backward.run = run
            return
        made = run.backward(incoming)
        backward.made = dict(zip(program.outgoing, made, strict=True))

    def _run_forward_again(self, run: Any) -> None:
        if self.generators is None:
            run.forward(self.inputs)
            return
        with _of_all_threads, self.generators.replayed():
            run.forward(self.inputs)

    def _copy_unsaved(self) -> None:
        for position in self.program.reads(self.run).copied:
            self.run.replace_input(position, self.inputs[position].clone())

    def _hand_over(
        self, backward: Backward, index: int, positions: Iterable[int]
    ) -> list[torch.Tensor | None]:
        """Run a part where it has not run, and return what it made."""
        with _without_gradients():
            return self._made(backward, index, positions)

    def _made(
        self, backward: Backward, index: int, positions: Iterable[int]
    ) -> list[torch.Tensor | None]:
        run, made = backward.run, backward.made
        if run is not None:
            part = self.parts[index]
            if index > 0:
                _check_versions(self, part.reads)
            outgoing = self.program.outgoing
            for place, gradient in run.continue_backward(part.end):
                made[outgoing[place]] = gradient
            if not run.in_backward:
                backward.run = None
            if not made.keys() >= set(part.positions):
                raise RuntimeError("a part of the backward of an ORTModule made too few gradients")
        handed_over = [made.pop(p, None) for p in positions]
        if backward.witness is not None:
            backward.witness.compare(list(positions), handed_over)
        return handed_over


def _check_versions(step: Pass, reads: CallersMemory) -> None:
    """Refuse to read inputs and outputs that were written to since the forward."""
    for position in reads.inputs:
        tensor, version = step.inputs[position], step.versions[position]
        if tensor._version != version:
            raise RuntimeError(
                f"'{_name_of(step, position)}' is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )
    _check_unwritten(step.outputs, step.output_versions, reads.outputs)


def _check_elements(step: Pass, read: Collection[int]) -> None:
    """Refuse to run a forward again with what was changed where no version tells: by `.data`, by NumPy."""
    changed = set(step.run.changed_inputs(step.inputs)).intersection(read)
    if changed:
        raise RuntimeError(
            f"'{_name_of(step, min(changed))}' is needed for the gradient and was modified past its version (by .data, "
            "or through memory that it shares) since the forward, which has to run again for this backward"
        )


def _name_of(step: Pass, position: int) -> str:
    # Only for errors: describing the graph's inputs costs more than all checks.
    described = [i for i in step.program.graph.inputs if i["role"] != "gradient"]
    return str(described[position]["target"] or described[position]["name"])


def _check_unwritten(
    outputs: Sequence[torch.Tensor], versions: Sequence[int], read: Iterable[int]
) -> None:
    for i in read:
        tensor, version = outputs[i], versions[i]
        if tensor._version != version:
            raise RuntimeError(
                f"output {i} is needed for the gradient and was modified by an inplace operation: "
                f"it is at version {tensor._version}, expected version {version}"
            )

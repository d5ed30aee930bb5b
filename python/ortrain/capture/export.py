# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Capture of a module as a functional ATen graph by torch.export."""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

from ortrain import logs
from ortrain.capture import recurrent_internals, size_internals
from ortrain.capture import torch_internals as internals
from ortrain.capture.announcements import announcements_held_back
from ortrain.capture.autocast_in_place import casts_in_place
from ortrain.capture.autocast_regions import (
    composites_in_float,
    decompose_under_autocast,
    has_autocast_region,
    recurrent_layers_in_one_dtype,
    switches_gradients_in_region,
)
from ortrain.capture.branches import Answers, Branch
from ortrain.capture.call_path import CallPath, stores_attributes
from ortrain.capture.captured import AutocastState, CapturedModule
from ortrain.capture.causal_hints import causal_hints_left_out
from ortrain.capture.changed_views import take_for_views
from ortrain.capture.checkpoints import MarkedCheckpoints
from ortrain.capture.composite_aliases import restore_aliases
from ortrain.capture.composite_operators import run_decompositions
from ortrain.capture.decomposition import decompose_unknown
from ortrain.capture.draw_bounds import draws_compared
from ortrain.capture.dynamo_internals import failures_untold
from ortrain.capture.errors import (
    CaptureError,
    HandledErrorError,
    SizeConditionError,
    SymbolicAttributeError,
    UnseenStateError,
)
from ortrain.capture.expansion import expand_unknown
from ortrain.capture.extents_of_one import at_one
from ortrain.capture.function_calls import FunctionCalls
from ortrain.capture.functional import inline_regions, keep_layers_in_regions, make_functional
from ortrain.capture.generator_watch import GeneratorWatch
from ortrain.capture.gradient_flow import follow_gradients
from ortrain.capture.gradient_paths import leaves_reached, refuse_writes_with_history
from ortrain.capture.guards import compile_guards, sizes_of
from ortrain.capture.interface import (
    dimensions_of,
    held_at_one,
    outputs_of,
    outside_tensors,
    placeholders_of,
    user_values,
)
from ortrain.capture.locations import error_source, reason_of
from ortrain.capture.names_read import NamesRead
from ortrain.capture.no_grad_regions import (
    detach_anew,
    detach_no_grad_regions,
    refuse_regions_with_gradients,
    refuse_writes_through_detach,
)
from ortrain.capture.number_questions import numbers_answer
from ortrain.capture.outside_reads import FOLLOWED_IN_PIECES
from ortrain.capture.random_internals import dead_draws_kept
from ortrain.capture.reachable_state import ReachableState
from ortrain.capture.registered_kernels import calls_operators_of_others
from ortrain.capture.replaced_functions import replacements_watched
from ortrain.capture.result_views import ResultViews, in_order_of
from ortrain.capture.shallow_copies import MadePlain
from ortrain.capture.shared_results import take_views_out
from ortrain.capture.side_effects import (
    containers_kept,
    first_call_error,
    refuse_acting_tensors,
    refuse_announcements,
    refuse_caches,
    refuse_changes,
    refuse_collectives,
    refuse_conditions_on_values,
    refuse_iterators,
    refuse_living_results,
    refuse_opaque_objects,
    refuse_other_ways,
    refuse_writes_through_windows,
)
from ortrain.capture.signature import (
    CallSignature,
    FlatCall,
    OutputTree,
    attributes_set,
    flatten_outputs,
    order_of,
)
from ortrain.capture.slice_sizes import slices_have_formulas
from ortrain.capture.symbolic_budget import (
    LIMIT,
    Freedom,
    SymbolicBudget,
    freedom_of,
    restrict_further,
)
from ortrain.capture.tensor_methods import methods_refused
from ortrain.capture.tensor_state import settings_kept, tensor_state_kept
from ortrain.capture.trace_internals import (
    deepest_lines_told,
    gradients_left_out,
    graphs_compiled_when_called,
    let_go_of_samples,
    linear_scales_as_computed,
    no_traces_kept,
    tracked_tensors_told,
)
from ortrain.capture.tracing import capturing_alone
from ortrain.capture.use_cache import without_cache
from ortrain.overlap import OccupiedMemory

_log = logs.get_logger("ortrain.capture")


class _FlatModule(nn.Module):
    """The module behind a signature of flat tensors; returns the flat tuple of result tensors."""

    def __init__(
        self,
        module: nn.Module,
        signature: CallSignature,
        call: FlatCall,
        equal: Sequence[Sequence[tuple[int, int]]],
        trees: list[OutputTree],
        reached: list[frozenset[str] | None],
        read: NamesRead,
        made: list[MadePlain],
        functions: FunctionCalls,
        at_each_tensor: Callable[[], None] | None,
        follows_logs: bool,
        branches: Sequence[Branch],
        checkpoints: MarkedCheckpoints,
    ) -> None:
        super().__init__()
        self.m = module
        name = type(module).__name__
        self.training = module.training
        # Real ones: a trace puts others in their place.
        given = dict([*module.named_parameters(), *module.named_buffers()])

        def forward(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with attributes_set(call.attributes, tensors):
                return contextvars.copy_context().run(run, *tensors)

        def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            for (first, first_axis), *rest in equal:
                for index, axis in rest:
                    torch._check(tensors[index].shape[axis] == tensors[first].shape[first_axis])
            args, kwargs = signature.unflatten(call.tree, tensors)
            before = self.reached = functions.around = ReachableState(module, (args, kwargs))
            answers = self.answers = Answers(branches)
            checkpoints.begin()
            try:
                refuse_iterators(before.consumed, name)
                refuse_opaque_objects(before.opaque, name)
                refuse_caches(before.caches.with_tensors(), name)
                refuse_acting_tensors(before.acting_tensors, name)
                switched: list[bool] = []
                tables = (*module.named_parameters(), *module.named_buffers())
                leaves = dict(zip(call.names, tensors, strict=True)) | dict(tables)
                wanting = {each for each, tensor in leaves.items() if tensor.requires_grad}
                path = CallPath() if stores_attributes(module) else None
                try:
                    # A region that changes nothing is one for an export all the same.
                    with (
                        internals.autocast_regions_entered() as regions,
                        internals.at_grad_mode_switches(lambda: switched.append(bool(regions))),
                    ):
                        # Not the class's own __call__, which goes around this one.
                        with (
                            read.recording(),
                            replacements_watched(),
                            methods_refused(),
                            tensor_state_kept(
                                zip(call.tensors, tensors, strict=True),
                                [(given[n], t) for n, t in tables if n in given],
                                read.asked_of,
                            ),
                            read.questions.heard(),
                            settings_kept(),
                            read.fakes.recording(at_each_tensor),
                            numbers_answer() as unanswered,
                            announcements_held_back(logs=follows_logs) as said,
                            answers.heard(),
                            path or contextlib.nullcontext(),
                        ):
                            result = nn.Module.__call__(module, *args, **kwargs)
                            checkpoints.end()
                        if unanswered:
                            raise unanswered[0]
                        refuse_writes_with_history(leaves, wanting)
                        refuse_living_results(result, before, name)
                        with path or contextlib.nullcontext():
                            flat, tree = flatten_outputs(result)
                        if path is not None:
                            path.end(flat, tree)
                finally:
                    changes, caches = before.restore(), before.caches.emptied()
                    kept = read.take_back_state()
                refuse_caches(caches, name)
                if any(switched) or switches_gradients_in_region(module):
                    raise CaptureError(
                        "its forward turns gradients on or off inside an autocast region of its "
                        "own, which an export forgets",
                        module=name,
                    )
                refuse_changes(changes, name, before.closing)
                read.loggers.update(said.loggers)
                made[:] = changes.made_plain
                if not made or functions.calls:
                    refuse_announcements(said, name)
                if kept.drawn:
                    raise UnseenStateError(
                        f"its forward draws from, or changes, {kept.drawn}, which a graph would do only once",
                        module=name,
                    )
                if kept.counted:
                    raise CaptureError(
                        f"its forward changes {kept.counted}, which a graph would not", module=name
                    )
                if kept.made:
                    raise first_call_error([kept.made.replace("'", "")], name)
                checkpoints.refuse_changes(each.name for each in made)
                what, where = read.outside_reads()
                if what:
                    kind = CaptureError if what in FOLLOWED_IN_PIECES else UnseenStateError
                    raise kind(
                        f"its forward reads {what} in {where}, which a graph would do only once",
                        module=name,
                    )
                if handler := read.goes_on_after_errors():
                    raise HandledErrorError(
                        f"its forward may go on in {handler} after an error, which a trace may raise "
                        "where PyTorch does not",
                        module=name,
                    )
                if made and not functions.calls and not answers.given:
                    with (
                        disable_proxy_modes_tracing(),
                        announcements_held_back(logs=follows_logs) as said_again,
                    ):
                        refuse_other_ways(
                            lambda: nn.Module.__call__(module, *args, **kwargs),
                            *(before, made, name, path),
                        )
                    refuse_announcements(said_again, name)
                    said.let_go()  # a later call finds that it was said
                elif made:
                    raise first_call_error([each.name for each in made], name)
            except CaptureError:
                raise
            except Exception as error:
                raise internals.QuietError from error
            flat += answers.conditions
            trees.append(tree.with_more(f"branch{i}" for i in range(len(answers.conditions))))
            reached[:] = leaves_reached(flat, leaves)
            return tuple(flat)

        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, kind) for name in call.names]
        )
        self.forward = forward


def _equal_sizes(tensors: Sequence[torch.Tensor]) -> list[list[tuple[int, int]]]:
    """Group the axes of the inputs that agree in position and size in the sample."""
    groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, tensor in enumerate(tensors):
        for axis, size in enumerate(tensor.shape):
            groups.setdefault((axis, size), []).append((index, axis))
    return [group for group in groups.values() if len(group) > 1]


def _samples(module: nn.Module, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return leaves like tensors, their axes in the same order but without gaps between elements.

    None lies in memory of another one, or of the module's: a write to that would be seen in it, in each later call too.
    """
    held = OccupiedMemory([*module.parameters(), *module.buffers()])
    return tuple(
        _sample(t, apart=held.touched_by(t) or OccupiedMemory(tensors[:i]).touched_by(t))
        for i, t in enumerate(tensors)
    )


def _sample(tensor: torch.Tensor, apart: bool) -> torch.Tensor:
    order = None if tensor.is_contiguous() else order_of(tensor)
    dense = tensor.detach()
    dense = dense.contiguous() if order is None else in_order_of(dense, order)
    if apart:
        dense = dense.clone()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(dense, tensor.requires_grad)
    return dense.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _capturing(module: nn.Module, functions: FunctionCalls) -> Iterator[None]:
    fast_path = torch.backends.mha.get_fastpath_enabled()
    tracks = torch.is_grad_enabled()  # leaving inference mode turns it on
    with (
        capturing_alone(),
        warnings.catch_warnings(),
        without_cache(module),
        internals.autograd_functions_by(functions.apply),
        dead_draws_kept(functions.calls),
        size_internals.flexible_sizes(),
        slices_have_formulas(),
        internals.quiet_logs(),
        failures_untold(),
        no_traces_kept(),
        deepest_lines_told(),
        gradients_left_out(),
        tracked_tensors_told(),
        draws_compared(),
        graphs_compiled_when_called(),
        torch.inference_mode(False),
        torch.set_grad_enabled(tracks),
        internals.nothing_saved_for_others(),
    ):
        warnings.filterwarnings("ignore", module=r"torch(\.|$)")
        warnings.filterwarnings("ignore", category=FutureWarning)
        # nn.LSTM and nn.GRU keep their weights in a list as well.
        warnings.filterwarnings(
            "ignore", message="The tensor attributes? .* assigned during export"
        )
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast_path)


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    known: Callable[[Any], bool] | None = None,
    dynamic: bool = True,
    read: NamesRead | None = None,
    standalone: bool = True,
    call: FlatCall | None = None,
    branches: Sequence[Branch] = (),
) -> CapturedModule:
    """Capture ``module`` as it runs for the given arguments.

    Every axis of the input tensors is dynamic where the module allows it. The training flags, the
    autocast state and the grad mode are those of the moment.

    Args:
      module: The module; its parameters stay where they are.
      args: Positional arguments of a call; only their structure and sizes matter.
      kwargs: Keyword arguments of that call.
      known: Tells whether an operator has a conversion; others are decomposed where possible.
      dynamic: Whether sizes may vary at all.
      read: Takes what the forward reads.
      standalone: Whether the graph gives all results by itself, copies of those that share memory.
      call: The arguments, flat, where numbers among them stand as tensors.
      branches: How branches on values went in PyTorch; the graph gives the conditions of those that the trace meets.

    Raises:
      CaptureError: The module cannot be captured; names the module, the reason and the line.
      TypeError: The arguments do not fit the module's signature.
    """
    signature = CallSignature(module.forward)
    call = signature.flatten(args, kwargs or {}) if call is None else call
    name = type(module).__name__
    read = NamesRead() if read is None else read
    least = freedom_of(module) if dynamic and call.tensors else Freedom.NONE
    try:
        return _freest(module, name, signature, call, known, read, branches, least, standalone)
    except CaptureError as error:
        if error.module and error.source:
            raise
        text = CaptureError(
            error.reason, module=error.module or name, source=error.source or error_source(error)
        )
        error.module, error.source, error.args = text.module, text.source, text.args
        raise
    except Exception as error:
        cause = internals.unwrapped(error)
        raise CaptureError(reason_of(cause), module=name, source=error_source(cause)) from cause


def _freest(
    module: nn.Module,
    name: str,
    signature: CallSignature,
    call: FlatCall,
    known: Callable[[Any], bool] | None,
    read: NamesRead,
    branches: Sequence[Branch],
    least: Freedom,
    standalone: bool,
) -> CapturedModule:
    """Capture with as many symbolic sizes as the budget of symbols allows, ``least`` or fewer."""
    for freedom in list(Freedom)[least:-1]:
        budget = SymbolicBudget(LIMIT)
        cause = f"symbols for them took more than {budget.limit} terms"
        try:
            with budget.counting():
                captured = _capture_unless_drawing(
                    *(module, name, signature, call, known, read, branches),
                    freedom=freedom,
                    standalone=standalone,
                )
            if not budget.is_exceeded and captured.needs_numbers:
                _log.info(
                    "%s: %s, so it is captured for these sizes alone", name, captured.needs_numbers
                )
                break
            if not budget.is_exceeded:
                _log.debug("%s: %d terms in symbolic sizes", name, budget.spent)
                return captured
        except Exception as error:
            by_numbers = isinstance(error, (SizeConditionError, SymbolicAttributeError))
            if not budget.is_exceeded and not by_numbers:
                if isinstance(error, CaptureError) or size_internals.has_unbacked_symbols(error):
                    raise
                reason = reason_of(internals.unwrapped(error))
                _log.info("%s: no capture with dynamic sizes (%s)", name, reason)
                break
            if not budget.is_exceeded:
                cause = reason_of(internals.unwrapped(error))
        restrict_further(module, cause)
    return _capture(
        *(module, name, signature, call, known, read, branches),
        Freedom.NONE,
        standalone=standalone,
    )


def _functional(
    program: torch.export.ExportedProgram,
    known: Callable[[Any], bool] | None,
    autocast: AutocastState,
    autocast_regions: bool,
) -> tuple[torch.export.ExportedProgram, list[str]]:
    """Return the program without writes, of known operators, and the conditions that this added."""
    detach_no_grad_regions(program, follow_gradients(program) if torch.is_grad_enabled() else ())
    if known is not None and not autocast.enabled and not autocast_regions:
        expand_unknown(program, known)
    # Tracing again is what puts the casts of autocast into the graph.
    if known is not None and not autocast.enabled and make_functional(program, known):
        inline_regions(program)
        return program, []
    if autocast.enabled or autocast_regions:
        recurrent_layers_in_one_dtype(program)
        composites_in_float(program, autocast)
        if known is not None and casts_in_place(program, known):
            inline_regions(program)
            with autocast.left():
                expand_unknown(program, known)
                traced = decompose_unknown(program, known)
            return traced, [] if traced is program else size_internals.guards_code(traced)
    keep_layers_in_regions(program)
    if known is not None and (autocast.enabled or autocast_regions):
        program = decompose_under_autocast(program, known)
    else:
        program = run_decompositions(program, {})
    if known is not None:
        with autocast.left():
            program = decompose_unknown(program, known)
    # Functionalizing traces once more, which may add conditions.
    return program, size_internals.guards_code(program)


def _capture_unless_drawing(*args: Any, freedom: Freedom, standalone: bool) -> CapturedModule:
    """Capture; what draws Python's or NumPy's random numbers is refused without a long trace first.

    A forward that sets the generators back is captured as any other.
    """
    watch = GeneratorWatch()
    try:
        captured = _capture(*args, freedom, standalone=standalone, at_each_tensor=watch.look)
        if not watch.has_ended:
            return captured
    except Exception:
        if not watch.has_ended:
            raise
    _capture(*args, Freedom.NONE, standalone=standalone)
    return _capture(*args, freedom, standalone=standalone)


def _capture(
    module: nn.Module,
    name: str,
    signature: CallSignature,
    call: FlatCall,
    known: Callable[[Any], bool] | None,
    read: NamesRead,
    branches: Sequence[Branch],
    freedom: Freedom,
    *,
    standalone: bool,
    at_each_tensor: Callable[[], None] | None = None,
) -> CapturedModule:
    seconds: dict[str, float] = {}
    autocast = AutocastState.current()
    functions = FunctionCalls()
    tensors = _samples(module, call.tensors)
    dynamic = freedom is not Freedom.NONE
    # A number that is the same as a size by chance is not held to it.
    equal = _equal_sizes(tensors[: len(tensors) - len(call.numbers)]) if dynamic else []
    auto = torch.export.Dim.AUTO
    first = freedom is Freedom.FIRST
    axes = [range(min(t.dim(), 1) if first else t.dim()) for t in tensors]
    shapes = tuple(dict.fromkeys(each, auto) for each in axes) if dynamic else None
    trees: list[OutputTree] = []  # outside the module: export resets a module's attributes
    reached: list[frozenset[str] | None] = []  # of each result
    made: list[MadePlain] = []
    checkpoints = MarkedCheckpoints(module)
    flat = _FlatModule(
        *(module, signature, call, equal, trees, reached),
        *(read, made, functions, at_each_tensor, not standalone, branches),
        checkpoints,
    )
    # Around the export: entered inside, it would become a region that knows no grad modes.
    with _capturing(module, functions), checkpoints.marked(), autocast.applied():
        start = time.perf_counter()
        with (
            recurrent_internals.recurrent_layers_whole(as_called=True),
            linear_scales_as_computed(),
            causal_hints_left_out(),
            containers_kept(module),
        ):
            program = torch.export.export(flat, tensors, dynamic_shapes=shapes, strict=False)
        seconds["export"] = time.perf_counter() - start
        read.make(made)

        start = time.perf_counter()
        take_for_views(program)
        restore_aliases(program, name)
        conditions = size_internals.guards_code(program)
        dims = dimensions_of(user_values(program))
        needs_numbers, larger = at_one(program, dims, call.names) if dynamic else ("", [])
        conditions += larger
        autocast_regions = has_autocast_region(program)
        refuse_collectives(program, name)
        refuse_conditions_on_values(program, name)
        refuse_writes_through_windows(program, name)
        detach_anew(program)
        if flat.answers.given and (functions.calls or calls_operators_of_others(program)):
            raise CaptureError(
                "it branches on values, and calls functions or operators of its own that would run "
                "twice where a branch goes another way",
                module=name,
            )
        functions.refuse_lost_effects(program)
        functions.refuse_writes_to_shared_memory(program)
        if torch.is_grad_enabled():
            refuse_writes_through_detach(program)
        else:
            refuse_regions_with_gradients(program)
        outside = outside_tensors(program, flat.reached)
        inputs = placeholders_of(program, module, call, outside)[0]
        views = None if standalone else take_views_out(program, inputs)
        exported = program
        with recurrent_internals.recurrent_layers_whole(), linear_scales_as_computed():
            program, added = _functional(program, known, autocast, autocast_regions)
        conditions += added
        if dynamic and not needs_numbers and program is not exported:
            needs_numbers, larger = at_one(program, dims, call.names)
            conditions += larger
        seconds["functionalize"] = time.perf_counter() - start

    start = time.perf_counter()
    placeholders, constants = placeholders_of(program, module, call, outside)
    values = user_values(program)
    dims = dimensions_of(values)
    result_views = None if views is None else ResultViews(views, dims)
    if result_views is not None and not (needs_numbers or result_views.are_known()):
        needs_numbers = "a view among its results has a size that no argument tells"
    static = [
        (index, axis, size)
        for index, value in enumerate(values)
        for axis, size in enumerate(map(size_internals.size_expression, value.shape))
        if isinstance(size, int)
    ]
    guards = compile_guards(conditions, call.names, static)
    let_go_of_samples(program)
    if not guards.holds(sizes_of(tensors)):
        raise CaptureError("the conditions of the capture do not hold for its own sample")
    captured = CapturedModule(
        module_name=name,
        graph_module=program.graph_module,
        placeholders=placeholders,
        outputs=outputs_of(program, trees[-1], call, views),
        reached=reached,
        constants=constants,
        input_names=list(call.names),
        output_tree=trees[-1],
        guards=guards,
        dims=dims,
        ones=held_at_one(values, guards, tensors),
        functions=functions,
        autocast_regions=autocast_regions,
        training={path: part.training for path, part in module.named_modules()},
        autocast=autocast,
        grad_enabled=torch.is_grad_enabled(),
        dynamic=dynamic,
        fixed=freedom.fixed if freedom_of(module) is not Freedom.ALL else "",
        seconds=seconds,
        num_made=len(made),
        branches=tuple(flat.answers.given),
        needs_numbers=needs_numbers,
        views=result_views,
        reads_any_attribute=flat.reached.reads_any_attribute,
        classes=frozenset(flat.reached.classes),
        others=read.codes_of_others(flat.reached.functions, flat.reached.autograd_functions()),
    )
    seconds["guards"] = time.perf_counter() - start
    return captured

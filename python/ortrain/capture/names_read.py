# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Which attributes a forward may have read, by the names in the code that ran."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import dis
import gc
import operator
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import mpmath
import sympy
import torch
import typing_extensions

from ortrain import _core
from ortrain.capture.absent_names import members_of_protocols
from ortrain.capture.announcements import LogThreshold
from ortrain.capture.class_comparisons import compares_classes_of_numbers
from ortrain.capture.class_facts import OF_CLASSES, READERS
from ortrain.capture.compiled_functions import compiled_functions
from ortrain.capture.error_handlers import ENDS_OF_A_SEARCH, handles_errors, origin_of
from ortrain.capture.kept_changes import Change
from ortrain.capture.library_reads import Variable, library_reads
from ortrain.capture.library_state import LibraryState, changes_of_context, changes_of_globals
from ortrain.capture.names_in_code import codes_in, globals_of, named_with_place
from ortrain.capture.outside_reads import (
    OF_INSTALLED_PACKAGES,
    READ_ONCE,
    outside_read,
    told_by_tensors,
)
from ortrain.capture.reachable_state import builtins_behind, home_of, is_own
from ortrain.capture.shallow_copies import MadePlain
from ortrain.capture.source_files import (
    CAPTURE_ROOT,
    LAYERS_ROOT,
    OWN_ROOT,
    TORCH_ROOT,
    is_installed,
    is_standard,
    is_taken_at_its_word,
    real_path,
)
from ortrain.capture.surviving_fakes import (
    FakesMade,
    without_collection_callbacks,
    without_collections,
)
from ortrain.capture.tensor_questions import TensorQuestions

# Under every trace, and never with a layer in hand.
_NEVER_READ = (
    *(os.path.dirname(os.path.realpath(m.__file__)) + os.sep for m in (sympy, mpmath)),
    os.path.realpath(typing_extensions.__file__),
)
# With names that are computed these may read any attribute of their first argument.
_BY_TEXT = frozenset({"getattr", "hasattr", "setattr", "delattr", "vars"})
# And these of any object; the standard library does so for nobody else.
_BY_ANY_MEANS = frozenset(
    {"attrgetter", "getmembers", "exec", "eval", "deepcopy", "asdict", "astuple"}
)
# With these it may write to any, and to globals.
_GLOBALS = frozenset({"globals", "vars", "exec", "eval"})
_WRITE_BY_TEXT = _GLOBALS | {"setattr", "__setattr__", "__dict__"}
_BY_OTHER_NAMES = (*READERS, operator.attrgetter)
_MATCHES = dis.opmap["MATCH_CLASS"]  # by `__match_args__` of the class
_FORMATS_PARTS = re.compile(r"\{[^{}!:]*[.\[]")  # of an object, by str.format
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_STORES = dis.opmap["STORE_GLOBAL"]
_UNDER_TRACES = frozenset({"torch", "ortrain", "sympy", "mpmath", "numpy"})
# Large packages: to look at what they hold takes as long as at that of all others.
_SEE_NO_TENSORS = frozenset(
    {
        *("scipy", "sklearn", "pandas", "matplotlib", "PIL", "huggingface_hub", "tokenizers"),
        *("tqdm", "rich", "typer", "jinja2", "yaml", "packaging", "fsspec", "filelock", "anyio"),
        *("h11", "httpx", "httpcore", "httpx2", "httpcore2", "idna", "regex", "psutil"),
        *("torchgen", "markupsafe", "typing_extensions", "onnx", "google", "ml_dtypes"),
        *("pytest", "_pytest", "xdist", "execnet", "pluggy", "hypothesis"),
        *("_hypothesis_globals", "_hypothesis_pytestplugin"),
        *("networkx", "pygments"),  # which PyTorch loads, and which has 9000 objects, and rich
    }
)
# PyTorch's tracing shows it, and it tells nobody anything.
_PROGRESS = f"{os.sep}tqdm{os.sep}"
# Texts that are executed: who does so is judged by that, and Dynamo's guards are PyTorch's.
_EXECUTED = frozenset({"<module>", "guard"})
# Of finders of modules, which an import in a forward runs.
_IMPORTS = frozenset({"find_spec", "find_module", "create_module", "exec_module"})
_SHOW = frozenset({"repr", "str", "format", "print", "ascii", "__str__", "__repr__", "__format__"})
_COMPARE = frozenset({"hash", "index", "count", "remove"})
# What texts show of a class or a function, and what makes them.
_SHOWN = frozenset({"__name__", "__qualname__", "__module__", "__repr__", "__str__", "__format__"})
# In which a text formats with "%".
_REMAINDERS = ("BINARY_OP", "BINARY_MODULO")
_SELF, _OTHER = " self", " other"  # which are no names
# Of a tensor, what a trace on tensors without gaps, each in a memory of its own, does not know.
_GAPS = frozenset({"is_contiguous", "stride"})
_METHODS = frozenset({"__dict__", "__getattribute__", "__getstate__", "__reduce_ex__"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Mentioned:
    """What the code of a function mentions.

    Attributes:
      names: Names and texts.
      of_self: Whether it may read any attribute of its `self`.
      of_any: Whether it may read any attribute of other objects.
    """

    names: frozenset[str]
    of_self: bool = False
    of_any: bool = False


_known: weakref.WeakKeyDictionary[types.CodeType, _Mentioned] = weakref.WeakKeyDictionary()
_known_to_show: weakref.WeakKeyDictionary[types.CodeType, bool] = weakref.WeakKeyDictionary()
_known_calls: weakref.WeakKeyDictionary[types.CodeType, frozenset[str]] = (
    weakref.WeakKeyDictionary()
)


class NamesRead:
    """Collects the code that runs while `recording`."""

    def __init__(self) -> None:
        self._codes: dict[types.CodeType, dict[str, Any]] = {}  # with the globals
        # Functions of a user that went on after an error, and where that began.
        self._handled: list[tuple[types.CodeType, types.CodeType]] = []
        # Of installed packages, before a trace.
        self._globals: list[dict[str, Any]] = []
        self._state = LibraryState(())
        self._context = contextvars.copy_context()
        self.has_begun = False
        self.fakes = FakesMade()
        self.questions = TensorQuestions((*told_by_tensors(), *_GAPS), _is_own_code, _is_standard)
        self.loggers: dict[int, LogThreshold] = {}  # that the user's code asks whether to log
        # Attributes that an installed package asks a tensor of the module for, which does not have them.
        self.asked: dict[tuple[int, str], Variable] = {}
        # Plain attributes that the forward made, and that are there since its capture.
        self._made: list[MadePlain] = []

    def asked_of(self, tensor: torch.Tensor, name: str) -> None:
        """Note that somebody asks a tensor for an attribute that it does not have, and may get later."""
        table = tensor.__dict__
        self.asked[id(table), name] = (table, name, "same")

    def make(self, attributes: Iterable[MadePlain]) -> None:
        """Leave plain attributes as PyTorch's first call would have left them."""
        for each in attributes:
            each.make()
            self._made.append(each)

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Take back what was made where an error leaves: PyTorch runs the first call then."""
        try:
            yield
        except BaseException:
            for each in reversed(self._made):
                each.take_back()
            self._made.clear()
            raise

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the code of this thread's functions."""
        self.has_begun = True
        self._handled.clear()
        with without_collections(), without_collection_callbacks():
            packages = list(_packages())
            self._globals = [dict(vars(module)) for module in packages]
            self._state = LibraryState(filter(_may_keep_counts, packages))
            self._context = contextvars.copy_context()
            with self._watching():
                yield

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        if sys.version_info >= (3, 12):
            with self._monitoring(sys.monitoring):
                yield
            return
        recorder = _core.CodeRecorder()
        recorder.start()
        try:
            yield
        finally:
            recorder.stop()
            self._codes.update(recorder.codes)
            self._handled.extend(pair for pair in recorder.handled if not _is_users(pair[1]))

    @contextlib.contextmanager
    def _monitoring(self, monitoring: Any) -> Iterator[None]:
        free = [i for i in range(6) if monitoring.get_tool(i) is None]
        if not free:
            raise RuntimeError("all of sys.monitoring's tools are in use")
        tool = free[-1]
        starts, handles = monitoring.events.PY_START, monitoring.events.EXCEPTION_HANDLED
        thread = threading.get_ident()

        def see(code: types.CodeType, _: int) -> Any:
            if threading.get_ident() != thread:
                return None  # it may run in this one later
            self._codes[code] = sys._getframe(1).f_globals
            return monitoring.DISABLE

        def see_handled(code: types.CodeType, _: int, error: BaseException) -> None:
            if isinstance(error, ENDS_OF_A_SEARCH) or threading.get_ident() != thread:
                return
            if isinstance(error, NameError) and is_installed(code.co_filename):
                return  # guards know that the name is not there
            origin = origin_of(error)
            if origin is not None and not (origin[1] and _is_users(origin[0])):
                self._handled.append((code, origin[0]))

        monitoring.use_tool_id(tool, "ortrain")
        try:
            monitoring.register_callback(tool, starts, see)
            monitoring.register_callback(tool, handles, see_handled)
            monitoring.restart_events()
            monitoring.set_events(tool, starts | handles)
            yield
        finally:
            monitoring.set_events(tool, 0)
            for event in (starts, handles):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    def outside_reads(self) -> tuple[str, str]:
        """Return what code has read, PyTorch's and Python's aside, that no guard compares, and where; "" for nothing."""
        for code, variables in self._codes.items():
            if not _is_users(code) or code.co_name in _IMPORTS or _PROGRESS in code.co_filename:
                continue
            if code.co_filename == "<string>" and code.co_name in _EXECUTED:
                continue
            what = outside_read(code, variables)
            if what and not (what in OF_INSTALLED_PACKAGES and is_installed(code.co_filename)):
                return what, named_with_place(code)
        told = told_by_tensors()
        for name, code in self.questions.asked.items():
            if name in told:
                return told[name], named_with_place(code)
        return "", ""

    def read_once(self) -> set[str]:
        """Return, in words, what a graph has as it was at the capture: what no guard compares of code that may be trusted."""
        found: set[str] = set()
        for code, variables in self._codes.items():
            if _is_own_code(code, variables):
                names = compiled_functions(code, variables)
                found.update(f"{name} (a function in C)" for name in names)
                if _shows_classes(code):
                    found.add(f"texts of the classes of tensors ({code.co_name})")
            elif _is_users(code) and is_installed(code.co_filename):
                what = outside_read(code, variables)
                if what in READ_ONCE and code.co_name not in _IMPORTS:
                    name = getattr(code, "co_qualname", code.co_name)
                    found.add(f"{what} ({variables.get('__name__')}.{name})")
        return found

    def goes_on_after_errors(self) -> str:
        """Return the user's function that has handled an error of the trace, or may have; "" for none.

        What has no contents refuses more than tensors do, and a handler would be captured as if these had refused.
        """
        for code, origin in self._handled:
            # What keeps results by sizes computes anew where these are symbols.
            if not _is_users(code) or (
                origin.co_name == "__hash__" and is_installed(code.co_filename)
            ):
                continue
            return getattr(code, "co_qualname", code.co_name)
        if sys.version_info >= (3, 12):
            return ""
        # Which of its own errors a function has handled nobody tells.
        for code in self._codes:
            if _is_users(code) and not is_installed(code.co_filename) and handles_errors(code):
                return getattr(code, "co_qualname", code.co_name)
        return ""

    def codes_of_others(
        self, known: Iterable[types.FunctionType], left_out: Iterable[types.FunctionType]
    ) -> dict[types.CodeType, dict[str, Any]]:
        """Return the code of the user's that has run and to which nothing leads, with its globals.

        Libraries call such functions: those registered with an operator, of a NumPy ufunc, of a layer that the forward
        makes.

        Args:
          known: Functions to which something leads.
          left_out: Functions that run in each call in any case.
        """
        codes = {part for f in (*known, *left_out) for part in codes_in(f.__code__)}
        return {
            code: variables
            for code, variables in self._codes.items()
            if code not in codes
            and code.co_name != "<module>"  # an import
            and _is_own_code(code, variables)
        }

    def reads_of_libraries(
        self, layers: Iterable[type], reached: Iterable[type]
    ) -> tuple[Variable, ...]:
        """Return what guards compare of installed packages: functions, methods, numbers, tables.

        Args:
          layers: Classes of the layers.
          reached: Those of other objects to which the module leads.
        """
        naming = tuple(filter(_is_users, self._codes))
        return tuple(library_reads(self._codes, naming, layers, reached))

    def take_back_state(self) -> StateChanged:
        """Set back what code of installed packages has changed of what these keep, and return where that is."""
        state, self._state = self._state, LibraryState(())
        before = {values["__name__"]: values for values in self._globals}
        named: set[str] = set()
        computing: set[str] = set()
        in_globals: list[Change] = []
        by_text: list[Change] = []
        for code, table in self._codes.items():
            if not _is_users(code):
                continue
            mentioned = _mentions(code)
            named |= mentioned.names
            home = str(table.get("__name__"))
            held = before.get(home, {}) if is_installed(code.co_filename) else {}
            if (
                mentioned.of_self
                or mentioned.of_any
                or not _WRITE_BY_TEXT.isdisjoint(code.co_names)
            ):
                computing.add(home.partition(".")[0])
            if not _GLOBALS.isdisjoint(code.co_names):
                by_text += changes_of_globals(held, table, {**held, **table} if held else ())
            elif held and _STORES in code.co_code[::2]:
                names = {
                    step.argval
                    for step in dis.get_instructions(code)
                    if step.opname == "STORE_GLOBAL"
                }
                in_globals += changes_of_globals(held, table, names)
        in_objects = [
            *state.changes(named, computing),
            *changes_of_context(self._context),
            *by_text,
        ]
        every = [*in_objects, *in_globals]
        for change in every:
            change.set_back()
        return StateChanged(
            next((c.where for c in in_objects if c.is_counted), ""),
            next((c.where for c in in_globals if c.is_counted), ""),
            next((c.where for c in every), ""),
        )

    def asks_of_memory(self) -> MemoryQuestions:
        """Return what the user's own code may ask of how tensors lie in memory."""
        called = set(self.questions.asked)
        for code, variables in self._codes.items():
            if _is_own_code(code, variables):
                called |= _methods_called(code)
        return MemoryQuestions(
            gaps=not called.isdisjoint(_GAPS),
            copies="contiguous" in called,
        )

    def compares_classes_of_numbers(self) -> bool:
        """Tell whether the user's code may ask for the very class of a number, which a trace hides."""
        return any(compares_classes_of_numbers(code) for code in self._codes if _is_users(code))

    def names(self) -> frozenset[str] | None:
        """Return the names of attributes that may have been read; None for all there are.

        ``class C`` stands for all attributes of objects of a class C, ``attributes of a`` for all those of what
        attributes a hold, ``namespaces as wholes`` for all attributes of objects that only hold some.
        """
        found: set[str] = {"training"}
        for code, variables in self._codes.items():
            file = real_path(code.co_filename)
            if file.startswith((CAPTURE_ROOT, *_NEVER_READ)) or is_standard(file):
                continue
            if file.startswith(TORCH_ROOT):
                # Only these read attributes of layers by name; what classes are called stands in messages.
                if file.startswith(LAYERS_ROOT):
                    found.update(name for name in code.co_names if name not in OF_CLASSES)
                continue
            mentioned = _mentions(code)
            if not is_installed(code.co_filename) and _reads_by_other_names(code, variables):
                return None
            owner = getattr(code, "co_qualname", code.co_name).rpartition(".")[0]
            if mentioned.of_any or (mentioned.of_self and not owner):
                return None
            if mentioned.of_self:
                found.add(f"class {owner}")
            found |= mentioned.names
            if _shows(code):
                found |= _SHOWN
            if _is_own_code(code, variables):
                found |= members_of_protocols(code, variables)
                if _compares(code) or _shows(code):
                    found.add("namespaces as wholes")
        return frozenset(found)


class MemoryQuestions(NamedTuple):
    """What code may ask of tensors that it is given.

    Attributes:
      gaps: Whether they lie without gaps, and their strides.
      copies: For one without gaps, which is itself where there are none.
    """

    gaps: bool = False
    copies: bool = False


class StateChanged(NamedTuple):
    """Where installed packages keep what a forward has changed, in words, "" for nowhere.

    Attributes:
      drawn: In objects of theirs, what is another number, state or list at each call.
      counted: In globals.
      made: Anywhere, as a first call does.
    """

    drawn: str
    counted: str
    made: str


class OthersFunctions(NamedTuple):
    """Functions of the user's that have run and to which the module does not lead.

    Attributes:
      functions: Those that were found.
      variables: What the code of the others reads: its globals and the name in them.
      libraries: Where the functions of installed packages are that have run.
    """

    functions: tuple[types.FunctionType, ...] = ()
    variables: tuple[Variable, ...] = ()
    libraries: tuple[Variable, ...] = ()


def functions_with(
    codes: Mapping[types.CodeType, dict[str, Any]], libraries: tuple[Variable, ...] = ()
) -> OthersFunctions:
    """Return the functions of code, given with its globals; of those that somebody has frozen, what they read."""
    holders = gc.get_referrers(*codes) if codes else []
    found = [f for f in holders if isinstance(f, types.FunctionType) and f.__code__ in codes]
    functions = {id(function): function for function in found}
    known = {function.__code__ for function in found}
    variables: list[Variable] = []
    for code, table in codes.items():
        if code not in known:
            names = {n for part in codes_in(code) for n in globals_of(part)}
            variables += [(table, name) for name in sorted(names & table.keys())]
            variables += builtins_behind(table, names)
    return OthersFunctions(tuple(functions.values()), tuple(variables), libraries)


def _packages() -> Iterator[types.ModuleType]:
    """Return the modules of installed packages that are loaded, those under every trace aside."""
    for name, module in list(sys.modules.items()):
        root = name.partition(".")[0]
        if root in _UNDER_TRACES or root in sys.stdlib_module_names:
            continue
        if isinstance(module, types.ModuleType) and vars(module).get("__name__") == name:
            yield module


def _may_keep_counts(module: types.ModuleType) -> bool:
    """Tell whether a module's objects are looked at: no library's that is known, nor the user's own."""
    root = module.__name__.partition(".")[0]
    return not (root in _SEE_NO_TENSORS or is_taken_at_its_word(root) or is_own(module))


def _mentions(code: types.CodeType) -> _Mentioned:
    mentioned = _known.get(code)
    if mentioned is None:
        mentioned = _known[code] = _mentioned_in(code)
    return mentioned


def _mentioned_in(code: types.CodeType) -> _Mentioned:
    names = frozenset({*code.co_names, *_texts(code.co_consts)})
    of_self = of_any = False
    within = set()
    if _MATCHES in code.co_code[::2]:
        of_any = True
    by_parts = any(map(_FORMATS_PARTS.search, names))
    if not names.isdisjoint(_BY_TEXT | _BY_ANY_MEANS | _METHODS | {"copy", "dir", "format"}):
        steps = list(dis.get_instructions(code))
        for i, step in enumerate(steps):
            is_global = step.opname in ("LOAD_GLOBAL", "LOAD_NAME")
            if is_global and step.argval in _BY_TEXT:
                owner = _owner_of_computed_name(steps[i + 1 :])
            elif step.argval == "format" and step.opname in _ATTRIBUTES:
                owner = _OTHER if by_parts else None
            elif step.argval in _METHODS and "CONST" not in step.opname:
                owner = _SELF if _is_self(steps[:i]) or "SUPER" in step.opname else _OTHER
            elif (
                is_global
                and step.argval in ("copy", "dir")
                or step.argval in _BY_TEXT
                and i
                and steps[i - 1].argval == "builtins"
            ):
                owner = _OTHER
            else:
                owner = _OTHER if step.argval in _BY_ANY_MEANS else None
            of_self |= owner == _SELF
            of_any |= owner == _OTHER
            if owner not in (None, _SELF, _OTHER):
                within.add(f"attributes of {owner}")
    return _Mentioned(names | within, of_self, of_any)


def _methods_called(code: types.CodeType) -> frozenset[str]:
    """Return the names of methods that code calls, or asks for by a literal."""
    found = _known_calls.get(code)
    if found is None:
        steps = dis.get_instructions(code)
        called = {s.argval for s in steps if s.opname in _ATTRIBUTES and _is_call(s)}
        by_text = {"getattr", "methodcaller"}.intersection(code.co_names)
        texts = _texts(code.co_consts) if by_text else ()
        found = _known_calls[code] = frozenset({*called, *texts})
    return found


def _is_call(step: dis.Instruction) -> bool:
    """Tell whether a step loads an attribute to call it."""
    return step.opname == "LOAD_METHOD" or (
        sys.version_info >= (3, 12) and step.arg is not None and bool(step.arg & 1)
    )


def _shows(code: types.CodeType) -> bool:
    """Tell whether a function may show objects as texts."""
    found = _known_to_show.get(code)
    if found is None:
        texts = _texts(code.co_consts)
        by_percent = any("%" in text for text in texts)
        found = _known_to_show[code] = not _SHOW.isdisjoint((*code.co_names, *texts)) or any(
            step.opname.startswith("FORMAT_") or (by_percent and step.opname in _REMAINDERS)
            for step in dis.get_instructions(code)
        )
    return found


def _shows_classes(code: types.CodeType) -> bool:
    """Tell whether a function may show the class of a tensor, which is another one while it is traced."""
    names = set(code.co_names)
    return not names.isdisjoint(("type", "__class__")) and (
        not names.isdisjoint(("__name__", "__qualname__", "__module__")) or _shows(code)
    )


def _compares(code: types.CodeType) -> bool:
    """Tell whether a function may compare objects as wholes."""
    names = (*code.co_names, *_texts(code.co_consts))
    return not _COMPARE.isdisjoint(names) or any(
        "==" in str(step.argval) or "!=" in str(step.argval)
        if step.opname == "COMPARE_OP"
        else step.opname.startswith("CONTAINS_OP")
        for step in dis.get_instructions(code)
    )


def _reads_by_other_names(code: types.CodeType, variables: Mapping[str, Any]) -> bool:
    """Tell whether a global that code mentions is ``getattr`` or the like under another name."""
    held = (variables.get(name) for name in code.co_names if name not in _BY_TEXT)
    return any(value is reader for value in held for reader in _BY_OTHER_NAMES)


def _owner_of_computed_name(steps: Sequence[dis.Instruction]) -> str | None:
    """Return whose attribute a call such as getattr reads; None where a literal names it.

    Args:
      steps: What follows the loading of the function.

    Returns:
      _SELF, the name of the attribute that holds the object, or else _OTHER.
    """
    steps = [s for s in steps if s.opname != "PUSH_NULL"]
    depth = 0
    for i, step in enumerate(steps):
        if depth == 1 and step.opname.startswith("LOAD_") and step.opname not in _ATTRIBUTES:
            behind = steps[i + 1].opname if i + 1 < len(steps) else ""
            if isinstance(step.argval, str) and "CONST" in step.opname and "BINARY" not in behind:
                return None
            if i == 1 and _is_self(steps[:1]):
                return _SELF
            return steps[i - 1].argval if steps[i - 1].opname == "LOAD_ATTR" else _OTHER
        if step.opcode in dis.hasjrel or step.opcode in dis.hasjabs or depth > 8:
            return _OTHER
        depth += dis.stack_effect(step.opcode, step.arg)
    return _OTHER


def _is_self(steps: Sequence[dis.Instruction]) -> bool:
    """Tell whether the last of some steps loads ``self`` or ``super()``."""
    if not steps:
        return False
    if steps[-1].opname.startswith("LOAD_") and steps[-1].argval == "self":
        return True
    before = [s for s in steps if s.opname not in ("PRECALL", "PUSH_NULL")][-2:]
    return [s.argval for s in before[:1]] == ["super"] and before[-1].opname.startswith("CALL")


def _texts(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, (tuple, frozenset)):
            yield from _texts(constant)


def _is_users(code: types.CodeType) -> bool:
    file = real_path(code.co_filename)
    return not (file.startswith((TORCH_ROOT, OWN_ROOT, *_NEVER_READ)) or is_standard(file))


def _is_standard(code: types.CodeType, _: Mapping[str, Any]) -> bool:
    return is_standard(code.co_filename)


def _is_own_code(code: types.CodeType, variables: Mapping[str, Any]) -> bool:
    """Tell whether code is the user's own and no installed package's; its globals say which module it is of."""
    return _is_users(code) and not is_installed(code.co_filename) and is_own(home_of(variables))

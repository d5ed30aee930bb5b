# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Where Dynamo has something else than Python, and says nothing: there it cuts, and Python runs what stands there.

As in ``torch_internals``, a release of PyTorch that moves one of these names is met here.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import threading
import types
from collections.abc import Callable
from typing import Any

from ortrain.capture.source_files import TORCH_ROOT

# Whether the trace of this thread has come to a cut.
_trace = threading.local()
_Cut = Callable[[Any, str, Callable[..., bool], str], None]


@functools.cache
def cut_where_python_is_replaced(applies: Callable[[], bool]) -> None:
    """Let Dynamo cut where it has something else than Python do.

    Args:
      applies: Tells whether what is being traced shall be cut.
    """
    from torch._dynamo import exc

    def cut(home: Any, name: str, is_replaced: Callable[..., bool], what: str) -> None:
        original = getattr(home, name, None)
        if original is None:  # by another name in this PyTorch
            return

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if applies() and is_replaced(*args):
                _trace.was_cut = True
                raise exc.Unsupported(what)
            return original(*args, **kwargs)

        setattr(home, name, call)

    _skip_where_cuts_are_lost(applies)
    _cut_numbers(cut)
    _cut_containers(cut)
    _cut_objects(cut)


def _skip_where_cuts_are_lost(applies: Callable[[], bool]) -> None:
    """Let Python run a function of which a trace has gone on past a cut, since it could fold constants, say.

    A cut begins another trace, which stops in front of it. So it does with generators that have more to do when they are
    dropped, of which a trace does nothing.
    """
    from torch._dynamo import exc, output_graph
    from torch._dynamo.variables.functions import LocalGeneratorObjectVariable

    graph = output_graph.OutputGraph
    begin, compile_subgraph = graph.__init__, graph.compile_subgraph

    @functools.wraps(begin)
    def begun(*args: Any, **kwargs: Any) -> None:
        _trace.was_cut, _trace.generators = False, []
        begin(*args, **kwargs)

    @functools.wraps(compile_subgraph)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        if applies() and getattr(_trace, "was_cut", False):
            raise exc.SkipFrame("a cut that a trace has gone past")
        if applies() and any(map(_has_an_end_to_come, getattr(_trace, "generators", ()))):
            raise exc.SkipFrame("a generator that is dropped")
        return compile_subgraph(*args, **kwargs)

    make = LocalGeneratorObjectVariable.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        if applies():
            _trace.generators.append(self)

    graph.__init__ = begun
    graph.compile_subgraph = compiled
    LocalGeneratorObjectVariable.__init__ = made


def _has_an_end_to_come(generator: Any) -> bool:
    """Tell whether a generator is suspended, and would do something when it is dropped."""
    is_suspended = not generator._is_generator_just_started() and not _is_exhausted(generator)
    handlers = ("PUSH_EXC_INFO", "SETUP_FINALLY", "SETUP_WITH")
    return is_suspended and any(
        step.opname in handlers for step in dis.get_instructions(generator.get_code())
    )


def _is_exhausted(generator: Any) -> bool:
    return bool(generator._is_generator_exhausted())


def _is_tensor(value: Any) -> bool:
    return bool(getattr(value, "is_tensor", bool)())


def _cut_numbers(cut: _Cut) -> None:
    """Cut at numbers that are others than Python's.

    Numbers and arrays of NumPy have likenesses of other dtypes; ``max`` and ``min`` of tensors compare elements and give
    none of their operands; texts of floats that vary are taken for the floats; a generator that an object holds
    draws while it is traced.
    """
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import misc
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.tensor import (
        NumpyNdarrayVariable,
        SymNodeVariable,
        UnspecializedPythonVariable,
    )

    def are_replaced(_: Any, __: Any, *operands: Any) -> bool:
        """Tell whether there are tensors among operands, or sizes among floats, of which Python gives the very one."""
        numbers = [each for each in operands if isinstance(each, SymNodeVariable)]
        floats = any(isinstance(getattr(each, "value", None), float) for each in operands)
        return bool(numbers and floats) or any(
            _is_tensor(each) and not isinstance(each, UnspecializedPythonVariable)
            for each in operands
        )

    def rounds_off_ints(_: Any, __: Any, number: Any, digits: Any = None) -> bool:
        return isinstance(number, SymNodeVariable) and digits is not None

    def is_float(value: Any) -> bool:
        return isinstance(value, SymNodeVariable) and value.python_type() is float

    def shows_floats(_: Any, __: str, args: Any = (), named: Any = ()) -> bool:
        return any(map(is_float, (*args, *dict(named).values())))

    cut(NumpyNdarrayVariable, "__init__", lambda *_: True, "a number or an array of NumPy")
    cut(BuiltinVariable, "_call_min_max_binary", are_replaced, "max or min of tensors or sizes")
    cut(BuiltinVariable, "call_round", rounds_off_ints, "digits of a size")
    translator = symbolic_convert.InstructionTranslatorBase
    shown = "the text of a number that varies"
    cut(translator, "_format_value", lambda tx, *_: is_float(tx.stack[-1]), shown)
    cut(misc.StringFormatVariable, "__init__", shows_floats, shown)
    holds = lambda _, generator=None, *__: generator is not None  # noqa: E731
    cut(misc.RandomVariable, "__init__", holds, "a generator of random numbers that is kept")


def _cut_containers(cut: _Cut) -> None:
    """Cut at containers that hold or find something else than Python's.

    Tensors, and objects with an ``__eq__`` of their own, are looked for in lists by the elements alone; what is in a range is
    an int; keys are equal if they are one object, or if all fields of their frozen dataclasses are; queues lose
    their limit; iterators and views of dictionaries become those of copies where a piece ends.
    """
    from torch._dynamo.variables import (
        builder,
        dicts,
        functions,
        hashable,
        lists,
        user_defined,
    )
    from torch._dynamo.variables import iter as iterators

    def has_own_equality(value: Any) -> bool:
        held = getattr(value, "value", None)
        is_object = isinstance(value, user_defined.UserDefinedObjectVariable)
        return is_object and _compares_by_code(type(held))

    def is_looked_for(_: Any, __: Any, item: Any) -> bool:
        return _is_tensor(item) or has_own_equality(item)

    def looks_for_tensors(_: Any, __: Any, name: str, args: Any = (), *more: Any) -> bool:
        return name in ("count", "index", "remove", "__contains__") and any(map(_is_tensor, args))

    for kind in filter(inspect.isclass, vars(lists).values()):
        if kind.__module__ != lists.__name__:
            continue
        if "sq_contains" in vars(kind):
            found = (lambda *_: True) if kind is lists.RangeVariable else is_looked_for
            cut(kind, "sq_contains", found, "what is in a range, or is looked for in a list")
        if "call_method" in vars(kind):
            cut(kind, "call_method", looks_for_tensors, "a tensor that is looked for in a list")

    def has_an_equality(key: Any, other: Any = None, *_: Any) -> bool:
        return getattr(other, "value", None) is not key.value and _compares_by_code(type(key.value))

    own = "keys with an __eq__ of their own"
    for name in ("UserDefinedObjectVariable", "FrozenDataClassVariable"):
        cut(getattr(user_defined, name), "is_python_equal", has_an_equality, own)
    cut(user_defined.FrozenDataClassVariable, "hash_impl", has_an_equality, own)

    def is_nan(_: Any, key: Any) -> bool:
        value = getattr(key, "value", None)
        return isinstance(value, float) and value != value

    def is_bounded(_: Any, value: Any) -> bool:
        return isinstance(value, collections.deque) and value.maxlen is not None

    cut(hashable.HashableTracker, "__init__", is_nan, "a key that is not equal to itself")
    cut(builder.VariableBuilder, "wrap_listlike", is_bounded, "a queue with a limit")
    kept = (
        *(iterators.ZipVariable, iterators.MapVariable, iterators.FilterVariable),
        *(dicts.DictViewVariable, dicts.MappingProxyVariable),
    )
    for kind in kept:
        cut(kind, "reconstruct", lambda *_: True, "an iterator or a view that is kept")
    cut(lists.ListIteratorVariable, "reconstruct", _has_more, "an iterator that is kept")
    cut(
        functions.LocalGeneratorObjectVariable,
        "reconstruct",
        lambda generator, *_: not _is_exhausted(generator),
        "a generator that is kept",
    )
    _cut_what_changes_behind_reversed(cut)


def _has_more(iterator: Any, *_: Any) -> bool:
    """Tell whether an iterator, not one of a tuple, may give more items: one that stands behind the last gives those to come."""
    from torch._dynamo.variables.lists import TupleIteratorVariable

    return not iterator.is_exhausted and not isinstance(iterator, TupleIteratorVariable)


def _cut_what_changes_behind_reversed(cut: _Cut) -> None:
    """Cut where a list or a dictionary changes of which a ``reversed`` is not at its end: that goes through a copy."""
    from torch._dynamo import side_effects
    from torch._dynamo.variables import dicts, lists

    def reversed_of(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call_method(self: Any, tx: Any, name: str, *args: Any) -> Any:
            result = method(self, tx, name, *args)
            if name == "__reversed__" and isinstance(result, lists.ListIteratorVariable):
                of = getattr(self, "dv_dict", self)  # a view's
                vars(tx.output).setdefault("_ortrain_reversed", []).append((of, result))
            return result

        return call_method

    for kind in (lists.BaseListVariable, dicts.ConstDictVariable, dicts.DictViewVariable):
        if "call_method" in vars(kind):
            kind.call_method = reversed_of(vars(kind)["call_method"])

    def is_reversed(store: Any, changed: Any) -> bool:
        pairs = getattr(store.output_graph_weakref(), "_ortrain_reversed", ())
        return any(of is changed and _has_more(iterator) for of, iterator in pairs)

    what = "what changes while it is gone through in reverse"
    cut(side_effects.SideEffects, "mutation", is_reversed, what)


def _compares_by_code(cls: type) -> bool:
    """Tell whether objects of a class are equal, or have hashes, by code that a user wrote, or by some of their fields."""
    fields = getattr(cls, "__dataclass_fields__", {}).values()
    if any(not field.compare or field.hash is False for field in fields):
        return True
    methods = (getattr(cls, name, None) for name in ("__eq__", "__hash__"))
    # dataclasses makes its methods of texts.
    return any(
        isinstance(method, types.FunctionType) and method.__code__.co_filename != "<string>"
        for method in methods
    )


def _cut_objects(cut: _Cut) -> None:
    """Cut at objects whose own methods or attributes are passed over.

    Of classes of dictionaries attributes that are set are not told from those of the class; what a metaclass says of its
    instances is not asked; what stands in ``__dict__``, read as a dictionary, is not compared.
    """
    from torch._dynamo import side_effects
    from torch._dynamo.variables import user_defined
    from torch._dynamo.variables.builtin import BuiltinVariable

    def is_of_dictionary(_: Any, target: Any, *__: Any) -> bool:
        return isinstance(target, user_defined.UserDefinedDictVariable)

    def has_own_instances(_: Any, __: Any, ___: Any, kinds: Any) -> bool:
        items = getattr(kinds, "items", None) or [kinds]
        return any(map(_tells_instances, (getattr(each, "value", None) for each in items)))

    def reads_dictionary(_: Any, tx: Any, name: str) -> bool:
        return name == "__dict__" and not tx.f_code.co_filename.startswith(TORCH_ROOT)

    store = side_effects.SideEffects
    cut(store, "store_attr", is_of_dictionary, "an attribute of a dictionary")
    cut(BuiltinVariable, "call_isinstance", has_own_instances, "a class that tells its instances")
    for kind in filter(inspect.isclass, vars(user_defined).values()):
        if "var_getattr" in vars(kind) and kind.__module__ == user_defined.__name__:
            cut(kind, "var_getattr", reads_dictionary, "the dictionary of an object")


def _tells_instances(cls: Any) -> bool:
    """Tell whether a user's metaclass decides what is an instance of a class."""
    method = getattr(type(cls), "__instancecheck__", None) if isinstance(cls, type) else None
    home = getattr(method, "__module__", None) or ""
    return isinstance(method, types.FunctionType) and home.partition(".")[0] not in (
        *("abc", "typing", "torch", "enum"),
    )

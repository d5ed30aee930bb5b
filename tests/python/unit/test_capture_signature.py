# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Flattening of arguments and results."""

import collections
import dataclasses
import re
from typing import Any

import pytest
import torch

from ortrain.capture.signature import CallSignature, Container, flatten_outputs, restore

Point = collections.namedtuple("Point", ["x", "y"])


@dataclasses.dataclass
class Record:
    value: Any
    note: str = ""


def forward(a: Any, b: Any = None, *rest: Any, flag: bool = False, **extra: Any) -> None:
    """Take every kind of parameter."""


SIGNATURE = CallSignature(forward)


def key(*args: Any, **kwargs: Any) -> Any:
    return SIGNATURE.flatten(args, kwargs).key


T = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((T,), {}),
        ((T, T + 1, T + 2, 5), {"flag": True, "z": T + 3}),
        (({"k": [T, (T + 1, None)], "n": 1.5},), {"b": "text"}),
        ((Point(T, 2), collections.OrderedDict(u=T + 1)), {}),
        ((Record(T, "note"),), {"extra_one": {1: T + 1}}),
        ((collections.defaultdict(list, {"a": T}),), {}),
    ],
)
def test_call_comes_back_as_it_was(args: Any, kwargs: Any) -> None:
    call = SIGNATURE.flatten(args, kwargs)
    assert len(set(call.names)) == len(call.names)
    assert all(name.isidentifier() for name in call.names)
    back_args, back_kwargs = SIGNATURE.unflatten(call.tree, call.tensors)
    bound = SIGNATURE.signature.bind(*args, **kwargs)
    again = SIGNATURE.signature.bind(*back_args, **back_kwargs)
    assert str(bound) == str(again)
    for old, new in zip(bound.arguments.values(), again.arguments.values(), strict=True):
        assert type(old) is type(new)


def usual(x: Any, y: Any = None, *, flag: bool = False) -> None:
    """Take what most modules take."""


def collecting(x: Any, **options: Any) -> None:
    """Take names that are not declared."""


def positional(x: Any, /, y: Any = None) -> None:
    """Take an argument that has no name to callers."""


@pytest.mark.parametrize("function", [usual, collecting, positional, forward])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((T,), {}),
        ((), {"x": T}),
        ((), {"flag": True, "y": 2, "x": T}),
        ((T, 1), {}),
        ((T,), {"x": T}),
        ((T, 1), {"y": 2}),
        ((T,), {"options": 3}),
        ((T,), {"unknown": 3, "flag": True}),
        ((T, 1, 2, 3), {}),
        ((), {"y": 1}),
        ((), {}),
    ],
)
def test_arguments_are_bound_as_python_binds_them(function: Any, args: Any, kwargs: Any) -> None:
    signature = CallSignature(function)
    try:
        expected = signature.signature.bind(*args, **kwargs).arguments
    except TypeError as error:
        with pytest.raises(TypeError, match=re.escape(str(error))):
            signature.flatten(args, kwargs)
        return
    call = signature.flatten(args, kwargs)
    assert list(call.tree) == list(expected)
    assert restore(Container(tuple, tuple(call.tree.values())), call.tensors) == tuple(
        expected.values()
    )


def test_key_sees_structure_and_not_sizes() -> None:
    assert key(T) == key(torch.ones(5, 7))
    assert key(T) == key(a=T)
    assert hash(key(T, {"k": [1, None]})) == hash(key(T, {"k": [1, None]}))
    different = [
        key(T),
        key(T.double()),
        key(T[0]),
        key(T.clone().requires_grad_()),
        key(T, None),
        key(T, 1),
        key(T, True),
        key(T, 1.0),
        key(T, 0.0),
        key(T, -0.0),
        key(T, "1"),
        key(T, [T + 1]),
        key(T, (T + 1,)),
        key(T, {"k": T + 1}),
        key(T, {"q": T + 1}),
        key(T, T + 1),
        key(T, T),
    ]
    assert len(set(different)) == len(different)


def test_tensor_passed_twice_is_one_input() -> None:
    call = SIGNATURE.flatten((T, [T, T + 1]), {})
    assert len(call.tensors) == 2


def test_nan_is_equal_to_itself() -> None:
    assert key(T, float("nan")) == key(T, float("nan"))


def test_wrong_arguments_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="missing"):
        SIGNATURE.flatten((), {})


@pytest.mark.parametrize(
    "result",
    [
        T,
        (T, T + 1),
        [T, {"a": T + 1, "n": None}],
        Point(T, 3),
        Record(T, "x"),
        {"deep": {"deeper": (T,)}},
    ],
)
def test_result_comes_back_as_it_was(result: Any) -> None:
    tensors, tree = flatten_outputs(result)
    assert len(tensors) == len(tree.paths)
    rebuilt = tree.rebuild(tensors)
    assert type(rebuilt) is type(result)
    assert str(rebuilt) == str(result)


def test_transformers_results_and_caches() -> None:
    pytest.importorskip("transformers")
    from transformers import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithPast

    result = CausalLMOutputWithPast(loss=T, logits=T + 1, past_key_values=DynamicCache())
    tensors, tree = flatten_outputs(result)
    assert tree.paths == ("loss", "logits")
    rebuilt = tree.rebuild(tensors)
    assert isinstance(rebuilt, CausalLMOutputWithPast)
    assert rebuilt.past_key_values is None
    assert torch.equal(rebuilt.loss, T)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Entries of the graph cache that anybody may have written: each field is checked before it is used."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import sys
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from ortrain import ORTModule
from ortrain.capture import cache, graph_files, source_files
from ortrain.capture.cache import CacheSlot
from ortrain.capture.graph_files import GraphFiles
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.signature import CallSignature

X0 = "L['x'].size()[0]"
SECONDS = 10.0  # what is not bounded took minutes, or gigabytes


class Net(nn.Module):
    """Returns tensors and a number that depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(4, 4)
        self.plain = nn.Linear(4, 4, bias=False)
        self.table = torch.arange(4.0)
        self.register_buffer("offset", torch.zeros(4))
        self.width = 4

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Any]:
        z = self.plain(self.fc(x)) + self.offset + self.table
        return {"z": z, "rows": x.shape[0] + y.shape[0], "parts": (y.float().mean(), [3, None])}

    @property
    def trap(self) -> int:
        raise AssertionError("a property was asked")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Net, Path, bytes]]:
    """A module, the folder of its cache, and the content of the entry there."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTRAIN_CACHE_DIR", str(folder))
        patch.setattr(source_files, "process_start", lambda: math.inf)
        net = Net()
        ORTModule(net)(*arguments(3))
        (path,) = folder.iterdir()
        content = GraphFiles(folder, cache.size_limit()).read(path.stem)
        assert content is not None
        yield net, folder, content
    graph_files._warned.clear()


def arguments(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, 4), torch.arange(2)


@pytest.fixture
def entry(written: tuple[Net, Path, bytes]) -> Entry:
    net, folder, content = written
    for path in folder.iterdir():
        path.unlink()
    return Entry(net, folder, content)


def joined(text: bytes, rest: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


class Entry:
    """An entry of which parts are replaced, behind a right checksum."""

    def __init__(self, net: Net, folder: Path, content: bytes) -> None:
        self.net, self._folder = net, folder
        self._files = GraphFiles(folder, 1 << 30)
        self._slot = CacheSlot(net, CallSignature(net.forward).flatten(arguments(3), {}))
        self._name = self._slot._names[0]
        self._head, graph = self._split(content)
        self._described, self._model = self._split(graph)

    @staticmethod
    def _split(data: bytes) -> tuple[bytes, bytes]:
        end = 8 + int.from_bytes(data[:8], "little")
        return data[8:end], data[end:]

    @property
    def description(self) -> dict[str, Any]:
        return json.loads(self._described)

    @property
    def head(self) -> dict[str, Any]:
        return json.loads(self._head)

    def write(
        self, head: Mapping[str, Any] | bytes = {}, description: Mapping[str, Any] | bytes = {}
    ) -> None:
        """Write the entry with some items of its head and of its description, or all of one, replaced."""
        if not isinstance(head, bytes):
            # One loaded file stands for thousands.
            head = json.dumps({**self.head, "sources": self.head["sources"][:1], **head}).encode()
        if not isinstance(description, bytes):
            description = json.dumps({**self.description, **description}).encode()
        content = joined(head, joined(description, self._model))
        assert self._files.write(self._name, content)

    def load(self) -> PreparedGraph | None:
        start = time.perf_counter()
        loaded = self._slot.load({})
        assert time.perf_counter() - start < SECONDS
        return loaded

    @property
    def is_there(self) -> bool:
        return self._files.read(self._name) is not None

    def is_refused(self) -> bool:
        """Tell whether it is not used, and not kept for the next process either."""
        before = {path: dict(vars(layer)) for path, layer in self.net.named_modules()}
        loaded = self.load()
        assert before == {path: vars(layer) for path, layer in self.net.named_modules()}
        return loaded is None and not self.is_there


@pytest.mark.parametrize(
    "condition",
    [
        "'a' * 10**10 != 'b'",
        "'%1000000000d' % 1 != ''",
        "L['x'].size()[9] == 1",
        "L['y'].stride()[1] == 1",
        "L['z'].size()[0] == 1",
        f"{'-' * 100_000}1 < 2",
        f"1{'+1' * 1000} > 0",
        7,
        ["1"],
        None,
    ],
    ids=lambda condition: str(condition)[:40],
)
def test_entry_with_a_strange_condition_is_damaged(entry: Entry, condition: Any) -> None:
    entry.write()
    assert entry.load() is not None
    entry.write(description={"conditions": [*entry.description["conditions"], condition]})
    assert entry.is_refused()


@pytest.mark.parametrize(
    "condition",
    ["9**9**9 > 0", "1 << 10**12 > 0", f"1 // ({X0} - 3) != 5", "round(1, -(10**9)) == 0"],
)
def test_entry_whose_condition_has_no_value_is_not_used(entry: Entry, condition: str) -> None:
    entry.write(description={"conditions": [condition]})
    assert entry.load() is None
    ours = ORTModule(entry.net)
    assert_same(ours(*arguments(3)), entry.net(*arguments(3)))
    assert not ours.report().captures[0].from_disk


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(actual["z"], expected["z"])
    torch.testing.assert_close(actual["parts"][0], expected["parts"][0])
    assert (actual["rows"], actual["parts"][1]) == (expected["rows"], expected["parts"][1])


@pytest.mark.parametrize(
    "condition",
    [f"1 // ({X0} - 5) <= 1", f"not 1 % ({X0} - 5) > 3", f"{X0} == 3 or L['x'].size()[9] == 1"],
)
def test_a_later_call_for_which_a_condition_has_no_value_is_captured(
    entry: Entry, condition: str
) -> None:
    entry.write(description={"conditions": [*entry.description["conditions"], condition]})
    ours = ORTModule(entry.net)
    for rows in (3, 5, 3, 5):
        assert_same(ours(*arguments(rows)), entry.net(*arguments(rows)))
    assert [record.from_disk for record in ours.report().captures] == [True, False]


class Plain(dict[str, Any]):
    """A mapping that is neither a dataclass nor a ModelOutput."""


@dataclasses.dataclass
class Acting:
    """A dataclass whose __init__ does something."""

    path: str = ""

    def __post_init__(self) -> None:
        raise AssertionError("it was made")


def deep_tree(depth: int) -> list[Any]:
    tree: list[Any] = ["slot", 0]
    for _ in range(depth):
        tree = ["sequence", ["builtins", "list"], [], [tree]]
    return tree


def tree_of(form: str, cls: type | list[str], keys: Sequence[Any], *children: Any) -> list[Any]:
    name = [cls.__module__, cls.__qualname__] if isinstance(cls, type) else cls
    return [form, name, [[type(key).__name__, key] for key in keys], list(children)]


SLOT = ["slot", 0]
TREES = [
    ["slot", 4],
    ["slot", -1],
    ["slot", True],
    ["slot", 0.0],
    ["slot", "0"],
    ["slot", 2**70],
    ["slot"],
    ["slot", 0, 0],
    ["number", 0],
    ["number", -1],
    ["constant", ["list", []]],
    ["constant", ["int", "1"]],
    ["constant", ["int", True]],
    ["constant", ["Popen", None]],
    ["constant", ["dtype", "_dynamo"]],
    ["constant", ["dtype", ["float32"]]],
    ["constant", ["float", 1.0]],
    ["factory", ["collections", "defaultdict"], [], []],
    ["unknown", ["builtins", "dict"], [], []],
    {"slot": 0},
    None,
    deep_tree(100),
    tree_of("sequence", list, (), *([SLOT] * 70_000)),
    tree_of("sequence", list, ("a",), SLOT),
    tree_of("sequence", torch.Size, (), SLOT),
    tree_of("sequence", torch.return_types.max, (), SLOT),
    tree_of("sequence", dict, ()),
    tree_of("sequence", ["torch.nn", "Linear"], ()),
    tree_of("sequence", ["builtins"], ()),
    tree_of("sequence", ["builtins", 3], ()),
    tree_of("sequence", [["builtins"], "list"], ()),
    tree_of("arguments", list, ()),
    tree_of("arguments", ["urllib.parse", "SplitResult"], (), SLOT),
    tree_of("mapping", dict, ("a",)),
    tree_of("mapping", dict, (), SLOT),
    tree_of("mapping", dict, ("a", "a"), SLOT, SLOT),
    tree_of("mapping", Mapping, ("a",), SLOT),
    tree_of("mapping", list, ("a",), SLOT),
    tree_of("keywords", Plain, ("a",), SLOT),
    tree_of("keywords", Acting, ("path",), SLOT),
    tree_of("keywords", dict, (3,), SLOT),
    tree_of("fields", Acting, ("other",), SLOT),
    tree_of("fields", Acting, ()),
    tree_of("fields", dict, ("a",), SLOT),
]


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: str(tree)[:60])
def test_entry_of_a_result_that_no_call_could_build_is_damaged(entry: Entry, tree: Any) -> None:
    entry.write(description={"tree": tree})
    assert entry.is_refused()


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Fields:
    tensor: torch.Tensor
    number: float


class Forms(nn.Module):
    """Returns containers of all kinds that have a form as bytes."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {
            "sequence": [x + 1, (x + 2, None, True, 2, 0.1, "text", torch.float16)],
            "arguments": Pair(x + 3, x + 4),
            "fields": Fields(x + 5, 0.5),
            "mapping": collections.OrderedDict([(1, x + 6), (None, x + 7)]),
            "size": x.shape,
            "max": x.max(0),
        }


def test_results_of_all_forms_are_kept(
    written: tuple[Net, Path, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    for from_disk in (False, True):
        ours = ORTModule(Forms())
        for rows in (3, 5):
            result, expected = ours(torch.ones(rows, 2)), Forms()(torch.ones(rows, 2))
            assert [type(part) for part in result.values()] == list(map(type, expected.values()))
            assert str(result) == str(expected)
        assert [record.from_disk for record in ours.report().captures] == [from_disk]


def test_classes_are_asked_of_modules_that_import_nothing(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = types.ModuleType("lazy_names")

    def imported(name: str) -> Any:
        raise AssertionError(f"{name} was asked for")

    lazy.__getattr__ = imported  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_names", lazy)
    entry.write(description={"tree": tree_of("mapping", ["lazy_names", "Mapping"], ("a",), SLOT)})
    assert entry.is_refused()


DAMAGES: list[dict[str, Any]] = [
    *({"user_inputs": [["x", i], ["y", 1]]} for i in (-2, 1, 2, 2**70, 0.0, False, "0", None)),
    {"user_inputs": [["x", 0]]},
    {"user_inputs": [[["x"], 0], ["y", 1]]},
    {"user_inputs": [["x", 0, 0], ["y", 1]]},
    {"user_inputs": {"x": 0}},
    {"input_names": ["y", "x"]},
    {"input_names": ["x", "z"]},
    {"input_names": ["x", "y", "z"]},
    {"input_names": "xy"},
    {"input_names": [0, 1]},
    {"aten_nodes": -1},
    {"aten_nodes": "7"},
    {"aten_nodes": 2**80},
    {"conditions": f"{X0} == 3"},
    {"paths": []},
    {"paths": [1, 2, 3]},
    {"paths": ["a", "b", "c", "d"]},
    *({flag: 1} for flag in ("grad_enabled", "autocast_regions")),
    {"grad_enabled": False},
    *({sets: [[0], [0]]} for sets in ("common_saves", "needed_results")),
    *({sets: [[0], [0], [3]]} for sets in ("common_saves", "needed_results")),
    *({sets: [[0], [0], [-1]]} for sets in ("common_saves", "needed_results")),
    {"common_saves": [[0], [0], {"0": 1}]},
    {"needed_results": None},
    *({texts: [1]} for texts in ("unsaved_inputs", "names_read", "cloned", "read_once")),
    *({texts: "ab"} for texts in ("unsaved_inputs", "names_read", "cloned", "read_once")),
    {"outside": {"a": ["", "width"]}, "same": 1},
    {"outside": {}},
    {"outside": []},
    {"asks_of_memory": [True, False, False, False]},
    {"asks_of_memory": [1, 0, 0]},
    {"asks_of_memory": None},
    {"fixed": 3},
    {"fixed": None},
]


@pytest.mark.parametrize("damage", DAMAGES, ids=str)
def test_entry_with_a_damaged_description_is_not_used(entry: Entry, damage: dict[str, Any]) -> None:
    assert len(entry.description["paths"]) == 3 and entry.description["outside"]
    entry.write(description=damage)
    assert entry.is_refused()


def test_outside_tensors_are_tensors_of_the_form_that_the_graph_takes(entry: Entry) -> None:
    (name,) = entry.description["outside"]
    entry.write(description={"outside": {name: ["", "table"]}})
    assert entry.load() is not None
    for place in (
        ["", "width"],
        ["", "fc"],
        ["none", "table"],
        ["", "none"],
        [["", "table"]],
        "ab",
    ):
        entry.write(description={"outside": {name: place}})
        assert entry.is_refused()


@pytest.mark.parametrize(
    "assignment",
    [
        ["", "", "trap", 3],
        ["", "", "training", None],
        ["", "", "training", 1],
        ["", "", "_compiled_call_impl", 3],
        ["", "", "_forward_hooks", None],
        ["", "", "call_super_init", True],
        ["plain", "", "bias", 3],
        ["", "", "offset", 3],
        ["", "", "fc", None],
        ["", "", "width", [3]],
        ["", "", "width"],
        ["", "", "width", 3, 3],
        [None, "", "width", 3],
        ["", None, "width", 3],
    ],
    ids=str,
)
def test_only_plain_attributes_are_assigned_to(entry: Entry, assignment: list[Any]) -> None:
    entry.write(head={"assignments": [assignment]})
    assert entry.is_refused()


def test_assignments_run_no_setter_and_are_taken_back(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Net, name: str, value: Any) -> None:
        raise ValueError(f"{name} is not to be set")

    monkeypatch.setattr(Net, "__setattr__", refuse)
    before = dict(vars(entry.net))
    entry.write(head={"assignments": [["", "", "width", 5], ["", "", "more", 6]], "compared": ""})
    assert entry.load() is None
    assert vars(entry.net) == before


@pytest.mark.parametrize(
    "state",
    [[3, 1, 1], ["relative.py", "0"], ["/x", 1], ["/x", 1, "1"], ["/x"], [], "/x", 7, {}],
    ids=str,
)
def test_only_states_of_files_are_compared(entry: Entry, state: Any) -> None:
    entry.write(head={"sources": [state]})
    assert entry.is_refused()


@pytest.mark.parametrize(
    "places",
    [
        {},
        None,
        [[]],
        ["torch"],
        [["torch", "", "float32"]],
        [["torch", "", "float32", "shown"]],
        [["torch", "", "float32", "own"]],
        [["torch", "=nn", "Module", "own"]],
        [["torch", "", 3, "same"]],
        [["torch", "", "float32", "same"]] * 20_000,
    ],
    ids=lambda places: str(places)[:60],
)
def test_only_places_in_packages_are_compared(entry: Entry, places: Any) -> None:
    entry.write(head={"libraries": places})
    assert entry.is_refused()


@pytest.mark.parametrize(
    "place",
    [
        ["no_such_module", "", "x", ""],
        ["torch", "NoSuchClass", "x", "own"],
        ["torch", "nn.Module", "x", "own"],
        ["torch", "Tensor.", "x", "own"],
        ["torch", "=float32", "x", ""],
        ["", "", "", ""],
        ["test_kept_entries", "Net", "trap", ""],
        ["torch", "", "\ud800", "items"],
        ["builtins", "", "breakpoint", "same"],
    ],
    ids=str,
)
def test_places_in_packages_run_nothing(entry: Entry, place: list[str]) -> None:
    entry.write(head={"libraries": [place]})
    assert entry.load() is None  # of another state: others may have it


def test_only_files_of_sources_are_read(entry: Entry, tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text("x = 1\n")
    states = [source_files._state(str(source), source.stat())]
    entry.write(head={"sources": states})
    assert entry.load() is not None
    entry.write(head={"sources": states * 2})
    assert entry.is_refused()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "device.py").symlink_to("/dev/zero")
    with (tmp_path / "sparse.py").open("wb") as stream:
        stream.truncate(1 << 40)
    for name in ("pipe.py", "device.py", "sparse.py", "missing.py"):
        entry.write(head={"sources": [[str(tmp_path / name), "0"]]})
        assert entry.is_refused()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b"[" + b"[]," * 3_000_000 + b"0]",
        b'{"key": ' + b"9" * 4000 + b"}",
        b'{"key": 1' + b"0" * 1_000_000 + b"}",
        b'{"key": NaN}',
        b'"key"',
        b"7",
        b"null",
        b"",
        b"\xff",
    ],
    ids=lambda text: str(text[:20]),
)
def test_texts_are_bounded(entry: Entry, text: bytes) -> None:
    entry.write(head=text)
    assert entry.is_refused()
    entry.write(description=text)
    assert entry.is_refused()


def test_what_would_not_be_read_is_not_written(
    entry: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ortrain.capture.guards._MOST_CHARACTERS", 1)
    ours = ORTModule(entry.net)
    assert_same(ours(*arguments(3)), entry.net(*arguments(3)))
    assert not entry.is_there

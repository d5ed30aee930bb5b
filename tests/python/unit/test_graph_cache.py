# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Graphs on disk: used where they are right, captured again everywhere else."""

from __future__ import annotations

import importlib
import json
import logging
import math
import multiprocessing
import os
import random
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ortrain
from ortrain import ORTModule, _core, progress
from ortrain.capture import cache, graph_files, source_files
from ortrain.capture.cache import CacheSlot
from ortrain.capture.compared_state import digest_of_compared
from ortrain.capture.graph_files import GraphFiles
from ortrain.capture.prepare import prepare
from ortrain.capture.prepared import NotStorableError, PreparedGraph
from ortrain.capture.signature import CallSignature
from ortrain.capture.value_digest import Unkeyable
from ortrain.testing.models import CASES

pytestmark = pytest.mark.slow  # captures and processes, half a minute in all

SCALE = 2.0
TABLE = {"shift": 1.0}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of the test's own; sources may be edited while the tests run."""
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(source_files, "process_start", lambda: math.inf)
    yield tmp_path / "cache"
    graph_files._warned.clear()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE + TABLE["shift"]


class Net(nn.Module):
    """Linear, dropout and a function that reads globals."""

    def __init__(self, width: int = 4, rate: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.fc = nn.Linear(width, width)
        self.drop = nn.Dropout(rate)
        self.register_buffer("offset", torch.zeros(width))
        self.names = ["a", "b"]
        self.constant = torch.tensor([1.0, 2.0])

    def forward(self, x: torch.Tensor, flag: bool = True) -> dict[str, torch.Tensor]:
        y = scaled(self.drop(self.fc(x))) + self.offset + self.constant.sum()
        return {"loss": y.square().mean(), "y": y if flag else -y}


class OtherNet(Net):
    """The same under another name."""


def step(module: nn.Module, rows: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(7)
    out = module(torch.randn(rows, 4))
    out["loss"].backward()
    return [out["loss"], out["y"], *(p.grad for p in module.parameters())]


def from_disk(module: ORTModule) -> list[bool]:
    return [record.from_disk for record in module.report().captures]


def key_of(module: nn.Module, *args: Any, **kwargs: Any) -> str:
    if not args and not kwargs:
        args = (torch.zeros(3, 4),)
    return cache._key(module, CallSignature(module.forward).flatten(args, kwargs))


def slot_of(module: nn.Module, rows: int = 3) -> CacheSlot:
    return CacheSlot(module, CallSignature(module.forward).flatten((torch.zeros(rows, 4),), {}))


# --- hits


def test_second_module_loads_what_the_first_captured(folder: Path) -> None:
    first, second = ORTModule(Net()), ORTModule(Net())
    expected = step(first)
    stages: list[str] = []
    with progress.listen(lambda name, seconds, state: stages.append(name)):
        actual = step(second)
    assert (from_disk(first), from_disk(second)) == ([False], [True])
    assert "load" in stages and not {"capture", "convert"} & set(stages)
    assert "from disk cache" in str(second.report())
    assert "load" in second.report().captures[0].stages
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    # Other sizes need no other graph.
    for a, b in zip(step(second, 6), step(first, 6), strict=True):
        assert torch.equal(a, b)
    assert len(list(folder.iterdir())) == 1


PROGRAM = """
import hashlib, sys, torch
from ortrain import ORTModule
from ortrain.testing.models import CASES
case = CASES["encoder"]
module = case.build().train()
for part in module.modules():
    if isinstance(part, torch.nn.Dropout):
        part.p = 0.25
model = ORTModule(module)
torch.manual_seed(3)
digest = hashlib.sha256()
for batch in (case.batch(3, 7, 0), case.batch(2, 5, 1)):
    out = model(**batch)
    loss = out["loss"] if isinstance(out, dict) else out[0]
    loss.backward()
    for t in (loss, *(p.grad for p in module.parameters() if p.grad is not None)):
        digest.update(t.detach().numpy().tobytes())
print(digest.hexdigest(), [r.from_disk for r in model.report().captures])
"""


def run_program(folder: Path, script: Path) -> list[str]:
    environment = {**os.environ, "ORTRAIN_CACHE_DIR": str(folder)}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split(" ", 1)


def test_second_process_gives_the_same_bits(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    time.sleep(0.05)  # a process trusts what is older than itself, as the clock's ticks tell
    first, second = (run_program(tmp_path / "cache", script) for _ in range(2))
    assert "True" not in first[1]
    assert "False" not in second[1]
    assert first[0] == second[0]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def engine_graph(name: str) -> tuple[PreparedGraph, nn.Module]:
    case = CASES[name]
    module = case.build().train()
    batch = case.batch(3, 7, 0)
    call = CallSignature(module.forward).flatten((), batch)
    return prepare(module, call, (), batch, {}), module


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", CASES)
def test_graphs_survive_the_way_through_bytes(name: str) -> None:
    if CASES[name].needs:
        pytest.importorskip(CASES[name].needs)
    before, module = engine_graph(name)
    if name == "bart" and before.escapes:
        pytest.skip("this version of transformers draws for LayerDrop whatever its rate")
    after = PreparedGraph.from_bytes(before.to_bytes(module), module)
    assert after.graph.text() == before.graph.text()
    assert after.graph.inputs == before.graph.inputs
    assert after.graph.outputs == before.graph.outputs
    assert (after.user_inputs, after.aten_nodes) == (before.user_inputs, before.aten_nodes)
    assert after.output_tree == before.output_tree
    assert after.guards.text == before.guards.text
    assert after.grad_enabled == before.grad_enabled
    for graph in (before.graph, after.graph):
        graph.build_backward(graph_roots(graph))
        graph.run_passes("fuse")
    assert with_constants(after.graph) == with_constants(before.graph)
    assert key_of(module, **CASES[name].batch(3, 7, 0))


def with_constants(graph: Any) -> str:
    """Return the text with constants in the place of their names, which depend on history."""
    text = graph.text()
    constants = dict(re.findall(r"^  const (\S+) = (.*)$", text, re.MULTILINE))
    text = re.sub(r"^  const .*\n", "", text, flags=re.MULTILINE)
    return re.sub(r"\bc(_\d+)?\b", lambda m: constants.get(m[0], m[0]), text)


def graph_roots(graph: Any) -> list[int]:
    return [i for i, yes in enumerate(graph.differentiable_outputs()) if yes][:1]


def test_assignments_of_the_first_forward_are_made_again(folder: Path) -> None:
    pytest.importorskip("transformers")
    case = CASES["bert"]
    kinds = []
    for _ in range(2):
        module = case.build()
        ours = ORTModule(module)
        assert module.config.problem_type is None
        ours(**case.batch(3, 7, 0))
        kinds.append((from_disk(ours), module.config.problem_type))
    assert kinds == [([False], "single_label_classification"), ([True], kinds[0][1])]


def test_sizes_that_a_graph_refuses_get_a_file_of_their_own(folder: Path) -> None:
    class Branching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if x.shape[0] > 4 else x * 3

    for expected in (False, True):
        ours = ORTModule(Branching())
        for rows, factor in ((3, 3), (6, 2)):
            assert torch.equal(ours(torch.ones(rows)), torch.full((rows,), float(factor)))
        assert from_disk(ours) == [expected] * 2
    assert len(list(folder.iterdir())) == 2


# --- what changes the key

CHANGES: dict[str, Callable[[Net], Any]] = {
    "attribute": lambda net: setattr(net, "width", 5),
    "list": lambda net: net.names.append("c"),
    "rate": lambda net: setattr(net.drop, "p", 0.25),
    "training": lambda net: net.drop.eval(),
    "dtype": lambda net: net.double(),
    "frozen": lambda net: net.fc.bias.requires_grad_(False),
    "layer": lambda net: net.add_module("more", nn.ReLU()),
    "layer_class": lambda net: setattr(net, "drop", nn.AlphaDropout(0.5)),
    "buffer": lambda net: net.register_buffer("more", torch.zeros(1)),
    "shape": lambda net: setattr(net, "offset", torch.zeros(1)),
    "constant": lambda net: net.constant.fill_(3.0),
    "method": lambda net: setattr(net, "forward", types.MethodType(other_forward, net)),
}


def other_forward(self: Net, x: torch.Tensor, flag: bool = True) -> dict[str, torch.Tensor]:
    return {"loss": self.fc(x).mean(), "y": x}


def test_equal_modules_have_equal_keys() -> None:
    assert key_of(Net()) == key_of(Net())
    assert key_of(Net()) == key_of(Net(), torch.ones(5, 4))  # sizes are for the guards
    # Equal sizes, and sizes of 1, are looked at by a capture.
    assert key_of(Net()) != key_of(Net(), torch.zeros(1, 4))


@pytest.mark.parametrize("name", CHANGES)
def test_changed_module_has_another_key(name: str) -> None:
    net = Net()
    before = key_of(net)
    CHANGES[name](net)
    assert key_of(net) != before


def test_ties_are_in_the_key() -> None:
    nets = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    nets[1][1].weight = nets[1][0].weight
    assert len({key_of(net) for net in nets}) == 2


def test_call_class_and_state_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    keys = [key_of(net), key_of(OtherNet()), key_of(net, torch.zeros(3, 4), flag=False)]
    keys.append(key_of(net, torch.zeros(3, 4, dtype=torch.float64)))
    keys.append(key_of(net, torch.zeros(3, 4, requires_grad=True)))
    keys.append(key_of(net, torch.zeros(2, 3, 4)))
    with torch.no_grad():
        keys.append(key_of(net))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        keys.append(key_of(net))
    torch.set_default_dtype(torch.float64)
    keys.append(key_of(net))
    torch.set_default_dtype(torch.float32)
    for name, value in (("ORTRAIN_DISABLE_PASSES", "x"), ("TRANSFORMERS_X", "1")):
        monkeypatch.setenv(name, value)
        keys.append(key_of(net))
        monkeypatch.delenv(name)
    for owner in (ortrain, torch):
        with monkeypatch.context() as patch:
            patch.setattr(owner, "__version__", "0.0.0")
            keys.append(key_of(net))
    with monkeypatch.context() as patch:
        patch.setattr(source_files, "own_sources", lambda: "other")
        keys.append(key_of(net))
    assert len(set(keys)) == len(keys)


def test_globals_and_closures_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [key_of(Net())]
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    keys.append(key_of(Net()))
    monkeypatch.setitem(TABLE, "shift", 2.0)
    keys.append(key_of(Net()))
    monkeypatch.setitem(globals(), "scaled", torch.tanh)
    keys.append(key_of(Net()))

    def closing(factor: float) -> nn.Module:
        class Closing(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * factor

        return Closing()

    keys += [key_of(closing(1.0)), key_of(closing(2.0))]
    assert len(set(keys)) == len(keys)


def test_replaced_functions_of_libraries_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    keys = [key_of(module)]
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight)
        keys.append(key_of(module))
    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "linear", nn.functional.bilinear)
        keys.append(key_of(module))
    assert len(set(keys)) == len(keys)
    monkeypatch.setattr(nn.functional, "relu", lambda x: x)
    with pytest.raises(Unkeyable, match="relu was replaced"):
        key_of(module)


SOURCE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        return self.fc(x) * {factor}
"""


def import_model(path: Path, monkeypatch: pytest.MonkeyPatch, **values: Any) -> nn.Module:
    path.write_text(SOURCE.format(**values))
    module = types.ModuleType(path.stem)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, path.stem, module)
    exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
    return module.Model()


def test_changed_source_is_captured_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "edited_model.py"
    model = import_model(path, monkeypatch, factor=2)
    x = torch.ones(3, 4)
    for expected in ([False], [True]):
        ours = ORTModule(model)
        torch.testing.assert_close(ours(x), model(x))
        assert from_disk(ours) == expected
    # The class is another one, and so is the file behind it.
    changed = import_model(path, monkeypatch, factor=3)
    ours = ORTModule(changed)
    torch.testing.assert_close(ours(x), changed(x))
    assert from_disk(ours) == [False]
    # Only the file, not the class that is loaded: which of the two is true cannot be known.
    path.write_text(path.read_text() + "\n# edited\n")
    assert from_disk_after(changed, x) == [False]


def from_disk_after(model: nn.Module, x: torch.Tensor) -> list[bool]:
    ours = ORTModule(model)
    ours(x)
    return from_disk(ours)


def test_files_changed_under_a_running_process_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", str(tmp_path / "cache"))
    model = import_model(tmp_path / "late_model.py", monkeypatch, factor=2)
    for _ in range(2):
        assert from_disk_after(model, torch.ones(3, 4)) == [False]
    assert not (tmp_path / "cache").exists()
    with pytest.raises(source_files.ChangingFileError, match="has changed since"):
        source_files.loaded_files()


def test_files_are_those_to_which_links_lead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in ("one", "two"):
        (tmp_path / release).mkdir()
        (tmp_path / release / "linked_module.py").write_text(f"NAME = {release!r}\n")
    current, by_way = tmp_path / "current", tmp_path / "by_way"
    current.symlink_to(tmp_path / "one")
    by_way.symlink_to("current")
    monkeypatch.syspath_prepend(by_way)
    module = importlib.import_module("linked_module")
    monkeypatch.setattr(source_files, "process_start", lambda: math.inf)
    files = source_files.loaded_files()
    assert source_files.changed_file(files) is None
    time.sleep(0.05)  # the system's time of a change may lie a little before it
    started = time.time()
    current.unlink()
    current.symlink_to(tmp_path / "two")
    assert source_files.changed_file(files) == module.__file__
    # Both releases are older than the process, the link is not.
    monkeypatch.setattr(source_files, "process_start", lambda: started - 0.02)
    with pytest.raises(source_files.ChangingFileError, match="linked_module"):
        source_files.loaded_files()
    del sys.modules["linked_module"]  # later tests keep graphs


def test_process_start_lies_in_the_past() -> None:
    assert 0 < source_files.process_start() <= source_files._imported_at


# --- what has no key


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(os.environ.get("FACTOR", "2"))


def holding(value: Any) -> nn.Module:
    net = Net()
    net.held = value
    return net


UNKEYABLE: dict[str, Callable[[], nn.Module]] = {
    "lock": lambda: holding(threading.Lock()),
    "generator": lambda: holding(torch.Generator()),
    "random": lambda: holding(random.Random(0)),
    "foreign layer": lambda: holding([nn.Linear(2, 2)]),
    "large tensor": lambda: holding(torch.zeros(1 << 20)),
    "bound method": lambda: holding(torch.Generator().seed),
    "array of objects": lambda: holding(np.array([object()])),
    "iterator": lambda: holding(iter([1, 2])),
    "local of a thread": lambda: holding(threading.local()),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", UNKEYABLE)
def test_what_cannot_be_described_is_not_cached(
    name: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = UNKEYABLE[name]()
    with pytest.raises(Unkeyable):
        key_of(module)
    with caplog.at_level(logging.DEBUG, "ortrain.cache"):
        slot = slot_of(module)
    assert "is not cached" in caplog.text
    assert slot.load({}) is None
    assert not folder.exists()


def test_what_no_guard_compares_is_not_kept(folder: Path) -> None:
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="environment"):
            ORTModule(Reading())(torch.ones(3))
    assert not folder.exists()


def evaluated(text: str) -> nn.Module:
    class Evaluated(nn.Module):
        forward = eval(f"lambda self, x: {text}", {"__name__": __name__})

    return Evaluated()


def test_code_without_a_source_is_told_apart(folder: Path) -> None:
    assert len({key_of(evaluated(text)) for text in ("x * 2", "x * 3", "x / 2")}) == 3
    assert from_disk_after(evaluated("x * 2"), torch.ones(3)) == [False]
    assert from_disk_after(evaluated("x * 2"), torch.ones(3)) == [True]


def test_a_graph_is_kept_only_if_all_that_is_compared_is_described(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = _core.comparisons

    def with_another(*args: Any) -> list[tuple[str, Any, int]]:
        return [*told(*args), ("same", object(), 0)]

    monkeypatch.setattr(_core, "comparisons", with_another)
    with caplog.at_level(logging.DEBUG, "ortrain.cache"):
        for _ in range(2):
            assert from_disk_after(Net(), torch.ones(3, 4)) == [False]
    assert "the graph is not kept" in caplog.text and "builtins.object" in caplog.text
    assert not folder.exists()


def test_a_graph_of_another_state_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the key does not see a difference, what the guards compare does."""
    net, other = Net(), Net()
    other.fc.in_features = 5
    assert from_disk_after(net, torch.ones(3, 4)) == [False]
    key = key_of(net)
    monkeypatch.setattr(cache, "_key", lambda *args: key)
    assert slot_of(net).load({}) is not None
    names = frozenset({"in_features"})
    assert digest_of_compared(net, names, (), ()) != digest_of_compared(other, names, (), ())
    other.fc.in_features, other.names[0] = 4, "c"
    assert slot_of(other).load({}) is not None  # which no code that has run names
    other.drop.p = 0.25
    with caplog.at_level(logging.DEBUG, "ortrain.cache"):
        assert slot_of(other).load({}) is None
    assert "is of another state" in caplog.text


def test_attributes_that_cannot_be_looked_at_do_no_harm(folder: Path) -> None:
    class Hostile:
        def __getattr__(self, name: str) -> Any:
            raise ValueError(name)

    net = holding(Hostile())
    assert slot_of(net).load({}) is None
    assert from_disk_after(net, torch.ones(3, 4)) == [False]
    assert not folder.exists()


@pytest.mark.parametrize("name", ["Popen", "missing", "list"])
def test_only_classes_of_containers_are_made_again(name: str) -> None:
    net, args = Net(), (torch.zeros(3, 4),)
    call = CallSignature(net.forward).flatten(args, {})
    data = prepare(net, call, args, {}, {}).to_bytes(net)
    size = int.from_bytes(data[:8], "little")
    text = data[8 : 8 + size]
    assert text.count(b'["builtins", "dict"]') == 1
    text = text.replace(b'["builtins", "dict"]', b'["subprocess", "%s"]' % name.encode())
    with pytest.raises(NotStorableError, match="no class of containers"):
        PreparedGraph.from_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :], net)


class Opaque(nn.Module):
    """Its result holds a value that has no form as bytes."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"y": x * 2, "kind": x.device}


def test_results_without_a_form_are_not_kept(folder: Path) -> None:
    for _ in range(2):
        assert from_disk_after(Opaque(), torch.ones(3)) == [False]
    assert not folder.exists()


# --- damage


def damaged(data: bytes, count: int) -> Iterator[bytes]:
    draw = random.Random(0)
    for i in range(count):
        changed = bytearray(data)
        if i % 4 == 0:
            changed = changed[: draw.randrange(len(data))]
        elif i % 4 == 1:
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        elif i % 4 == 2:
            changed[draw.randrange(48)] ^= 0xFF  # magic or checksum
        else:
            start = draw.randrange(len(data) - 64)
            changed[start : start + 64] = draw.randbytes(64)
        yield bytes(changed)


def test_a_hundred_damaged_files_are_captured_again(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net()
    step(ORTModule(net))  # loads modules, whose files an entry names
    (path,) = folder.iterdir()
    path.unlink()
    net.zero_grad()
    expected = step(ORTModule(net))
    data = path.read_bytes()
    for i, broken in enumerate(damaged(data, 100)):
        path.write_bytes(broken)
        with caplog.at_level(logging.INFO, "ortrain.cache"):
            if i % 20:
                assert slot_of(net).load({}) is None
            else:
                net.zero_grad()
                ours = ORTModule(net)
                for a, b in zip(step(ours), expected, strict=True):
                    assert torch.equal(a, b)
                assert from_disk(ours) == [False]
                assert path.read_bytes() == data
                path.unlink()
        assert not path.exists()
        assert "removing" in caplog.text
        caplog.clear()


def test_foreign_content_under_a_right_checksum_is_refused(folder: Path) -> None:
    net = Net()
    step(ORTModule(net))
    (path,) = folder.iterdir()
    files = GraphFiles(folder, 1 << 20)
    for content in (b"", b"\xff" * 9, b"\2" + bytes(7) + b"{}", files.read(path.stem)[:-20]):
        files.write(path.stem, content)
        assert slot_of(net).load({}) is None
        assert not path.exists()
    step(ORTModule(net))
    (path,) = folder.iterdir()
    content = files.read(path.stem)
    end = 8 + int.from_bytes(content[:8], "little")
    head, graph = json.loads(content[8:end]), content[end:]
    heads = [{**head, "compared": 1}, {**head, "sources": [[2**200]]}]
    heads += [{**head, "assignments": [["", "", 1, 2]]}, {**head, "assignments": 7}]
    texts = [json.dumps(wrong).encode() for wrong in heads] + [b"[" * 100_000]
    for text in texts:
        files.write(path.stem, len(text).to_bytes(8, "little") + text + graph)
        assert slot_of(net).load({}) is None
        assert not path.exists()
    # A condition on an axis that the input does not have.
    size = int.from_bytes(graph[:8], "little")
    description = json.loads(graph[8 : 8 + size])
    description["conditions"] = [f"L['{description['input_names'][0]}'].size()[9] == 1"]
    text = json.dumps(description).encode()
    rest = len(text).to_bytes(8, "little") + text + graph[8 + size :]
    files.write(path.stem, content[:end] + rest)
    assert slot_of(net).load({}) is None
    assert not path.exists()
    # The graph of another module under this one's name.
    step(ORTModule(OtherNet()))
    (other,) = folder.iterdir()
    other.rename(path)
    assert slot_of(net).load({}) is None
    assert not path.exists()


# --- the folder


@pytest.mark.parametrize("kind", ["writable", "link", "owner", "file", "impossible"])
def test_folder_that_is_not_the_users_alone_is_not_used(
    kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "writable":
        folder.mkdir()
        folder.chmod(0o770)
    elif kind == "link":
        (folder.parent / "real").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "real")
    elif kind == "owner":
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    elif kind == "file":
        folder.write_text("")
    else:
        monkeypatch.setenv("ORTRAIN_CACHE_DIR", "/proc/none/cache")
    files = GraphFiles(cache.folder(), 1 << 20)
    with caplog.at_level(logging.INFO, "ortrain.cache"):
        for _ in range(2):
            files.read("x")
            assert not files.write("x", b"content")
    assert caplog.text.count("no graphs are kept") == 1
    assert kind != "link" or not list((folder.parent / "real").iterdir())


def test_folder_that_cannot_be_written_to_only_costs_the_capture(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **kwargs: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(GraphFiles, "_write", staticmethod(full))
    step(ORTModule(Net()))
    assert not list(folder.iterdir())


def test_links_and_shared_files_are_not_read(folder: Path, tmp_path: Path) -> None:
    files = GraphFiles(folder, 1 << 20)
    assert files.write("x", b"content") and files.read("x") == b"content"
    path = folder / "x.ortrain-graph"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o620)
    assert files.read("x") is None and not path.exists()
    files.write("x", b"content")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert files.read("x") is None and not path.is_symlink()
    os.mkfifo(path)
    assert files.read("x") is None and not path.exists()


def test_oldest_files_go_first(folder: Path) -> None:
    draw = random.Random(0)
    files = GraphFiles(folder, 3500)
    for i, name in enumerate("abc"):
        assert files.write(name, draw.randbytes(1000))
        os.utime(folder / f"{name}.ortrain-graph", (i, i))
    assert files.read("a")  # the latest use counts
    (folder / ".d.ortrain-graph.1.2").write_text("")  # left by a writer
    os.utime(folder / ".d.ortrain-graph.1.2", (0, 0))
    assert files.write("d", draw.randbytes(1000))
    assert sorted(p.name for p in folder.iterdir()) == [f"{name}.ortrain-graph" for name in "acd"]
    assert not files.write("e", draw.randbytes(4000))


def write_often(folder: Path, content: bytes) -> None:
    files = GraphFiles(folder, 1 << 20)
    for _ in range(50):
        files.write("x", content)
        read = files.read("x")
        if read is None or len(set(read)) != 1:
            os._exit(1)
    os._exit(0)


def test_writers_at_once_leave_whole_files(folder: Path) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [
        fork.Process(target=write_often, args=(folder, bytes([i]) * (1000 + i))) for i in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert [path.name for path in folder.iterdir()] == ["x.ortrain-graph"]


def test_flags(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert {"ORTRAIN_CACHE_DIR", "ORTRAIN_CACHE_SIZE"} <= {flag[0] for flag in _core.flags()}
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", "OFF")
    assert cache.folder() is None
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", "")
    assert cache.folder() is None
    monkeypatch.setenv("ORTRAIN_CACHE_DIR", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.folder() == Path("/x/ortrain")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.folder() == Path.home() / ".cache" / "ortrain"
    for value, expected in (("", 512), ("7", 7), ("many", 512)):
        monkeypatch.setenv("ORTRAIN_CACHE_SIZE", value)
        assert cache.size_limit() == expected << 20

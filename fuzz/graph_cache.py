# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Read kept graphs that are wrong behind their checksum; print executions and findings.

An entry of the cache of graphs is read in Python: a head and a description as JSON, a model as
bytes. What differs from what was written is refused by its SHA-256 before that; here the checksum
fits, as after a mistake of the writer or of another version. A wrong entry must be refused, by the
slot itself, at once: no error leaves it, and nothing but a graph or None comes out. A graph that is
taken holds for other sizes or not, without an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ortrain.capture.cache import CacheSlot
from ortrain.capture.graph_files import GraphFiles
from ortrain.capture.prepare import prepare
from ortrain.capture.prepared import PreparedGraph
from ortrain.capture.signature import CallSignature

_MOST_SECONDS = 10  # of one entry
_EXTREMES = [0, -1, 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1, -(2**63), 2**64, 2**200, 1e308]
# Operands of conditions, among them what takes long where it is computed.
_OPERANDS = [
    "L['x'].size()[0]",
    "L['x'].stride()[1]",
    "L['x'].size()[9]",
    "9",
    "-1",
    "0.5",
    "10**9",
]
_OPERANDS += ["True", "'a'", "1e308", str(2**63), "L['y'].size()[0]", "None"]
_OPERATORS = ["**", "<<", ">>", "*", "//", "%", "/", "+", "-", "==", "<", "<=", " and ", " or "]
_FUNCTIONS = [
    "",
    "-",
    "not ",
    "round",
    "int",
    "abs",
    "min",
    "max",
    "math.exp",
    "math.pow",
    "math.log",
]
_OTHERS: list[Any] = [None, True, "", "x", [], {}, [[]], "\ud800", float("nan")]


def changed_json(value: Any, draw: random.Random) -> Any:
    """Return a value like another one, with one place of it changed."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(sorted(value))
        return {**value, key: changed_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        kind = draw.randrange(8)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return value[:at] + [value[at]] + value[at:]
        return value[:at] + [changed_json(value[at], draw)] + value[at + 1 :]
    if isinstance(value, str) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return value[:at] + draw.choice("()[]'*/%<>= 09aL.\\\0") + value[at + 1 :]
    return draw.choice(_EXTREMES + _OTHERS)


def condition(draw: random.Random, depth: int = 6) -> str:
    """Return a condition on sizes, or what looks like one."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(_OPERANDS)
    parts = [condition(draw, depth - 1) for _ in range(draw.choice([1, 2, 2, 2, 3]))]
    if draw.random() < 0.3:
        return f"{draw.choice(_FUNCTIONS)}({', '.join(parts[:2])})"
    return "(" + draw.choice(_OPERATORS).join(parts) + ")"


def changed_bytes(data: bytes, draw: random.Random) -> bytes:
    """Return bytes that differ from others in one to three places."""
    result = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(len(result) + 1)
        length = draw.choice([0, 1, 1, 2, 8, 64])
        filler = draw.choice([b"", b"\xff", b"\x00", b"\x80" * 9, draw.randbytes(4)])
        result[at : at + length] = filler
    return bytes(result)


def _split(data: bytes) -> tuple[bytes, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def _joined(text: bytes, rest: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


def changed_entry(content: bytes, draw: random.Random) -> bytes:
    """Return an entry with one of its three parts changed, or cut, or with other lengths."""
    head, graph = _split(content)
    description, model = _split(graph)
    kind = draw.randrange(9)
    if kind == 0:
        return changed_bytes(content, draw)
    if kind == 1:
        return _joined(changed_bytes(head, draw), graph)
    if kind == 2:
        return _joined(head, _joined(changed_bytes(description, draw), model))
    if kind == 3:
        return _joined(head, _joined(description, changed_bytes(model, draw)))
    if kind == 4:
        deep = draw.choice([b"[", b'{"a":', b'["slot",']) * draw.choice([10, 1000, 5000])
        return _joined(deep, graph) if draw.random() < 0.5 else _joined(head, _joined(deep, model))
    if kind == 5:
        text = json.dumps(changed_json(json.loads(head), draw)).encode()
        return _joined(text, graph)
    read = json.loads(description)
    if kind == 6:
        read["conditions"].append(condition(draw))
    else:
        read = changed_json(read, draw)
    return _joined(head, _joined(json.dumps(read).encode(), model))


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 5)
        self.second = torch.nn.Linear(5, 2)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = self.drop(self.first(x).relu())
        return {"logits": self.second(hidden), "parts": (hidden.sum(), [3, None, torch.float16])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=-1, help="-1: as many as the time allows")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    findings: dict[str, int] = {}
    executions = taken = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ORTRAIN_CACHE_DIR"] = str(Path(folder) / "cache")
        torch.manual_seed(0)
        module, args = _Model(), (torch.zeros(3, 4),)
        call = CallSignature(module.forward).flatten(args, {})
        slot = CacheSlot(module, call)
        slot.save(prepare(module, call, args, {}, {}))
        files = slot._files
        if files is None:
            raise SystemExit("the module is not kept, so there is no entry to change")
        name = slot._names[0]
        content = files.read(name)
        if content is None or slot._parsed(files, name, content) is None:
            raise SystemExit("the entry that was written is not read")
        head, graph = _split(content)
        # One loaded file stands for the thousands that each entry would have to be compared with.
        read = json.loads(head)
        read["sources"] = read["sources"][:1]
        content = _joined(json.dumps(read).encode(), graph)
        if slot._parsed(files, name, content) is None:
            raise SystemExit("the entry with one source is not read")
        draw = random.Random(options.seed)
        nowhere = GraphFiles(Path(folder) / "nowhere", 0)
        end = time.monotonic() + options.seconds
        while executions != options.runs and time.monotonic() < end:
            entry = changed_entry(content, draw)
            executions += 1
            begin = time.monotonic()
            try:
                result = slot._parsed(nowhere, name, entry)
                if result is not None:
                    taken += 1
                    if not isinstance(result[0], PreparedGraph) or not isinstance(result[1], dict):
                        raise TypeError(f"it gives {result!r}")
                    for sizes in ([3, 4], [5, 4], [0, 0], [2**62, 2**62]):
                        result[0].guards.holds([sizes])
                if time.monotonic() - begin > _MOST_SECONDS:
                    raise TimeoutError("it takes long")
            except Exception as error:  # whatever it is, it is what is looked for
                label = f"{type(error).__name__}: {str(error)[:80]}"
                if label not in findings:
                    print(f"finding, execution {executions - 1}: {label}", file=sys.stderr)
                    Path(f"graph_cache-{executions - 1}").write_bytes(entry)
                findings[label] = findings.get(label, 0) + 1
    print(f"graph_cache: {executions} executions, {taken} taken, {len(findings)} findings")
    return int(bool(findings))


if __name__ == "__main__":
    raise SystemExit(main())

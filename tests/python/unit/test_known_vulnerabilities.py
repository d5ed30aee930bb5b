# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Vulnerabilities that ONNX, PyTorch and protobuf had since 2022: what was done there is refused here.

A test has the numbers of those it rebuilds. These have no counterpart:

- CVE-2024-5187, CVE-2024-7776 (archives with paths out of the folder), CVE-2026-28500 (models of a hub
  that are trusted unasked): nothing is downloaded, no archive is opened.
- CVE-2026-0994 (nesting in protobuf's JSON form), CVE-2024-7254 (protobuf in Java): neither is read.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
import torch
from onnx import TensorProto
from torch import nn

from ortrain import ORTModule, _core
from ortrain.capture import cache, graph_files, source_files
from ortrain.capture.cache import CacheSlot
from ortrain.capture.graph_files import GraphFiles
from ortrain.capture.signature import CallSignature
from ortrain.errors import FileError, InvalidModelError, OrtrainError


def model_of(
    nodes: list[onnx.NodeProto], initializers: list[TensorProto] = (), size: int | str = 4
) -> onnx.ModelProto:
    """A model with one float input "x" and one output "y"."""
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", TensorProto.FLOAT, [size])],
        [onnx.helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        list(initializers),
    )
    return onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", 23)], ir_version=10
    )


def external(**entries: str) -> onnx.ModelProto:
    """A model whose initializer of 4 floats lies in another file."""
    tensor = TensorProto(
        name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL
    )
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return model_of([onnx.helper.make_node("Add", ["x", "w"], ["y"])], [tensor])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for models with weights in it, beside a file that is none of theirs."""
    (tmp_path / "secret").write_bytes(np.arange(4, dtype=np.float32).tobytes())
    (tmp_path / "models" / "sub").mkdir(parents=True)
    (tmp_path / "models" / "w.bin").write_bytes(bytes(16))
    return tmp_path / "models"


def load(folder: Path, model: onnx.ModelProto) -> None:
    """Load a model as a file, and as bytes with the folder named."""
    (folder / "m.onnx").write_bytes(model.SerializeToString())
    try:
        _core.load_onnx_model(folder / "m.onnx")
    except OrtrainError as error:
        with pytest.raises(type(error)):
            _core.load_onnx_model(model.SerializeToString(), external_data_directory=folder)
        raise
    _core.load_onnx_model(model.SerializeToString(), external_data_directory=folder)


def test_weights_beside_the_model_are_read(folder: Path) -> None:
    load(folder, external(location="w.bin"))
    load(folder, external(location="w.bin", offset="0", length="16"))


@pytest.mark.parametrize(
    "location",
    [
        pytest.param("../secret", id="CVE-2022-25882"),
        pytest.param("../models/../secret", id="CVE-2022-25882-and-back"),
        pytest.param("{}/secret", id="CVE-2022-25882-absolute"),
        pytest.param("sub/../../secret", id="CVE-2024-27318"),
        pytest.param("./../secret", id="CVE-2024-27318-dot"),
        pytest.param("sub/..//../secret", id="CVE-2024-27318-slashes"),
        pytest.param("..\\secret", id="CVE-2024-27318-backslash"),
        pytest.param("", id="empty"),
        pytest.param("w.bin\0/../../secret", id="NUL"),
        pytest.param("/dev/zero", id="device"),
    ],
)
def test_external_data_stay_in_the_folder(folder: Path, location: str) -> None:
    with pytest.raises(InvalidModelError, match="the file name"):
        load(folder, external(location=location.format(folder.parent)))


@pytest.mark.parametrize(
    "make, location, reason",
    [
        pytest.param(Path.symlink_to, "link", "link", id="CVE-2026-27489"),
        pytest.param(Path.symlink_to, "up/secret", "link", id="CVE-2026-34447-folder"),
        pytest.param(Path.hardlink_to, "link", "hard links", id="CVE-2026-34446"),
    ],
)
def test_external_data_are_no_links(
    folder: Path, make: Callable[[Path, Path], None], location: str, reason: str
) -> None:
    if "/" in location:
        make(folder / "up", folder.parent)
    else:
        make(folder / location, folder.parent / "secret")
    with pytest.raises(InvalidModelError, match=reason):
        load(folder, external(location=location))


@pytest.mark.parametrize(
    "key", ["basepath", "__class__", "__dict__", "_file_size", "LOCATION", "location\0"]
)
def test_CVE_2026_34445_keys_of_a_file_set_no_attributes(folder: Path, key: str) -> None:
    with pytest.raises(InvalidModelError, match="not known"):
        load(folder, external(**{"location": "w.bin", key: "/"}))


@pytest.mark.parametrize("key", ["offset", "length"])
@pytest.mark.parametrize(
    "value", ["-1", "17", "9223372036854775807", "18446744073709551616", "1e9", "0x10", "", " 16"]
)
def test_CVE_2026_34445_offsets_and_lengths_lie_in_the_file(
    folder: Path, key: str, value: str
) -> None:
    with pytest.raises(InvalidModelError, match="external data"):
        load(folder, external(**{"location": "w.bin", key: value}))


@pytest.mark.parametrize("name", ["../stolen", "/stolen", "sub/stolen", "..", "w\0", "link"])
def test_CVE_2025_51480_external_data_are_written_beside_the_model(folder: Path, name: str) -> None:
    weights = np.ones(4, dtype=np.float32)
    model = model_of(
        [onnx.helper.make_node("Add", ["x", "w"], ["y"])],
        [onnx.numpy_helper.from_array(weights, "w")],
    )
    graph = _core.load_onnx(model.SerializeToString())
    secret = folder.parent / "secret"
    before = secret.read_bytes()
    # A race for the name changes nothing (GHSA-q56x-g2fj-4rj6): files are made new and renamed.
    (folder / "link").symlink_to(secret)
    if name == "link":
        graph.save(folder / "out.onnx", external_data_threshold=0, external_data_file=name)
        assert not (folder / "link").is_symlink()
    else:
        with pytest.raises(OrtrainError):
            graph.save(folder / "out.onnx", external_data_threshold=0, external_data_file=name)
    assert secret.read_bytes() == before
    assert not list(folder.parent.glob("stolen")) and not Path("/stolen").exists()


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 4095, 65536, 1 << 22])
def test_CVE_2024_27319_errors_quote_names_of_any_length(size: int) -> None:
    # There an assertion's text ran over the end of its buffer.
    for part in ("op_type", "name", "domain"):
        node = onnx.helper.make_node("Add", ["x", "x"], ["y"])
        setattr(node, part, "%s%n" * (size // 4) + "a" * (size % 4))
        node.input.append("x")
        with pytest.raises(OrtrainError) as refused:
            _core.load_onnx(model_of([node]).SerializeToString())
        assert str(refused.value)


def field(number: int, body: bytes) -> bytes:
    """A field of bytes as protobuf writes it."""
    size, head = len(body), bytearray([number << 3 | 2])
    while size >= 0x80:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes(head) + bytes([size]) + body


def graphs_in_graphs(levels: int) -> bytes:
    body = b""
    for _ in range(levels):
        body = field(1, field(5, field(6, body)))  # a node, its attribute, the graph in that
    return field(7, body)


def groups_in_groups(levels: int) -> bytes:
    return b"\xa3\x06" * levels + b"\xa4\x06" * levels  # of a field that no message has


@pytest.mark.parametrize("levels", [101, 1000])
@pytest.mark.parametrize("nest", [graphs_in_graphs, groups_in_groups])
def test_CVE_2025_4565_nesting_has_a_bound(nest: Callable[[int], bytes], levels: int) -> None:
    whole = model_of([onnx.helper.make_node("Relu", ["x"], ["y"])]).SerializeToString()
    _core.load_onnx(whole + groups_in_groups(10))
    with pytest.raises(InvalidModelError, match="no ONNX model"):
        _core.load_onnx(whole + nest(levels))


@pytest.mark.parametrize("sign", ["(", "-", "2*("])
def test_CVE_2025_4565_texts_have_a_bound(sign: str) -> None:
    deep = sign * 100_000
    for text in (deep, f"graph g (float32[{deep}", f"graph g (float32[b] x) => (y) {{ y = {deep}"):
        with pytest.raises(OrtrainError):
            _core.Graph.parse(text)


def test_CVE_2022_1941_small_messages_take_little_memory() -> None:
    # A megabyte of empty tensors: refused by the bound, not when memory is gone.
    model = model_of([onnx.helper.make_node("Relu", ["x"], ["y"])])
    flood = field(7, field(5, b"") * (1 << 19))
    before = time.monotonic()
    with pytest.raises(OrtrainError):
        _core.load_onnx(model.SerializeToString() + flood)
    assert time.monotonic() - before < 5


def test_malformed_protobuf_is_refused() -> None:
    whole = model_of([onnx.helper.make_node("Relu", ["x"], ["y"])]).SerializeToString()
    for bytes_ in (
        b"",
        b"\x00",
        b"\xff" * 64,
        whole + b"\x3a\xff\xff\xff\xff\x0f",
        whole + b"\x07",
    ):
        with pytest.raises(InvalidModelError):
            _core.load_onnx(bytes_)
    for size in range(1, len(whole), 3):
        with pytest.raises(OrtrainError):
            _core.load_onnx(whole[:size])


@pytest.mark.parametrize(
    "attributes",
    [
        {"kernel_shape": [2] * 40},
        {"kernel_shape": [2], "pads": [0]},
        {"kernel_shape": [2], "strides": [1, 1, 1]},
        {"kernel_shape": [2], "dilations": []},
        {"kernel_shape": [2], "strides": [0]},
        {"kernel_shape": [2], "pads": [-(1 << 62), 1 << 62]},
        {"kernel_shape": [-1]},
    ],
)
def test_lists_of_other_lengths_than_the_rank(attributes: dict[str, list[int]]) -> None:
    # ONNX's inference of convolutions and pools read behind such lists (2024, without a number).
    node = onnx.helper.make_node("MaxPool", ["x"], ["y"])
    for name, values in attributes.items():
        node.attribute.add(name=name, type=onnx.AttributeProto.INTS).ints.extend(values)
    model = model_of([node])
    shape = model.graph.input[0].type.tensor_type.shape
    del shape.dim[:]
    for size in (1, 1, 8):
        shape.dim.add(dim_value=size)
    with pytest.raises(OrtrainError):
        _core.Session(_core.load_onnx(model.SerializeToString()))


@pytest.mark.parametrize("index", [4, -5, 1 << 40, -(1 << 62)])
def test_indices_out_of_range(index: int) -> None:
    # ONNX Runtime's ArrayFeatureExtractor read before its tensor (2026, without a number).
    model = model_of([onnx.helper.make_node("Gather", ["x", "i"], ["y"])])
    model.graph.input.append(onnx.helper.make_tensor_value_info("i", TensorProto.INT64, [1]))
    session = _core.Session(_core.load_onnx(model.SerializeToString()))
    with pytest.raises(IndexError):
        _core.Run(session).forward([torch.zeros(4), torch.tensor([index])])


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def safetensors(header: dict[str, object], data: bytes = bytes(16)) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(shape: list[int], begin: int = 0, end: int = 16, dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="CVE-2025-32434-pickle"),
        pytest.param(safetensors({"w": entry([8])}), id="CVE-2026-24747-more-than-there-is"),
        pytest.param(safetensors({"w": entry([2])}), id="CVE-2026-24747-less-than-there-is"),
        pytest.param(safetensors({"w": entry([4], 4, 20)}), id="CVE-2026-24747-behind-the-end"),
        pytest.param(safetensors({"w": entry([1 << 62, 4])}), id="CVE-2026-24747-product"),
        pytest.param(safetensors({"w": entry([-4])}), id="CVE-2026-24747-negative"),
        pytest.param(safetensors({"w": entry([4]), "v": entry([4])}), id="CVE-2026-24747-overlap"),
        pytest.param(safetensors({"w": entry([4], dtype="os.system")}), id="CVE-2025-32434-type"),
        pytest.param(safetensors({"w": [1]}), id="CVE-2026-24747-no-dictionary"),
        pytest.param(struct.pack("<Q", 1 << 63) + b"{}", id="CVE-2026-24747-header"),
        pytest.param(struct.pack("<Q", 200_000) + b"[" * 200_000, id="CVE-2025-4565-nesting"),
    ],
)
def test_checkpoints_are_numbers_alone(tmp_path: Path, content: bytes | None) -> None:
    path = _core.save_checkpoint(tmp_path / "kept", _core.TrainingState())
    _core.load_checkpoint(tmp_path / "kept")
    content = pickle.dumps(Payload(tmp_path / "made")) if content is None else content
    for name in ("parameters.safetensors", "manifest.json"):
        before = (path / name).read_bytes()
        (path / name).write_bytes(content)
        with pytest.raises(FileError):
            _core.load_checkpoint(tmp_path / "kept")
        (path / name).write_bytes(before)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "text",
    ["__import__('os').mkdir('{}')", "(lambda: __import__('os').mkdir('{}'))()", "s*{}"],
)
def test_CVE_2022_45907_texts_of_a_file_are_not_evaluated(tmp_path: Path, text: str) -> None:
    # There a comment that states types ran as Python.
    text = text.format(tmp_path / "made")
    for part in ("extent", "equation", "graph"):
        try:
            if part == "graph":
                _core.Graph.parse(f"graph g (float32[{text}] x) => (y) {{ y = Relu(x) }}")
            elif part == "extent":
                model = model_of([onnx.helper.make_node("Relu", ["x"], ["y"])], size=text)
                _core.load_onnx(model.SerializeToString())
            else:
                node = onnx.helper.make_node("Einsum", ["x"], ["y"], equation=text)
                _core.load_onnx(model_of([node]).SerializeToString())
        except OrtrainError:
            pass  # an extent may be a name of any kind
    assert not (tmp_path / "made").exists()


# --- captured graphs on disk


@pytest.fixture(scope="module")
def captured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[nn.Module, Path, bytes]]:
    """A module, the file of its graph, and what that holds."""
    folder = tmp_path_factory.mktemp("kept") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ORTRAIN_CACHE_DIR", str(folder))
        patch.setattr(source_files, "process_start", lambda: math.inf)
        net = nn.Linear(2, 2)
        ORTModule(net)(torch.zeros(3, 2))
        (file,) = folder.iterdir()
        yield net, file, file.read_bytes()
    graph_files._warned.clear()


@pytest.fixture
def kept(captured: tuple[nn.Module, Path, bytes]) -> tuple[nn.Module, Path, Callable[[], object]]:
    """The module, the file as it was written, and what loads it."""
    net, file, content = captured
    file.write_bytes(content)
    file.chmod(0o600)
    call = CallSignature(net.forward).flatten((torch.zeros(3, 2),), {})
    return net, file, lambda: CacheSlot(net, call).load({})


def with_assignments(content: bytes, assignments: object) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    head = json.loads(content[8:end])
    head["assignments"] = assignments
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + content[end:]


@pytest.mark.parametrize(
    "assignments",
    [
        [["", "__class__", "in_features", 5]],
        [["", "__dict__", "in_features", 5]],
        [["", "", "__class__", "str"]],
        [["", "", "forward", "str"]],
        [["", "", "weight", 1.0]],
        [["", "", "_parameters", None]],
        [["", "", "in_features", [5]]],
        [["", "config", "in_features", 5]],
        [["nowhere", "", "in_features", 5]],
        [[["unhashable"], "", "in_features", 5]],
        [["", "", 5, 5]],
        [[]],
        "text",
    ],
    ids=str,
)
def test_CVE_2026_34445_kept_graphs_set_plain_attributes_alone(
    kept: tuple[nn.Module, Path, Callable[[], object]], assignments: object
) -> None:
    net, file, load_kept = kept
    assert load_kept() is not None
    files = GraphFiles(file.parent, cache.size_limit())
    content = files.read(file.stem)
    before = dict(vars(net))
    files.write(file.stem, with_assignments(content, assignments))
    assert load_kept() is None
    assert not file.exists()
    assert vars(net) == before and not hasattr(nn.Linear, "in_features")
    assert type(net) is nn.Linear


def test_CVE_2025_32434_kept_graphs_are_not_unpickled(
    kept: tuple[nn.Module, Path, Callable[[], object]], tmp_path: Path
) -> None:
    _, file, load_kept = kept
    payload = pickle.dumps(Payload(tmp_path / "made"))
    GraphFiles(file.parent, cache.size_limit()).write(file.stem, payload)
    assert load_kept() is None
    file.write_bytes(payload)
    file.chmod(0o600)
    assert load_kept() is None
    assert not (tmp_path / "made").exists()

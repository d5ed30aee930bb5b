# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Captured graphs on disk, so that the next process need not capture again.

A graph is found by a digest of the module, the call and the versions (`fingerprint.py`). It is used
only if the loaded source files are those of the capture (`source_files.py`), if its guards hold, and
if all that they compare is as it was after the capture (`compared_state.py`). Where something has no
digest, nothing is read or written.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import platform
import stat
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ortrain
from ortrain import logs, progress
from ortrain.capture import source_files
from ortrain.capture.captured import environment_key
from ortrain.capture.compared_state import digest_of_compared, variables_of
from ortrain.capture.dtypes import ONNX_CODE
from ortrain.capture.fingerprint import Fingerprint
from ortrain.capture.graph_files import GraphFiles
from ortrain.capture.guards import sizes_of
from ortrain.capture.library_places import Place as LibraryPlace
from ortrain.capture.library_places import check_places, places_of, variables_at
from ortrain.capture.library_reads import Variable
from ortrain.capture.names_read import OthersFunctions
from ortrain.capture.prepared import NotStorableError, PreparedGraph, read_json
from ortrain.capture.signature import FlatCall
from ortrain.capture.value_digest import Unkeyable
from ortrain.errors import InvalidModelError
from ortrain.random_numbers import DropoutSource

_log = logs.get_logger("ortrain.cache")

# Environment variables that libraries read when they build a graph.
_ENVIRONMENT = ("ACCELERATE_", "HF_", "PYTORCH_", "TORCH_", "TRANSFORMERS_")
_NOT_READ_BY_GRAPHS = ("HF_HOME", "HF_TOKEN", "HF_HUB", "HF_DATASETS", "TORCH_HOME", "TORCH_LOGS")


_disabled = False


def disable() -> None:
    """Neither read nor keep graphs any more: this process makes them differently."""
    global _disabled
    _disabled = True


def folder() -> Path | None:
    """Return the folder of the cache, or None where nobody asked for one."""
    if _disabled:
        return None
    value = os.environ.get("ORTRAIN_CACHE_DIR", "")
    if value.lower() in ("", "off", "0", "none"):
        return None
    if value.lower() not in ("on", "1"):
        return Path(value)
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "ortrain"
    except RuntimeError:  # there is no home
        return None


def size_limit() -> int:
    """Return the bytes that the cache may take."""
    value = os.environ.get("ORTRAIN_CACHE_SIZE", "")
    try:
        return int(value or 512) << 20
    except ValueError:
        _log.warning("ORTRAIN_CACHE_SIZE is '%s', expected a number of MiB", value)
        return 512 << 20


# Plain attributes by (path of a layer, "" or "config").
Attributes = dict[tuple[str, str], dict[str, Any]]
Assignment = list[Any]  # path of a layer, "" or "config", name, value
Place = tuple[dict[str, Any], str, Any]  # attributes of an object, name, value; _OTHER for none
# Of a file: key, states of sources, assignments, digest of what is compared.
Head = dict[str, Any]
_OTHER = object()
_PLAIN = (type(None), bool, int, float, str)
_OF_EACH_MODULE = frozenset({*vars(nn.Module), *vars(nn.Module())})
_MOST_SOURCES = 256 << 20  # bytes that are read to compare the user's own files
_MOST_SHOWN = 1000


class CacheSlot:
    """The place in the cache of the graph for one call of a module.

    Args:
      module: The module, as it is before the capture.
      call: The call, flattened.
      dropout: Who draws the masks of dropout.

    Attributes:
      variables: What the guards of the graph that was loaded or kept compare outside of the module; None before that.
    """

    def __init__(
        self, module: nn.Module, call: FlatCall, dropout: DropoutSource = DropoutSource.ENGINE
    ) -> None:
        self.variables: list[Variable] | None = None
        self._files: GraphFiles | None = None
        self._names: tuple[str, str] = ("", "")
        self._module = module
        self._call = call
        where = folder()
        if where is None:
            return
        self._started = time.perf_counter()
        try:
            key = _key(module, call, dropout)
        except Unkeyable as reason:
            _log.debug("%s is not cached: %s", type(module).__name__, reason)
            return
        except Exception as error:  # attributes may run any code when they are looked at
            _log.debug("%s is not cached: %r", type(module).__name__, error)
            return
        # A graph may hold for some sizes only: those that it refuses get a place of their own.
        sizes = hashlib.sha256(repr(_sizes(call)).encode()).hexdigest()[:16]
        self._names = (key, f"{key}-{sizes}")
        self._files = GraphFiles(where, size_limit())
        self._attributes = _attributes(module)

    def load(self, stages: dict[str, float]) -> PreparedGraph | None:
        """Return the graph if it is there, belongs to the code that is loaded, and takes the call.

        Its time goes into ``stages`` then, the search included.
        """
        if self._files is None:
            return None
        for name in self._names:
            content = self._files.read(name)
            if content is None:
                continue
            with progress.stage("load"):
                kept = self._parsed(self._files, name, content)
            if kept is None:
                continue
            prepared, head = kept
            if prepared.guards.holds(sizes_of(self._call.tensors)):
                before = _assign(_places(self._module, head["assignments"]))
                if self._compared(prepared, head["libraries"]) == head["compared"]:
                    stages["load"] = time.perf_counter() - self._started
                    return prepared
                _set_back(before)
                self.variables = None
                _log.debug("the kept graph %s is of another state", name)
        return None

    def _compared(self, prepared: PreparedGraph, libraries: list[LibraryPlace]) -> str:
        """Return the digest of what the guards of a graph compare now; "" where there is none.

        Args:
          prepared: The graph.
          libraries: Where what it has read of installed packages stands.
        """
        try:
            names = prepared.names_read
            others = OthersFunctions(libraries=tuple(variables_at(libraries)))
            self.variables = variables_of(self._module, names, others)
            outside = prepared.outside.values()
            return digest_of_compared(self._module, names, self.variables, outside)
        except Unkeyable as reason:
            _log.debug("the graph is not kept: %s", reason)
        except Exception as error:  # attributes may run any code when they are looked at
            _log.debug("the graph is not kept: %r", error)
        return ""

    def save(self, prepared: PreparedGraph) -> None:
        """Keep a graph for the next process."""
        self.variables = None
        if self._files is None:
            return
        try:
            assignments = _assignments(self._attributes, _attributes(self._module))
            if len(assignments) < prepared.num_made:
                raise NotStorableError("the forward assigns to objects that are no layers")
            _places(self._module, assignments)
            sources = source_files.loaded_files()
            graph = prepared.to_bytes(self._module)
            libraries = places_of(prepared.others.libraries)
            compared = self._compared(prepared, libraries)
        except (source_files.ChangingFileError, NotStorableError, InvalidModelError) as reason:
            _log.debug("the graph is not kept: %s", reason)
            return
        if not compared:
            return
        head = json.dumps(
            {
                "key": self._names[0],
                "sources": sources,
                "assignments": assignments,
                "compared": compared,
                "libraries": libraries,
            }
        ).encode()
        content = len(head).to_bytes(8, "little") + head + graph
        general, special = self._names
        taken = self._files.read(general)
        if taken is not None and self._parsed(self._files, general, taken) is not None:
            self._files.write(special, content)
        else:
            self._files.write(general, content)

    def _parsed(
        self, files: GraphFiles, name: str, content: bytes
    ) -> tuple[PreparedGraph, Head] | None:
        try:
            end = 8 + int.from_bytes(content[:8], "little")
            head: Head = read_json(content[8:end])
            if head["key"] != self._names[0]:
                raise NotStorableError("it belongs to another module")
            _check_head(head)
            changed = source_files.changed_file(head["sources"])
            if changed is None:
                _places(self._module, head["assignments"])
                prepared = PreparedGraph.from_bytes(content[end:], self._module)
                _check_call(prepared, self._call)
                return prepared, head
            reason = f"{changed} has changed"
        except Exception as error:  # its checksum fits, and still it may hold anything
            reason = f"{type(error).__name__}: {error}"
        _log.info("the kept graph %s is not used: %s", name, reason[:_MOST_SHOWN])
        files.remove(name)
        return None


def _check_head(head: Head) -> None:
    """Check what is used of a head after it has been read.

    Raises:
      NotStorableError: It is not what is written.
      OSError: It names a file that is gone.
    """
    if type(head["compared"]) is not str:
        raise NotStorableError("the digest of what is compared is no text")
    check_places(head["libraries"])
    seen: set[str] = set()
    read = 0
    for path, *rest in head["sources"]:
        kinds = [type(part) for part in rest]
        if type(path) is not str or not os.path.isabs(path) or kinds not in ([str], [int, int]):
            raise NotStorableError("the state of a file is none")
        if path in seen:
            raise NotStorableError(f"it names {path} twice")
        seen.add(path)
        if path.endswith(".py") and not source_files.is_installed(path):  # whose contents are read
            status = os.stat(path)
            read += status.st_size
            if not stat.S_ISREG(status.st_mode) or read > _MOST_SOURCES:
                raise NotStorableError(f"{path} is no source file")


def _check_call(prepared: PreparedGraph, call: FlatCall) -> None:
    """Check that a graph is one for calls of this kind.

    Raises:
      NotStorableError: It takes other arguments.
      SizeConditionError: A condition is none for such arguments.
    """
    if prepared.input_names != call.names:
        raise NotStorableError("it takes other arguments")
    if prepared.grad_enabled != torch.is_grad_enabled():
        raise NotStorableError("it was captured in another grad mode")
    places = dict(prepared.user_inputs)
    for described in prepared.graph.inputs:
        if described["role"] == "user":
            tensor = call.tensors[places[described["name"]]]
            form = ONNX_CODE.get(tensor.dtype), tensor.dim()
            if form != (described["dtype"], len(described["shape"])):
                raise NotStorableError(f"'{described['name']}' has another dtype or rank")
    prepared.guards.check(sizes_of(call.tensors))


def _attributes(module: nn.Module) -> Attributes:
    """Return the attributes of the layers, and of their configurations, as far as they are plain."""
    found: Attributes = {}
    for path, part in module.named_modules():
        found[path, ""] = _plain_values(part)
        config = part.__dict__.get("config")
        if hasattr(config, "__dict__"):
            found[path, "config"] = _plain_values(config)
    return found


def _plain_values(owner: Any) -> dict[str, Any]:
    return {n: v if type(v) in _PLAIN else _OTHER for n, v in vars(owner).items()}


def _assignments(before: Attributes, after: Attributes) -> list[Assignment]:
    """Return what a capture's run of the forward has assigned, as eager PyTorch's first run would.

    Raises:
      NotStorableError: It has made or deleted an attribute that is no plain value.
    """
    result: list[Assignment] = []
    for place, values in after.items():
        held = before.get(place, {})
        if held.keys() - values.keys():
            raise NotStorableError("the forward deletes attributes")
        for name, value in values.items():
            if name in held and held[name] is value:
                continue
            if name in held and type(held[name]) is type(value) and held[name] == value:
                continue
            if value is _OTHER:
                raise NotStorableError(f"the forward assigns to '{name}'")
            result.append([*place, name, value])
    return result


def _places(module: nn.Module, assignments: list[Assignment]) -> list[Place]:
    """Return where assignments go: to plain values of layers and of their configurations, since a file says which.

    Raises:
      NotStorableError: Another object, a method or a value of another kind is meant.
    """
    layers = dict(module.named_modules())
    return [_place(layers, *assignment) for assignment in assignments]


def _place(layers: dict[str, nn.Module], path: str, attribute: str, name: str, value: Any) -> Place:
    owner: Any = layers.get(path)
    if attribute == "config":
        owner = getattr(owner, "__dict__", {}).get("config")
    elif attribute != "":
        owner = None
    table = getattr(owner, "__dict__", None)
    fits = type(table) is dict and type(name) is str and not name.startswith("__")
    if fits:
        # Nothing is asked for that runs code.
        held = inspect.getattr_static(type(owner), name, None), table.get(name), value
        fits = {type(each) for each in held} <= {*_PLAIN}
    if fits and attribute == "":
        fits = type(value) is bool if name == "training" else name not in _OF_EACH_MODULE
        fits &= all(name not in table[kind] for kind in ("_parameters", "_buffers", "_modules"))
    if not fits:
        raise NotStorableError(f"it would set '{name}' of '{path}'")
    return table, name, value


def _assign(places: list[Place]) -> list[Place]:
    """Let places have their values, by no setter, which a file might surprise; return them as they were."""
    before = []
    for table, name, value in places:
        before.append((table, name, table.get(name, _OTHER)))
        table[name] = value
    return before


def _set_back(before: list[Place]) -> None:
    for table, name, value in reversed(before):
        if value is _OTHER:
            table.pop(name, None)
        else:
            table[name] = value


def _sizes(call: FlatCall) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in call.tensors]


def _pattern(call: FlatCall) -> list[list[int]]:
    """Return which sizes are 0 or 1 and which are equal, since a capture looks at that."""
    first: dict[tuple[int, int], int] = {}
    return [
        [size if size < 2 else first.setdefault((axis, size), 2 + len(first)) for axis, size in row]
        for row in (enumerate(sizes) for sizes in _sizes(call))
    ]


def _key(module: nn.Module, call: FlatCall, dropout: DropoutSource = DropoutSource.ENGINE) -> str:
    """Return the digest of everything that a graph depends on, sizes and source files aside."""
    print_of = Fingerprint(module)
    print_of.token(ortrain.__version__, source_files.own_sources(), sys.version, platform.machine())
    print_of.token(torch.__version__, getattr(torch.version, "git_version", ""), sys.prefix)
    print_of.token(os.environ.get("ORTRAIN_DISABLE_PASSES", ""))
    for name in sorted(os.environ):
        if name.startswith(_ENVIRONMENT) and not name.startswith(_NOT_READ_BY_GRAPHS):
            print_of.token(name, os.environ[name])
    print_of.token(torch.is_inference_mode_enabled(), torch.get_default_device(), dropout.value)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        print_of.token(torch.distributed.get_rank(), torch.distributed.get_world_size())
    print_of.token(_pattern(call))
    print_of.add_module()
    print_of.add(_plain(environment_key()), "the environment")
    print_of.add(_plain(call.key), "the call")
    return print_of.digest()


def _plain(key: Any) -> Any:
    """Return a key with tuples in the place of what has fields."""
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        key = tuple(getattr(key, field.name) for field in dataclasses.fields(key))
    return tuple(_plain(part) for part in key) if type(key) is tuple else key

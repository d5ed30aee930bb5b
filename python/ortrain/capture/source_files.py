# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The files behind the Python code that is loaded, and whether they still are what was loaded."""

from __future__ import annotations

import functools
import hashlib
import os
import site
import stat
import sys
import sysconfig
import time
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

TORCH_ROOT = os.path.dirname(os.path.realpath(torch.__file__)) + os.sep
LAYERS_ROOT = TORCH_ROOT + "nn" + os.sep
CAPTURE_ROOT = os.path.dirname(os.path.realpath(__file__)) + os.sep
OWN_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_imported_at = time.time()

# [path, size, time of change] of an installed file, [path, digest] of the user's own.
FileState = list[Any]


class ChangingFileError(Exception):
    """A loaded file is gone, or younger than the process: what was loaded is not known."""


def file_of(module: object) -> str | None:
    """Return the file that a module says it is of; asks no ``__getattr__`` of the module's own."""
    attributes = module.__dict__ if isinstance(module, types.ModuleType) else {}
    file = attributes.get("__file__")
    return file if isinstance(file, str) else None


def _roots() -> tuple[str, ...]:
    paths = {sysconfig.get_path(kind) for kind in ("purelib", "platlib", "stdlib", "platstdlib")}
    paths.update(site.getsitepackages())
    paths.add(site.getusersitepackages())
    paths.add(TORCH_ROOT)
    return tuple(sorted(os.path.realpath(p) + os.sep for p in paths if p))


_ROOTS = _roots()
_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"
_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


@functools.cache
def real_path(file: str) -> str:
    """Return where a file of code lies; code tells the path by which it was imported, links and all."""
    return file if file.startswith("<") else os.path.realpath(file)


# Libraries of layers that are taken at their word: what their forwards keep and read lies in the layers.
_LIBRARIES = frozenset(
    {
        *(
            "accelerate",
            "deepspeed",
            "diffusers",
            "einops",
            "lightning",
            "ortrain",
            "peft",
            "pytorch_lightning",
        ),
        *("sentence_transformers", "timm", "torch", "torch_geometric", "torchaudio", "torchdiffeq"),
        *("torchmetrics", "torchvision", "transformers", "trl"),
    }
)
_own_packages: set[str] = set()


@functools.cache
def is_installed(file: str) -> bool:
    """Tell whether a file belongs to the standard library, or to a package that was installed.

    Packages whose layers are captured count as the user's own code, known libraries aside.
    """
    if file.startswith("<frozen"):
        return True
    real = os.path.realpath(file)
    is_known = real.startswith(_ROOTS) or any(part in real for part in _PACKAGES)
    if not (is_known or _folder_of_distribution(real)):
        return False
    return _package_of(real) not in _own_packages


def _folder_of_distribution(real: str) -> str:
    """Return the folder of ``sys.path`` into which somebody has installed what a file belongs to, "" for none.

    Such folders (``pip install --target``) may hold the user's own code as well.
    """
    for folder in map(os.path.realpath, sys.path):
        begin = folder + os.sep
        if real.startswith(begin) and real[len(begin) :].partition(os.sep)[0] in _installed_in(
            folder
        ):
            return begin
    return ""


@functools.cache
def _installed_in(folder: str) -> frozenset[str]:
    """Return the names of files and folders that distributions in a folder say that they have brought."""
    names: set[str] = set()
    try:
        records = list(Path(folder).glob("*.dist-info/RECORD"))
        for record in records:
            lines = record.read_text(encoding="utf-8").splitlines()
            names.update(line.partition(",")[0].partition("/")[0].strip('"') for line in lines)
    except (OSError, UnicodeError):  # a folder that cannot be read says nothing
        return frozenset()
    return frozenset(names)


def _package_of(real: str) -> str:
    """Return the first folder or file below the folder of packages that a file lies in."""
    roots = [real.find(part) + len(part) for part in _PACKAGES if part in real]
    roots += [len(root) for root in _ROOTS if real.startswith(root) and root != TORCH_ROOT]
    below = max(roots) if roots else len(_folder_of_distribution(real))
    return real[below:].partition(os.sep)[0].removesuffix(".py")


def take_for_own(classes: Iterable[type]) -> None:
    """Let the packages that define classes of layers count as the user's own code, as long as the process lives."""
    for cls in set(classes):
        file = file_of(sys.modules.get(cls.__module__))
        if not file or is_standard(file) or not is_installed(file):
            continue
        package = _package_of(os.path.realpath(file))
        if package not in _LIBRARIES:
            _own_packages.add(package)
            is_installed.cache_clear()


def package_of(file: str) -> str:
    """Return the package that an installed file is of, "" for none."""
    return _package_around(file) if is_installed(file) else ""


@functools.cache
def _package_around(file: str) -> str:
    return _package_of(os.path.realpath(file))


def is_taken_at_its_word(package: str) -> bool:
    """Tell whether a package is one of the libraries of layers that are not taken for the user's own code."""
    return package in _LIBRARIES


@functools.cache
def is_standard(file: str) -> bool:
    """Tell whether a file belongs to the standard library."""
    if file.startswith("<frozen"):
        return True
    real = os.path.realpath(file)
    return real.startswith(_STANDARD) and not any(part in real for part in _PACKAGES)


def _is_keyed_elsewhere(file: str) -> bool:
    """Tell whether versions in the key stand for a file: the standard library and PyTorch."""
    return is_standard(file) or real_path(file).startswith(TORCH_ROOT)


def process_start() -> float:
    """Return the time since which loaded files must not have changed."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _imported_at
    # A forked process is younger than what it has loaded.
    return min(time.time() - age, _imported_at) if age > 0 else _imported_at


def loaded_files() -> list[FileState]:
    """Return the state of each loaded source or extension file, standard library aside.

    A file is named by the path by which it was imported: where a link on it leads elsewhere later, that is other code.

    Raises:
      ChangingFileError: A file is gone, or it or a link to it has changed since the process started.
    """
    start = process_start()
    result: dict[str, FileState] = {}
    links: dict[str, float] = {}
    for module in list(sys.modules.values()):
        file = getattr(module, "__dict__", {}).get("__file__")
        if not isinstance(file, str) or file.startswith("<"):
            continue
        path = os.path.abspath(file)
        if path in result or _is_keyed_elsewhere(path):
            continue
        try:
            status = os.stat(path)
            if max(status.st_mtime, status.st_ctime, _age_of_links(path, links)) > start:
                raise ChangingFileError(f"{path} has changed since the process started")
            result[path] = _state(path, status)
        except OSError as error:
            raise ChangingFileError(f"{path}: {error.strerror}") from error
    return list(result.values())


def _age_of_links(path: str, known: dict[str, float]) -> float:
    """Return when the youngest link was made on the way to a file, 0 where there is none.

    Args:
      path: Absolute.
      known: What has been found of other paths at this moment.
    """
    if path in known:
        return known[path]
    known[path] = 0.0  # links in a circle
    parent = os.path.dirname(path)
    age = _age_of_links(parent, known) if parent != path else 0.0
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        target = os.path.normpath(os.path.join(parent, os.readlink(path)))
        age = max(age, status.st_ctime, _age_of_links(target, known))
    known[path] = age
    return age


def _state(path: str, status: os.stat_result) -> FileState:
    if is_installed(path) or not path.endswith(".py"):
        return [path, status.st_size, status.st_mtime_ns]
    return [
        path,
        _digest(path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns),
    ]


@functools.cache
def _digest(path: str, *_state_of_file: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def changed_file(states: Sequence[FileState]) -> str | None:
    """Return the first file that is not as it was, or None."""
    for state in states:
        path = state[0]
        try:
            if _state(path, os.stat(path)) != state:
                return path
        except OSError:
            return path
    return None


@functools.cache
def own_sources() -> str:
    """Return a digest of what turns modules into graphs: our sources and the extension."""
    digest = hashlib.sha256()
    for path in sorted([*Path(OWN_ROOT, "capture").rglob("*.py"), Path(OWN_ROOT, "engine.py")]):
        data = path.read_bytes()
        digest.update(f"{path.name} {len(data)}\n".encode())
        digest.update(data)
    for path in sorted(Path(OWN_ROOT).glob("_core*.so")):
        status = path.stat()
        digest.update(f"{path.name} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()

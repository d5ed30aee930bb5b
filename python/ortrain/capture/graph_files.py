# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""A folder of small files that are whole or not there: checked, replaced at once, bounded."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

from ortrain import logs

_log = logs.get_logger("ortrain.cache")

_MAGIC = b"ORTRAIN GRAPH 1\n"
_HEADER = len(_MAGIC) + 32 + 16  # magic, SHA-256 of what follows, length packed and unpacked
_SUFFIX = ".ortrain-graph"
_MAX_BYTES = 256 << 20  # of one file, unpacked
_STALE_SECONDS = 3600  # a file that is being written is never older

_warned: set[str] = set()


class GraphFiles:
    """Files in one folder, which must belong to the user alone.

    Args:
      folder: Made with mode 0700 if it is not there.
      limit: Bytes that the files may take; the ones not used for longest go first.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit

    def read(self, name: str) -> bytes | None:
        """Return the content stored under a name; a damaged file is removed."""
        with self._opened(create=False) as folder:
            if folder is None:
                return None
            try:
                return self._read(folder, name + _SUFFIX)
            except FileNotFoundError:
                return None
            except (OSError, ValueError, zlib.error) as error:
                _log.info("removing %s: %s", self._folder / (name + _SUFFIX), error)
                self._remove(folder, name + _SUFFIX)
                return None

    def write(self, name: str, content: bytes) -> bool:
        """Store content under a name; return whether it is there."""
        if len(content) > _MAX_BYTES:
            _log.debug("%d bytes are too many to keep", len(content))
            return False
        packed = zlib.compress(content, 1)
        body = len(packed).to_bytes(8, "little") + len(content).to_bytes(8, "little") + packed
        data = _MAGIC + hashlib.sha256(body).digest() + body
        if len(data) > self._limit:
            _log.debug("%d bytes are more than the folder may hold", len(data))
            return False
        with self._opened(create=True) as folder:
            if folder is None:
                return False
            try:
                self._write(folder, name + _SUFFIX, data)
                self._prune(folder, name + _SUFFIX)
            except OSError as error:
                _log.info("%s: %s", self._folder, error)
                return False
        return True

    def remove(self, name: str) -> None:
        """Remove what is stored under a name."""
        with self._opened(create=False) as folder:
            if folder is not None:
                self._remove(folder, name + _SUFFIX)

    # --- the folder

    @contextlib.contextmanager
    def _opened(self, *, create: bool) -> Iterator[int | None]:
        """Open the folder; None where it is not there or not the user's alone."""
        folder: int | None = None
        try:
            if create:
                self._folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._folder, 0o700)
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            reason = _not_private(os.fstat(folder))
        except OSError as error:
            absent = isinstance(error, FileNotFoundError) and not create
            reason = "" if absent else error.strerror or str(error)
        try:
            if reason and str(self._folder) not in _warned:
                _warned.add(str(self._folder))
                _log.warning("no graphs are kept in %s: %s", self._folder, reason)
            yield None if reason else folder
        finally:
            if folder is not None:
                os.close(folder)

    @staticmethod
    def _read(folder: int, name: str) -> bytes:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(file, "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it is no regular file")
            reason = _not_private(status)
            if reason:
                raise ValueError(reason)
            if not _HEADER <= status.st_size <= _MAX_BYTES:
                raise ValueError(f"it has {status.st_size} bytes")
            data = stream.read(status.st_size + 1)
            content = _unpack(data)
            with contextlib.suppress(OSError):  # its age counts from the latest use
                os.utime(stream.fileno())
        return content

    @staticmethod
    def _write(folder: int, name: str, data: bytes) -> None:
        temporary = f".{name}.{os.getpid()}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        file = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise

    @staticmethod
    def _remove(folder: int, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=folder)

    def _prune(self, folder: int, newest: str) -> None:
        """Remove files until the rest fits, and what a writer left that was killed."""
        files = []
        for name in os.listdir(folder):
            try:
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if name.startswith(".") and _SUFFIX + "." in name:
                if time.time() - status.st_mtime > _STALE_SECONDS:
                    self._remove(folder, name)
            elif name.endswith(_SUFFIX):
                files.append((name != newest, -status.st_mtime_ns, status.st_size, name))
        total = 0
        for _, _, size, name in sorted(files):
            total += size
            if total > self._limit:
                self._remove(folder, name)


def _not_private(status: os.stat_result) -> str:
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


def _unpack(data: bytes) -> bytes:
    if not data.startswith(_MAGIC):
        raise ValueError("it is no graph of this format")
    start = len(_MAGIC)
    body = data[start + 32 :]
    if hashlib.sha256(body).digest() != data[start : start + 32]:
        raise ValueError("its checksum differs")
    packed, unpacked = (int.from_bytes(body[i : i + 8], "little") for i in (0, 8))
    if packed != len(body) - 16 or unpacked > _MAX_BYTES:
        raise ValueError("its length differs")
    content = zlib.decompressobj().decompress(body[16:], unpacked + 1)
    if len(content) != unpacked:
        raise ValueError("its unpacked length differs")
    return content

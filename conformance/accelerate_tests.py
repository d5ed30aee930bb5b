# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The tests of Hugging Face's accelerate that need no GPU, with Ortrain imported and without.

Importing Ortrain must change nothing for them. They are part of accelerate's source package only,
which pip fetches.
"""

from __future__ import annotations

import collections
import os
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path

VERSION = "1.15.0"
_LIBRARIES = (f"accelerate=={VERSION}", "parameterized", "psutil")
_FILES = (
    "accelerator",
    "cpu",
    "data_loader",
    "dataclasses",
    "grad_sync",
    "hooks",
    "kwargs_handlers",
    "logging",
    "memory_utils",
    "optimizer",
    "scheduler",
    "utils",
)

Outcomes = Mapping[str, str]


class NotFetchedError(Exception):
    """The package could not be fetched."""


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"]
        raise NotFetchedError(lines[-1])


def _outcomes(source: Path, libraries: Path, plugins: Sequence[str], report: Path) -> Outcomes:
    """Run the tests; return what became of each."""
    repository = Path(__file__).resolve().parent.parent
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    for plugin in plugins:
        command += ["-p", plugin]
    command += [f"--junitxml={report}", *(f"tests/test_{name}.py" for name in _FILES)]
    path = os.pathsep.join([str(repository / "python"), str(libraries)])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run(command, cwd=source, env=environment, capture_output=True, check=False)
    outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [part.tag for part in case if part.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname')}.{case.get('name')}"
        outcomes[name] = bad[0] if bad else "passed"
    return outcomes


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack an archive; 3.11.2 has no filters yet, so what leads out of the folder is refused here."""
    for member in archive.getmembers():
        inside = (folder / member.name).resolve().is_relative_to(folder.resolve())
        if not inside or not (member.isfile() or member.isdir()):
            raise ValueError(f"the archive holds '{member.name}', which is no file inside of it")
        archive.extract(member, folder)


def run() -> tuple[Outcomes, Outcomes]:
    """Return what became of each test without and with Ortrain.

    Raises:
      NotFetchedError: pip cannot fetch the package.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch = ("--no-deps", "--no-binary", "accelerate", f"accelerate=={VERSION}")
        _pip("download", "--dest", str(folder), *fetch)
        with tarfile.open(folder / f"accelerate-{VERSION}.tar.gz") as archive:
            _extract(archive, folder)
        _pip("install", "--target", str(folder / "lib"), "--no-deps", *_LIBRARIES)
        source, libraries = folder / f"accelerate-{VERSION}", folder / "lib"
        without = _outcomes(source, libraries, (), folder / "without.xml")
        return without, _outcomes(source, libraries, ("ortrain",), folder / "with.xml")


def counts(outcomes: Outcomes) -> str:
    """Return how many ended in which way, for a table."""
    return ", ".join(
        f"{n} {kind}" for kind, n in sorted(collections.Counter(outcomes.values()).items())
    )

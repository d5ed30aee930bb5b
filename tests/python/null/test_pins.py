# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""What the Makefile installs is known by its hash."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.tags import Tag

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))
lock_packages = pytest.importorskip("lock_packages")  # reads TOML: from Python 3.11 on

MAKEFILE = (ROOT / "Makefile").read_text().replace("\\\n", " ")
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


def lines_of(lock: Path) -> list[str]:
    return [x for x in lock.read_text().splitlines() if x and not x.startswith("#")]


def commands() -> list[str]:
    """The calls of pip that install or build, with the Makefile's variables in their place."""
    text = re.sub(r"^#.*$", "", MAKEFILE, flags=re.M)
    (locked,) = re.findall(r"^LOCKED := (.+)$", text, re.M)
    found = re.split(
        r"&&|\|\||;|\n", text.replace("$(LOCKED)", locked).replace("$(LOCKS)", "requirements")
    )
    return [x for x in found if re.search(r"(PIP\)|-m pip).* (install|wheel|download)\b", x)]


def test_calls_of_pip_ask_for_hashes():
    assert len(commands()) >= 10
    for command in commands():
        if "--require-hashes" in command:
            assert re.search(r"-r \S+", command), command
            assert not re.search(r"[<>=]=", command), command
            # A source package is built with what nobody has pinned, unless that is there already.
            built = "--no-binary" in command and "--no-build-isolation" in command
            assert ("--only-binary :all:" in command) or built, command
        else:
            # This package itself, by what is installed.
            assert re.search(r" \.\s*$", command.rstrip()), command
            assert "--no-build-isolation" in command and "--no-deps" in command, command


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_lines_have_hashes(lock):
    assert lines_of(lock)
    for line in lines_of(lock):
        pin, *hashes = line.split(" --hash=sha256:")
        (specifier,) = Requirement(pin).specifier
        assert specifier.operator == "==", line
        assert hashes and all(re.fullmatch(r"[0-9a-f]{64}", h) for h in hashes), line


def test_each_lock_is_used_and_each_that_is_used_is_there():
    used = set(re.findall(r"\$\(LOCKS\)/([\w-]+\.lock)", MAKEFILE))
    assert used - {"locker.lock"} == {lock.name for lock in LOCKS} - {"locker.lock"}
    assert (ROOT / "requirements/locker.lock") in LOCKS


def test_locks_agree_with_each_other():
    (torch,) = re.findall(r"^TORCH := (\S+)$", MAKEFILE, re.M)
    (audit,) = re.findall(r"^ABI3AUDIT := (\S+)$", MAKEFILE, re.M)
    versions = {
        lock.stem: dict(p.split("==") for p in lock_packages.pins_of(lock.read_text()))
        for lock in LOCKS
    }
    assert versions["torch"]["torch"] == torch
    assert versions["torch-cpu"] == {"torch": f"{torch}+cpu"}
    assert versions["abi3audit"]["abi3audit"] == audit
    for other in ("torch", "abi3audit"):
        for name in versions[other].keys() & versions["dev"].keys():
            assert versions[other][name] == versions["dev"][name], name
    assert versions["deepspeed"]["setuptools"] == versions["torch"]["setuptools"]


@pytest.mark.parametrize(
    "tag, fits",
    [
        ("py3-none-any", True),
        ("cp313-cp313-manylinux_2_28_x86_64", True),
        ("cp312-abi3-manylinux2014_x86_64", True),
        ("cp37-abi3-linux_x86_64", True),
        ("cp310-cp310-manylinux_2_28_x86_64", False),
        ("cp313-cp313t-manylinux_2_28_x86_64", False),
        ("cp312-cp312-musllinux_1_2_x86_64", False),
        ("cp312-cp312-manylinux_2_28_aarch64", False),
        ("cp312-cp312-win_amd64", False),
        ("py2-none-any", False),
        ("pp311-pypy311_pp73-manylinux_2_28_x86_64", False),
    ],
)
def test_which_files_a_lock_names(tag, fits):
    assert lock_packages.fits(Tag(*tag.split("-"))) == fits

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Write a lock file: pinned packages with the SHA-256 of each file that pip may take for them.

    python tools/lock_packages.py requirements/cmake.lock                          # hashes for its own pins
    python tools/lock_packages.py requirements/dev.lock --pins pins.txt            # for these
    python tools/lock_packages.py requirements/torch.lock --resolve torch==2.13.0  # and all that it needs

Needs the command uv, which asks PyPI. Kept are source packages, and wheels for CPython 3.11 to 3.14 on Linux with glibc
on x86-64. A line holds a package, so that grep can choose some. The comments at the head of a lock file stay.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import tomllib
from packaging.tags import Tag
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
MINORS = range(11, 15)
PLATFORM = "x86_64-manylinux_2_34"


def fits(tag: Tag) -> bool:
    """Tell whether an interpreter that development uses installs wheels of this tag."""
    if tag.platform != "any" and not re.fullmatch(r"(many)?linux.*_x86_64", tag.platform):
        return False
    name = re.fullmatch(r"(cp|py)3(\d*)", tag.interpreter)
    if name is None:
        return False
    minor = int(name[2] or 0)
    if tag.abi == tag.interpreter:
        return minor in MINORS
    return tag.abi in ("none", "abi3") and minor <= MINORS[-1]


def locked_line(package: dict) -> str:
    """Return the line for an entry of uv's lock file."""
    wheels = [
        wheel
        for wheel in package.get("wheels", ())
        if any(map(fits, parse_wheel_filename(wheel["url"].rpartition("/")[2])[3]))
    ]
    files = wheels + ([package["sdist"]] if "sdist" in package else [])
    if not files:
        raise SystemExit(f"{package['name']} {package['version']}: no file fits")
    hashes = sorted({file["hashes"]["sha256"] for file in files})
    pin = f"{package['name']}=={package['version']}"
    return " ".join([pin, *(f"--hash=sha256:{value}" for value in hashes)])


def pins_of(text: str) -> list[str]:
    """Return the requirements in a lock file, without their hashes."""
    lines = (line.partition(" --hash")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def look_up(requirements: list[str], *options: str) -> list[dict]:
    """Let uv find packages; return the entries of its lock file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dev = pins_of((ROOT / "requirements/dev.lock").read_text(encoding="utf-8"))
        for file, lines in (("dev-pins.txt", dev), ("asked.txt", requirements)):
            (folder / file).write_text("\n".join([*lines, ""]), encoding="utf-8")
        # Nothing but packages is fetched, by the certificates that pip trusts.
        environment = {"UV_PYTHON_DOWNLOADS": "never", **os.environ}
        if certificates := os.environ.get("PIP_CERT"):
            environment.setdefault("SSL_CERT_FILE", certificates)
        command = ["uv", "pip", "compile", "--quiet", "--no-config", "--format", "pylock.toml"]
        command += ["--python-version", f"3.{MINORS[0]}", *options]
        command += ["--output-file", "pylock.toml", "asked.txt"]
        subprocess.run(command, cwd=folder, env=environment, check=True)
        return tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))["packages"]


def resolve(requirement: str) -> list[str]:
    """Return pins of a package and all that it needs, where development has some of it the same."""
    found = look_up([requirement], "--python-platform", PLATFORM, "--constraints", "dev-pins.txt")
    return [f"{package['name']}=={package['version']}" for package in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lock", type=Path)
    parser.add_argument("--pins", type=Path, help="a file that lists the packages")
    parser.add_argument("--resolve", metavar="NAME==VERSION", help="a package, with its needs")
    arguments = parser.parse_args()
    text = arguments.lock.read_text(encoding="utf-8")
    if arguments.resolve:
        pins = resolve(arguments.resolve)
    else:
        pins = pins_of(arguments.pins.read_text(encoding="utf-8") if arguments.pins else text)
    # Universal: files for all versions of Python, not for the first alone.
    lines = sorted(map(locked_line, look_up(pins, "--universal", "--no-deps")))
    head = [line for line in text.splitlines() if line.startswith("#")]
    arguments.lock.write_text("\n".join([*head, *lines, ""]), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

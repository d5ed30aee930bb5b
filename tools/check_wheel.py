# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Check a wheel of the stable ABI: size, tags, its libraries, its list of components, a step trained with it.

    python tools/check_wheel.py dist/ortrain-0.1.0-cp312-abi3-linux_x86_64.whl --python env/bin/python

Needs readelf (binutils) and the package abi3audit. Each --python names the interpreter of an
environment with torch, numpy and onnx, what these need, and nothing else: the wheel is installed
without network into a fresh environment on top of it, and tools/train_installed.py trains there.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
MAX_BYTES = 60_000_000
PYTHON_ABI = "3.12"
TAG = "cp312-abi3-linux_x86_64"

# What a library may name: the C library's parts, the compiler's runtime, the OpenMP of PyTorch.
SYSTEM = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libgomp.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}
# The plugin is loaded only where oneDNN is installed.
EXTRA_NEEDED = {"libortrain_onednn.so": {"libdnnl.so.3"}}
# It calls nothing of which the C library has a checked form.
WITHOUT_CHECKED_CALLS = {"libortrain_onednn.so"}
# Newest versions of symbols in Debian 12, Ubuntu 22.04 and RHEL 9 (PEP 600's manylinux_2_34).
NEWEST = {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (12,)}
# Packages that an environment has without asking for them.
INSTALLERS = {"pip", "setuptools", "wheel"}
ALLOWED_ROOTS = ("torch", "numpy", "onnx")


def name_errors(wheel: Path) -> list[str]:
    """Compare the tags of the file name, and the size, with what is expected."""
    errors = []
    tags = {str(tag) for tag in parse_wheel_filename(wheel.name)[3]}
    if tags != {TAG}:
        errors.append(f"the tags are {', '.join(sorted(tags))}, expected {TAG}")
    if (size := wheel.stat().st_size) >= MAX_BYTES:
        errors.append(f"the wheel has {size} bytes, expected fewer than {MAX_BYTES}")
    return errors


def content_errors(names: Iterable[str]) -> list[str]:
    """Look for what does not belong into a wheel, or is missing."""
    names = list(names)
    errors = [f"{name} does not belong into a wheel" for name in names if "cpython-" in name]
    for wanted in (r"ortrain/_core\.abi3\.so", r"ortrain/include/.*\.h", r".*/THIRD_PARTY\.md"):
        if not any(re.fullmatch(wanted, name) for name in names):
            errors.append(f"no file matches {wanted}")
    return errors


def needed_errors(library: str, dynamic_section: str) -> list[str]:
    """Compare the libraries that `readelf -d` lists with those allowed."""
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic_section))
    foreign = needed - SYSTEM - EXTRA_NEEDED.get(library, set())
    return [f"{library} needs {name}" for name in sorted(foreign)]


def version_errors(library: str, version_section: str) -> list[str]:
    """Compare the symbol versions that `readelf -V` lists with the newest allowed."""
    errors = []
    for family, text in sorted(set(re.findall(r"Name: ([A-Z]+)_([0-9.]+)\b", version_section))):
        version = tuple(int(part) for part in text.split("."))
        if family in NEWEST and version > NEWEST[family]:
            newest = ".".join(str(part) for part in NEWEST[family])
            errors.append(f"{library} needs {family}_{text}, expected {newest} or earlier")
    return errors


def hardening_errors(library: str, headers: str, dynamic_section: str, symbols: str) -> list[str]:
    """Look for what cmake/OrtrainHardening.cmake asks for, in what `readelf -l`, `-d` and `--dyn-syms` list."""
    errors = []
    stack = re.search(r"^\s*GNU_STACK(?:\s+0x\w+){5} ([RWE ]{3})", headers, re.M)
    if stack is None or "E" in stack[1]:
        errors.append("its stack is executable")
    if not re.search(r"^\s*GNU_RELRO\s", headers, re.M):
        errors.append("nothing of it becomes read-only after the start (RELRO)")
    if not re.search(r"\(FLAGS\).*\bBIND_NOW\b|\(FLAGS_1\).*\bNOW\b", dynamic_section):
        errors.append("its symbols are bound when they are first called (BIND_NOW)")
    if re.search(r"\(TEXTREL\)|\(FLAGS\).*\bTEXTREL\b", dynamic_section):
        errors.append("its code is changed while it is loaded (TEXTREL)")
    for paths in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic_section):
        outside = [path for path in paths.split(":") if not re.match(r"\$ORIGIN(/|$)", path)]
        errors += [f"it looks for libraries in '{path}'" for path in outside]
    imported = set(re.findall(r"\bUND (\w+)", symbols))
    if "__stack_chk_fail" not in imported:
        errors.append("its functions have no canaries (-fstack-protector-strong)")
    if library not in WITHOUT_CHECKED_CALLS and not any(n.endswith("_chk") for n in imported):
        errors.append("it has no checked calls of the C library (_FORTIFY_SOURCE)")
    return [f"{library}: {error}" for error in errors]


def linked_components(third_party: str, device_code: bool) -> set[str]:
    """Return the names of what THIRD_PARTY.md calls linked; of GPU kernels' where a wheel has these."""
    names = set()
    for line in third_party.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 3 and cells[2].startswith("linked"):
            if "GPU" in cells[2] and not device_code:
                continue
            links = re.findall(r"\[([^]]+)\]\(", cells[0])
            names.update(links or [re.split(r" \(|:", cells[0])[0]])
    return names


def sbom_errors(documents: dict[str, bytes], third_party: str, device_code: bool) -> list[str]:
    """Compare the components that a wheel names, in CycloneDX, with those of THIRD_PARTY.md."""
    if not documents:
        return ["no file matches *.dist-info/sboms/*.cdx.json"]
    versions: dict[str, str] = {}
    for name, content in documents.items():
        try:
            read = json.loads(content)
            if read["bomFormat"] != "CycloneDX" or float(read["specVersion"]) < 1.5:
                return [f"{name} is no CycloneDX of 1.5 or later"]
            versions.update({c["name"]: c["version"] for c in read["components"]})
        except (ValueError, KeyError, TypeError) as error:
            return [f"{name} cannot be read: {error!r}"]
    bad = [name for name, version in versions.items() if not re.match(r"\d", str(version))]
    errors = [f"the component '{name}' has no version" for name in sorted(bad)]
    missing = linked_components(third_party, device_code) - set(versions)
    return errors + [f"the component '{name}' is not listed" for name in sorted(missing)]


def has_device_code(sections: str) -> bool:
    """Tell whether `readelf -S` lists the section that holds kernels of CUDA."""
    return re.search(r"\s\.nv_fatbin\s", sections) is not None


def readelf(option: str, library: Path) -> str:
    # LC_ALL: others translate the words.
    return subprocess.run(
        ["readelf", "-W", option, library],
        env={**os.environ, "LC_ALL": "C"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def library_errors(wheel: Path, device_code: bool) -> list[str]:
    errors = []
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        errors += content_errors(names)
        found_code = False
        for name in (n for n in names if n.endswith(".so")):
            path = Path(archive.extract(name, folder))
            sections = readelf("-S", path)
            needed, versions = readelf("-d", path), readelf("-V", path)
            errors += needed_errors(path.name, needed) + version_errors(path.name, versions)
            errors += hardening_errors(
                path.name, readelf("-l", path), needed, readelf("--dyn-syms", path)
            )
            found_code = found_code or has_device_code(sections)
            libraries = ", ".join(re.findall(r"\(NEEDED\).*\[(.+)\]", needed))
            print(f"{name}: {path.stat().st_size} bytes, needs {libraries}")
        print(f"device code of CUDA: {'yes' if found_code else 'none'}")
        licences = [n for n in names if n.endswith(".dist-info/licenses/THIRD_PARTY.md")]
        third_party = "".join(archive.read(name).decode() for name in licences)
        sboms = [n for n in names if re.fullmatch(r"[^/]+\.dist-info/sboms/.*\.cdx\.json", n)]
        documents = {name: archive.read(name) for name in sboms}
        errors += sbom_errors(documents, third_party, found_code)
        if device_code and not found_code:
            errors.append("no library holds device code of CUDA")
    return errors


def abi_errors(wheel: Path) -> list[str]:
    """Let abi3audit compare the symbols of Python with the limited API of PYTHON_ABI."""
    if importlib.util.find_spec("abi3audit") is None:
        return ["abi3audit is missing: pip install abi3audit"]
    command = [sys.executable, "-m", "abi3audit", "--strict", "--verbose", wheel]
    command += ["--assume-minimum-abi3", PYTHON_ABI]
    done = subprocess.run(command, capture_output=True, text=True)
    print((done.stdout + done.stderr).strip())
    return [] if done.returncode == 0 else ["abi3audit refuses the wheel, see above"]


def dependencies(installed: dict[str, importlib.metadata.Distribution], version: str) -> set[str]:
    """Return the names of ALLOWED_ROOTS and of all that they ask for in a version of Python."""
    markers = {"python_full_version": version, "python_version": version.rpartition(".")[0]}
    seen: set[tuple[str, str]] = set()
    waiting = [(name, "") for name in ALLOWED_ROOTS]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen or name not in installed:
            continue
        seen.add((name, extra))
        for text in installed[name].requires or ():
            asked = Requirement(text)
            if asked.marker is None or asked.marker.evaluate({**markers, "extra": extra}):
                other = canonicalize_name(asked.name)
                waiting += [(other, chosen) for chosen in ("", *asked.extras)]
    return {name for name, _ in seen}


def environment_errors(python: Path, version: str, folders: list[str]) -> list[str]:
    """Check that an environment holds torch, numpy, onnx, what these need, and nothing else."""
    distributions = importlib.metadata.distributions(path=folders)
    installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions}
    missing = [name for name in ALLOWED_ROOTS if name not in installed]
    errors = [f"{python}: {name} is not installed" for name in missing]
    more = set(installed) - dependencies(installed, version) - INSTALLERS
    if more:
        wanted = ", ".join(ALLOWED_ROOTS)
        errors.append(f"{python} has more than {wanted} and their needs: {', '.join(sorted(more))}")
    return errors


def training_errors(wheel: Path, python: Path) -> list[str]:
    """Install the wheel on top of an environment and train with it."""
    # Nothing of the caller: no path to sources, no index, no links of pip.
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "PYTHON", "ORTRAIN"))}
    code = (
        "import platform, sysconfig as s\n"
        "print(platform.python_version(), s.get_path('purelib'), s.get_path('platlib'), sep='\\n')"
    )
    listed = subprocess.run(
        [python, "-I", "-c", code], check=True, capture_output=True, text=True, env=clean
    )
    version, *paths = listed.stdout.splitlines()
    folders = sorted(set(paths))
    if errors := environment_errors(python, version, folders):
        return errors
    with tempfile.TemporaryDirectory() as name:
        environment = Path(name) / "env"
        subprocess.run([python, "-I", "-m", "venv", environment], check=True, env=clean)
        inside = environment / "bin" / "python"
        (own,) = environment.glob("lib/python*/site-packages")
        (own / "underlying.pth").write_text("".join(f"{f}\n" for f in folders), encoding="utf-8")
        # Without --no-deps: pip finds the needs met, or says what is missing.
        install = [inside, "-I", "-m", "pip", "--isolated", "install", "--quiet", "--no-index"]
        trained = [inside, "-I", ROOT / "tools" / "train_installed.py"]
        for what, command in (("pip", [*install, wheel]), ("training", trained)):
            done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=name)
            print(done.stdout.strip())
            if done.returncode != 0:
                return [f"{python}, {what}: {done.stdout}{done.stderr}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--python", type=Path, action="append", default=[], metavar="PATH")
    parser.add_argument(
        "--device-code", action="store_true", help="fail without device code of CUDA"
    )
    arguments = parser.parse_args()
    wheel = arguments.wheel.resolve()
    if not wheel.is_file():
        parser.error(f"{wheel} is no file")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    errors = name_errors(wheel) + library_errors(wheel, arguments.device_code) + abi_errors(wheel)
    for python in arguments.python:
        # absolute(), not resolve(): the link is what makes it the environment's interpreter.
        errors += training_errors(wheel, python.absolute())
    for error in errors:
        print(f"check_wheel: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())

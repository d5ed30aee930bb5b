# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Write what a package is made of, as CycloneDX in JSON. Called by cmake/OrtrainSbom.cmake.

    python write_sbom.py ortrain.cdx.json --version 0.1.0 --headers Highway=/usr/include --release ONNX=1.23.2

Versions are read from the headers that the compiler reads, or given. No time and no random number is
in the file: the same sources give the same bytes.
"""

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

SPECIFICATION = "1.6"


@dataclass(frozen=True)
class Component:
    """Software that a package holds or is linked to.

    Attributes:
      licence: An SPDX expression, or a name that SPDX does not have.
      url: A package URL without its version; "" where there is none.
      relation: As THIRD_PARTY.md says it.
      header: The file below the include folder that has the version.
      macros: The names of its parts there.
    """

    licence: str
    url: str
    relation: str
    header: str = ""
    macros: tuple[str, ...] = ()


# By their names in THIRD_PARTY.md.
COMPONENTS = {
    "Highway": Component(
        "Apache-2.0 OR BSD-3-Clause",
        "pkg:github/google/highway",
        "linked (headers)",
        "hwy/highway.h",
        ("HWY_MAJOR", "HWY_MINOR", "HWY_PATCH"),
    ),
    "JSON for Modern C++": Component(
        "MIT",
        "pkg:github/nlohmann/json",
        "linked (headers)",
        "nlohmann/detail/abi_macros.hpp",
        tuple(f"NLOHMANN_JSON_VERSION_{part}" for part in ("MAJOR", "MINOR", "PATCH")),
    ),
    "xxHash": Component(
        "BSD-2-Clause",
        "pkg:github/cyan4973/xxhash",
        "linked (headers)",
        "xxhash.h",
        ("XXH_VERSION_MAJOR", "XXH_VERSION_MINOR", "XXH_VERSION_RELEASE"),
    ),
    "nanobind": Component(
        "BSD-3-Clause",
        "pkg:pypi/nanobind",
        "linked into the extension module",
        "include/nanobind/nanobind.h",
        ("NB_VERSION_MAJOR", "NB_VERSION_MINOR", "NB_VERSION_PATCH"),
    ),
    "robin-map": Component(
        "MIT",
        "pkg:github/tessil/robin-map",
        "linked into the extension module",
        "ext/robin_map/include/tsl/robin_growth_policy.h",
        ("TSL_RH_VERSION_MAJOR", "TSL_RH_VERSION_MINOR", "TSL_RH_VERSION_PATCH"),
    ),
    "ONNX": Component("Apache-2.0", "pkg:pypi/onnx", "its schema file generates message classes"),
    "oneDNN": Component(
        "Apache-2.0", "pkg:github/uxlfoundation/onednn", "loaded by libortrain_onednn.so"
    ),
    "GCC runtime": Component(
        "GPL-3.0-or-later WITH GCC-exception-3.1", "", "linked (shared libraries)"
    ),
    "CUDA runtime": Component("NVIDIA CUDA Toolkit EULA", "", "linked"),
    "cuDNN frontend": Component(
        "Apache-2.0 AND MIT",
        "pkg:github/nvidia/cudnn-frontend",
        "linked (headers)",
        "include/cudnn_frontend_version.h",
        tuple(f"CUDNN_FRONTEND_{part}_VERSION" for part in ("MAJOR", "MINOR", "PATCH")),
    ),
    "cuDNN": Component(
        "NVIDIA cuDNN licence",
        "pkg:pypi/nvidia-cudnn-cu13",
        "its headers while the package is built; loaded at run time",
        "nvidia/cudnn/include/cudnn_version.h",
        ("CUDNN_MAJOR", "CUDNN_MINOR", "CUDNN_PATCHLEVEL"),
    ),
}


def header_version(component: Component, folder: Path) -> str:
    """Return the version that a header of a component defines.

    Raises:
      ValueError: It defines none.
    """
    text = (folder / component.header).read_text(encoding="utf-8", errors="replace")
    parts = []
    for macro in component.macros:
        found = re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", text, re.M)
        if found is None:
            raise ValueError(f"{folder / component.header} does not define {macro}")
        parts.append(found[1])
    return ".".join(parts)


def described(name: str, version: str) -> dict[str, object]:
    known = COMPONENTS[name]
    is_expression = re.fullmatch(r"[\w.+-]+( (OR|AND|WITH) [\w.+-]+)*", known.licence) is not None
    licence = (
        {"expression": known.licence} if is_expression else {"license": {"name": known.licence}}
    )
    result: dict[str, object] = {
        "type": "library",
        "bom-ref": name,
        "name": name,
        "version": version,
        "licenses": [licence],
        "properties": [{"name": "ortrain:relation", "value": known.relation}],
    }
    if known.url:
        result["purl"] = f"{known.url}@{version}"
    return result


def sbom(own_version: str, versions: dict[str, str]) -> dict[str, object]:
    """Return the document for a version of ortrain and the components by name."""
    own = {
        "type": "library",
        "bom-ref": "ortrain",
        "name": "ortrain",
        "version": own_version,
        "licenses": [{"expression": "Apache-2.0"}],
        "purl": f"pkg:pypi/ortrain@{own_version}",
    }
    names = sorted(versions)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "version": 1,
        "metadata": {"component": own},
        "components": [described(name, versions[name]) for name in names],
        "dependencies": [{"ref": "ortrain", "dependsOn": names}],
    }


def pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if name not in COMPONENTS or not equals or not value:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE of a known component")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", type=Path)
    parser.add_argument("--version", required=True, help="of ortrain")
    for option, value in (("--headers", "FOLDER"), ("--release", "VERSION")):
        parser.add_argument(option, type=pair, action="append", default=[], metavar=f"NAME={value}")
    arguments = parser.parse_args()
    versions = dict(arguments.release)
    for name, folder in arguments.headers:
        versions[name] = header_version(COMPONENTS[name], Path(folder))
    text = json.dumps(sbom(arguments.version, versions), indent=2) + "\n"
    if not arguments.output.is_file() or arguments.output.read_text(encoding="utf-8") != text:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

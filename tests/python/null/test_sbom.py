# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The list of components in a wheel: how it is written, and what tools/check_wheel.py asks of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "cmake")]
import check_wheel  # noqa: E402
import write_sbom  # noqa: E402

THIRD_PARTY = (ROOT / "THIRD_PARTY.md").read_text()
PLACE = "ortrain-0.1.0.dist-info/sboms/ortrain.cdx.json"
OF_GPU = {"CUDA runtime", "cuDNN frontend"}


def document(names) -> bytes:
    return json.dumps(write_sbom.sbom("0.1.0", dict.fromkeys(names, "1.2.3"))).encode()


def test_it_lists_what_is_linked():
    linked = check_wheel.linked_components(THIRD_PARTY, device_code=False)
    assert {"Highway", "nanobind", "robin-map", "xxHash", "GCC runtime"} <= linked
    assert check_wheel.linked_components(THIRD_PARTY, device_code=True) == linked | OF_GPU
    # Each has its place in the writer, and nothing else has that nobody names.
    assert linked | OF_GPU <= set(write_sbom.COMPONENTS)
    assert all(f"[{n}]" in THIRD_PARTY or n in linked | OF_GPU for n in write_sbom.COMPONENTS)


def test_a_complete_list_passes():
    linked = check_wheel.linked_components(THIRD_PARTY, device_code=False)
    assert check_wheel.sbom_errors({PLACE: document(linked)}, THIRD_PARTY, False) == []
    everything = {PLACE: document(write_sbom.COMPONENTS)}
    assert check_wheel.sbom_errors(everything, THIRD_PARTY, True) == []


def test_what_is_missing_is_named():
    linked = check_wheel.linked_components(THIRD_PARTY, device_code=False)
    assert check_wheel.sbom_errors({}, THIRD_PARTY, False) != []
    (error,) = check_wheel.sbom_errors({PLACE: document(linked - {"xxHash"})}, THIRD_PARTY, False)
    assert error == "the component 'xxHash' is not listed"
    assert len(check_wheel.sbom_errors({PLACE: document(linked)}, THIRD_PARTY, True)) == 2


@pytest.mark.parametrize(
    "content, reason",
    [
        (b"{", "cannot be read"),
        (b"[]", "cannot be read"),
        (b'{"bomFormat": "CycloneDX", "specVersion": "1.5"}', "cannot be read"),
        (b'{"bomFormat": "CycloneDX", "specVersion": "1.4"}', "no CycloneDX"),
        (b'{"bomFormat": "SPDX", "specVersion": "2.3"}', "no CycloneDX"),
    ],
)
def test_another_file_is_refused(content, reason):
    (error,) = check_wheel.sbom_errors({PLACE: content}, THIRD_PARTY, False)
    assert reason in error


def test_a_version_is_a_number():
    text = json.dumps(write_sbom.sbom("0.1.0", {"Highway": ""})).encode()
    errors = check_wheel.sbom_errors({PLACE: text}, "", False)
    assert errors == ["the component 'Highway' has no version"]


def test_versions_come_from_headers(tmp_path):
    (tmp_path / "xxhash.h").write_text(
        "#define XXH_VERSION_MAJOR    0\n  #  define XXH_VERSION_MINOR 8\n"
        "#define XXH_VERSION_RELEASE 1  /* a comment */\n"
    )
    output = tmp_path / "out.json"
    command = [sys.executable, ROOT / "cmake/write_sbom.py", output, "--version", "0.1.0"]
    command += [f"--headers=xxHash={tmp_path}", "--release=GCC runtime=12.2.0"]
    subprocess.run(command, check=True)
    first = output.read_bytes()
    read = json.loads(first)
    assert {c["name"]: c["version"] for c in read["components"]} == {
        "xxHash": "0.8.1",
        "GCC runtime": "12.2.0",
    }
    assert read["dependencies"] == [{"ref": "ortrain", "dependsOn": ["GCC runtime", "xxHash"]}]
    subprocess.run(command, check=True)
    assert output.read_bytes() == first
    (tmp_path / "xxhash.h").write_text("")
    assert subprocess.run(command, capture_output=True).returncode != 0

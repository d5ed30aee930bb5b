# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Version pins, metadata and links agree with each other."""

import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(name: str) -> dict[str, Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    parsed = [
        Requirement(line.partition(" --hash")[0])
        for line in lines
        if line and not line.startswith("#")
    ]
    return {canonicalize_name(r.name): r for r in parsed}


def pinned_version(requirement: Requirement) -> str:
    (specifier,) = requirement.specifier
    assert specifier.operator == "==", requirement
    return specifier.version


def test_lock_pins_all_that_development_uses():
    lock = requirements("dev.lock")
    for name, wanted in requirements("dev.in").items():
        assert wanted.specifier.contains(pinned_version(lock[name])), name


def test_lock_and_makefile_fit_the_package():
    lock = {name: pinned_version(r) for name, r in requirements("dev.lock").items()}
    assert "torch" not in lock  # installed first, by itself
    makefile = (ROOT / "Makefile").read_text()
    lock["torch"] = re.search(r"^TORCH := (\S+)$", makefile, re.M).group(1)
    for text in PROJECT["dependencies"]:
        dependency = Requirement(text)
        assert dependency.specifier.contains(lock[dependency.name]), text


def test_at_most_three_hard_dependencies():
    assert len(PROJECT["dependencies"]) <= 3


def test_agpl_data_is_no_dependency():
    texts = (ROOT / "pyproject.toml").read_text() + (ROOT / "requirements/dev.lock").read_text()
    assert "orange" not in texts.lower()


@pytest.mark.parametrize(
    "page", sorted(p.name for p in ROOT.glob("*.md")) + ["docs/status.md", "docs/wheel.md"]
)
def test_relative_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize(
    "state, api", [("wheel", "cp312"), ("metadata_wheel", "cp312"), ("editable", "")]
)
def test_wheels_alone_ask_for_the_stable_abi(state, api):
    # An editable install holds no library, and the build backend refuses the two together.
    reading = pytest.importorskip("scikit_build_core.settings.skbuild_read_settings")
    reader = reading.SettingsReader.from_file(ROOT / "pyproject.toml", {}, state=state)
    assert reader.settings.wheel.py_api == api

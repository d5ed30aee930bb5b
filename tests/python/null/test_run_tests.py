# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""The runner counts what the reports say, and never takes a crash for a pass."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

import run_tests

REPORT = """<testsuites><testsuite>
<testcase name="a"/><testcase name="b"><failure/></testcase>
<testcase name="c"><error/></testcase><testcase name="d"><skipped/></testcase>
</testsuite></testsuites>"""


def run(path: Path, code: str) -> tuple[int, int, int]:
    return run_tests.run("fake", {path: [sys.executable, "-c", code, str(path)]})


def test_counts(tmp_path):
    write = f"import sys; open(sys.argv[1], 'w').write('''{REPORT}'''); sys.exit(1)"
    assert run(tmp_path / "r.xml", write) == (1, 2, 1)


def test_a_crash_without_a_report_is_a_failure(tmp_path):
    assert run(tmp_path / "r.xml", "import os; os.abort()") == (0, 1, 0)


def test_an_old_report_does_not_count(tmp_path):
    (tmp_path / "r.xml").write_text(REPORT)
    assert run(tmp_path / "r.xml", "import sys; sys.exit(3)") == (0, 1, 0)


def test_a_bad_status_with_only_passes_is_a_failure(tmp_path):
    good = "<testsuite><testcase name='a'/></testsuite>"
    write = f'import sys; open(sys.argv[1], "w").write("{good}"); sys.exit(1)'
    assert run(tmp_path / "r.xml", write) == (1, 1, 0)


def test_shards_add_up(tmp_path):
    write = "import sys; open(sys.argv[1], 'w').write('<a><testcase/><testcase/></a>')"
    paths = [tmp_path / "0.xml", tmp_path / "1.xml"]
    commands = {path: [sys.executable, "-c", write, str(path)] for path in paths}
    assert run_tests.run("fake", commands) == (4, 0, 0)

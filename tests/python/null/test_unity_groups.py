# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Files that are compiled as one do not meet in names that each keeps to itself."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "cmake"))

import unity_groups  # noqa: E402


def read(folder: Path, name: str, text: str) -> unity_groups.Source:
    path = folder / name
    path.write_text(text)
    return unity_groups.read(path, folder)


def test_private_names_are_found(tmp_path: Path) -> None:
    source = read(
        tmp_path,
        "a.cpp",
        """
namespace ortrain {
namespace {
constexpr int kSize = 3;
enum Place { kFirst, kLast = 2 };
struct Form { int member; void method(int argument) { const int local = 1; } };
template <class T> T twice(T value, std::function<void(Form&)> then = {}) { return value; }
}  // namespace
static int counter;
const int kAlias = kOther, kSum = kOther + call(1);
void published(int parameter) { const char* const text = "namespace { int quoted; }"; }
}  // namespace ortrain
""",
    )
    assert source.private == {
        "kSize",
        "Place",
        "kFirst",
        "kLast",
        "Form",
        "twice(",
        "counter",
        "kAlias",
        "kSum",
    }


@pytest.mark.parametrize(
    ("text", "apart"),
    [
        ("namespace { int run(long x) { return 1; } }", True),  # another function of the name
        ("int f() { return run(1); }", True),  # a call of one from elsewhere
        ("int f() { return run<long>(1); }", True),
        ("int f() { return kSize; }", True),
        ("int f(S s) { return s.run(1) + s->run(2) + other::run(3); }", False),
        ("int f() { int run = 1; return run; }", False),
        ('// run(1), kSize\nint f() { return g("kSize"); }', False),
    ],
)
def test_files_that_would_meet_are_kept_apart(tmp_path: Path, text: str, apart: bool) -> None:
    first = read(
        tmp_path, "a.cpp", "namespace { int run(int x) { return x; } const int kSize = 1; }"
    )
    second = read(tmp_path, "b.cpp", text)
    assert first.meets(second) == second.meets(first) == apart
    assert bool(unity_groups.group([first, second], 2)) != apart


@pytest.mark.parametrize(
    ("header", "apart"),
    [
        ("int run(long x);", True),  # might be meant by the first file's calls
        ("inline int f() { return run(1); }", True),  # might mean the first file's
        ("struct Runner { int run(long x); Matrix<int>& run(); int size; };", False),
    ],
)
def test_names_in_headers_keep_files_apart(tmp_path: Path, header: str, apart: bool) -> None:
    (tmp_path / "outer.h").write_text('#include "inner.h"\n#include <vector>\n')
    (tmp_path / "inner.h").write_text(f'#include "outer.h"\n{header}\n')
    first = read(tmp_path, "a.cpp", "namespace { int run(int x) { return x; } }")
    second = read(tmp_path, "b.cpp", '#include "outer.h"\nint g();')
    assert first.meets(second) == second.meets(first) == apart


def test_groups_are_the_same_wherever_the_project_lies(tmp_path: Path) -> None:
    groups = []
    for root in (tmp_path / "a", tmp_path / "b" / "c"):
        for i in range(30):
            folder = root / f"d{i % 5}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"f{i}.cpp").write_text(f"int f{i}();")
        sources = [unity_groups.read(path, root) for path in root.rglob("*.cpp")]
        groups.append(unity_groups.group(sources, 4))
    assert groups[0] == groups[1]


@pytest.mark.parametrize(
    "text",
    [
        "#define N 1",
        "using namespace std;",
        "extern template int f<int>();",
        "template class A<int>;",
    ],
)
def test_files_that_change_what_follows_stay_alone(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, "a.cpp", f"{text}\nint f();\n").alone


def test_groups_keep_to_their_size(tmp_path: Path) -> None:
    sources = [read(tmp_path, f"f{i}.cpp", f"int f{i}() {{ return {i}; }}") for i in range(20)]
    numbers = unity_groups.group(sources, 5)
    assert len(numbers) == 20
    assert all(list(numbers.values()).count(n) <= 6 for n in set(numbers.values()))

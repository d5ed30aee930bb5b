# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Print which files of a target are compiled as one: lines of ``file|group``, alone where there is no group.

A name that one file keeps to itself (in an unnamed namespace, or static) occurs in no other file of its group and in
none of the project's headers that the others include, in whatever meaning, so that a file means the same in its group
as by itself. Groups are the same wherever the project lies. Files that define macros, open
namespaces for the rest of the file or instantiate templates for others stay alone, and so do those of instruction sets,
which include themselves.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

_NOT_CODE = re.compile(
    r"""R"(?P<mark>[^()\\ ]*)\(.*?\)(?P=mark)"  # raw string
    | //[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])+'(?![0-9a-fA-F])""",
    re.DOTALL | re.VERBOSE,
)
_ALONE = re.compile(
    r"^\s*#\s*define\b|^\s*using\s+namespace\b|^\s*(?:extern\s+)?template\s+(?!<)|foreach_target|"
    r"GetChosenTarget",
    re.MULTILINE,
)
# Not a member of something named before it. A function's name is in the way only where one is called.
_USED = re.compile(r"(?<![\w.:])(?<!->)([A-Za-z_]\w*)((?:\s*<[^;{}()]*?>)?\s*\()?")
_INCLUDED = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
# A declaration, in a header mostly of a member: a type ends directly before the space.
_MEMBER = re.compile(
    r"(?:(?<![\w.])(?!return\b|else\b|throw\b|case\b|new\b|co_\w+\b)\w+|\w[&*>]+|>[&*>]*) (\w+)\s*\("
)
# What a declaration at the scope of a namespace declares stands in front of one of these.
_DECLARED = re.compile(
    r"(?<![\w:])([A-Za-z_]\w*)\s*(\1|(?=[{=;,\[]|:(?!:))|$)".replace(r"\1", "\1")
)
_ARGUMENTS = re.compile(r"\([^()]*\)")
_PARAMETERS = re.compile(r"<[^<>]*>")
_VALUE = re.compile(r"=[^,;{]*")
_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        "__attribute__ alignas auto bool char class const constexpr decltype default delete double "
        "else enum explicit extern false final float for if inline int int16_t int32_t int64_t int8_t "
        "long mutable namespace noexcept nullptr operator private public requires return "
        "short signed size_t sizeof static static_assert static_cast std string string_view struct "
        "switch template this throw true typedef typename uint16_t uint32_t uint64_t uint8_t union "
        "unsigned using vector void volatile while",
    )
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A file; names of functions end with a parenthesis.

    Attributes:
        private: What is declared in unnamed namespaces, and static or constant outside of them.
        used: Which names occur, in it and in what it includes of the project.
        alone: Whether it takes no company.
    """

    path: str
    private: frozenset[str]
    used: frozenset[str]
    alone: bool

    def meets(self, other: Source) -> bool:
        """Whether what one declares for itself occurs in the other."""
        return bool(self.private & (other.used | other.private) or other.private & self.used)


def _declared_names(code: str, *, everything: bool) -> set[str]:
    """Return what is declared outside of functions and classes: all, or only what a file keeps to itself."""
    names: set[str] = set()
    scopes: list[tuple[bool, bool]] = []  # around each open brace, what the next two say of it
    unnamed = False
    body = False  # of a class, a function or a value, where nothing is declared for the file
    header = ""  # of the declaration that is being read

    def close_declaration() -> None:
        nonlocal header
        # Arguments of functions and templates are nobody's names.
        for nested, instead in ((_ARGUMENTS, "\1"), (_PARAMETERS, "")):
            while nested.search(header):
                header = nested.sub(instead, header)
        header = _VALUE.sub("=", header)
        if re.match(r"\s*namespace\b", header):  # another name of a namespace, which may come twice
            header = ""
        elif (
            unnamed
            or everything
            or re.search(r"\b(static|constexpr|const|using|typedef)\b", header)
        ):
            names.update(n + ("(" if p else "") for n, p in _DECLARED.findall(header))
        header = ""

    for part in re.split(r"([{};])", re.sub(r"^\s*#.*$", "", code, flags=re.MULTILINE)):
        if part == "{":
            scopes.append((unnamed, body))
            if body:
                continue
            if header.count("(") > header.count(")"):  # a value among arguments
                body = True
                continue
            named = re.search(r"\bnamespace\b(\s*\w+)?[^()]*$", header)
            if named:
                unnamed |= named.group(1) is None
                header = ""
            elif re.search(r"\benum\b(?!\s+(class|struct))", header):
                close_declaration()  # its values are declared beside it
            else:
                close_declaration()
                body = True
        elif part == "}":
            if not body:
                close_declaration()
            unnamed, body = scopes.pop() if scopes else (False, False)
        elif part == ";":
            if not body:
                close_declaration()
        elif not body:
            header += part
    # Macros of tests and types of the standard are everybody's.
    return {name for name in names if name.rstrip("(") not in _KEYWORDS and not name.isupper()}


def _used_names(code: str) -> frozenset[str]:
    return frozenset(
        n for name, call in _USED.findall(code) for n in {name, name + call.strip()[-1:]}
    )


@functools.cache
def _header(path: Path) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names in a header and what it includes."""
    if not path.is_file():  # of another project, or generated
        return frozenset(), ()
    text = path.read_text(encoding="utf-8")
    code = _NOT_CODE.sub(" ", text)
    called = _used_names(_MEMBER.sub(" ", code))
    return called | _declared_names(code, everything=True), tuple(_INCLUDED.findall(text))


def read(path: Path, root: Path) -> Source:
    """Read a file of the project at ``root``, where its includes begin."""
    text = path.read_text(encoding="utf-8")
    code = _NOT_CODE.sub(" ", text)
    used = set(_used_names(code))
    seen: set[str] = set()
    ahead = _INCLUDED.findall(text)
    while ahead:
        include = ahead.pop()
        if include not in seen:
            seen.add(include)
            names, further = _header(root / include)
            used |= names
            ahead += further
    return Source(
        path.relative_to(root).as_posix(),
        frozenset(_declared_names(code, everything=False)),
        frozenset(used),
        bool(_ALONE.search(text)),
    )


def group(sources: Iterable[Source], size: int) -> dict[str, int]:
    """Return the number of the group of each file that has company."""
    sources = sorted((s for s in sources if not s.alone), key=lambda s: s.path)
    count = -(-len(sources) // size) if sources else 0
    groups: list[list[Source]] = [[] for _ in range(count)]
    for source in sources:
        # A folder starts at a place of its own, so that another file moves few.
        folder = str(Path(source.path).parent)
        first = int(hashlib.sha256(folder.encode()).hexdigest()[:6], 16) % count
        for place in [*range(first, count), *range(first)]:
            members = groups[place]
            if len(members) <= size and not any(map(source.meets, members)):
                members.append(source)
                break
        else:
            groups.append([source])
    return {s.path: n for n, members in enumerate(groups) for s in members if len(members) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("size", type=int, help="files of a group, about")
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    root = Path.cwd()
    sources = [read(path if path.is_absolute() else root / path, root) for path in options.files]
    numbers = group(sources, options.size)
    for path, source in zip(options.files, sources, strict=True):
        if source.path in numbers:
            print(f"{path}|{numbers[source.path]}")


if __name__ == "__main__":
    main()

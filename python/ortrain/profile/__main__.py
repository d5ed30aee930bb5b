# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a script and report where the time of every ORTModule in it went.

Options that are none of these go to the script, in their order; all behind a ``--`` do.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ortrain.profile.record import profile
from ortrain.tools.script import run_script


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit status of the script."""
    parser = argparse.ArgumentParser(
        prog="python -m ortrain.profile", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("--trace", type=Path, help="write a trace for Chrome or Perfetto")
    parser.add_argument("--html", type=Path, help="write a page with tables and a timeline")
    parser.add_argument("--top", type=int, default=15, help="rows of each printed table")
    parser.add_argument(
        "--each-layer", action="store_true", help="do not merge layers that differ in a number"
    )
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    options, rest = parser.parse_known_args(given[:cut])
    if not options.script.is_file():
        parser.error(f"there is no script {options.script}")
    with profile() as measured:
        status = run_script(options.script, [*rest, *given[cut + 1 :]])
    print(measured.tables(options.top, merge_repeated=not options.each_layer))
    if options.trace:
        measured.save_trace(options.trace)
    if options.html:
        measured.save_html(options.html, f"{options.script.name}: where the time goes")
    return status


if __name__ == "__main__":
    sys.exit(main())

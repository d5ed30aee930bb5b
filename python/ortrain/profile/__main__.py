# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a script and report where the time of every ORTModule in it went.

Options that are none of these go to the script, in their order; all behind a ``--`` do.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

from ortrain.profile.record import profile


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
    saved = sys.argv, sys.path[0]
    sys.argv = [str(options.script), *rest, *given[cut + 1 :]]
    sys.path[0] = str(options.script.resolve().parent)
    status = 0
    try:
        with profile() as measured:
            try:
                runpy.run_path(str(options.script), run_name="__main__")
            except SystemExit as ended:
                if ended.code is not None:
                    status = ended.code if isinstance(ended.code, int) else 1
                    if isinstance(ended.code, str):
                        print(ended.code, file=sys.stderr)
    finally:
        sys.argv, sys.path[0] = saved
    print(measured.tables(options.top, merge_repeated=not options.each_layer))
    if options.trace:
        measured.save_trace(options.trace)
    if options.html:
        measured.save_html(options.html, f"{options.script.name}: where the time goes")
    return status


if __name__ == "__main__":
    sys.exit(main())

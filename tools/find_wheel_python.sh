#!/bin/sh
# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python that can build a wheel of the stable ABI: CPython 3.12 or later with its
# headers and with venv. Looks at the argument; without one, along PATH and at the versions of pyenv.
set -eu

# Prints why $1 does not serve; nothing where it does.
why_not() {
  command -v "$1" >/dev/null 2>&1 || { echo "not found"; return; }
  "$1" - 2>/dev/null <<'PYTHON' || echo "does not start"
import importlib.util
import os
import platform
import sys
import sysconfig

version = platform.python_version()
header = os.path.join(sysconfig.get_path("include"), "Python.h")
if sys.implementation.name != "cpython" or sys.version_info < (3, 12):
    print(f"is {sys.implementation.name} {version}, needed is CPython 3.12 or later")
elif sysconfig.get_config_var("Py_GIL_DISABLED"):
    print(f"is the free-threaded {version}, which has no stable ABI")
elif not os.path.exists(header):
    print(f"has no headers ({header}): install python3.{sys.version_info.minor}-dev")
elif importlib.util.find_spec("ensurepip") is None:
    print(f"has no ensurepip: install python3.{sys.version_info.minor}-venv")
PYTHON
}

if [ -n "${1:-}" ]; then
  reason=$(why_not "$1")
  [ -z "$reason" ] || { echo "PYTHON312=$1 $reason." >&2; exit 1; }
  command -v "$1"
  exit 0
fi

tried=""
for candidate in python3.12 python3.13 python3.14 python3 \
  "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9].*/bin/python; do
  reason=$(why_not "$candidate")
  [ -n "$reason" ] || { command -v "$candidate"; exit 0; }
  tried="$tried
  $candidate: $reason"
done
echo "A wheel of the stable ABI needs CPython 3.12 or later with headers. Name one: PYTHON312=path. Tried:$tried" >&2
exit 1

#!/bin/sh
# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0
# Installs what pip cannot: a compiler, Highway, JSON, xxHash, GoogleTest, a browser. Does nothing where all is present.
set -eu

python=${1:-python3}
missing=""
need() { missing="$missing $1"; }

command -v c++ >/dev/null 2>&1 || need g++
command -v cmake >/dev/null 2>&1 || need cmake
[ -e /usr/include/hwy/highway.h ] || [ -n "${CMAKE_PREFIX_PATH:-}" ] || need libhwy-dev
[ -e /usr/include/nlohmann/json.hpp ] || [ -n "${CMAKE_PREFIX_PATH:-}" ] || need nlohmann-json3-dev
[ -e /usr/include/xxhash.h ] || [ -n "${CMAKE_PREFIX_PATH:-}" ] || need libxxhash-dev
[ -e /usr/include/gtest/gtest.h ] || [ -n "${CMAKE_PREFIX_PATH:-}" ] || need libgtest-dev
[ -e /usr/include/gmock/gmock.h ] || [ -n "${CMAKE_PREFIX_PATH:-}" ] || need libgmock-dev
# The tests look at pages in a browser.
command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 || need chromium
"$python" -c 'import ensurepip' 2>/dev/null || need python3-venv
"$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
  need python3-dev

[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null 2>&1; then
  echo "Ortrain needs these packages (Debian names), please install them:$missing" >&2
  exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
  echo "Ortrain needs these packages. Please run:" >&2
  echo "  sudo apt-get install --no-install-recommends$missing" >&2
  exit 1
fi
echo "Installing with apt-get:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
# shellcheck disable=SC2086
apt-get install -y -qq --no-install-recommends $missing

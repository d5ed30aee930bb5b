// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0

// Part of everything that a build with ORTRAIN_COVERAGE makes: writes what has run since the last call.
#include <cstdlib>

extern "C" {
void __gcov_dump();
void __gcov_reset();

// Writes the counters of this library or program below `folder`, then sets them to zero; nullptr: only that.
__attribute__((visibility("default"))) void ortrain_coverage_take(const char* folder) {
  if (folder != nullptr) {
    setenv("GCOV_PREFIX", folder, 1);
    __gcov_dump();
    unsetenv("GCOV_PREFIX");
  }
  __gcov_reset();
}
}

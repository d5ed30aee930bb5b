# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# ORTRAIN_FUZZ_FILES: the fuzz targets, for libFuzzer and for the tests that run their seeds.
file(GLOB ORTRAIN_FUZZ_FILES CONFIGURE_DEPENDS
  fuzz/*_target.cpp fuzz/*_targets.cpp fuzz/*_mutator.cpp
  fuzz/exercise_graph.cpp fuzz/guarded_memory.cpp)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# Language level, build types, warnings and sanitizers.
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)

# Kernels get -O3 file by file (OrtrainLibrary.cmake); the rest gains nothing from it.
# Development builds take -O1 for that rest, a fifth less to wait; wheels, whose speed counts, -O2.
if(ORTRAIN_DEV)
  set(CMAKE_CXX_FLAGS_RELEASE "-O1 -g0 -DNDEBUG")
else()
  set(CMAKE_CXX_FLAGS_RELEASE "-O2 -g0 -DNDEBUG")
endif()

if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(ORTRAIN_CCACHE ccache)
  if(ORTRAIN_CCACHE)
    set(CMAKE_CXX_COMPILER_LAUNCHER "${ORTRAIN_CCACHE}")
  endif()
endif()

# No -ffast-math and no -march: NaN must survive, and the wheel runs on any x86-64.
set(ORTRAIN_WARNINGS -Wall -Wextra -Werror -fno-math-errno
  # Designated initializers leave members at their defaults on purpose.
  -Wno-missing-field-initializers)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # False positives of gcc 12 inside std::optional and std::string.
  list(APPEND ORTRAIN_WARNINGS
    -Wno-maybe-uninitialized -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread
    -Wno-array-bounds)
else()
  # What a template captures for others of its instances, and hints that gcc alone knows.
  # libstdc++ 12 uses in its own headers what newer clangs warn of.
  list(APPEND ORTRAIN_WARNINGS -Wno-unused-lambda-capture -Wno-unknown-pragmas
    -Wno-deprecated-declarations)
endif()
add_library(ortrain_flags INTERFACE)
target_compile_options(ortrain_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${ORTRAIN_WARNINGS}>")

if(ORTRAIN_SANITIZE)
  add_compile_options(-fsanitize=${ORTRAIN_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${ORTRAIN_SANITIZE})
  if(ORTRAIN_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize-recover=all)
  endif()
endif()

if(ORTRAIN_FUZZ OR ORTRAIN_SANITIZE MATCHES "thread")
  # One set of instructions above the baseline: kernels would take most of the build otherwise.
  add_compile_definitions("HWY_DISABLED_TARGETS=(HWY_SSSE3|HWY_SSE4|HWY_AVX3|HWY_AVX3_DL)")
endif()

# For tools/run_coverage.py: programs and libraries write what ran, test by test.
option(ORTRAIN_COVERAGE "Count what runs" OFF)
set(ORTRAIN_COVERAGE_FILES "")
if(ORTRAIN_COVERAGE)
  add_compile_options(--coverage -fprofile-update=atomic)
  add_link_options(--coverage)
  set(ORTRAIN_COVERAGE_FILES "${CMAKE_CURRENT_SOURCE_DIR}/tests/cpp/coverage_probe.cpp")
endif()

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# One test executable from every *_test.cpp.
file(GLOB_RECURSE ORTRAIN_TEST_FILES CONFIGURE_DEPENDS
  ortrain/*_test.cpp tests/cpp/*_test.cpp fuzz/*_test.cpp)
# What `make fuzz` runs, so that it does not rot.
include(OrtrainFuzzTargets)
list(APPEND ORTRAIN_TEST_FILES ${ORTRAIN_FUZZ_FILES})
if(NOT ORTRAIN_GPU STREQUAL "simulator")
  list(FILTER ORTRAIN_TEST_FILES EXCLUDE REGEX "/ortrain/gpu/")
endif()
if(NOT ORTRAIN_TEST_FILES)
  message(STATUS "C++ tests: no sources")
  return()
endif()

find_package(GTest REQUIRED)
enable_testing()
include(GoogleTest)

add_executable(ortrain_tests ${ORTRAIN_TEST_FILES} ortrain/capi/ortrain.cpp ${ORTRAIN_COVERAGE_FILES})
if(ORTRAIN_COVERAGE)
  target_sources(ortrain_tests PRIVATE tests/cpp/coverage_listener.cpp)
endif()
target_link_libraries(ortrain_tests PRIVATE
  ortrain_testing ortrain_core ortrain_flags ortrain_headers ortrain_hwy GTest::gmock GTest::gtest_main)
if(TARGET ortrain_gpu)
  target_link_libraries(ortrain_tests PRIVATE ortrain_gpu)
endif()
target_include_directories(ortrain_tests PRIVATE "${ORTRAIN_PROTO_DIR}")
if(TARGET ortrain_gpu)
  # For tools/check_generated_kernels.py.
  add_executable(ortrain_print_kernels EXCLUDE_FROM_ALL tools/print_generated_kernels.cpp)
  target_link_libraries(ortrain_print_kernels PRIVATE
    ortrain_testing ortrain_core ortrain_flags ortrain_gpu)
endif()
target_compile_definitions(ortrain_tests PRIVATE
  ORTRAIN_SOURCE_DIR="${CMAKE_CURRENT_SOURCE_DIR}" ORTRAIN_VERSION="${PROJECT_VERSION}")
if(ORTRAIN_HAVE_ONEDNN)
  # dlopen by name searches the RUNPATH of the caller.
  set_target_properties(ortrain_tests PROPERTIES
    BUILD_RPATH "$<TARGET_FILE_DIR:ortrain_onednn>")
  add_dependencies(ortrain_tests ortrain_onednn)
endif()
# The library of the example, loaded by the tests as a program loads its own.
add_library(ortrain_example_extension MODULE examples/custom_op/scaled_swish.cpp)
target_include_directories(ortrain_example_extension PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_link_libraries(ortrain_example_extension PRIVATE ortrain_flags)
add_dependencies(ortrain_tests ortrain_example_extension)
target_compile_definitions(ortrain_tests PRIVATE
  ORTRAIN_EXAMPLE_EXTENSION="$<TARGET_FILE:ortrain_example_extension>")
if(ORTRAIN_GPU STREQUAL "simulator")
  # It reads device code.
  set_source_files_properties(ortrain/gpu/cudnn_test.cpp PROPERTIES
    COMPILE_OPTIONS "-Wno-unknown-pragmas")
  # In the place of cuBLASLt.
  add_library(ortrain_cublaslt_stand_in MODULE tests/cpp/cublaslt_stand_in.cpp)
  target_include_directories(ortrain_cublaslt_stand_in PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_link_libraries(ortrain_cublaslt_stand_in PRIVATE ortrain_flags)
  set_target_properties(ortrain_cublaslt_stand_in PROPERTIES CXX_VISIBILITY_PRESET default)
  add_dependencies(ortrain_tests ortrain_cublaslt_stand_in)
  target_compile_definitions(ortrain_tests PRIVATE
    ORTRAIN_CUBLASLT_STAND_IN="$<TARGET_FILE:ortrain_cublaslt_stand_in>")
endif()
ortrain_unity(ortrain_tests 6 ${ORTRAIN_TEST_FILES})
gtest_discover_tests(ortrain_tests DISCOVERY_MODE PRE_TEST
  PROPERTIES TIMEOUT 300 DISCOVERY_TIMEOUT 60)

# The simulator that looks at accesses, against planted mistakes: all of it is compiled here once more.
# Its instrumentation goes with no other one.
if(ORTRAIN_GPU STREQUAL "simulator" AND NOT ORTRAIN_SANITIZE)
  add_executable(ortrain_race_tests
    tests/gpu/planted_races.cpp ortrain/gpu/simulator.cpp ortrain/gpu/simulator_races.cpp)
  target_compile_definitions(ortrain_race_tests PRIVATE ORTRAIN_GPU_RACES=1)
  target_compile_options(ortrain_race_tests PRIVATE -Wno-unknown-pragmas)
  target_link_libraries(ortrain_race_tests PRIVATE
    ortrain_core ortrain_flags GTest::gmock GTest::gtest_main)
  set_source_files_properties(tests/gpu/planted_races.cpp PROPERTIES
    COMPILE_OPTIONS "-fsanitize=thread")
  gtest_discover_tests(ortrain_race_tests DISCOVERY_MODE PRE_TEST PROPERTIES DISCOVERY_TIMEOUT 60)
endif()

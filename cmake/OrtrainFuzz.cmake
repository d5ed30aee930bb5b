# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# ortrain_fuzz_<target> for each function of fuzz/targets.h, and ortrain_fuzz_seeds; ortrain_fuzz is all.
if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
  message(FATAL_ERROR "ORTRAIN_FUZZ: libFuzzer comes with clang; ${CMAKE_CXX_COMPILER} is none.")
endif()

include(OrtrainFuzzTargets)
add_library(ortrain_fuzz_targets STATIC ${ORTRAIN_FUZZ_FILES})
target_include_directories(ortrain_fuzz_targets PRIVATE "${ORTRAIN_PROTO_DIR}")
target_link_libraries(ortrain_fuzz_targets PUBLIC ortrain_core PRIVATE ortrain_flags ortrain_headers)

add_executable(ortrain_fuzz_seeds fuzz/write_seeds.cpp)
target_link_libraries(ortrain_fuzz_seeds PRIVATE ortrain_testing ortrain_core ortrain_flags)

add_custom_target(ortrain_fuzz DEPENDS ortrain_fuzz_seeds)
foreach(name checkpoint extension onnx sizes text)
  add_executable(ortrain_fuzz_${name} fuzz/libfuzzer_entry.cpp)
  target_compile_definitions(ortrain_fuzz_${name} PRIVATE ORTRAIN_FUZZ_RUN=run_${name})
  if(name MATCHES "onnx|text")
    target_compile_definitions(ortrain_fuzz_${name} PRIVATE ORTRAIN_FUZZ_MUTATE=mutate_${name})
  endif()
  target_link_libraries(ortrain_fuzz_${name} PRIVATE ortrain_fuzz_targets ortrain_flags)
  target_link_options(ortrain_fuzz_${name} PRIVATE -fsanitize=fuzzer)
  add_dependencies(ortrain_fuzz ortrain_fuzz_${name})
endforeach()

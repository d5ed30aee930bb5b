# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# ortrain_core: everything that ships. ortrain_testing: op cases and the harness that runs them.
file(GLOB_RECURSE ORTRAIN_CORE_FILES CONFIGURE_DEPENDS
  ortrain/base/*.cpp ortrain/ir/*.cpp ortrain/autodiff/*.cpp ortrain/passes/*.cpp
  ortrain/plan/*.cpp ortrain/runtime/*.cpp ortrain/cpu/*.cpp ortrain/extension/*.cpp
  ortrain/training/*.cpp)
list(FILTER ORTRAIN_CORE_FILES EXCLUDE REGEX "_test\\.cpp$")
set(ORTRAIN_ONNX_FILES ${ORTRAIN_CORE_FILES})
list(FILTER ORTRAIN_ONNX_FILES INCLUDE REGEX "/ortrain/ir/onnx_[^/]*\\.cpp$")
list(FILTER ORTRAIN_CORE_FILES EXCLUDE REGEX "/ortrain/ir/onnx_[^/]*\\.cpp$")

# Loops over numbers live in ortrain/cpu and in the kernels of the ops.
set(ORTRAIN_KERNEL_FILES ${ORTRAIN_CORE_FILES} ${ORTRAIN_OP_CORE_FILES})
list(FILTER ORTRAIN_KERNEL_FILES INCLUDE REGEX "/ortrain/cpu/|_cpu\\.cpp$")
list(APPEND ORTRAIN_CORE_FILES ${ORTRAIN_OP_CORE_FILES})
list(REMOVE_ITEM ORTRAIN_CORE_FILES ${ORTRAIN_KERNEL_FILES})

add_library(ortrain_kernels OBJECT ${ORTRAIN_KERNEL_FILES})
if(CMAKE_BUILD_TYPE STREQUAL "Release")
  target_compile_options(ortrain_kernels PRIVATE -O3)
endif()
if(ORTRAIN_FUZZ)
  # Numbers that they compare lead to no input of interest, and AddressSanitizer looks at each access.
  target_compile_options(ortrain_kernels PRIVATE
    -fno-sanitize-coverage=trace-cmp -fno-sanitize=alignment,null,object-size,pointer-overflow,vptr)
endif()
target_include_directories(ortrain_kernels PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_link_libraries(ortrain_kernels PRIVATE
  OpenMP::OpenMP_CXX Threads::Threads ortrain_flags ortrain_hwy)
ortrain_unity(ortrain_kernels 5 ${ORTRAIN_KERNEL_FILES})

add_library(ortrain_core STATIC
  ${ORTRAIN_CORE_FILES} "${ORTRAIN_ALL_OPS}" $<TARGET_OBJECTS:ortrain_kernels>)
target_include_directories(ortrain_core PUBLIC "${CMAKE_CURRENT_SOURCE_DIR}")
target_link_libraries(ortrain_core
  PUBLIC OpenMP::OpenMP_CXX Threads::Threads ${CMAKE_DL_LIBS}
  PRIVATE ortrain_flags ortrain_headers)
ortrain_unity(ortrain_core 8 ${ORTRAIN_CORE_FILES})

# Only these files see the generated ONNX messages.
add_library(ortrain_onnx OBJECT ${ORTRAIN_ONNX_FILES} ${ORTRAIN_PROTO_FILES})
target_include_directories(ortrain_onnx PRIVATE
  "${CMAKE_CURRENT_SOURCE_DIR}" "${ORTRAIN_PROTO_DIR}")
target_link_libraries(ortrain_onnx PRIVATE ortrain_flags)
ortrain_unity(ortrain_onnx 6 ${ORTRAIN_ONNX_FILES})
target_sources(ortrain_core PRIVATE $<TARGET_OBJECTS:ortrain_onnx>)

file(GLOB_RECURSE ORTRAIN_TESTING_FILES CONFIGURE_DEPENDS ortrain/testing/*.cpp)
list(FILTER ORTRAIN_TESTING_FILES EXCLUDE REGEX "_test\\.cpp$")
add_library(ortrain_testing STATIC
  ${ORTRAIN_TESTING_FILES} ${ORTRAIN_OP_CASE_FILES} "${ORTRAIN_ALL_CASES}")
target_link_libraries(ortrain_testing PUBLIC ortrain_core PRIVATE ortrain_flags)
ortrain_unity(ortrain_testing 8 ${ORTRAIN_TESTING_FILES} ${ORTRAIN_OP_CASE_FILES})

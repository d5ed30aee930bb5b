# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# Programs with the host's part of a build for CUDA, linked with what stands in for the CUDA runtime
# and for cuBLASLt: for tools/check_gpu_host.py, on machines without a GPU. Not part of `all`.
if(NOT ORTRAIN_GPU STREQUAL "cuda")
  return()
endif()

set(ORTRAIN_STAND_INS "${CMAKE_CURRENT_BINARY_DIR}/gpu_host")

# Names and sonames are those of the libraries for which they stand.
function(ortrain_stand_in target library)
  add_library(${target} SHARED EXCLUDE_FROM_ALL ${ARGN})
  set_target_properties(${target} PROPERTIES
    OUTPUT_NAME ${library} VERSION 13 SOVERSION 13 CXX_VISIBILITY_PRESET default
    LIBRARY_OUTPUT_DIRECTORY "${ORTRAIN_STAND_INS}" CUDA_RUNTIME_LIBRARY None)
  target_include_directories(${target} PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_compile_features(${target} PRIVATE cxx_std_20)
endfunction()

ortrain_stand_in(cudart_stand_in cudart
  tools/gpu_host/device.cpp tools/gpu_host/kernels.cpp tools/gpu_host/memory.cpp
  tools/gpu_host/streams.cpp tools/gpu_host/pytorch.cpp)
# The versions of its symbols, for PyTorch.
target_link_options(cudart_stand_in PRIVATE
  "-Wl,--version-script=${CMAKE_CURRENT_SOURCE_DIR}/tools/gpu_host/cudart.map")
ortrain_stand_in(cublaslt_stand_in cublasLt tools/gpu_host/cublaslt.cpp)
target_link_libraries(cublaslt_stand_in PRIVATE cudart_stand_in)

function(ortrain_host_program target source)
  add_executable(${target} EXCLUDE_FROM_ALL ${source})
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None)
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  target_link_libraries(${target} PRIVATE
    ortrain_testing ortrain_core ortrain_flags ortrain_gpu cudart_stand_in)
endfunction()
ortrain_host_program(ortrain_host_check_kernels tools/check_device_kernels.cpp)
ortrain_host_program(ortrain_host_train_models tools/gpu_host/train_models.cpp)

add_executable(ortrain_planted_mistakes EXCLUDE_FROM_ALL tools/gpu_host/planted_mistakes.cu)
set_target_properties(ortrain_planted_mistakes PROPERTIES CUDA_RUNTIME_LIBRARY None)
target_link_libraries(ortrain_planted_mistakes PRIVATE cudart_stand_in)

# The driver, of which PyTorch asks a few things itself.
enable_language(C)
add_library(driver_stand_in SHARED EXCLUDE_FROM_ALL tools/driver_stand_in.c)
set_target_properties(driver_stand_in PROPERTIES
  OUTPUT_NAME cuda VERSION 1 SOVERSION 1 LIBRARY_OUTPUT_DIRECTORY "${ORTRAIN_STAND_INS}"
  C_VISIBILITY_PRESET default CUDA_RUNTIME_LIBRARY None)

# The extension module: the objects of the wheel's.
if(TARGET _core)
  get_target_property(core_libraries _core LINK_LIBRARIES)
  add_library(ortrain_host_core MODULE EXCLUDE_FROM_ALL
    $<TARGET_OBJECTS:_core> tools/gpu_host/open_cublaslt.cpp)
  set_target_properties(ortrain_host_core PROPERTIES
    PREFIX "" OUTPUT_NAME _core SUFFIX ".abi3.so" LIBRARY_OUTPUT_DIRECTORY "${ORTRAIN_STAND_INS}"
    CUDA_RUNTIME_LIBRARY None)
  target_link_libraries(ortrain_host_core PRIVATE ${core_libraries} cudart_stand_in)
  target_link_options(ortrain_host_core PRIVATE
    -Wl,--exclude-libs,ALL -Wl,--wrap=dlopen)
endif()

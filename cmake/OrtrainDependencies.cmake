# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# What the core needs: Python with the onnx package (its schema), OpenMP, Highway.
if(NOT DEFINED Python_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV} AND
   EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python")
endif()
set(Python_FIND_VIRTUALENV FIRST)
# scikit-build-core names Development.SABIModule where a wheel is to hold the stable ABI (3.12 and later).
if(ORTRAIN_PYTHON)
  find_package(Python 3.10 REQUIRED
    COMPONENTS Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
else()
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# libgomp.so.1 is found by SONAME at run time: PyTorch has then loaded its copy, and there is one pool.
find_package(OpenMP REQUIRED COMPONENTS CXX)

# Headers alone: ortrain/cpu/simd/highway_dispatch.cpp defines the little that Highway's library would.
find_path(ORTRAIN_HWY_INCLUDE hwy/highway.h)
if(NOT ORTRAIN_HWY_INCLUDE)
  message(FATAL_ERROR "Highway is missing. Install libhwy-dev, or run 'make setup'.")
endif()
file(STRINGS "${ORTRAIN_HWY_INCLUDE}/hwy/highway.h" ORTRAIN_HWY_MAJOR REGEX "define HWY_MAJOR [0-9]")
if(NOT ORTRAIN_HWY_MAJOR MATCHES "HWY_MAJOR [1-9]")
  message(FATAL_ERROR "Highway 1.0 or later is needed; ${ORTRAIN_HWY_INCLUDE} holds an older one.")
endif()
add_library(ortrain_hwy INTERFACE)
target_include_directories(ortrain_hwy SYSTEM INTERFACE "${ORTRAIN_HWY_INCLUDE}")

# Headers alone: JSON and checksums of checkpoints.
find_path(ORTRAIN_JSON_INCLUDE nlohmann/json.hpp)
find_path(ORTRAIN_XXHASH_INCLUDE xxhash.h)
if(NOT ORTRAIN_JSON_INCLUDE OR NOT ORTRAIN_XXHASH_INCLUDE)
  message(FATAL_ERROR
    "nlohmann/json.hpp or xxhash.h is missing. Install nlohmann-json3-dev and libxxhash-dev, or run "
    "'make setup'.")
endif()
add_library(ortrain_headers INTERFACE)
target_include_directories(ortrain_headers SYSTEM INTERFACE
  "${ORTRAIN_JSON_INCLUDE}" "${ORTRAIN_XXHASH_INCLUDE}")

# The ONNX messages: classes generated from the onnx package, over our own wire format reader. No
# libprotobuf is linked, so none can meet the copy inside libtorch.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u; print(u.find_spec('onnx').submodule_search_locations[0])"
  OUTPUT_VARIABLE ORTRAIN_ONNX_PACKAGE OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE ORTRAIN_ONNX_RESULT ERROR_QUIET)
if(NOT ORTRAIN_ONNX_RESULT EQUAL 0)
  message(FATAL_ERROR
    "${Python_EXECUTABLE} has no 'onnx' package, which holds the ONNX schema. Run 'make setup'.")
endif()

set(ORTRAIN_PROTO_DIR "${CMAKE_CURRENT_BINARY_DIR}/proto")
set(ORTRAIN_PROTO_FILES
  "${ORTRAIN_PROTO_DIR}/onnx/onnx-ml.pb.cc" "${ORTRAIN_PROTO_DIR}/onnx/onnx-ml.pb.h")
add_custom_command(
  OUTPUT ${ORTRAIN_PROTO_FILES}
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/onnx_messages.py"
          "${ORTRAIN_PROTO_DIR}"
  DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cmake/onnx_messages.py"
          "${ORTRAIN_ONNX_PACKAGE}/onnx-ml.proto"
  COMMENT "Generating the ONNX message classes"
  VERBATIM)

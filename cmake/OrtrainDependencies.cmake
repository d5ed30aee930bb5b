# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# What the core needs: Python (for the ONNX schema file), OpenMP, Highway, protobuf-lite.
if(NOT DEFINED Python_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV} AND
   EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${CMAKE_CURRENT_SOURCE_DIR}/.venv/bin/python")
endif()
set(Python_FIND_VIRTUALENV FIRST)
if(ORTRAIN_PYTHON)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
endif()

set(THREADS_PREFER_PTHREAD_FLAG ON)
find_package(Threads REQUIRED)

# libgomp.so.1 is found by SONAME at run time: PyTorch has then loaded its copy, and there is one pool.
find_package(OpenMP REQUIRED COMPONENTS CXX)

find_path(ORTRAIN_HWY_INCLUDE hwy/highway.h)
find_library(ORTRAIN_HWY_LIBRARY hwy)
if(NOT ORTRAIN_HWY_INCLUDE OR NOT ORTRAIN_HWY_LIBRARY)
  message(FATAL_ERROR "Highway is missing. Install libhwy-dev, or run 'make setup'.")
endif()
add_library(ortrain_hwy INTERFACE)
target_include_directories(ortrain_hwy SYSTEM INTERFACE "${ORTRAIN_HWY_INCLUDE}")
target_link_libraries(ortrain_hwy INTERFACE "${ORTRAIN_HWY_LIBRARY}")

# ONNX protobuf. The library is static and hidden because libtorch exports protobuf symbols of its own.
find_program(ORTRAIN_PROTOC protoc)
find_library(ORTRAIN_PROTOBUF_LITE libprotobuf-lite.a)
find_path(ORTRAIN_PROTOBUF_INCLUDE google/protobuf/message_lite.h)
if(NOT ORTRAIN_PROTOC OR NOT ORTRAIN_PROTOBUF_LITE OR NOT ORTRAIN_PROTOBUF_INCLUDE)
  message(FATAL_ERROR
    "protobuf is missing. Install protobuf-compiler and libprotobuf-dev, or run 'make setup'.")
endif()

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util as u; print(u.find_spec('onnx').submodule_search_locations[0])"
  OUTPUT_VARIABLE ORTRAIN_ONNX_PACKAGE OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE ORTRAIN_ONNX_RESULT ERROR_QUIET)
if(NOT ORTRAIN_ONNX_RESULT EQUAL 0)
  message(FATAL_ERROR
    "${Python_EXECUTABLE} has no 'onnx' package, whose onnx-ml.proto is needed. Run 'make setup'.")
endif()
get_filename_component(ORTRAIN_ONNX_SITE "${ORTRAIN_ONNX_PACKAGE}" DIRECTORY)

set(ORTRAIN_PROTO_DIR "${CMAKE_CURRENT_BINARY_DIR}/proto")
file(MAKE_DIRECTORY "${ORTRAIN_PROTO_DIR}")
add_custom_command(
  OUTPUT "${ORTRAIN_PROTO_DIR}/onnx/onnx-ml.pb.cc" "${ORTRAIN_PROTO_DIR}/onnx/onnx-ml.pb.h"
  COMMAND "${ORTRAIN_PROTOC}" -I "${ORTRAIN_ONNX_SITE}"
          "--cpp_out=lite:${ORTRAIN_PROTO_DIR}" onnx/onnx-ml.proto
  DEPENDS "${ORTRAIN_ONNX_PACKAGE}/onnx-ml.proto"
  VERBATIM)
add_library(ortrain_onnx_proto STATIC
  "${ORTRAIN_PROTO_DIR}/onnx/onnx-ml.pb.cc" "${ORTRAIN_PROTO_DIR}/onnx/onnx-ml.pb.h")
target_include_directories(ortrain_onnx_proto SYSTEM PUBLIC
  "${ORTRAIN_PROTO_DIR}" "${ORTRAIN_PROTOBUF_INCLUDE}")
target_compile_definitions(ortrain_onnx_proto PUBLIC
  ONNX_ML=1 ONNX_USE_LITE_PROTO ONNX_NAMESPACE=onnx)
target_link_libraries(ortrain_onnx_proto PUBLIC "${ORTRAIN_PROTOBUF_LITE}" Threads::Threads)

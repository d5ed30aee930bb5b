# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# ortrain.cdx.json: what is compiled in and linked, with versions; in a wheel where PEP 770 wants it.
set(ORTRAIN_SBOM "${CMAKE_CURRENT_BINARY_DIR}/ortrain.cdx.json")
get_filename_component(ORTRAIN_NANOBIND_PACKAGE "${nanobind_ROOT}/.." ABSOLUTE)

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import importlib.metadata as m; print(m.version('onnx'))"
  OUTPUT_VARIABLE ORTRAIN_ONNX_VERSION OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)

# libstdc++ and libgomp are those of the compiler; another compiler takes those of some GCC.
set(ORTRAIN_GCC_VERSION "${CMAKE_CXX_COMPILER_VERSION}")
if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -dM -E -x c++ -include cstddef /dev/null
    OUTPUT_VARIABLE macros COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "_GLIBCXX_RELEASE ([0-9]+)" matched "${macros}")
  set(ORTRAIN_GCC_VERSION "${CMAKE_MATCH_1}")
endif()

set(ORTRAIN_SBOM_ARGUMENTS
  "--headers=Highway=${ORTRAIN_HWY_INCLUDE}" "--headers=JSON for Modern C++=${ORTRAIN_JSON_INCLUDE}"
  "--headers=xxHash=${ORTRAIN_XXHASH_INCLUDE}" "--headers=nanobind=${ORTRAIN_NANOBIND_PACKAGE}"
  "--headers=robin-map=${ORTRAIN_NANOBIND_PACKAGE}" "--release=ONNX=${ORTRAIN_ONNX_VERSION}"
  "--release=GCC runtime=${ORTRAIN_GCC_VERSION}")
if(ORTRAIN_HAVE_ONEDNN)
  list(APPEND ORTRAIN_SBOM_ARGUMENTS "--release=oneDNN=${dnnl_VERSION}")
endif()
if(ORTRAIN_GPU STREQUAL "cuda")
  list(APPEND ORTRAIN_SBOM_ARGUMENTS "--release=CUDA runtime=${CMAKE_CUDA_COMPILER_VERSION}")
  if(ORTRAIN_CUDNN_ROOT)
    list(APPEND ORTRAIN_SBOM_ARGUMENTS
      "--headers=cuDNN frontend=${ORTRAIN_CUDNN_ROOT}" "--headers=cuDNN=${ORTRAIN_CUDNN_ROOT}")
  endif()
endif()
execute_process(
  COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/write_sbom.py" "${ORTRAIN_SBOM}"
          --version "${PROJECT_VERSION}" ${ORTRAIN_SBOM_ARGUMENTS}
  COMMAND_ERROR_IS_FATAL ANY)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS cmake/write_sbom.py)

# scikit-build-core puts what lies there into the wheel's dist-info.
if(SKBUILD_METADATA_DIR)
  install(FILES "${ORTRAIN_SBOM}" DESTINATION "${SKBUILD_METADATA_DIR}/sboms" COMPONENT python)
endif()

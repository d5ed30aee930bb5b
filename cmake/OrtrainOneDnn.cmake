# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# libortrain_onednn.so: loaded at run time by name, so the core imports and runs without oneDNN.
# The core finds it through its own RUNPATH ($ORIGIN).
set(ORTRAIN_PACKAGE_DIR "${CMAKE_CURRENT_SOURCE_DIR}/python/ortrain"
  CACHE PATH "Where a development build puts the extension and the plugin")
set(ORTRAIN_HAVE_ONEDNN OFF)

file(GLOB_RECURSE ORTRAIN_ONEDNN_FILES CONFIGURE_DEPENDS ortrain/onednn/*.cpp)
list(FILTER ORTRAIN_ONEDNN_FILES EXCLUDE REGEX "_test\\.cpp$")

if(NOT ORTRAIN_BLAS MATCHES "^(auto|onednn|none)$")
  message(FATAL_ERROR "ORTRAIN_BLAS is '${ORTRAIN_BLAS}'; it must be auto, onednn or none")
endif()
if(ORTRAIN_BLAS STREQUAL "none" OR NOT ORTRAIN_ONEDNN_FILES)
  message(STATUS "oneDNN: not built")
  return()
endif()

# The PyPI package onednn-devel-cpu-gomp installs its CMake files into the Python prefix.
execute_process(COMMAND "${Python_EXECUTABLE}" -c "import sys; print(sys.prefix)"
  OUTPUT_VARIABLE ORTRAIN_PYTHON_PREFIX OUTPUT_STRIP_TRAILING_WHITESPACE)
find_package(dnnl 3 CONFIG QUIET HINTS "${ORTRAIN_PYTHON_PREFIX}")
if(NOT dnnl_FOUND)
  if(ORTRAIN_BLAS STREQUAL "onednn")
    message(FATAL_ERROR "ORTRAIN_BLAS=onednn, but oneDNN 3 was not found. "
      "Install onednn-devel-cpu-gomp with pip, or set dnnl_DIR.")
  endif()
  message(STATUS "oneDNN: not found, own kernels only")
  return()
endif()

set(ORTRAIN_HAVE_ONEDNN ON)
message(STATUS "oneDNN: ${dnnl_VERSION} in ${dnnl_DIR}")
add_library(ortrain_onednn MODULE ${ORTRAIN_ONEDNN_FILES})
target_include_directories(ortrain_onednn PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_link_libraries(ortrain_onednn PRIVATE ortrain_flags DNNL::dnnl OpenMP::OpenMP_CXX)
target_link_options(ortrain_onednn PRIVATE -Wl,--exclude-libs,ALL)
set_target_properties(ortrain_onednn PROPERTIES
  PREFIX "lib" OUTPUT_NAME "ortrain_onednn" BUILD_WITH_INSTALL_RPATH ON)
if(ORTRAIN_DEV)
  set_target_properties(ortrain_onednn PROPERTIES
    LIBRARY_OUTPUT_DIRECTORY "${ORTRAIN_PACKAGE_DIR}"
    INSTALL_RPATH "$<TARGET_FILE_DIR:DNNL::dnnl>")
else()
  # An installed package lies in lib/pythonX.Y/site-packages/ortrain, libdnnl.so.3 in lib.
  set_target_properties(ortrain_onednn PROPERTIES INSTALL_RPATH "$ORIGIN/../../..")
endif()
install(TARGETS ortrain_onednn LIBRARY DESTINATION ortrain COMPONENT python)

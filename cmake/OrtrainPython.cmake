# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# The extension module ortrain._core. A development build puts it beside the Python sources.
file(GLOB ORTRAIN_BINDING_FILES CONFIGURE_DEPENDS python/src/*.cpp)
if(NOT ORTRAIN_BINDING_FILES)
  message(STATUS "Python extension: no sources")
  return()
endif()

execute_process(COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
  OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE nanobind_RESULT)
if(NOT nanobind_RESULT EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no 'nanobind' package. Run 'make setup'.")
endif()
find_package(nanobind 3.1 CONFIG REQUIRED)

# One module of the stable ABI serves every Python from the version on that built it.
set(ORTRAIN_STABLE_ABI "")
if(SKBUILD_SABI_COMPONENT)
  set(ORTRAIN_STABLE_ABI STABLE_ABI)
endif()
# PROTECT_STACK: nanobind would take the canaries away.
nanobind_add_module(_core NB_STATIC NOMINSIZE PROTECT_STACK ${ORTRAIN_STABLE_ABI}
  ${ORTRAIN_BINDING_FILES} ${ORTRAIN_COVERAGE_FILES})
get_filename_component(ORTRAIN_NANOBIND_INCLUDE "${nanobind_ROOT}/../include" ABSOLUTE)
target_include_directories(_core SYSTEM PRIVATE "${ORTRAIN_NANOBIND_INCLUDE}")
target_compile_definitions(_core PRIVATE
  ORTRAIN_VERSION="${PROJECT_VERSION}" ORTRAIN_BUILD_TYPE="${CMAKE_BUILD_TYPE}")
target_link_libraries(_core PRIVATE ortrain_core ortrain_testing ortrain_flags)
if(TARGET ortrain_gpu)
  target_link_libraries(_core PRIVATE ortrain_gpu)
endif()
if(ORTRAIN_GPU STREQUAL "simulator")
  # Its switches for tests.
  set_source_files_properties(python/src/device.cpp PROPERTIES
    COMPILE_DEFINITIONS ORTRAIN_GPU_IS_SIMULATED=1)
endif()
target_link_options(_core PRIVATE -Wl,--exclude-libs,ALL)
ortrain_unity(_core 4 ${ORTRAIN_BINDING_FILES})
# The core looks for its plugins beside itself.
set_target_properties(_core PROPERTIES BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")
if(ORTRAIN_DEV)
  set_target_properties(_core PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${ORTRAIN_PACKAGE_DIR}")
  if(ORTRAIN_HAVE_ONEDNN)
    add_dependencies(_core ortrain_onednn)
  endif()
endif()
install(TARGETS _core LIBRARY DESTINATION ortrain COMPONENT python)

# Headers for libraries of operators, found by ortrain.extension.include_dir().
set(ORTRAIN_EXTENSION_HEADERS ortrain/extension/abi.h ortrain/extension/extension.h)
if(ORTRAIN_DEV)
  foreach(header IN LISTS ORTRAIN_EXTENSION_HEADERS)
    configure_file("${header}" "${ORTRAIN_PACKAGE_DIR}/include/${header}" COPYONLY)
  endforeach()
endif()
install(FILES ${ORTRAIN_EXTENSION_HEADERS} DESTINATION ortrain/include/ortrain/extension
  COMPONENT python)

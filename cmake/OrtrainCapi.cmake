# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# libortrain.so: the C interface, and all of the engine in it. Found by find_package(ortrain).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_library(ortrain SHARED ortrain/capi/ortrain.cpp)
target_compile_definitions(ortrain PRIVATE ORTRAIN_VERSION="${PROJECT_VERSION}")
target_include_directories(ortrain PUBLIC
  "$<BUILD_INTERFACE:${CMAKE_CURRENT_SOURCE_DIR}>" "$<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>")
target_link_libraries(ortrain PRIVATE ortrain_core ortrain_flags)
target_link_options(ortrain PRIVATE -Wl,--exclude-libs,ALL -Wl,--gc-sections)
set_target_properties(ortrain PROPERTIES
  VERSION ${PROJECT_VERSION} SOVERSION 0 CXX_VISIBILITY_PRESET hidden
  BUILD_WITH_INSTALL_RPATH ON INSTALL_RPATH "$ORIGIN")

install(TARGETS ortrain EXPORT ortrain COMPONENT capi
  LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(FILES ortrain/capi/ortrain.h ortrain/capi/ortrain.hpp
  DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ortrain/capi COMPONENT capi)
if(TARGET ortrain_onednn)
  install(TARGETS ortrain_onednn COMPONENT capi LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endif()
set(ORTRAIN_CMAKE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/ortrain)
install(EXPORT ortrain FILE ortrain-targets.cmake NAMESPACE ortrain:: COMPONENT capi
  DESTINATION ${ORTRAIN_CMAKE_DIR})
file(CONFIGURE OUTPUT "${CMAKE_CURRENT_BINARY_DIR}/ortrain-config.cmake" @ONLY CONTENT
"# find_package(ortrain) gives the target ortrain::ortrain.
include(\"\${CMAKE_CURRENT_LIST_DIR}/ortrain-targets.cmake\")
")
write_basic_package_version_file("${CMAKE_CURRENT_BINARY_DIR}/ortrain-config-version.cmake"
  COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_CURRENT_BINARY_DIR}/ortrain-config.cmake"
  "${CMAKE_CURRENT_BINARY_DIR}/ortrain-config-version.cmake"
  DESTINATION ${ORTRAIN_CMAKE_DIR} COMPONENT capi)

# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# ortrain_unity(<target> <size> <file>...): compile about <size> files of a target as one, which reads their headers
# once; unity_groups.py says which. In development builds only: in a wheel each file stands by itself.
option(ORTRAIN_UNITY "Compile several files as one" ${ORTRAIN_DEV})
if(ORTRAIN_UNITY)
  # A name in a header may part a file from its group.
  file(GLOB_RECURSE ortrain_headers ortrain/*.h python/src/*.h)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    ${ortrain_headers} cmake/unity_groups.py)
endif()

function(ortrain_unity target size)
  if(NOT ORTRAIN_UNITY)
    return()
  endif()
  set(files "")
  foreach(file IN LISTS ARGN)
    get_source_file_property(options "${file}" COMPILE_OPTIONS)
    if(NOT options)
      list(APPEND files "${file}")
    endif()
  endforeach()
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${files})
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${CMAKE_CURRENT_SOURCE_DIR}/cmake/unity_groups.py" ${size} ${files}
    WORKING_DIRECTORY "${CMAKE_CURRENT_SOURCE_DIR}"
    OUTPUT_VARIABLE lines OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  string(REPLACE "\n" ";" lines "${lines}")
  foreach(line IN LISTS lines)
    string(REPLACE "|" ";" line "${line}")
    list(GET line 0 file)
    list(GET line 1 group)
    set_source_files_properties("${file}" PROPERTIES UNITY_GROUP "${group}")
  endforeach()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Sources are headers here, where a type of an unnamed namespace in another type would be a mistake.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
endfunction()

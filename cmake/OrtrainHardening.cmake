# SPDX-FileCopyrightText: Ortrain contributors
# SPDX-License-Identifier: Apache-2.0

# What an optimised build does against memory errors that remain: canaries on the stack, checked calls of the C library,
# tables of symbols that are bound at the start and then read-only. tools/check_wheel.py looks for them in a wheel.
# Sanitizers check more, and their interceptors know fewer of the checked calls.
if(ORTRAIN_SANITIZE OR NOT CMAKE_BUILD_TYPE MATCHES "^(Release|RelWithDebInfo|MinSizeRel)$")
  return()
endif()
add_link_options("LINKER:-z,relro,-z,now,-z,noexecstack")

# Level 3 also checks sizes that are known at run time alone. Elsewhere its headers warn, which is an error here.
include(CheckCXXSourceCompiles)
check_cxx_source_compiles("
#include <features.h>
#if !__GLIBC_PREREQ(2, 34) || !__has_builtin(__builtin_dynamic_object_size)
#error
#endif
int main() {}
" ORTRAIN_FORTIFY_3)
if(ORTRAIN_FORTIFY_3)
  set(ORTRAIN_FORTIFY_LEVEL 3)
else()
  set(ORTRAIN_FORTIFY_LEVEL 2)
endif()
# Some distributions' compilers define a level of their own.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-U_FORTIFY_SOURCE;-D_FORTIFY_SOURCE=${ORTRAIN_FORTIFY_LEVEL}>")
# The C library's checked calls are not for device code, which nvcc reads from the same headers.
add_compile_options("$<$<COMPILE_LANGUAGE:CXX>:-fstack-protector-strong>"
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-fstack-protector-strong>")

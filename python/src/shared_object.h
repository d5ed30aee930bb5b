// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

namespace ortrain::python {

// A Python object that any thread may drop, with or without the interpreter's lock.
inline std::shared_ptr<nanobind::object> shared(nanobind::object object) {
  return std::shared_ptr<nanobind::object>(new nanobind::object(std::move(object)),
                                           [](nanobind::object* held) {
                                             if (Py_IsInitialized()) {
                                               nanobind::gil_scoped_acquire lock;
                                               delete held;
                                             } else {
                                               held->release();
                                               delete held;
                                             }
                                           });
}

}  // namespace ortrain::python

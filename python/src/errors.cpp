// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"

#include <nanobind/nanobind.h>

#include "python/src/init.h"

namespace nb = nanobind;

namespace ortrain::python {

void init_errors(nb::module_& module) {
  // Translators run in reverse order of registration: the base class comes first.
  nb::exception<Error>(module, "OrtrainError", PyExc_RuntimeError);
  nb::exception<InvalidModelError>(module, "InvalidModelError", PyExc_ValueError);
  nb::exception<ShapeError>(module, "ShapeError", PyExc_ValueError);
  nb::exception<DTypeError>(module, "DTypeError", PyExc_TypeError);
  nb::exception<UnsupportedError>(module, "UnsupportedError", PyExc_NotImplementedError);
  nb::exception<FileError>(module, "FileError", PyExc_OSError);
  nb::exception<DeviceError>(module, "DeviceError", PyExc_RuntimeError);
  nb::exception<OutOfMemoryError>(module, "OutOfMemoryError", PyExc_RuntimeError);
  nb::exception<InternalError>(module, "InternalError", PyExc_RuntimeError);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const IndexError& error) {
      PyErr_SetString(PyExc_IndexError, error.what());
    }
  });
}

}  // namespace ortrain::python

// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "ortrain/base/error.h"

#include <nanobind/nanobind.h>

#include "python/src/init.h"

namespace nb = nanobind;

namespace ortrain::python {

void init_errors(nb::module_& module) {
  // Translators run in reverse order of registration: the base class comes first.
  const nb::object base = nb::exception<Error>(module, "OrtrainError", PyExc_RuntimeError);
  const auto also = [&](PyObject* type) { return nb::make_tuple(base, nb::handle(type)); };
  nb::exception<InvalidModelError>(module, "InvalidModelError", also(PyExc_ValueError));
  nb::exception<ShapeError>(module, "ShapeError", also(PyExc_ValueError));
  nb::exception<DTypeError>(module, "DTypeError", also(PyExc_TypeError));
  nb::exception<UnsupportedError>(module, "UnsupportedError", also(PyExc_NotImplementedError));
  nb::exception<FileError>(module, "FileError", also(PyExc_OSError));
  nb::exception<NanError>(module, "NanError", also(PyExc_ArithmeticError));
  nb::exception<DeviceError>(module, "DeviceError", base);
  nb::exception<OutOfMemoryError>(module, "OutOfMemoryError", also(PyExc_MemoryError));
  nb::exception<InternalError>(module, "InternalError", base);
  nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
    try {
      std::rethrow_exception(pointer);
    } catch (const IndexError& error) {
      PyErr_SetString(PyExc_IndexError, error.what());
    }
  });
}

}  // namespace ortrain::python

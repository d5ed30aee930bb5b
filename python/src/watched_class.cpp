// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/watched_class.h"

#include <dlfcn.h>

#include "python/src/attribute_snapshot.h"

namespace nb = nanobind;

namespace ortrain::python {

nb::object dictionary_of_class(nb::handle cls) {
#if PY_VERSION_HEX < 0x030C0000
  if (PyObject* dict = reinterpret_cast<PyTypeObject*>(cls.ptr())->tp_dict) return nb::borrow(dict);
#else
  using Get = PyObject* (*)(PyTypeObject*);  // outside of the limited API
  static const Get get = reinterpret_cast<Get>(dlsym(RTLD_DEFAULT, "PyType_GetDict"));
  if (PyObject* dict = get ? get(reinterpret_cast<PyTypeObject*>(cls.ptr())) : nullptr) {
    return nb::steal(dict);
  }
#endif
  return cls.attr("__dict__");
}

bool is_held_by_class(PyObject* cls, PyObject* name) {
  static PyObject* const order = PyUnicode_InternFromString("__mro__");
  const auto way = PyType_GetSlot(Py_TYPE(cls), Py_tp_getattro);
  if (way != PyType_GetSlot(&PyType_Type, Py_tp_getattro)) return false;
  const nb::object value = attribute(cls, name), bases = attribute(cls, order);
  if (!value.is_valid() || !bases.is_valid() || !PyTuple_Check(bases.ptr())) return false;
  for (nb::handle base : nb::iter(bases)) {
    const nb::object held = nb::steal(PyObject_GetItem(dictionary_of_class(base).ptr(), name));
    if (held.is_valid()) return held.is(value);
    PyErr_Clear();
  }
  return false;
}

}  // namespace ortrain::python

// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace ortrain::python {

// The dictionary of a class, which says more quickly than attributes do what it has itself; what
// shows its items where this Python hands none out.
nanobind::object dictionary_of_class(nanobind::handle cls);

// Whether an attribute of a class is what the class or one of its bases holds under that name, not
// what something there makes of it when it is asked.
bool is_held_by_class(PyObject* cls, PyObject* name);

// A number that is another one whenever what a class, one of its bases or its metaclass has under a
// name was set or removed; never again that of another state of a class. 0 where Python does not
// tell: before 3.12 it numbers classes as they are used, and later does not show the numbers.
inline uint64_t version_of_class([[maybe_unused]] PyObject* cls) {
#if PY_VERSION_HEX < 0x030C0000
  const auto number = [](const PyTypeObject* type) -> uint64_t {
    return PyType_HasFeature(const_cast<PyTypeObject*>(type), Py_TPFLAGS_VALID_VERSION_TAG)
               ? type->tp_version_tag
               : 0;
  };
  const uint64_t own = number(reinterpret_cast<PyTypeObject*>(cls)), meta = number(Py_TYPE(cls));
  return own == 0 || meta == 0 ? 0 : own << 32 | meta;
#else
  return 0;
#endif
}

}  // namespace ortrain::python

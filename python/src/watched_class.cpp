// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/watched_class.h"

#include <algorithm>
#include <unordered_map>

#include "python/src/attribute_snapshot.h"
#include "python/src/python_function.h"

namespace nb = nanobind;

namespace ortrain::python {

nb::object dictionary_of_class(nb::handle cls) {
#if PY_VERSION_HEX < 0x030C0000
  if (PyObject* dict = reinterpret_cast<PyTypeObject*>(cls.ptr())->tp_dict) return nb::borrow(dict);
#else
  using Get = PyObject* (*)(PyTypeObject*);  // outside of the limited API
  static const Get get = python_function<Get>("PyType_GetDict");
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

#if PY_VERSION_HEX < 0x030C0000

WatchedClass::WatchedClass(PyObject* cls) : class_(nb::borrow(cls)) {}

WatchedClass::~WatchedClass() = default;

uint64_t WatchedClass::version() const {
  const auto number = [](const PyTypeObject* type) -> uint64_t {
    return PyType_HasFeature(const_cast<PyTypeObject*>(type), Py_TPFLAGS_VALID_VERSION_TAG)
               ? type->tp_version_tag
               : 0;
  };
  if (!class_.is_valid()) return 0;
  PyObject* const cls = class_.ptr();
  const uint64_t own = number(reinterpret_cast<PyTypeObject*>(cls)), meta = number(Py_TYPE(cls));
  return own == 0 || meta == 0 ? 0 : own << 32 | meta;
}

#else

namespace {

struct ClassWatcher {
  int number = -1;  // that Python gave; negative where it tells nothing
  int (*watch)(int number, PyObject* cls) = nullptr;
  int (*unwatch)(int number, PyObject* cls) = nullptr;
  // Numbers a class, without which Python does not tell of changes; 0 where it is out of numbers.
  int (*assign)(PyTypeObject* cls) = nullptr;
  std::unordered_map<PyTypeObject*, WatchedClass::Record> records;
  uint64_t last = 0;  // version that was given
};

ClassWatcher& class_watcher();

// Called after a numbered class, or one of its bases, was written to, which takes the number away.
int note_class(PyTypeObject* cls) {
  const auto found = class_watcher().records.find(cls);
  if (found != class_watcher().records.end()) found->second.version = ++class_watcher().last;
  return 0;
}

// Never freed: classes change until the interpreter has ended.
ClassWatcher& class_watcher() {
  static ClassWatcher* const made = [] {
    auto* watcher = new ClassWatcher;
#ifndef Py_GIL_DISABLED  // records have no lock
    const auto add = python_function<int (*)(int (*)(PyTypeObject*))>("PyType_AddWatcher");
    watcher->watch = python_function<int (*)(int, PyObject*)>("PyType_Watch");
    watcher->unwatch = python_function<int (*)(int, PyObject*)>("PyType_Unwatch");
    watcher->assign = python_function<int (*)(PyTypeObject*)>("PyUnstable_Type_AssignVersionTag");
    if (add && watcher->watch && watcher->unwatch && watcher->assign) {
      watcher->number = add(note_class);
      if (watcher->number < 0) PyErr_Clear();
    }
#endif
    return watcher;
  }();
  return *made;
}

// Null where Python watches no more.
WatchedClass::Record* begin_watching(PyTypeObject* cls) {
  ClassWatcher& watcher = class_watcher();
  const auto [found, is_first] = watcher.records.try_emplace(cls, WatchedClass::Record{0, 0});
  if (is_first) {
    if (watcher.watch(watcher.number, reinterpret_cast<PyObject*>(cls)) != 0) {
      PyErr_Clear();
      watcher.records.erase(found);
      return nullptr;
    }
    found->second.version = ++watcher.last;
  }
  ++found->second.uses;
  return &found->second;
}

void end_watching(PyTypeObject* cls, WatchedClass::Record* record) {
  if (record == nullptr || --record->uses != 0) return;
  ClassWatcher& watcher = class_watcher();
  if (watcher.unwatch(watcher.number, reinterpret_cast<PyObject*>(cls)) != 0) PyErr_Clear();
  watcher.records.erase(cls);
}

}  // namespace

WatchedClass::WatchedClass(PyObject* cls) : class_(nb::borrow(cls)) {
  if (cls == nullptr || class_watcher().number < 0) return;
  own_ = begin_watching(reinterpret_cast<PyTypeObject*>(cls));
  meta_ = begin_watching(Py_TYPE(cls));
}

WatchedClass::~WatchedClass() {
  if (!class_.is_valid()) return;
  end_watching(reinterpret_cast<PyTypeObject*>(class_.ptr()), own_);
  end_watching(Py_TYPE(class_.ptr()), meta_);
}

uint64_t WatchedClass::version() const {
  if (own_ == nullptr || meta_ == nullptr) return 0;
  const ClassWatcher& watcher = class_watcher();
  PyTypeObject* const meta = Py_TYPE(class_.ptr());
  if (watcher.assign(reinterpret_cast<PyTypeObject*>(class_.ptr())) == 0) return 0;
  if (watcher.assign(meta) == 0) return 0;
  // Whichever was written to last has the largest version of all.
  return std::max(own_->version, meta_->version);
}

#endif

int WatchedClass::traverse(visitproc visit, void* arg) const {
  Py_VISIT(class_.ptr());
  return 0;
}

}  // namespace ortrain::python

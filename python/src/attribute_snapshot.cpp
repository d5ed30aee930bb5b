// SPDX-FileCopyrightText: Ortrain contributors
// SPDX-License-Identifier: Apache-2.0
#include "python/src/attribute_snapshot.h"

#include <algorithm>
#include <bit>

namespace nb = nanobind;

namespace ortrain::python {
namespace {

constexpr int kDepth = 6;  // of objects within each other; deeper ones are compared by identity

// What a capture bakes in.
bool is_baked_in(PyObject* value) {
  const PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyBool_Type || type == &PyLong_Type ||
         type == &PyFloat_Type || type == &PyUnicode_Type || type == &PyComplex_Type;
}

bool is_dictionary(PyObject* value) {
  static PyObject* const ordered =
      nb::object(nb::module_::import_("collections").attr("OrderedDict")).release().ptr();
  return PyDict_CheckExact(value) || reinterpret_cast<PyObject*>(Py_TYPE(value)) == ordered;
}

bool is_instance(PyObject* value, PyObject* type) {
  const int found = PyObject_IsInstance(value, type);
  if (found < 0) PyErr_Clear();
  return found == 1;
}

int64_t version_of(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_version");
  const nb::object version = attribute(tensor, name);
  if (!version.is_valid() || !PyLong_Check(version.ptr())) return -1;
  return PyLong_AsLongLong(version.ptr());
}

// The attributes of an object that is neither a class nor callable.
nb::object attributes_of(PyObject* object) {
  if (PyType_Check(object) || PyCallable_Check(object) != 0) return {};
  static PyObject* const name = PyUnicode_InternFromString("__dict__");
  nb::object found = attribute(object, name);
  return found.is_valid() && PyDict_CheckExact(found.ptr()) ? found : nb::object();
}

}  // namespace

nb::object attribute(PyObject* object, PyObject* name) {
  nb::object value = nb::steal(PyObject_GetAttr(object, name));
  if (!value.is_valid()) PyErr_Clear();
  return value;
}

bool is_same_name(PyObject* a, PyObject* b) {
  if (a == b) return true;
  return PyUnicode_CheckExact(a) && PyUnicode_CheckExact(b) && PyUnicode_Compare(a, b) == 0;
}

SlotTensors::SlotTensors(std::span<PyObject* const> tensors)
    : tuple_(nb::steal(PyTuple_New(static_cast<Py_ssize_t>(tensors.size())))) {
  if (!tuple_.is_valid()) nb::raise_python_error();
  for (size_t slot = 0; slot < tensors.size(); ++slot) {
    PyTuple_SetItem(tuple_.ptr(), static_cast<Py_ssize_t>(slot),
                    nb::borrow(tensors[slot]).release().ptr());
    if (tensors[slot] != Py_None) first_.try_emplace(tensors[slot], static_cast<int64_t>(slot));
  }
}

bool SlotTensors::are(std::span<PyObject* const> tensors) const {
  if (PyTuple_Size(tuple_.ptr()) != static_cast<Py_ssize_t>(tensors.size())) return false;
  for (size_t slot = 0; slot < tensors.size(); ++slot) {
    if ((*this)[slot] != tensors[slot]) return false;
  }
  return true;
}

int64_t SlotTensors::slot_of(PyObject* object) const {
  const auto found = first_.find(object);
  return found == first_.end() ? -1 : found->second;
}

std::vector<int64_t> SlotTensors::ties() const {
  std::vector<int64_t> ties(static_cast<size_t>(PyTuple_Size(tuple_.ptr())));
  for (size_t slot = 0; slot < ties.size(); ++slot) ties[slot] = slot_of((*this)[slot]);
  return ties;
}

AttributeSnapshot::AttributeSnapshot(PyObject* value, SnapshotContext& context, int depth)
    : value_(nb::borrow(value)) {
  if (is_baked_in(value)) {
    kind_ = Kind::equal;
  } else if (is_instance(value, context.tensor_type)) {
    number_ = context.tensors->slot_of(value);
    kind_ = number_ < 0 ? Kind::tensor : Kind::slot_tensor;
    if (number_ < 0) {
      number_ = version_of(value);
    } else {
      value_ = nb::none();  // another one may take its place, and it be let go
    }
  } else if (context.seen.count(value) != 0 || depth == kDepth ||
             is_instance(value, context.module_type)) {
    kind_ = Kind::identity;
  } else if (PyTuple_CheckExact(value) || PyList_CheckExact(value)) {
    kind_ = Kind::sequence;
    context.seen.insert(value);
    value_ = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(value)));
    for (Py_ssize_t i = 0; i < PySequence_Size(value); ++i) {
      const nb::object item = nb::steal(PySequence_GetItem(value, i));
      parts_.emplace_back(item.ptr(), context, depth + 1);
    }
  } else if (is_dictionary(value)) {
    take_dictionary(value, context, depth);
  } else if (const nb::object attributes = attributes_of(value); attributes.is_valid()) {
    kind_ = Kind::object;
    context.seen.insert(value);
    parts_.emplace_back(attributes.ptr(), context, depth + 1);
  }
}

bool AttributeSnapshot::holds(PyObject* now, const SlotTensors& tensors) {
  switch (kind_) {
    case Kind::identity:
      return now == value_.ptr();
    case Kind::tensor:
      return now == value_.ptr() && (number_ < 0 || version_of(now) == number_) &&
             tensors.slot_of(now) < 0;
    case Kind::slot_tensor:
      return now == tensors[static_cast<size_t>(number_)];
    case Kind::equal:
      return equals(now);
    case Kind::sequence:
      return holds_sequence(now, tensors);
    case Kind::dictionary:
      return holds_dictionary(now, tensors);
    case Kind::object: {
      if (now != value_.ptr()) return false;
      const nb::object attributes = attributes_of(now);
      return attributes.is_valid() && parts_[0].holds(attributes.ptr(), tensors);
    }
  }
  return false;
}

bool AttributeSnapshot::may_change_in_place() const {
  if (kind_ == Kind::identity || kind_ == Kind::equal) return false;
  if (kind_ != Kind::sequence || value_.ptr() != reinterpret_cast<PyObject*>(&PyTuple_Type)) {
    return true;
  }
  return std::any_of(parts_.begin(), parts_.end(),
                     [](const AttributeSnapshot& part) { return part.may_change_in_place(); });
}

int AttributeSnapshot::traverse(visitproc visit, void* arg) const {
  Py_VISIT(value_.ptr());
  for (const nb::object& key : keys_) Py_VISIT(key.ptr());
  for (const AttributeSnapshot& part : parts_) {
    if (const int found = part.traverse(visit, arg)) return found;
  }
  return 0;
}

void AttributeSnapshot::take_dictionary(PyObject* dict, SnapshotContext& context, int depth) {
  kind_ = Kind::dictionary;
  context.seen.insert(dict);
  value_ = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(dict)));
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &key, &value) != 0) {
    keys_.push_back(nb::borrow(key));
    parts_.emplace_back(value, context, depth + 1);
  }
}

bool AttributeSnapshot::equals(PyObject* now) {
  if (now == value_.ptr()) return true;
  if (Py_TYPE(now) != Py_TYPE(value_.ptr())) return false;
  if (PyFloat_CheckExact(now)) {  // -0.0 is not 0.0 to a graph, and NaN is what it was
    const double before = PyFloat_AsDouble(value_.ptr());
    return std::bit_cast<uint64_t>(before) == std::bit_cast<uint64_t>(PyFloat_AsDouble(now));
  }
  const int equal = PyObject_RichCompareBool(value_.ptr(), now, Py_EQ);
  if (equal < 0) PyErr_Clear();
  if (equal != 1) return false;
  value_ = nb::borrow(now);
  return true;
}

bool AttributeSnapshot::holds_sequence(PyObject* now, const SlotTensors& tensors) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(now)) != value_.ptr()) return false;
  for (size_t i = 0; i < parts_.size(); ++i) {
    // Asked for each time: reading an attribute may run code that changes the list.
    if (PySequence_Size(now) != static_cast<Py_ssize_t>(parts_.size())) return false;
    const nb::object item = nb::steal(PySequence_GetItem(now, static_cast<Py_ssize_t>(i)));
    if (!parts_[i].holds(item.ptr(), tensors)) return false;
  }
  return PySequence_Size(now) == static_cast<Py_ssize_t>(parts_.size());
}

bool AttributeSnapshot::holds_dictionary(PyObject* now, const SlotTensors& tensors) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(now)) != value_.ptr() ||
      PyDict_Size(now) != static_cast<Py_ssize_t>(keys_.size())) {
    return false;
  }
  PyObject* key = nullptr;
  PyObject* value = nullptr;
  Py_ssize_t position = 0;
  for (size_t i = 0; i < keys_.size(); ++i) {
    if (PyDict_Next(now, &position, &key, &value) == 0 || !is_same_name(key, keys_[i].ptr()) ||
        !parts_[i].holds(nb::borrow(value).ptr(), tensors)) {
      return false;
    }
  }
  return true;
}

}  // namespace ortrain::python
